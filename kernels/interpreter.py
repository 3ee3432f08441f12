"""Repairs of Triton's CPU interpreter (3.6 to 3.9), for those who run the kernels without a GPU.

`repair()` changes Triton's own classes in this process, so nothing calls it unasked; the tests and the command line do.

1. bfloat16: the interpreter keeps it as raw 16-bit words, and `tl.dot` and arithmetic compute on bit patterns
   (triton#11584); float32 -> bfloat16 truncates. Here operands are widened and results rounded to nearest even.
2. Triton 3.6 with numpy >= 2.4: a loop bound known only at run time is a one-element array, which int() refuses (triton#9171).
3. Speed: each helper call patches the whole language module anew, and integer operations check for overflow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti

_COMPARISONS = {
    np.less,
    np.greater,
    np.less_equal,
    np.greater_equal,
    np.equal,
    np.not_equal,
}

repaired = False


def _widen(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper 16 bits, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _as_f32(handle: Any) -> Any:
    return ti.TensorHandle(_widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def repair() -> None:
    """Applies the repairs, once."""
    global repaired
    if repaired:
        return
    repaired = True
    _repair_bf16()
    _repair_loop_bounds()
    _repair_speed()


def _repair_bf16() -> None:
    builder: Any = ti.InterpreterBuilder
    create_dot, binary_op, cast_impl = builder.create_dot, builder.binary_op, builder.cast_impl

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return create_dot(self, _as_f32(a), _as_f32(b), d, *rest)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            return binary_op(self, lhs, rhs, op)
        result = op(_widen(lhs.data), _widen(rhs.data))
        if op in _COMPARISONS:
            return ti.TensorHandle(result, tl.int1)
        return ti.TensorHandle(_round(result), tl.bfloat16)

    def cast(self: Any, source: Any, target: Any) -> Any:
        from_bf16 = _is_bf16(source)
        to_bf16 = target.scalar == tl.bfloat16
        if from_bf16 and not to_bf16:
            wide = _as_f32(source)
            return wide if target.scalar == tl.float32 else cast_impl(self, wide, target)
        if to_bf16 and not from_bf16 and source.dtype.scalar.is_floating():
            return ti.TensorHandle(_round(source.data), tl.bfloat16)
        return cast_impl(self, source, target)

    builder.create_dot, builder.binary_op, builder.cast_impl = dot, binary, cast


def _repair_loop_bounds() -> None:
    patch_tensor: Any = ti._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        )

    ti._patch_lang_tensor = patched


def _repair_speed() -> None:
    patch_language: Any = ti._patch_lang
    patched: set[tuple[int, ...]] = set()

    def patch_once(function: Any) -> Any:
        scope = patch_language(function)
        restore = scope.restore

        def forget_and_restore() -> None:
            patched.clear()
            restore()

        scope.restore = forget_and_restore
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_languages"):
            known = self.fn.__globals__.values()
            self._languages = tuple(id(m) for m in (tl, tl.core) if any(g is m for g in known))
        if self._languages not in patched:
            patch_language(self.fn)
            patched.add(self._languages)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise ti.InterpreterError(repr(error)) from error

    ti._patch_lang = patch_once
    ti.InterpretedFunction.__call__ = call
    options = ti.interpreter_builder.options
    ti.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
