"""Changes of the kernels' source that a bench is to decide. What wins goes into the source, what loses goes from here;
why each is thought to win, and what it is predicted to win, stands in NOTES.md."""

from itertools import product

from ops.bench.gpu.changes import Edit, Rows

Trial = tuple[str, tuple[Edit, ...], Rows, tuple[str, ...]]  # a label, what is changed, the cases to try it on
ATTENTION = "kernels.paged_attention.triton_kernel"
QUANTISED = "kernels.quantised_linear.triton_kernel"
VECTOR = "kernels.sgmv.triton_vector"
SIZES = ("4096→6144", "14336→4096", "4096→28672")


def trials() -> list[Trial]:
    """Also of what is known to be wrong, for its price: such a one says so."""
    prompts = ("2048 causal", "4096 causal", "8192 causal")
    waiting = tuple(f"{kind} {size} T={rows}" for kind, size, rows in product(("fp8", "int8"), SIZES, (64, 128, 256)))
    going_on = ((QUANTISED, "            if WAITS:\n", "            if False:\n"),)
    return [
        ("scale in the exponent", _scale_in_the_exponent(), {}, prompts),
        ("products go on, which is wrong", going_on, {}, waiting),
        *_tiles_of_32_ranks(),
    ]


def _tiles_of_32_ranks() -> list[Trial]:
    """Rank 64 in two turns of expand's loop where it has four, each a way to memory and back."""
    edits = ((VECTOR, "RANKS = 16  # of a tile", "RANKS = 32  # of a tile"),)
    cases = ("T=64 L=64 r=8/16/32/64", "T=256 L=256 r=8/16/32/64", "T=64 L=64 r=64")
    return [
        (
            f"tiles of 32 ranks, k{k}/{warps} n{n}/{few_warps}",
            edits,
            {"sgmv_vector": {"block_k": k, "shrink_warps": warps, "block_n": n, "expand_warps": few_warps, "pdl": 1}},
            cases,
        )
        for k, warps, n, few_warps in ((1024, 8, 256, 1), (2048, 16, 512, 2))
    ]


def _scale_in_the_exponent() -> tuple[Edit, ...]:
    """There it is a factor of a fused multiply-add: one operation a score less."""
    edits = (
        ("tl.trans(b_keys), input_precision=PRECISION) * scale_log2", "tl.trans(b_keys), input_precision=PRECISION)"),
        ("tl.exp2(b_scores - b_shift[:, None])", "tl.exp2(b_scores * scale_log2 - (b_shift * scale_log2)[:, None])"),
        (
            "b_keep = tl.exp2(b_largest - b_shift)\n            b_total",
            "b_keep = tl.exp2((b_largest - b_shift) * scale_log2)\n            b_total",
        ),
        ("i_rows * 2, b_largest, mask=m_rows)", "i_rows * 2, b_largest * scale_log2, mask=m_rows)"),
    )
    return tuple((ATTENTION, old, new) for old, new in edits)
