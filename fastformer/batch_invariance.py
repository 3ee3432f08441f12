"""`batch_invariant`: the same bits for a row alone and in any batch."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_KEY = "fastformer: batch_invariant"  # of the state that torch copies to autograd's threads
entered = False  # whether a thread has ever entered the context; until then `on` costs little


def on() -> bool:
    """Return whether this thread, or the thread whose backward it runs, is in a
    `batch_invariant`.
    """
    if not entered or torch.compiler.is_compiling():  # compiled code runs eagerly in the context
        return False
    return torch._C._is_key_in_tls(_KEY) and torch._C._get_obj_in_tls(_KEY)


_open = threading.local()  # `contexts` of this thread, the innermost last


class batch_invariant:
    """A context in which the results of a sequence or a row do not depend on the batch: it has the
    same bits alone, in any batch, packed or not, and prefilled in chunks of any size.

        with ff.batch_invariant():
            model(tokens)

    Attention to cached keys runs the kernel of the prefill, with the same tiles in the same order;
    all tiles are those of the tables, without the measurements of `fastformer tune`; and one kernel
    with fixed tiles computes the matrix products of torch: mm, bmm, mv, addmm, baddbmm and addmv,
    hence nn.Linear, F.linear, matmul, @ and einsum. The same holds for gradients that are not
    summed over rows, if backward() is called within the context, too. It costs time, and compiled
    functions run eagerly. The context belongs to the thread. docs/batch_invariance.md lists what
    holds.

    Raises RuntimeError for a call that the kernels cannot run: all calls on a CPU, except in
    Triton's interpreter.

    Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab.
    """

    def __enter__(self) -> None:
        global entered
        entered = True
        contexts = _open.__dict__.setdefault("contexts", [])
        contexts.append((on(), _Products()))
        contexts[-1][1].__enter__()
        torch._C._stash_obj_in_tls(_KEY, True)

    def __exit__(self, *error: Any) -> None:
        before, products = _open.contexts.pop()
        torch._C._stash_obj_in_tls(_KEY, before)
        products.__exit__(*error)


class _Products(TorchDispatchMode):
    """Computes torch's matrix products by `product` of kernels/products.py."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is None:
            if torch.is_inference_mode_enabled():  # where torch leaves linear and matmul whole
                with self:
                    found = func.decompose(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            return func(*args, **kwargs)
        first = next(x for x in args if isinstance(x, Tensor))
        if not (first.is_floating_point() or first.is_complex()):
            return func(*args, **kwargs)  # integers are exact
        if types:
            names = ", ".join(x.__name__ for x in types)
            raise RuntimeError(f"batch_invariant() cannot compute {func} of a {names}")
        out, dtype = kwargs.pop("out", None), kwargs.pop("out_dtype", None)
        if func._overloadname in ("dtype", "dtype_out"):
            *args, dtype = args
        given = args[-1]  # a factor
        if dtype not in (None, given.dtype) and (dtype, given.itemsize) != (torch.float32, 2):
            raise RuntimeError(
                f"batch_invariant() cannot compute {func} of {given.dtype} in {dtype}"
            )
        found = formula(*args, **kwargs, dtype=dtype)
        in_place = func.overloadpacket.__name__.endswith("_")
        if out is None and not in_place:
            return found
        out = first if in_place else out
        fits = (out.dtype, out.device) == (found.dtype, found.device)
        if not fits or (in_place and out.shape != found.shape):
            given, wanted = (f"{list(x.shape)} {x.dtype} on {x.device}" for x in (out, found))
            raise RuntimeError(f"batch_invariant() cannot write {wanted} to {given}")
        return out.resize_(found.shape).copy_(found)


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: Any = None, dims: int = 2
) -> Tensor:
    fit = a.dim() == b.dim() == dims and (*a.shape[:-2], a.shape[-1]) == b.shape[:-1]
    if not fit or a.dtype != b.dtype or a.device != b.device:
        given = " and ".join(f"{list(x.shape)} {x.dtype} on {x.device}" for x in (a, b))
        raise RuntimeError(f"batch_invariant() cannot multiply {given}")
    kernels = importlib.import_module("fastformer.kernels.products")
    reason = kernels.unsupported(a)
    if reason is not None:
        raise RuntimeError(f"batch_invariant() cannot compute a matrix product: {reason}")
    return kernels.product(a, b, bias, dtype=dtype)


def _added(
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    dtype: Any = None,
    dims: int = 2,
) -> Tensor:
    """Compute beta input + alpha a b, rounded once."""
    if input.dtype not in (a.dtype, dtype or a.dtype) or input.device != a.device:
        given = " to ".join(f"{x.dtype} on {x.device}" for x in (input, a))
        raise RuntimeError(f"batch_invariant() cannot add {given}")
    if beta == alpha == 1 and input.shape == b.shape[-1:]:
        return _product(a, b, input, dtype, dims)
    wide = _product(a, b, None, torch.promote_types(a.dtype, torch.float32), dims)
    wide = wide * alpha if alpha != 0 else torch.zeros_like(wide)  # also where the product is NaN
    input = input.expand_as(wide)
    if beta != 0:
        wide = wide + beta * input.to(wide.dtype)
    return wide.to(dtype or a.dtype)


def _of_vector(a: Tensor, x: Tensor, dtype: Any = None) -> Tensor:
    return _product(a, x.unsqueeze(-1), None, dtype).squeeze(1)


def _added_of_vector(input: Tensor, a: Tensor, x: Tensor, **options: Any) -> Tensor:
    return _added(input.unsqueeze(-1), a, x.unsqueeze(-1), **options).squeeze(1)


_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm: _product,
    _aten.bmm: partial(_product, dims=3),
    _aten.mv: _of_vector,
    **dict.fromkeys((_aten.addmm, _aten.addmm_), _added),
    **dict.fromkeys((_aten.baddbmm, _aten.baddbmm_), partial(_added, dims=3)),
    **dict.fromkeys((_aten.addmv, _aten.addmv_), _added_of_vector),
}
