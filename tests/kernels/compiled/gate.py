"""Compiles every launch of the Triton kernels for sm_90, without a GPU, and prints what each takes, as JSON.

    PYTHONPATH=FOLDER_WITH_TRITON_3_6_0:. python -m tests.kernels.compiled.gate [CASE [KERNEL JSON]]

The wrappers run on CPU tensors with a recorder in the place of the launch, for every row of every table in
kernels/configs: so the signatures, the constants and the alignment are those of the real launches. CASE chooses the
cases whose names begin so; JSON takes the place of all rows of one kernel, for a trial. The golden file of
tests/prove/test_prove_kernels_sm90.py is what this prints.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import tiles
from kernels.moe import RoutingRule
from kernels.moe import triton_kernel as moe_kernel
from kernels.moe import triton_pairs as moe_pairs
from kernels.moe import triton_plan as moe_plan
from kernels.moe import triton_route as moe_route
from kernels.moe.adapters import CutPairs
from kernels.paged_attention import DecodeShape, captured_plan, plan_attention, plan_numbers
from kernels.paged_attention import triton_kernel as attention_kernel
from kernels.qk_rope_kv import HeadNorms
from kernels.qk_rope_kv import triton_kernel as qk_rope_kv_kernel
from kernels.qk_rope_kv import triton_low as qk_rope_kv_low_kernel
from kernels.quantised_linear import QuantisedWeight
from kernels.quantised_linear import triton_kernel as quantised_kernel
from kernels.quantised_linear import triton_widen as widen_kernel
from kernels.rms_norm import triton_kernel as rms_norm_kernel
from kernels.rope import triton_kernel as rope_kernel
from kernels.sampling import SamplingRows
from kernels.sampling import triton_kernel as sampling_kernel
from kernels.sgmv import LoraSlice, PartialLow, plan_sgmv
from kernels.sgmv import triton_kernel as sgmv_kernel
from kernels.sgmv.captured import CapturedSgmv, segment_numbers
from kernels.silu_mul import triton_kernel as silu_mul_kernel
from kernels.silu_mul import triton_low as silu_low_kernel
from kernels.store_kv import triton_kernel as store_kv_kernel
from tests.kernels.compiled.operands import overwritten

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")
Launch = tuple[JITFunction, dict[str, Any]]


def record(run: Callable[[], object]) -> list[Launch]:
    """The launches that ``run`` would make."""
    launches: list[Launch] = []

    def recorder(kernel: JITFunction, *args: object, grid: object, warmup: bool, **named: object) -> None:
        launches.append((kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **named}))

    original, JITFunction.run = JITFunction.run, recorder
    try:
        run()
    finally:
        JITFunction.run = original
    return launches


def compile_launch(kernel: JITFunction, given: dict[str, Any]) -> Any:
    """As Triton itself would specialise these arguments."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = (
            POINTERS[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        )
        if parameter.do_not_specialize:
            continue
        if not isinstance(value, float) and (value.data_ptr() if is_tensor else value) % 16 == 0:
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: given[name] for name in OPTIONS if name in given}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers, stack, spilling instructions, shared memory, matrix instructions, wide and narrow global loads, and
    writes to registers of products under way."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": count(r"\b(?:LDL|STL)\b"),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": count(r"\bHGMMA"),
        "mma": count(r"\bHMMA"),
        "wide_loads": count(r"\b(?:LDG|LDGSTS)\.E[.\w]*\.128"),
        "narrow_loads": count(r"\bLDG\.E(?!\S*128)"),
        "atomics": count(r"\b(?:ATOM|ATOMG|RED)\."),
        "overwritten": len(overwritten(code)),
    }


def normal(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def qk_rope_kv(num_tokens: int, heads: tuple[int, int, int], norms: HeadNorms | None) -> None:
    num_heads, num_kv_heads, head_dim = heads
    x = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cache, numbers = normal(4, 16, num_kv_heads, head_dim), torch.arange(num_tokens)
    turned, values = x[:, : num_heads + num_kv_heads], x[:, num_heads + num_kv_heads :]
    table = torch.zeros(num_tokens, 2, head_dim)
    qk_rope_kv_kernel.qk_rope_kv(turned, values, numbers, table, cache, cache, numbers, norms)


def attention(
    heads: tuple[int, int, int],
    queries: int,
    context: int,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_fixed: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    blocks = -(-context // 16)
    plan = plan_attention(
        torch.arange(blocks)[None],
        [0, queries],
        [context],
        block_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        sliding_window=window,
    )
    plan = replace(plan, is_fixed=is_fixed)
    cache = torch.zeros(blocks, 16, num_kv_heads, head_dim, dtype=dtype)
    x = torch.zeros(queries, num_heads, head_dim, dtype=dtype)
    attention_kernel.paged_attention(x, cache, cache, plan, head_dim**-0.5)


def captured_decode(heads: tuple[int, int, int], *, has_groups: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    device = torch.device("cpu")
    shape = DecodeShape(64, 4096, 16, num_heads, num_kv_heads, device, has_groups=has_groups)
    memory = torch.zeros(plan_numbers(shape), dtype=torch.int32)
    plan = captured_plan(memory, torch.zeros(64, 256, dtype=torch.int32), shape)
    cache = normal(256, 16, num_kv_heads, head_dim)
    attention_kernel.paged_attention(normal(64, num_heads, head_dim), cache, cache, plan, head_dim**-0.5)


def quantised_weight(kind: torch.dtype, sizes: tuple[int, int], *, is_blocked: bool) -> QuantisedWeight:
    size_out, size_in = sizes
    scales = torch.zeros((size_out // 128, size_in // 128) if is_blocked else (size_out,))
    return QuantisedWeight(torch.zeros(size_out, size_in, dtype=kind), scales)


def sample(num_rows: int) -> None:
    columns = [torch.zeros(num_rows, dtype=kind) for kind in (torch.float32, torch.int32, *[torch.float32] * 3)]
    sampling_kernel.sample(torch.zeros(num_rows, 128_256), SamplingRows(*columns))


def shrunk(
    num_rows: int,
    size_in: int,
    sizes_out: tuple[int, ...],
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_slots: int = 1,
    is_captured: bool = False,
) -> PartialLow:
    slices, start = [], 0
    for size_out in sizes_out:
        a, b = (torch.zeros(1, rank, size, dtype=dtype) for size in (size_in, size_out))
        slices.append(LoraSlice(a, b, (rank,) * num_slots, start))
        start += size_out
    x = torch.zeros(num_rows, size_in, dtype=dtype)
    if is_captured:
        memory = torch.zeros(segment_numbers(num_rows), dtype=torch.int32)
        return sgmv_kernel.shrink(x, slices, CapturedSgmv(memory, num_rows, 0))
    return sgmv_kernel.shrink(x, slices, plan_sgmv([row % num_slots for row in range(num_rows)], x.device))


def lora(
    num_rows: int,
    size_in: int,
    sizes_out: tuple[int, ...],
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_slots: int = 1,
    is_captured: bool = False,
) -> None:
    part = shrunk(num_rows, size_in, sizes_out, rank, dtype, num_slots=num_slots, is_captured=is_captured)
    y = torch.zeros(num_rows, sum(sizes_out), dtype=dtype)
    sgmv_kernel.expand(y, part)
    if sizes_out == GATE_UP:
        silu_low_kernel.silu_mul(y, part)


def qk_rope_kv_low(heads: tuple[int, int, int], norms: HeadNorms | None, rank: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    sizes_out = tuple(number * head_dim for number in (num_heads, num_kv_heads, num_kv_heads))
    low = shrunk(32, 4096, sizes_out, rank, num_slots=32)
    cache, numbers, table = normal(4, 16, num_kv_heads, head_dim), torch.arange(32), torch.zeros(32, 2, head_dim)
    x = normal(32, num_heads + 2 * num_kv_heads, head_dim)
    qk_rope_kv_low_kernel.qk_rope_kv(x, numbers, table, cache, cache, numbers, norms, low)


GATE_UP = (14336, 14336)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Shapes of Llama-3-8B, SmolLM2-135M, and of models with head size 256 and one key/value head."""
    for size in (576, 4096):
        yield f"rms_norm {size}", lambda size=size: rms_norm_kernel.rms_norm(normal(64, size), normal(size), 1e-5)
        yield (
            f"add_rms_norm {size}",
            lambda size=size: rms_norm_kernel.rms_norm(normal(64, size), normal(size), 1e-5, normal(64, size)),
        )
    for parts in (2, 4):
        yield (
            f"add_rms_norm 4096 of {parts} parts",
            lambda parts=parts: rms_norm_kernel.rms_norm(
                torch.zeros(parts, 32, 4096), normal(4096), 1e-5, normal(32, 4096)
            ),
        )
    yield "qk_norm 128", lambda: rms_norm_kernel.rms_norm(normal(64, 48, 128)[:, :32], normal(128), 1e-5)
    for num_heads, head_dim in ((48, 128), (15, 64)):
        heads, table = normal(64, num_heads, head_dim), torch.zeros(64, 2, head_dim)
        yield (
            f"rope {num_heads} {head_dim}",
            lambda heads=heads, table=table: rope_kernel.rope(heads[:, 2:], torch.arange(64), table),
        )
    for shape in ((64, 8, 128), (64, 3, 64)):
        new, cache = normal(*shape), normal(4, 16, *shape[1:])
        yield (
            f"store_kv {shape[1]} {shape[2]}",
            lambda new=new, cache=cache: store_kv_kernel.store_kv(new, new, cache, cache, torch.arange(64)),
        )
    for num_tokens in (64, 1024):
        yield f"silu_mul T={num_tokens} 14336", lambda n=num_tokens: silu_mul_kernel.silu_mul(normal(n, 2 * 14336))
        for heads, norms in (
            ((32, 8, 128), None),
            ((16, 8, 128), HeadNorms(normal(128), normal(128), 1e-6)),
            ((9, 3, 64), None),
        ):
            yield (
                f"qk_rope_kv T={num_tokens} {'/'.join(map(str, heads))}{' norms' if norms else ''}",
                lambda n=num_tokens, heads=heads, norms=norms: qk_rope_kv(n, heads, norms),
            )
    for name, heads in {"32/8 128": (32, 8, 128), "9/3 64": (9, 3, 64), "8/1 256": (8, 1, 256)}.items():
        yield f"decode {name}", lambda heads=heads: attention(heads, 1, 4096)
        yield f"prefill {name}", lambda heads=heads: attention(heads, 64, 4096)
        yield f"captured decode {name}", lambda heads=heads: captured_decode(heads, has_groups=False)
        yield f"groups {name}", lambda heads=heads: captured_decode(heads, has_groups=True)
        yield f"fixed {name}", lambda heads=heads: attention(heads, 64, 4096, is_fixed=True)
    yield "fp32, fixed 32/8 128", lambda: attention((32, 8, 128), 64, 4096, dtype=torch.float32, is_fixed=True)
    for head_dim in (80, 96):  # no power of two
        heads = (32, 8, head_dim)
        for queries in (1, 64):
            yield (
                f"{queries} queries 32/8 {head_dim}",
                lambda heads=heads, queries=queries: attention(heads, queries, 4096),
            )
        yield f"captured decode 32/8 {head_dim}", lambda heads=heads: captured_decode(heads, has_groups=False)
        yield f"fixed 32/8 {head_dim}", lambda heads=heads: attention(heads, 64, 4096, is_fixed=True)
    yield "qk_rope_kv T=64 32/8/96", lambda: qk_rope_kv(64, (32, 8, 96), None)
    yield "decode 32/8 128 window", lambda: attention((32, 8, 128), 1, 4096, 1024)
    yield "prefill 32/8 128 window", lambda: attention((32, 8, 128), 64, 4096, 1024)
    for queries in (1, 64):
        yield (
            f"fp32, {queries} queries 32/8 128",
            lambda queries=queries: attention((32, 8, 128), queries, 4096, dtype=torch.float32),
        )
    yield "fp32, 64 queries 9/3 64", lambda: attention((9, 3, 64), 64, 4096, dtype=torch.float32)
    yield "attention of 8 queries 32/8 128", lambda: attention((32, 8, 128), 8, 4096)
    yield "attention of 8 queries 64/1 128", lambda: attention((64, 1, 128), 8, 4096)
    for num_rows in (4, 64, 512, 2048):
        for rank in (16, 32, 64, 128):
            yield f"lora T={num_rows} r={rank}", lambda n=num_rows, r=rank: lora(n, 4096, (4096, 1024, 1024), r)
    for rank in (16, 64, 256):
        yield (
            f"captured lora T=1024 r={rank}",
            lambda r=rank: lora(1024, 4096, (4096, 1024, 1024), r, is_captured=True),
        )
    for num_rows in (64, 512, 2048):
        yield f"fp32, lora T={num_rows} r=128", lambda n=num_rows: lora(n, 4096, (4096,), 128, torch.float32)
    for num_rows in (4, 64, 256):
        for rank in (16, 64, 256):
            yield (
                f"distinct lora T={num_rows} r={rank}",
                lambda n=num_rows, r=rank: lora(n, 4096, (4096, 1024, 1024), r, num_slots=n),
            )
            yield (
                f"distinct lora of gate and up T={num_rows} r={rank}",
                lambda n=num_rows, r=rank: lora(n, 4096, GATE_UP, r, num_slots=n),
            )
    for num_rows in (512, 2048):
        for rank in (16, 64, 128):
            yield f"lora of gate and up T={num_rows} r={rank}", lambda n=num_rows, r=rank: lora(n, 4096, GATE_UP, r)
    for heads, norms, rank in (
        ((32, 8, 128), None, 16),
        ((32, 8, 128), None, 64),
        ((16, 8, 128), HeadNorms(normal(128), normal(128), 1e-6), 16),
        ((9, 3, 64), None, 16),
        ((32, 8, 96), None, 16),
    ):
        name = f"{'/'.join(map(str, heads))}{' norms' if norms else ''} r={rank}"
        yield f"lora into qk_rope_kv {name}", lambda heads=heads, norms=norms, r=rank: qk_rope_kv_low(heads, norms, r)
    yield "sample", lambda: sample(64)
    tokens = torch.zeros(64, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(64, 128_256, dtype=dtype)
        yield f"highest {dtype}", lambda logits=logits: sampling_kernel.highest(logits, tokens)
    yield from quantised_cases()
    yield from moe_cases()
    yield "lora of odd sizes", lambda: lora(64, 97, (41,), 16)


def quantised_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, kind in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for sizes, is_blocked in (
            ((6144, 4096), False),
            ((4096, 14336), False),
            ((28672, 4096), False),
            ((4096, 14336), True),
            ((28672, 4096), True),
        ):
            weight = quantised_weight(kind, sizes, is_blocked=is_blocked)
            label = f"{name} {sizes[1]}→{sizes[0]}{' blocks' if is_blocked else ''}"
            for num_rows in (16, 32, 64, 128, 256):
                x = normal(num_rows, sizes[1])
                yield f"{label} T={num_rows}", lambda x=x, weight=weight: quantised_kernel.quantised_linear(x, weight)
            yield f"{label} widened", lambda weight=weight: widen_kernel.widened(weight, 0, 14336, torch.bfloat16)


def moe_step(num_rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, *, is_padded: bool) -> None:
    num_experts, top_k, hidden, inner = sizes
    ids = torch.zeros(num_rows, top_k, dtype=torch.int32)
    weights = moe_route.route(torch.zeros(num_rows, num_experts, dtype=dtype), top_k, RoutingRule(), ids)
    counter = torch.zeros(1, dtype=torch.int32) if is_padded else None
    plan = moe_plan.plan_experts(ids, num_experts, torch.zeros(num_experts, dtype=torch.int64), counter)
    gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)  # never touched
    down = torch.empty(num_experts, hidden, inner, dtype=dtype)
    between = moe_kernel.grouped_silu_mul(torch.empty(num_rows, hidden, dtype=dtype), gate_up, plan)
    moe_route.combine(moe_kernel.grouped_linear(between, down, plan), weights, plan)


def moe_adapters_step(num_rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """A captured step of adapters on experts, of rank 16 in two slots: what it launches beside ``moe_step``."""
    num_experts, top_k, hidden, inner = sizes
    plan = moe_plan.plan_experts(
        torch.zeros(num_rows, top_k, dtype=torch.int32), num_experts, None, torch.zeros(1, dtype=torch.int32)
    )
    adapters = CutPairs(*moe_pairs.cut_pairs(plan, torch.zeros(num_rows, dtype=torch.int32), 2))
    ranks = torch.zeros(2 * num_experts, dtype=torch.int32)

    def part(size_in: int, size_out: int, start: int = 0) -> LoraSlice:
        a, b = (torch.empty(2 * num_experts, 16, size, dtype=dtype) for size in (size_in, size_out))
        return LoraSlice(a, b, (16,), start, ranks)

    gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)
    x = torch.empty(num_rows, hidden, dtype=dtype)
    both = moe_kernel.grouped_gate_up(x, gate_up, plan)
    adapters.add_of_tokens(both, x, [part(hidden, inner), part(hidden, inner, inner)])
    between = silu_mul_kernel.silu_mul(both)
    y = torch.empty(num_rows * top_k, hidden, dtype=dtype)
    adapters.add_of_pairs(y, between, [part(inner, hidden)])


def moe_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """A step of each row of the tables."""
    for name, sizes, numbers in (
        ("Qwen3-30B-A3B", (128, 8, 2048, 768), (1, 64, 256, 512, 1024)),
        ("Mixtral", (8, 2, 4096, 14336), (64, 256)),
        ("upcycled SmolLM2", (8, 2, 576, 1536), (16, 128)),
        ("Qwen1.5-MoE-A2.7B", (60, 4, 2048, 1408), (64, 1024)),
    ):
        for num_rows in numbers:
            yield (
                f"experts of {name} T={num_rows}",
                lambda n=num_rows, sizes=sizes: moe_step(n, sizes, torch.bfloat16, is_padded=True),
            )
    for num_rows in (1, 4, 16, 64, 128, 1024):
        yield (
            f"adapters on experts of Qwen3-30B-A3B T={num_rows}",
            lambda n=num_rows: moe_adapters_step(n, (128, 8, 2048, 768), torch.bfloat16),
        )
    yield (
        "experts by hand of Qwen3-30B-A3B T=4096",
        lambda: moe_step(4096, (128, 8, 2048, 768), torch.bfloat16, is_padded=False),
    )
    for num_rows in (16, 1024):
        yield (
            f"fp32, experts T={num_rows}",
            lambda n=num_rows: moe_step(n, (8, 2, 576, 1536), torch.float32, is_padded=True),
        )


_known: dict[str, dict[str, int]] = {}


def resources_of(kernel: JITFunction, given: dict[str, Any]) -> dict[str, int]:
    compiled = compile_launch(kernel, given)
    if compiled.hash not in _known:
        _known[compiled.hash] = resources(compiled)
    return _known[compiled.hash]


def rows_of_tables() -> Iterator[tuple[str, dict[str, list[dict[str, int]]]]]:
    for path in sorted(tiles.CONFIGS.glob("*.json")):
        yield path.stem, json.loads(path.read_text())


def name_of(table: str, case: str, kernel: JITFunction, given: dict[str, Any]) -> str:
    chosen = [f"{name.lower()}={given[name]}" for name in (*OPTIONS, "IS_GROUP") if given.get(name)]
    return f"{table} | {case} | {kernel.__name__} {' '.join(chosen)}"


def main() -> None:
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    trial = {sys.argv[2]: [json.loads(sys.argv[3])]} if len(sys.argv) > 2 else {}
    found: dict[str, dict[str, int]] = {}
    for name, table in rows_of_tables():
        tiles._table = lambda _, table=table: {**table, **trial}
        for case, run in cases():
            for kernel, given in record(run) if case.startswith(chosen) else ():
                found[name_of(name, case, kernel, given)] = resources_of(kernel, given)
    print("{", ",\n".join(f"{json.dumps(launch)}: {json.dumps(now)}" for launch, now in found.items()), "}", sep="\n")


if __name__ == "__main__":
    main()
