"""What Triton's interpreter does again at every operation, done once: three quarters of its time. No result changes.

It replaces private names of triton 3.6 and 3.7 by ones that remember what those answered; kernels run as before.
"""

import dataclasses
import math
from functools import cached_property
from types import SimpleNamespace

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core = tl.core
_numbers_of, _block_type_init = interpreter._get_np_dtype, core.block_type.__init__
_equals, _broadcast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value
_numbers: dict[str, object] = {}
_blocks: dict[tuple, tuple] = {}
_shapes: dict[tuple, object] = {}
_tensor_shapes: dict[tuple, tuple] = {}


class _StaysPatched:
    def restore(self) -> None:
        pass


def _get_np_dtype(kind):
    if kind.name not in _numbers:
        _numbers[kind.name] = _numbers_of(kind)
    return _numbers[kind.name]


def _dtype_equals(self, other):
    return self is other or _equals(self, other)


def _tuple_init(self, args, type=None):  # noqa: A002 - Triton names it
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple(self):  # nobody asks for that of a shape
    return core._type_for_tuple_values(self.values)


def _block_init(self, element_ty, shape):
    """One shape object for all blocks of a shape."""
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    if (element_ty.name, sizes) not in _blocks:
        _block_type_init(self, element_ty, shape)
        _blocks[element_ty.name, sizes] = (_shapes.setdefault(sizes, self.shape), self.numel, self.name)
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _blocks[element_ty.name, sizes]


def _tensor_init(self, handle, type):  # noqa: A002
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in _tensor_shapes:
        _tensor_shapes[sizes] = (core.tuple(map(core.constexpr, sizes)), core.constexpr(math.prod(sizes)))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shapes[sizes]


def _broadcast_impl_value(self, left, right):
    if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
        return left, right
    return _broadcast(self, left, right)


def install() -> None:
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda _: _StaysPatched()  # at every call of tl.sum it patched the whole language
    interpreter._get_np_dtype = _get_np_dtype
    builder = interpreter.interpreter_builder  # it looks for overflows, and asserts them in debug mode alone
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core.dtype.__eq__ = _dtype_equals
    core.tuple.type = cached_property(_type_of_tuple)
    core.tuple.type.__set_name__(core.tuple, "type")
    core.tuple.__init__ = _tuple_init
    core.block_type.__init__ = _block_init
    core.tensor.__init__ = _tensor_init
    TritonSemantic.broadcast_impl_value = _broadcast_impl_value
