"""kernels/prefetch: which bytes of a weight are asked for, and that nobody's result knows of it."""

import pytest
import torch

from kernels import prefetch, tiles
from kernels.prefetch import PIECE_BYTES, prefetch_beside, prefetch_of
from kernels.rms_norm import add_rms_norm
from kernels.silu_mul import silu_mul

WEIGHT = torch.zeros(512, 1024, dtype=torch.bfloat16)  # a MiB, 2 KiB a row
MIB = 1 << 20


def spans(found: prefetch.Prefetch) -> list[tuple[int, int]]:
    """First and end byte of each piece."""
    return [
        (piece * found.stride_bytes, piece * found.stride_bytes + found.piece_bytes)
        for piece in range(found.num_pieces)
    ]


@pytest.mark.parametrize("row_bytes", [0, 2048, 4096])
def test_whole_rows_are_one_stretch_from_the_beginning(row_bytes):
    found = prefetch_of(WEIGHT, MIB // 4, row_bytes, 8)

    assert found is not None
    assert spans(found) == [(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES) for piece in range(16)]


def test_the_beginnings_of_rows_are_a_row_apart():
    found = prefetch_of(WEIGHT, 64 * 256, 256, 8)

    assert found is not None
    assert spans(found) == [(row * 2048, row * 2048 + 256) for row in range(64)]


@pytest.mark.parametrize("row_bytes", [0, 256])
@pytest.mark.parametrize("num_bytes", [MIB // 3, MIB, 2 * MIB])
def test_no_piece_ends_behind_the_weight_or_over_the_amount(num_bytes, row_bytes):
    found = prefetch_of(WEIGHT, num_bytes, row_bytes, 8)

    assert found is not None
    assert spans(found)[-1][1] <= WEIGHT.nbytes
    assert found.num_pieces * found.piece_bytes <= num_bytes


@pytest.mark.parametrize(
    ("weight", "num_bytes", "row_bytes"),
    [
        (WEIGHT, 0, 0),
        (WEIGHT, 100, 0),
        (WEIGHT.view(-1)[4 : 4 + 1024 * 64].view(64, 1024), MIB, 0),  # 8 bytes past a multiple of 16
        (WEIGHT[:, ::2], MIB, 256),
        (torch.zeros(512, 1020, dtype=torch.bfloat16), MIB, 256),  # 2,040 bytes a row
        (WEIGHT, MIB, 200),
    ],
    ids=["none", "less than a piece", "odd address", "not dense", "odd rows", "odd pieces"],
)
def test_what_the_instruction_cannot_do_is_not_asked_for(weight, num_bytes, row_bytes):
    assert prefetch_of(weight, num_bytes, row_bytes, 8) is None


def test_a_cpu_is_asked_for_nothing(monkeypatch):
    monkeypatch.setattr(tiles, "_table", lambda _: {"prefetch_norm": [{"mib": 1, "row_bytes": 0, "programs": 8}]})

    assert prefetch_beside("norm", WEIGHT, 4) is None


@pytest.mark.parametrize(("num_tokens", "is_asked"), [(64, True), (65, False)])
def test_the_table_says_for_how_many_tokens(monkeypatch, num_tokens, is_asked):
    rows = [{"up_to_tokens": 64, "mib": 1, "row_bytes": 0, "programs": 8}, {"mib": 0, "row_bytes": 0, "programs": 0}]
    monkeypatch.setattr(tiles, "_table", lambda _: {"prefetch_norm": rows})
    monkeypatch.setattr(prefetch, "_has_instruction", lambda device: True)

    found = prefetch_beside("norm", WEIGHT, num_tokens)

    assert (found is not None) == is_asked


def test_results_are_those_without_a_next_weight():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    residual, weight = x.flip(0), x[0]

    assert torch.equal(silu_mul(x, WEIGHT), silu_mul(x))
    assert torch.equal(
        add_rms_norm(x, residual.clone(), weight, 1e-5, WEIGHT), add_rms_norm(x, residual.clone(), weight, 1e-5)
    )
