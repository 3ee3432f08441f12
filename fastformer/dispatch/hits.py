"""Plans of calls, and the functions that find out whether a plan is that of a call."""

from __future__ import annotations

import builtins
import functools
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from fastformer.checks import autocast_dtype, random_seeds
from fastformer.plans import SEQUENCES, TENSORS, alignment, allow_tf32, guard

NO_OPTIONS: dict[str, Any] = {}
MOST_ASKED = 4  # plans whose `hit` a call asks before the table of all
_PLAIN = frozenset({type(None), bool, int, float, str})  # the types of the other arguments
_grad_mode = torch.is_grad_enabled


class Plan:
    """What a call does that has passed the checks. It is called with all arguments of the call.

    run: the op, a function of its tensors. kept: a function that returns those of its outputs that
    the caller gets; None for all. places: where the tensors of the op are among the n arguments;
    n for None, n + 1 for a seed that is drawn. checks: those that read tensors, none in the first
    call, which has made them already. hit: what `hit` returns, None before the second call.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        kept: Callable[[Any], Any] | None,
        places: list[int],
        n: int,
        device: torch.device | None = None,
    ) -> None:
        self.run, self.kept, self.places = run, kept, places
        self.checks: Sequence[Callable[[Sequence[Any]], None]] = ()
        self.hit: Any = None
        self.draw = None
        if max(places) > n:
            self.draw = functools.partial(random_seeds, (1,), device=device)

    def __call__(self, values: tuple[Any, ...], seed: Tensor | None = None) -> Any:
        """seed: the one that the caller has drawn; None to draw it here, if the op takes one."""
        for check in self.checks:
            check(values)
        if seed is None and self.draw is not None:
            seed = self.draw()
        values = *values, None, seed
        outputs = self.run(*[values[i] for i in self.places])
        return outputs if self.kept is None else self.kept(outputs)


def with_hit(
    plan: Plan, known: Sequence[Plan], backend: str, options: dict[str, Any], values: Any
) -> tuple[Plan, ...]:
    """Return the plans whose `hit` later calls ask, the last one first, given those before."""
    if plan.hit is None:
        plan.hit = hit(plan, backend, options, values)
    return plan, *[x for x in known if x is not plan][: MOST_ASKED - 1]


def as_key(x: Any) -> tuple[Any, ...]:
    """Return what a plan depends on in an argument."""
    kind = type(x)
    if kind in TENSORS:
        layout = x.shape, x.stride(), x.dtype, x.device, x.requires_grad
        return *layout, x.is_neg(), alignment(x)
    # The types first: a tensor in a sequence is not compared.
    return (kind, *map(type, x), *x) if kind in SEQUENCES else (kind, x)


def first_tensor(values: Sequence[Any]) -> Any:
    """Return the first floating tensor among the arguments of a call; without one, the first
    tensor; None without any.
    """
    tensors = [x for x in values if type(x) in TENSORS]
    floating = (x for x in tensors if x.is_floating_point())
    return next(floating, tensors[0] if tensors else None)


def is_known(x: Any) -> bool:
    """Return whether a key describes an argument: a tensor that can be read as it is, a plain
    value, or a sequence of these.
    """
    if type(x) in TENSORS:
        if x.layout is not torch.strided or x.is_nested or x.is_neg():
            return False
        try:
            return x.data_ptr() != 0 or x.numel() == 0
        except RuntimeError:  # a transform wraps the tensor
            return False
    return type(x) in _PLAIN or (type(x) in SEQUENCES and _PLAIN.issuperset(map(type, x)))


def hit(
    plan: Plan, backend: str, options: dict[str, Any], values: tuple[Any, ...]
) -> Callable[[str, dict[str, Any], tuple[Any, ...]], Any]:
    """Return a function that makes a call by a plan if its arguments have the key of this call, and
    else returns NotImplemented, as it also may if they do.

    It is what every call pays for, so that it is made for this number of arguments, these types and
    alignments: with x0, x2 tensors, "if backend != own or ... or not fit(x0, x2): .. run(x0, x2)".
    """
    n = len(values)
    known: dict[str, Any] = dict(own=backend, names=[*options], key=as_key, grad_mode=_grad_mode)
    known["__builtins__"] = builtins  # dynamo looks for them if it meets the function
    tests, tensors = [f"grad_mode() is not {_grad_mode()}"], dict[str, Tensor]()
    for i, x in enumerate(values):
        known[f"t{i}"] = type(x)
        if type(x) not in TENSORS:
            known |= {f"c{i}": x, f"k{i}": as_key(x)}
            other = "True" if type(x) is list else f"x{i} is not c{i}"  # a list may change
            tests.append(f"{other} and (type(x{i}) is not t{i} or key(x{i}) != k{i})")
            continue
        same = next((k for k, y in tensors.items() if y is x), None)
        if same is not None:  # torch's guards refuse a tensor in two places
            tests.append(f"x{i} is not {same}")
            continue
        tensors[f"x{i}"] = x
        tests.append(f"type(x{i}) is not t{i} or x{i}.is_nested")
    tests.append(f"not fit({', '.join(tensors)})")
    known["fit"] = guard([*tensors.values()])
    first = first_tensor(values)
    kernels = backend != "reference" and not (backend == "auto" and first.is_cpu)
    for name, x in tensors.items() if kernels else ():
        place = f"{name}.data_ptr()"
        off = alignment(x)
        tests.append(place if off < 0 else f"not (p := {place}) or p & 15 != {off}")
    dtype = autocast_dtype(first)
    if dtype is not None:  # whether it is on is among the keys that torch's guards see
        known |= dict(autocast_dtype=autocast_dtype, dtype=dtype)
        tests.append(f"autocast_dtype({next(iter(tensors))}) is not dtype")
    if kernels and first.dtype is torch.float32:
        known |= dict(allow_tf32=allow_tf32, tf32=allow_tf32())
        tests.append("allow_tf32() is not tf32")
    arguments = [*(f"x{i}" for i in range(n)), "None", "draw()"]
    result = f"run({', '.join(arguments[i] for i in plan.places)})"
    if plan.kept is not None:
        result = f"kept({result})"
    checks = [f"check{i}(values)" for i in range(len(plan.checks))]
    known |= {f"check{i}": check for i, check in enumerate(plan.checks)}
    known |= dict(run=plan.run, kept=plan.kept, draw=plan.draw)
    other_names = "[*options] != names" if options else "options"
    lines = [
        f"if backend != own or len(values) != {n} or {other_names}:",
        "    return NotImplemented",
        f"{', '.join(arguments[:n])}, = values",
        f"if {' or '.join(tests)}:",
        "    return NotImplemented",
        *checks,
        f"return {result}",
    ]
    return FunctionType(_compiled("\n".join(lines)), known)


@functools.lru_cache(1024)
def _compiled(lines: str) -> CodeType:
    names: dict[str, Any] = {}
    source = f"def hit(backend, options, values):\n{textwrap.indent(lines, '    ')}"
    exec(compile(source, f"<{__name__}>", "exec"), names)
    return names["hit"].__code__
