"""Triton's interpreter, without the work that it does over and over, and with products that no shape changes."""

from __future__ import annotations

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
