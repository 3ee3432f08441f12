"""Repairs of Triton's CPU interpreter (3.6 to 3.9), which runs the kernels without a GPU.

`repair()` changes Triton's own classes in this process, so no op calls it; the tests and the
command line do.

1. bfloat16: the interpreter keeps it as raw 16-bit words, and `tl.dot` and arithmetic compute on
   bit patterns (triton#11584); float32 -> bfloat16 truncates. Here operands are widened and results
   rounded to nearest even.
2. Triton 3.6 with numpy >= 2.4: a loop bound known only at run time is a one-element array, which
   int() refuses (triton#9171). Here it is read as a number.
3. Speed: each call of a helper patches all of `triton.language` again, integer operations check for
   overflow, types are built again for every value, and Philox takes 35 to 80 operations of 20 us.
   Here the module is patched once, types are cached, overflow is not checked, and numpy computes
   Philox.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from triton.language import random

from . import common

_COMPARISONS = {np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal}

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)

repaired = False
replaced: dict[str, Any] = {}  # the functions that numpy versions have replaced


def _widen(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """Round float32 to its upper 16 bits, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _as_f32(handle: Any) -> Any:
    return ti.TensorHandle(_widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def repair() -> None:
    """Apply the repairs, once."""
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
    _remember_types()
    replaced.update(philox_impl=random.philox_impl, philox=common.philox)
    random.philox_impl, common.philox = _philox4x32, _philox2x32


def _remember_types() -> None:
    """Make each block type, tensor shape and numpy dtype once."""
    make_block_type = tl.block_type.__init__
    block_types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr():
            return make_block_type(self, element_ty, shape)
        key = (element_ty, tuple(getattr(n, "value", n) for n in shape))
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)
        self.__dict__.update(block_types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = (
                tl.core.tuple([tl.constexpr(n) for n in key]),
                tl.constexpr(math.prod(key)),
            )
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    np_dtype = ti._get_np_dtype
    np_dtypes: dict[Any, Any] = {}

    def known_np_dtype(type: Any) -> Any:
        if type.is_ptr():
            return np_dtype(type)
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype(type)
        return np_dtypes[type.name]

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    ti._get_np_dtype = known_np_dtype


def _philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = 10) -> Any:
    """Compute Triton's Philox in numpy, in fewer operations than the interpreter would take."""
    assert c0.dtype == tl.uint32, "the repaired interpreter has the 32-bit form only"
    x0, x1, x2, x3, y0, y1 = _wide(c0, c1, c2, c3, k0, k1)
    for _ in range(getattr(n_rounds, "value", n_rounds)):
        b, a = x2 * np.uint64(0xCD9E8D57), x0 * np.uint64(0xD2511F53)
        x0, x1, x2, x3 = (b >> _HALF) ^ x1 ^ y0, b & _LOW, (a >> _HALF) ^ x3 ^ y1, a & _LOW
        y0, y1 = (y0 + np.uint64(0x9E3779B9)) & _LOW, (y1 + np.uint64(0xBB67AE85)) & _LOW
    return _as_words((c0, c1, c2, c3), (x0, x1, x2, x3))


def _philox2x32(key: Any, c0: Any, c1: Any) -> Any:
    """Compute `common.philox` in numpy."""
    y, x0, x1 = _wide(key, c0, c1)
    for _ in range(common.PHILOX_ROUNDS.value):
        product = x0 * np.uint64(0xD256D193)
        x0, x1 = (product >> _HALF) ^ y ^ x1, product & _LOW
        y = (y + np.uint64(0x9E3779B9)) & _LOW
    return _as_words((c0, c1), (x0, x1))


def _wide(*words: Any) -> list[np.ndarray]:
    return [word.handle.data.astype(np.uint64) for word in words]


def _as_words(counters: tuple[Any, ...], results: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
    """Wrap results as uint32 values of the shape that the counters broadcast to."""
    results = np.broadcast_arrays(*results)
    block = any(c.type.is_block() for c in counters)
    kind = tl.block_type(tl.uint32, list(results[0].shape)) if block else tl.uint32
    words = (ti.TensorHandle(x.astype(np.uint32), tl.uint32) for x in results)
    return tuple(tl.tensor(word, kind) for word in words)
