"""Every kernel on tensors that end at a page which nobody may touch: a read or a write past an end kills the process
that runs the case."""

import ctypes
import mmap
from dataclasses import replace

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: Tensor) -> Tensor:
    """A copy of it that stands between two pages without access, its end flush with the upper one."""
    size = tensor.numel() * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    private_anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _libc.mmap(None, room + 2 * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous, -1, 0)
    for page in (base, base + mmap.PAGESIZE + room):
        assert _libc.mprotect(page, mmap.PAGESIZE, 0) == 0
    memory = (ctypes.c_char * size).from_address(base + mmap.PAGESIZE + room - size)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def _rms_norm() -> None:
    from kernels.rms_norm import triton_kernel

    x, weight = guarded(torch.randn(3, 97)), guarded(torch.randn(97))
    triton_kernel.rms_norm(x, weight, 1e-5)
    triton_kernel.rms_norm(x, weight, 1e-5, guarded(torch.randn(3, 97)))


def _rope() -> None:
    from kernels.rope import triton_kernel

    heads, table = guarded(torch.randn(3, 5, 24)), guarded(torch.randn(9, 2, 24))
    triton_kernel.rope(heads, guarded(torch.tensor([8, 0, 3])), table)


def _store_kv() -> None:
    from kernels.store_kv import triton_kernel

    keys, values = guarded(torch.randn(3, 3, 24)), guarded(torch.randn(3, 3, 24))
    caches = [guarded(torch.zeros(2, 4, 3, 24)) for _ in range(2)]
    triton_kernel.store_kv(keys, values, *caches, guarded(torch.tensor([7, 0, 3])))


def _silu_mul() -> None:
    from kernels.silu_mul import triton_kernel

    triton_kernel.silu_mul(guarded(torch.randn(3, 194)))


def _qk_rope_kv() -> None:
    from kernels.qk_rope_kv import HeadNorms, triton_kernel

    heads, values = guarded(torch.randn(3, 5, 24)), guarded(torch.randn(3, 2, 24))
    caches = [guarded(torch.zeros(2, 4, 2, 24)) for _ in range(2)]
    norms = HeadNorms(guarded(torch.randn(24)), guarded(torch.randn(24)), 1e-5)
    table, slots = guarded(torch.randn(9, 2, 24)), guarded(torch.tensor([7, -1, 3]))
    triton_kernel.qk_rope_kv(heads, values, guarded(torch.tensor([8, 0, 3])), table, *caches, slots, norms)


def _sgmv() -> None:
    from kernels.sgmv import LoraSlice, plan_sgmv, triton_kernel

    x, y = guarded(torch.randn(5, 97)), guarded(torch.randn(5, 41))
    part = LoraSlice(guarded(torch.randn(2, 8, 97)), guarded(torch.randn(2, 8, 41)), (3, 8))
    triton_kernel.expand(y, triton_kernel.shrink(x, [part], plan_sgmv([1, -1, 0, 1, 1], x.device)))


def _silu_low() -> None:
    from kernels.sgmv import LoraSlice, plan_sgmv, triton_kernel
    from kernels.silu_mul import triton_low

    x, gate_up = guarded(torch.randn(5, 97)), guarded(torch.randn(5, 82))
    a, b = guarded(torch.randn(2, 8, 97)), guarded(torch.randn(2, 8, 41))
    slices = [LoraSlice(a, b, (3, 8), start) for start in (0, 41)]
    for slots in ([1, -1, 0, -1, -1], [0, 0, -1, 0, 0]):
        triton_low.silu_mul(gate_up, triton_kernel.shrink(x, slices, plan_sgmv(slots, x.device)))


def _rope_low() -> None:
    from kernels.qk_rope_kv import HeadNorms, triton_low
    from kernels.sgmv import LoraSlice, plan_sgmv, triton_kernel

    x, heads = guarded(torch.randn(3, 97)), guarded(torch.randn(3, 7, 24))
    a = guarded(torch.randn(2, 8, 97))
    b = [guarded(torch.randn(2, 8, size)) for size in (72, 48, 48)]
    slices = [LoraSlice(a, part, (3, 8), start) for part, start in zip(b, (0, 72, 120), strict=True)]
    low = triton_kernel.shrink(x, slices, plan_sgmv([1, -1, 0], x.device))
    caches = [guarded(torch.zeros(2, 4, 2, 24)) for _ in range(2)]
    norms = HeadNorms(guarded(torch.randn(24)), guarded(torch.randn(24)), 1e-5)
    table, slots = guarded(torch.randn(9, 2, 24)), guarded(torch.tensor([7, -1, 3]))
    triton_low.qk_rope_kv(heads, guarded(torch.tensor([8, 0, 3])), table, *caches, slots, norms, low)


def _paged_attention() -> None:
    from kernels.paged_attention import plan_attention, triton_kernel

    caches = [guarded(torch.randn(5, 16, 2, 24)) for _ in range(2)]
    tables = guarded(torch.tensor([[4, 3], [2, 1]]))
    for starts, contexts in (([0, 1, 2], [17, 32]), ([0, 3, 23], [32, 31])):
        plan = plan_attention(tables, starts, contexts, block_size=16, num_heads=6, num_kv_heads=2)
        triton_kernel.paged_attention(guarded(torch.randn(starts[-1], 6, 24)), *caches, plan, 0.2)


def _moe() -> None:
    from kernels.moe import RoutingRule, triton_kernel, triton_plan, triton_route

    x, gate_up, down = (guarded(torch.randn(*shape)) for shape in ((5, 97), (7, 82, 97), (7, 97, 41)))
    ids = guarded(torch.zeros(5, 3, dtype=torch.int32))
    weights = guarded(triton_route.route(guarded(torch.randn(5, 7)), 3, RoutingRule(), ids))
    for num_tokens in (None, guarded(torch.tensor([4], dtype=torch.int32))):
        plan = triton_plan.plan_experts(ids, 7, guarded(torch.zeros(7, dtype=torch.int64)), num_tokens)
        kept = replace(plan.tiled, places=guarded(plan.tiled.places), table=guarded(plan.tiled.table))
        plan = replace(plan, pairs=guarded(plan.pairs), tiled=kept)
        inner = guarded(triton_kernel.grouped_silu_mul(x, gate_up, plan))
        triton_route.combine(guarded(triton_kernel.grouped_linear(inner, down, plan)), weights, plan)


def _past_an_end() -> None:
    from kernels.store_kv import triton_kernel

    keys = guarded(torch.randn(1, 3, 24))
    caches = [guarded(torch.zeros(2, 4, 3, 24)) for _ in range(2)]
    triton_kernel.store_kv(keys, keys, *caches, torch.tensor([8]))


CASES = {
    case.__name__.lstrip("_"): case
    for case in (
        _rms_norm,
        _rope,
        _store_kv,
        _silu_mul,
        _qk_rope_kv,
        _sgmv,
        _silu_low,
        _rope_low,
        _paged_attention,
        _moe,
        _past_an_end,
    )
}
