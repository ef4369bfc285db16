"""Mutants through the upload's own path in this process: gate, canonical file, blob store, engine's reader, forward."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.models.config import module_sizes
from engine.models.decoder import Decoder
from engine.weights.adapter import AdapterWeights, read_adapter
from tenants.adapters.blobs import BlobStore
from tenants.adapters.gate import CanonicalAdapter, InvalidAdapter, canonicalise
from tenants.adapters.header import BadHeader, read_header
from tenants.adapters.shape import AdapterShape
from tests import expert_files
from tests.adapter_files import Allowed
from tests.adapter_mutants import Mutant
from tests.adapter_reference import Deltas, expected_deltas, merged_logprobs, num_pairs
from tests.tiny import tiny_config, tiny_weights
from tests.tiny_steps import Steps

DENSE = AdapterShape(module_sizes(tiny_config()), 2, max_lora_rank=16, served_models=frozenset({"tiny"}))
TENANT = "ten_fuzz"
TOKENS = [5, 77, 131, 9, 250, 18, 42]
MAX_DELTA = 30.0  # of a weight; beyond it fp32 itself isn't comparable any more, and deltas alone are compared
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Tally:
    """What became of the mutants so far."""

    num: int = 0
    num_past_gate: int = 0
    num_accepted: int = 0
    num_forwards: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def table(self) -> str:
        lines = [
            f"{self.num} mutants: {self.num_past_gate} past the header gate, {self.num_accepted} accepted with the "
            f"deltas of the reference, {self.num_forwards} of them run and equal to merged weights"
        ]
        return "\n".join(lines + [f"{count:7} {reason}" for reason, count in self.reasons.most_common()])


class Fuzz:
    """One tenant's store below ``folder``; every mutant leaves it as it was."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "blobs"
        self.tally = Tally()
        self._blobs = BlobStore(self.root)
        self._steps = Steps(Decoder(tiny_config(), tiny_weights()))

    def run(self, mutant: Mutant) -> None:
        """Refused with reasons, or accepted with the right binding; anything else raises."""
        shape = expert_files.SHAPE if mutant.has_experts else DENSE
        self.tally.num += 1
        with self._blobs.staged() as weights, self._blobs.staged() as canonical:
            weights.write_bytes(mutant.weights)
            self.tally.num_past_gate += _is_past_gate(weights, shape)
            try:
                accepted = canonicalise(mutant.config, weights, canonical, shape, Allowed())
            except InvalidAdapter as error:
                _check_reasons(error.reasons)
                self.tally.reasons.update(set(map(kind_of, error.reasons)))
                assert not canonical.exists()
            else:
                self._use(mutant, accepted, canonical)
        assert self.files() == []

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir())

    def _use(self, mutant: Mutant, accepted: CanonicalAdapter, canonical: Path) -> None:
        blob = self._blobs.publish(TENANT, accepted.sha256, canonical)
        assert blob == self.root / "tenants" / TENANT / accepted.sha256
        self.tally.num_accepted += 1
        weights, expected = read_adapter(blob, accepted.sha256), expected_deltas(mutant.config, mutant.weights)
        assert accepted.num_pairs == num_pairs(mutant.weights)
        assert accepted.lora_rank == max(len(pair.a) for pair in weights.pairs.values()) <= 16
        _check_deltas(weights, expected)
        if not mutant.has_experts and max(float(delta.abs().max()) for delta in expected.values()) < MAX_DELTA:
            self._check_forward(weights, expected)
        self._blobs.delete(TENANT, accepted.sha256)

    def _check_forward(self, weights: AdapterWeights, expected: Deltas) -> None:
        self.tally.num_forwards += 1
        self._steps.slots.load_slot(0, weights)
        logprobs = torch.log_softmax(self._steps.prefill([(TOKENS, 0)])[0].double(), -1)
        reference = merged_logprobs(expected, TOKENS)
        assert float((logprobs - reference).abs().max()) < 2e-3 * max(1.0, float(reference.abs().max()) / 100)


def _is_past_gate(path: Path, shape: AdapterShape) -> bool:
    with path.open("rb") as file:
        try:
            read_header(file, path.stat().st_size, shape.max_tensors)
        except BadHeader:
            return False
    return True


def _check_reasons(reasons: list[str]) -> None:
    assert reasons
    text = "\n".join(reasons)
    assert len(text) < 40_000
    assert all(line and line.isprintable() for line in reasons), text


def _check_deltas(weights: AdapterWeights, expected: Deltas) -> None:
    assert weights.pairs.keys() == expected.keys()
    for place, pair in weights.pairs.items():
        found = pair.scale * pair.b.double() @ pair.a.double()
        assert torch.allclose(found, expected[place], rtol=1e-9, atol=1e-12), place


KINDS = (
    "header length", "shorter than its length field", "doesn't begin with {", "header:", "__metadata__", "no tensors",
    "the model can take", "names outside the grammar", "exactly dtype, shape", "dtype", "shape must be",
    "data_offsets must be", "bytes for", "a hole before", "an overlap at", "tensors end at", "trailing bytes",
)  # fmt: skip


def kind_of(reason: str) -> str:
    """A reason without what it names."""
    if reason.startswith("safetensors:"):
        return "safetensors: " + next((kind for kind in KINDS if kind in reason.removeprefix("safetensors:")), reason)
    if reason.startswith("LoRA rank"):
        return "LoRA rank over the limit"
    return reason.partition(": ")[0] if ": " in reason else reason.partition(" at ")[0]


@contextmanager
def nothing_written_outside(root: Path) -> Iterator[None]:
    """Fails when this process makes, moves or removes anything that isn't below ``root``."""
    _watched.append(root)
    try:
        yield
    finally:
        _watched.pop()
    found, _outside[:] = list(_outside), []
    assert not found, found


_watched: list[Path] = []
_outside: list[str] = []
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.system")


def _hook(event: str, arguments: tuple) -> None:
    if not _watched or (event not in _CHANGES and not _opens_to_write(event, arguments)):
        return
    path = arguments[0]
    if isinstance(path, str | bytes | os.PathLike):
        text = os.fsdecode(path)
        is_of_a_folder = event in ("os.remove", "os.rename") and not os.path.isabs(text)  # with an open folder's handle
        if not is_of_a_folder and not Path(text).is_relative_to(_watched[-1]):
            _outside.append(f"{event} {text}")


def _opens_to_write(event: str, arguments: tuple) -> bool:
    return event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITES)


sys.addaudithook(_hook)
