"""Adapters as a layer of Llama-3-8B has them: around the products with base weights, and on their way into SiLU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels.sgmv import LoraSlice, Low, PartialLow, SgmvPlan, expand, plan_sgmv, sgmv, shrink
from kernels.silu_mul import silu_mul, triton_low
from ops.bench.gpu.cases import DEVICE, HIDDEN, QKV, Built, Case, error, random
from ops.bench.gpu.timing import num_sets

INNER, RANK, PROMPT = 14336, 16, 512
PROJECTIONS: dict[str, tuple[int, tuple[int, ...]]] = {
    "q,k,v": (HIDDEN, QKV),
    "o": (HIDDEN, (HIDDEN,)),
    "gate,up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}


@dataclass(frozen=True)
class Inputs:
    """One set: x [T, in], y [T, out] for who only adds, the base weight, the adapters."""

    x: Tensor
    y: Tensor
    weight: Tensor
    slices: list[LoraSlice]
    plan: SgmvPlan
    rank: int = RANK

    @property
    def low(self) -> Low:
        low = shrink(self.x, self.slices, self.plan)
        assert low is not None
        return low

    def delta(self) -> Tensor:
        found = torch.zeros(self.y.shape, device=DEVICE)
        for slot, rows in self.plan.rows_of_slot.items():
            for part in self.slices:
                low = self.x[rows].float() @ part.a[slot, : self.rank].float().T
                found[rows, part.start : part.start + part.b.shape[2]] = low @ part.b[slot, : self.rank].float()
        return found


def inputs(num_rows: int, num_adapters: int, size_in: int, sizes_out: Sequence[int], rank: int = RANK) -> list[Inputs]:
    """A decode's rows take the adapters in turn, prompts of 512 tokens likewise."""
    length = 1 if num_rows < PROMPT else PROMPT
    slots = [row // length % num_adapters for row in range(num_rows)]
    found = []
    for _ in range(num_sets(sum(sizes_out) * size_in * 2, 6)):
        slices, start = [], 0
        for size_out in sizes_out:
            a, b = (random(num_adapters, 64, size) * size_in**-0.5 for size in (size_in, size_out))
            slices.append(LoraSlice(a, b, (rank,) * num_adapters, start))
            start += size_out
        rows = random(num_rows, size_in), random(num_rows, start)
        found.append(Inputs(*rows, random(start, size_in) * size_in**-0.5, slices, plan_sgmv(slots, DEVICE), rank))
    return found


def alone(one: Inputs) -> Tensor:
    return linear(one.x, one.weight)


def behind(one: Inputs) -> Tensor:
    """As the engine does: shrink and expand one behind the other, behind the product."""
    y = linear(one.x, one.weight)
    sgmv(y, one.x, one.slices, one.plan)
    return y


def around(one: Inputs) -> Tensor:
    """Shrink before the product, which it does not need, and expand behind it."""
    low = one.low
    y = linear(one.x, one.weight)
    expand(y, low)
    return y


def projection(run: Callable[[Inputs], Tensor], num_rows: int, num_adapters: int, name: str) -> Built:
    sets = inputs(num_rows, num_adapters, *PROJECTIONS[name])

    def verify() -> float:
        one = sets[0]
        expected = one.x.float() @ one.weight.float().T
        return error(run(one), expected if run is alone else expected + one.delta())

    return Built([lambda one=one: run(one) for one in sets], verify)


def half(what: str, num_rows: int, num_adapters: int, name: str) -> Built:
    """Shrink or expand alone."""
    sets = [(one, one.low) for one in inputs(num_rows, num_adapters, *PROJECTIONS[name])]

    def verify() -> float:
        one, low = sets[0]
        fresh = torch.zeros_like(one.y)
        expand(fresh, low)
        return error(fresh, one.delta())

    if what == "shrink":
        return Built([lambda one=one: one.low for one, _ in sets], verify)
    return Built([lambda one=one, low=low: expand(one.y, low) for one, low in sets], verify)


def added_then_silu(gate_up: Tensor, low: PartialLow) -> Tensor:
    expand(gate_up, low)
    return silu_mul(gate_up)


def into_silu(run: Callable[[Tensor, PartialLow], Tensor], num_rows: int, num_adapters: int) -> Built:
    sets = [(one, one.low) for one in inputs(num_rows, num_adapters, *PROJECTIONS["gate,up"])]

    def call(gate_up: Tensor, low: Low) -> Tensor:
        assert isinstance(low, PartialLow)
        return run(gate_up, low)

    def verify() -> float:
        one, low = sets[0]
        gate, up = (one.y.float() + one.delta()).chunk(2, -1)
        return error(call(one.y.clone(), low), silu(gate) * up)

    return Built([lambda one=one, low=low: call(one.y, low) for one, low in sets], verify)


def lora_step_cases() -> list[Case]:
    """Names: what, T rows, L adapters, projection, how."""
    found = []
    for num_rows, adapters in ((32, (8, 32)), (8192, (8,))):
        for name, (size_in, sizes_out) in PROJECTIONS.items():
            num_bytes = 2.0 * (size_in * sum(sizes_out) + num_rows * (size_in + sum(sizes_out)))
            flops = 2.0 * num_rows * size_in * sum(sizes_out)
            build = lambda n=num_rows, p=name: projection(alone, n, 1, p)  # noqa: E731
            found.append(Case("lora_step", f"product T={num_rows} {name}", build, num_bytes, flops))
            for count in adapters:
                both = num_bytes + 2.0 * RANK * count * (size_in * len(sizes_out) + sum(sizes_out))
                both += 4.0 * num_rows * sum(sizes_out)
                for run in (behind, around):
                    build = lambda r=run, n=num_rows, c=count, p=name: projection(r, n, c, p)  # noqa: E731
                    label = f"product + lora T={num_rows} L={count} {name} {run.__name__}"
                    found.append(Case("lora_step", label, build, both, flops, 3))
    for num_rows, count in ((32, 8), (32, 32), (8192, 8)):
        num_bytes = 6.0 * num_rows * INNER + 4.0 * RANK * count * INNER
        for label, run, launches in (("then", added_then_silu, 2), ("fused", triton_low.silu_mul, 1)):
            build = lambda r=run, n=num_rows, c=count: into_silu(r, n, c)  # noqa: E731
            found.append(
                Case("lora_step", f"expand, silu T={num_rows} L={count} {label}", build, num_bytes, 0, launches)
            )
    return [*found, *_halves(8192, 8)]


def _halves(num_rows: int, count: int) -> list[Case]:
    """What the tiles of prompts are chosen by."""
    found = []
    for name, (size_in, sizes_out) in PROJECTIONS.items():
        for what, num_bytes in (("shrink", 2.0 * num_rows * size_in), ("expand", 4.0 * num_rows * sum(sizes_out))):
            build = lambda w=what, n=num_rows, c=count, p=name: half(w, n, c, p)  # noqa: E731
            found.append(Case("lora_step", f"{what} T={num_rows} L={count} {name}", build, num_bytes))
    return found
