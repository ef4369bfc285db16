"""Makes Triton's interpreter compute bf16 by value (fp32, rounded to nearest even) and show what a GPU leaves open.

The interpreter adds and multiplies the bits of bf16 as integers, and gives zeros for the lanes that a masked load
without ``other`` leaves undefined; with this they are NaN (the largest number for integers). It patches private
names of triton 3.6 and 3.7: ``check`` fails loudly where they have changed.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_Builder, _Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_binary, _unary, _dot = _Builder.binary_op, _Builder.unary_op, _Builder.create_dot
_cast, _float_cast, _masked_load = _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_masked_load
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}
_BF16_NAN = np.uint16(0x7FC0)


def _widen(handle):
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _round(values):
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, rounded)


def _is_bf16(handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _binary_op(self, left, right, op):
    if not (_is_bf16(left) and _is_bf16(right)) or op in _BITWISE:
        return _binary(self, left, right, op)
    out = op(_widen(left), _widen(right))
    return _Handle(out, tl.int1) if op in _COMPARISONS else _Handle(_round(out), tl.bfloat16)


def _unary_op(self, operand, op):
    return _Handle(_round(op(_widen(operand))), tl.bfloat16) if _is_bf16(operand) else _unary(self, operand, op)


def _create_dot(self, left, right, total, *options):
    if not (_is_bf16(left) and _is_bf16(right)):
        return _dot(self, left, right, total, *options)
    out = np.matmul(_widen(left), _widen(right)) + total.data
    return _Handle(out.astype(total.data.dtype), total.dtype.scalar)


def _cast_impl(self, source, target):
    before, after = source.dtype.scalar, target.scalar
    if before == after or tl.bfloat16 not in (before, after):
        return _cast(self, source, target)
    if after == tl.bfloat16:
        return _Handle(_round(source.data.astype(np.float32)), tl.bfloat16)
    wide = _Handle(_widen(source), tl.float32)
    return wide if after == tl.float32 else _cast(self, wide, target)


def _create_fp_to_fp(self, source, target, rounding):
    kinds = (source.dtype.scalar, target.scalar)
    if tl.bfloat16 in kinds and 8 not in (kind.primitive_bitwidth for kind in kinds):
        return _cast_impl(self, source, target)
    return _float_cast(self, source, target, rounding)


def _create_load(self, pointers, *options):
    everywhere = _Handle(np.ones(pointers.data.shape, dtype=bool), tl.int1)
    return _masked_load(self, pointers, everywhere, None, *options)


def _create_masked_load(self, pointers, mask, other, *options):
    if other is None:
        kind = pointers.get_element_ty()
        numbers = interpreter._get_np_dtype(kind)
        worst = _BF16_NAN if kind == tl.bfloat16 else np.nan if kind.is_floating() else np.iinfo(numbers).max
        other = _Handle(np.full(pointers.data.shape, worst, dtype=numbers), kind)
    return _masked_load(self, pointers, mask, other, *options)


@triton.jit
def _self_test(p_x, p_out, count):
    offsets = tl.arange(0, 16)
    block = tl.load(p_x + offsets[:, None] * 16 + offsets[None, :])
    product = tl.dot(block, tl.trans(block)).to(tl.bfloat16) + block
    tl.store(p_out + offsets[:, None] * 16 + offsets[None, :], product)
    tl.store(p_out + 256 + offsets, tl.load(p_x + offsets, mask=offsets < count))


def check() -> None:
    """Raises AssertionError where the interpreter does not do what this module promises."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(272, dtype=torch.bfloat16)
    _self_test[(1,)](x, out, 5)
    expected = (x.float() @ x.float().T).bfloat16() + x
    torch.testing.assert_close(out[:256].view(16, 16), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(out[256:261], x[0, :5])
    assert out[261:].isnan().all()


def install() -> None:
    np.seterr(all="ignore")  # lanes that nothing stores overflow as they like
    _Builder.binary_op, _Builder.unary_op, _Builder.create_dot = _binary_op, _unary_op, _create_dot
    _Builder.cast_impl, _Builder.create_fp_to_fp = _cast_impl, _create_fp_to_fp
    _Builder.create_load, _Builder.create_masked_load = _create_load, _create_masked_load
    check()
