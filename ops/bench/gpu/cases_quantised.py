"""Products with weights of 8 bits, beside cuBLAS in bf16; and whether they are right."""

import itertools
from dataclasses import replace

import torch

from kernels.quantised_linear import QuantisedWeight, quantised_linear, triton_kernel, triton_widen
from kernels.quantised_linear.reference import dequantised
from ops.bench.gpu.cases import DEVICE, READ_BYTES_PER_S, Built, Case, error, random
from ops.bench.gpu.checks import require
from ops.bench.gpu.timing import num_sets

SIZES = {"4096→6144": (6144, 4096), "4096→28672": (28672, 4096), "14336→4096": (4096, 14336)}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 8192)
FORMS = (
    ("int8", torch.int8, False),
    ("fp8", torch.float8_e4m3fn, False),
    ("block fp8", torch.float8_e4m3fn, True),
)


def weight_of(
    size_out: int, size_in: int, kind: torch.dtype, *, is_blocked: bool, bias: torch.dtype | None = None
) -> QuantisedWeight:
    """``bias``: of this type, if any."""
    data = (torch.randn(size_out, size_in, device=DEVICE) * 40).clamp(-127, 127).to(kind)
    blocks = (-(-size_out // 128), -(-size_in // 128)) if is_blocked else (size_out,)
    added = None if bias is None else random(size_out).to(bias)
    return QuantisedWeight(data, torch.rand(blocks, device=DEVICE) / (40 * size_in**0.5), added)


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
    for (name, sizes), num_rows in itertools.product(SIZES.items(), ROWS):
        num_bytes = float(sizes[0] * sizes[1] + num_rows * 2 * sum(sizes))
        for label, kind, is_blocked in (*FORMS, ("bf16 cuBLAS", None, False)):
            build = lambda n=num_rows, s=sizes, k=kind, b=is_blocked: products(n, s, k, is_blocked=b)  # noqa: E731
            total = num_bytes if kind is not None else num_bytes + sizes[0] * sizes[1]
            floor = total / READ_BYTES_PER_S * 1e6
            bounds = (None, floor / 0.75, floor / 0.85) if kind is not None and num_rows <= 64 else (None, None, None)
            flops = 2.0 * num_rows * sizes[0] * sizes[1]
            found.append(Case("quantised", f"{label} {name} T={num_rows}", build, total, flops, 1, *bounds))
    return [*found, *(widening(*form) for form in FORMS)]


def widening(label: str, kind: torch.dtype, is_blocked: bool) -> Case:
    """The weight of 117 MB multiplied out, as the product of many rows does before it multiplies."""
    size_out, size_in = SIZES["4096→28672"]

    def build() -> Built:
        weights = [weight_of(size_out, size_in, kind, is_blocked=is_blocked) for _ in range(2)]
        verify = lambda: error(  # noqa: E731
            triton_widen.widened(weights[0], 0, size_out, torch.bfloat16), dequantised(weights[0])
        )
        return Built([lambda w=w: triton_widen.widened(w, 0, size_out, torch.bfloat16) for w in weights], verify)

    return Case("quantised", f"{label} 4096→28672 widened", build, 3.0 * size_out * size_in)


def quantised_linear_against_float64() -> None:
    for (_, kind, is_blocked), dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16)):
        for num_rows, sizes in itertools.product((1, 7, 16, 17, 64, 200, 300), ((6144, 4096), (200, 300), (41, 97))):
            weight = weight_of(*sizes, kind, is_blocked=is_blocked, bias=dtype if num_rows in (7, 300) else None)
            x = random(num_rows, sizes[1]).to(dtype)
            out = quantised_linear(x, weight)
            require(out, exact(x, weight), f"{kind} blocks {is_blocked} {dtype} {num_rows} {sizes}")
            assert all(torch.equal(quantised_linear(x, weight), out) for _ in range(20)), "launches differ"
            if dtype == torch.float32:
                continue
            order = torch.randperm(num_rows, device=DEVICE)
            moved = triton_kernel.quantised_linear(x[order], weight)
            assert torch.equal(moved, triton_kernel.quantised_linear(x, weight)[order]), "a row depends on its place"


def every_number_of_8_bits_comes_out_as_it_is() -> None:
    """Rows of the unit matrix times weights that hold all bytes (but fp8's two NaN), for every row of the tables."""
    for (_, kind, is_blocked), size_out in itertools.product(FORMS, (4096, 6144, 9000)):
        byte = (torch.arange(size_out, device=DEVICE)[:, None] + torch.arange(1024, device=DEVICE)) % 256
        byte = byte.masked_fill((byte % 128 == 127), 0) if kind == torch.float8_e4m3fn else byte
        data = byte.to(torch.uint8).view(kind)
        blocks = (-(-size_out // 128), 8) if is_blocked else (size_out,)
        weight = QuantisedWeight(data, torch.ones(blocks, device=DEVICE))
        for num_rows in (1, 16, 32, 64, 128, 256, 512, 600):
            columns = torch.randperm(1024, device=DEVICE)[:num_rows]
            out = quantised_linear(torch.eye(1024, device=DEVICE, dtype=torch.bfloat16)[columns], weight)
            assert torch.equal(out, data.to(torch.bfloat16)[:, columns].T), (kind, is_blocked, size_out, num_rows)


def numbers_are_multiplied_out_to_the_bit() -> None:
    """Also in parts, whose products stand in columns of one output; behind the weight's last number stands NaN."""
    for (_, kind, is_blocked), dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16)):
        for sizes in ((6144, 4096), (200, 300), (41, 97), (16384 * 3 + 40, 4096)):
            weight = before_nan(weight_of(*sizes, kind, is_blocked=is_blocked, bias=dtype))
            first = min(128, sizes[0] // 256 * 128)
            wide = triton_widen.widened(weight, first, sizes[0] - first, dtype)
            assert torch.equal(wide, dequantised(weight)[first:].to(dtype)), (kind, is_blocked, dtype, sizes)
            x = random(300, sizes[1]).to(dtype)
            out = triton_widen.quantised_linear(x, weight)
            require(out, exact(x, weight), f"widened {kind} blocks {is_blocked} {dtype} {sizes}")


def exact(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    expected = x.double() @ dequantised(weight).double().T
    return expected if weight.bias is None else expected + weight.bias.double()


def before_nan(weight: QuantisedWeight) -> QuantisedWeight:
    """It, in memory that goes on with NaN of fp8 (127 of int8)."""
    count = weight.data.numel()
    memory = torch.full((count + 4096,), 0x7F, dtype=torch.uint8, device=DEVICE)
    memory[:count] = weight.data.view(torch.uint8).flatten()
    return replace(weight, data=memory[:count].view(weight.data.dtype).view(weight.data.shape))


CHECKS = {
    "quantised": quantised_linear_against_float64,
    "quantised, each number": every_number_of_8_bits_comes_out_as_it_is,
    "quantised, multiplied out": numbers_are_multiplied_out_to_the_bit,
}
