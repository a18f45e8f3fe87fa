"""Triton's interpreter, without the work that it does over and over, and with products that no shape changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Any, throughout: Triton's interpreter is untyped.


def replace_the_language_once() -> None:
    """Let a kernel's call of a device function find the language as the kernel has it.

    The interpreter replaces the functions of `triton.language` when a kernel is launched, and again whenever one calls
    a device function: it then looks at every member of the language, to find that all were replaced. That is a quarter
    of what kernels take there.
    """
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton, which may do as it does
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang

    def once(fn: Any) -> Any:
        seen = [each for each in (language, language.core) if any(each is value for value in fn.__globals__.values())]
        if seen and all(each.static_print is print for each in seen):  # as one that was replaced has it
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = once


def share_what_shapes_are() -> None:
    """Let blocks of one shape share what is made of it, and NumPy's types be looked up once.

    The interpreter makes a new type for whatever a kernel computes: that is a third of what kernels take there.
    """
    import numpy as np
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_get_np_dtype") or not hasattr(core, "_unwrap_shape"):  # another version of Triton
        return
    dtype_of: Callable[[Any], Any] = functools.cache(interpreter._get_np_dtype)
    make_type: Callable[[Any, Any, Any], None] = core.block_type.__init__
    make_tensor: Callable[[Any, Any, Any], None] = core.tensor.__init__
    types: dict[tuple[int, ...], tuple[Any, Any, str]] = {}  # shape, number of elements and name by sizes
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(scalar, core.pointer_type) else dtype_of(scalar)

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if (known := types.get(sizes)) is None:
            make_type(self, element_ty, shape)
            types[sizes] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if (known := tensors.get(sizes)) is None:
            make_tensor(self, handle, type)
            tensors[sizes] = (self.shape, self.numel)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    broadcast: Callable[[Any, Any, Any], Any] = TritonSemantic.broadcast_impl_value

    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = lhs.type.shape if lhs.type.is_block() else None
        if shape is not None and rhs.type.is_block() and rhs.type.shape is shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_value
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__ = type_init
    core.tensor.__init__ = tensor_init


def check_overflow_at_once() -> None:
    """Let integers be held to their bits by one sum in NumPy, for which the interpreter runs eight operations."""
    import numpy as np
    from triton.language.semantic import TritonSemantic

    if not hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):  # another version of Triton
        return
    exactly = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert scalar == rhs.type.scalar and scalar.is_int()
        found = exactly[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        fits = scalar.get_int_min_value() <= found.min() and found.max() <= scalar.get_int_max_value()
        assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def sum_products_in_doubles() -> None:
    """Let `tl.dot` give a row the same bits whatever rows are beside it.

    NumPy's BLAS sums in an order that depends on the shape, on some processors; rounding float64 sums to float32 hides
    it.
    """
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    dot: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, *options)
        found = dot(self, a, b, interpreter.TensorHandle(d.data.astype(np.float64), language.float64), *options)
        return interpreter.TensorHandle(found.data.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
