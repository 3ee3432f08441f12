"""Repairs of Triton's CPU interpreter (3.6 to 3.9), which runs the kernels without a GPU.

`repair()` changes Triton's own classes in this process, so no op calls it; the tests and the
command line do.

1. bfloat16: the interpreter keeps it as raw 16-bit words, and `tl.dot` and arithmetic compute on
   bit patterns (triton#11584); float32 -> bfloat16 truncates. Here operands are widened and results
   rounded to nearest even.
2. Triton 3.6 with numpy >= 2.4: a loop bound known only at run time is a one-element array, which
   int() refuses (triton#9171). Here it is read as a number.
3. Speed: each call of a helper patches all of `triton.language` again, integer operations check for
   overflow, types are built again for every value and compared at every operation, and Philox takes
   35 to 80 operations of 20 us. Here the module is patched once, types and constants are made once,
   two types are compared once, overflow is not checked, and numpy computes Philox.
4. `tl.fma` rounds twice before Triton 3.9, and 3.9 gives a comparison the type of its operands,
   which no mask may have. Here a comparison is a bool, and a float32 fma is computed in float64,
   which rounds as on a GPU but for rare halves.
5. `tl.dot` calls a BLAS, which adds up the products of a row in an order that depends on its place
   in the tile; a tensor core does not. Within `batch_invariant` each row is a call of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from triton.language import random

from fastformer.batch_invariance import on

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
    return handle.dtype.scalar.name == "bf16"


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
    create_fma = builder.create_fma

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _as_f32(a), _as_f32(b)
        if not on():
            return create_dot(self, a, b, d, *rest)
        rows = np.matmul(a.data[..., None, :], b.data, dtype=d.data.dtype)
        return ti.TensorHandle(rows[..., 0, :] + d.data, d.dtype.scalar)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            result = binary_op(self, lhs, rhs, op)
            if op in _COMPARISONS:  # Triton gives it the type of lhs, and 3.9 takes no such mask
                result.dtype = tl.int1
            return result
        result = op(_widen(lhs.data), _widen(rhs.data))
        if op in _COMPARISONS:
            return ti.TensorHandle(result, tl.int1)
        return ti.TensorHandle(_round(result), tl.bfloat16)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return create_fma(self, x, y, z)
        wide = x.data.astype(np.float64) * y.data + z.data
        return ti.TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    def cast(self: Any, source: Any, target: Any) -> Any:
        from_bf16 = _is_bf16(source)
        to_bf16 = target.scalar.name == "bf16"
        if from_bf16 and not to_bf16:
            wide = _as_f32(source)
            return wide if target.scalar == tl.float32 else cast_impl(self, wide, target)
        if to_bf16 and not from_bf16 and source.dtype.scalar.is_floating():
            return ti.TensorHandle(_round(source.data), tl.bfloat16)
        return cast_impl(self, source, target)

    builder.create_dot, builder.binary_op, builder.cast_impl = dot, binary, cast
    builder.create_fma = fma


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
    _remember_constants()
    _decide_types_once()
    _call_directly()
    replaced.update(philox_impl=random.philox_impl, philox=common.philox)
    random.philox_impl, common.philox = _philox4x32, _philox2x32


def _remember_types() -> None:
    """Make each block type and tensor shape once."""
    make_block_type = tl.block_type.__init__
    block_types: dict[Any, Any] = {}
    no_shape = tl.core.tuple([]), tl.constexpr(1)
    shapes: dict[Any, Any] = {}  # one object for each, which is quicker to compare than its numbers

    def make(block: Any, element_ty: Any, shape: Any) -> Any:
        make_block_type(block, element_ty, shape)
        block.shape = shapes.setdefault(tuple(block.shape), block.shape)
        block.of_tensors = tl.core.tuple(map(tl.constexpr, block.shape)), tl.constexpr(block.numel)
        return block

    def new_block_type(cls: Any, element_ty: Any, shape: Any, *rest: Any) -> Any:
        if cls is not tl.block_type or element_ty.is_ptr():
            return object.__new__(cls)
        sizes = tuple(shape.values if type(shape) is tl.core.tuple else shape)
        # The sizes may be constexpr: they are looked up as they are, then as numbers.
        known = block_types.get(key := (element_ty.name, sizes))
        if known is None:
            numbers = element_ty.name, tuple(getattr(n, "value", n) for n in sizes)
            known = block_types.get(numbers) or make(object.__new__(cls), element_ty, shape)
            block_types[key] = block_types[numbers] = known
        return known

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "of_tensors"):
            make(self, element_ty, shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else no_shape

    tl.block_type.__new__ = new_block_type
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


def _remember_constants() -> None:
    """Make each constant, and the numpy dtype of each type, once."""
    np_dtype = ti._get_np_dtype
    np_dtypes: dict[Any, Any] = {}

    def known_np_dtype(type: Any) -> Any:
        if type.is_ptr():
            return np_dtype(type)
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype(type)
        return np_dtypes[type.name]

    semantic: Any = type(ti.interpreter_semantic)
    make_constant = semantic.scalar_constant
    constants: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if self is not ti.interpreter_semantic or dtype is None or dtype.is_ptr():
            return make_constant(self, value, dtype)
        key = dtype.name, value
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    ti._get_np_dtype = known_np_dtype
    semantic.scalar_constant = constant


def _decide_types_once() -> None:
    """Remember which type a pair of operands is converted to, so that Triton decides it once."""
    semantic: Any = type(ti.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    common_types: dict[Any, Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        pair = tuple(
            x.type.scalar.name if type(x) is tl.tensor else (type(x), x) for x in (lhs, rhs)
        )
        key = *pair, options, *named.items()
        to = common_types.get(key)
        if to is None:  # Triton checks the first such call
            lhs, rhs = check(self, lhs, rhs, *options, **named)
            if lhs.type.scalar == rhs.type.scalar and not lhs.type.scalar.is_ptr():
                common_types[key] = lhs.type.scalar
            return lhs, rhs
        converted = [
            x
            if name == to.name
            else self.cast(x, to)
            if type(x) is tl.tensor
            else self.scalar_constant(x, to)
            for x, name in zip((lhs, rhs), pair)
        ]
        return self.broadcast_impl_value(*converted)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape is b.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl = operands
    semantic.broadcast_impl_value = broadcast_impl_value


def _call_directly() -> None:
    """Call the functions of the language with little in between."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, tl.constexpr, tl.dtype, int, float, bool, type(None)}

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o.value if kind is tl.constexpr else o
        return unwrap(o)

    # All built-in functions have this wrapper, which only checks that `_semantic` is given.
    wrapper = tl.program_id.__code__
    members: dict[Any, list[tuple[str, Any, Any]]] = {}

    def interpreted(member: Any) -> Any:
        call = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def function(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return call(*args, **kwargs, _semantic=ti.interpreter_semantic)

        return function

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:
            members[package] = [
                (name, member, interpreted(member))
                for name, member in inspect.getmembers(package, tl.core.is_builtin)
            ]
        for name, member, function in members[package]:
            if getattr(package, name) is member:
                scope._changes.append((package, name, member))
                setattr(package, name, function)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    ti._patch_builtin = patch_builtin


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
