"""Products with weights of 8 bits, beside cuBLAS in bf16; and whether they are right."""

import itertools

import torch

from kernels.quantised_linear import KINDS, QuantisedWeight, quantised_linear
from kernels.quantised_linear.reference import dequantised
from ops.bench.gpu.cases import DEVICE, Built, Case, error, random
from ops.bench.gpu.timing import num_sets

SIZES = {"4096→6144": (6144, 4096), "4096→28672": (28672, 4096), "14336→4096": (4096, 14336)}


def weight_of(size_out: int, size_in: int, kind: torch.dtype, *, is_blocked: bool) -> QuantisedWeight:
    data = (torch.randn(size_out, size_in, device=DEVICE) * 40).clamp(-127, 127).to(kind)
    blocks = (-(-size_out // 128), -(-size_in // 128)) if is_blocked else (size_out,)
    return QuantisedWeight(data, torch.rand(blocks, device=DEVICE) / (40 * size_in**0.5))


def products(num_rows: int, sizes: tuple[int, int], kind: torch.dtype | None, *, is_blocked: bool = False) -> Built:
    """kind None: cuBLAS."""
    count = num_sets(sizes[0] * sizes[1] * (2 if kind is None else 1), 12)
    xs = [random(num_rows, sizes[1]) for _ in range(count)]
    if kind is None:
        plain = [random(*sizes) for _ in range(count)]
        pairs = zip(xs, plain, strict=True)
        return Built([lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in pairs], lambda: 0.0)
    weights = [weight_of(*sizes, kind, is_blocked=is_blocked) for _ in range(count)]

    def verify() -> float:
        return error(quantised_linear(xs[0], weights[0]), xs[0].float() @ dequantised(weights[0]).T)

    return Built([lambda x=x, w=w: quantised_linear(x, w) for x, w in zip(xs, weights, strict=True)], verify)


def quantised_cases() -> list[Case]:
    found = []
    for (name, sizes), num_rows in itertools.product(SIZES.items(), (1, 16, 32, 64)):
        num_bytes = float(sizes[0] * sizes[1] + num_rows * 2 * sum(sizes))
        for label, kind, is_blocked in (
            ("int8", torch.int8, False),
            ("fp8", torch.float8_e4m3fn, False),
            ("block fp8", torch.float8_e4m3fn, True),
            ("bf16 cuBLAS", None, False),
        ):
            build = lambda n=num_rows, s=sizes, k=kind, b=is_blocked: products(n, s, k, is_blocked=b)  # noqa: E731
            total = num_bytes if kind is not None else num_bytes + sizes[0] * sizes[1]
            floor = total / 4.22e12 * 1e6
            bounds = (None, floor / 0.75, floor / 0.85) if kind is not None else (None, None, None)
            found.append(Case("quantised", f"{label} {name} T={num_rows}", build, total, 0.0, 1, *bounds))
    return found


def quantised_linear_against_float64() -> None:
    for kind, is_blocked, dtype in itertools.product(KINDS, (False, True), (torch.float32, torch.bfloat16)):
        for num_rows, sizes in itertools.product((1, 7, 16, 17, 64, 200, 300), ((6144, 4096), (200, 300), (41, 97))):
            weight = weight_of(*sizes, kind, is_blocked=is_blocked)
            x = random(num_rows, sizes[1]).to(dtype)
            out = quantised_linear(x, weight)
            found = error(out, x.double() @ dequantised(weight).double().T)
            assert found < (5e-3 if dtype == torch.bfloat16 else 1e-5), (
                kind,
                is_blocked,
                dtype,
                num_rows,
                sizes,
                found,
            )
            assert all(torch.equal(quantised_linear(x, weight), out) for _ in range(3)), "launches differ"
