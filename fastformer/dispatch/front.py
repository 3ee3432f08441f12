"""The front door: a table of plans that each public function asks before anything else.

A key holds all that the checks, the choice of a backend and a launch depend on: the function, the
backend of the thread, the grad mode, the other arguments with their types, and of each tensor its
type, shape, strides, dtype, device, alignment and whether it requires a gradient. The first call
with a key makes all checks and chooses. If the tensors of the op are those that the function was
given, it leaves a plan, and later calls allocate, launch and save.

What watches or changes calls takes the long way, through all checks and PyTorch's dispatcher: see
`state.is_special`. So do calls whose arguments a plan cannot describe: one that needs a copy of a
tensor, or reads a number from it.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fastformer.checks import random_seeds
from fastformer.dispatch.state import is_transformed, state, unwatched_backend
from fastformer.eager import readings
from fastformer.plans import SEQUENCES, TENSORS, alignment, allow_tf32, front, guard, recent

F = TypeVar("F", bound=Callable[..., Any])

MOST_RECENT = 4  # plans of an op whose guards a call asks before the table
_PLAIN = frozenset({type(None), bool, int, float, str})  # the types of the other arguments
_UNUSED = frozenset({"dropout_seed"})  # tensors that no op may read: without dropout
_grad_mode = torch.is_grad_enabled


def front_door(contract: F) -> F:
    """Decorate a public function, so that it asks the table of plans first."""
    names = [*inspect.signature(contract).parameters]
    op = f"{contract.__module__}.{contract.__name__}"

    @functools.wraps(contract)
    def call(*args: Any, **options: Any) -> Any:
        backend = unwatched_backend()
        if backend is None:
            return contract(*args, **options)
        values = (*args, *options.values()) if options else args
        last = recent.get(op, ())
        for plan in last:
            result = plan.hit(backend, options, values)
            if result is not NotImplemented:
                return result
        if is_compiling() or is_transformed():
            return contract(*args, **options)
        try:
            key = (op, backend, _grad_mode(), *options, *map(_as_key, values))
            if backend != "reference" and values[0].dtype is torch.float32:
                key = *key, allow_tf32()
            plan = front.get(key)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return contract(*args, **options)  # no dense tensor first, or a value without a hash
        if plan is None:
            call = FirstCall([*names[: len(args)], *options], values)
            return call.make(contract, key, args, options)
        if plan.hit is None:
            plan.hit = _hit(plan, backend, options, values)
        recent[op] = (plan, *[x for x in last if x is not plan][: MOST_RECENT - 1])
        return plan(values)

    call.__dict__["_torchdynamo_inline"] = contract  # what torch.compile traces in its place
    return cast(F, call)


def _as_key(x: Any) -> tuple[Any, ...]:
    """Return what a plan depends on in an argument."""
    kind = type(x)
    if kind in TENSORS:
        layout = x.shape, x.stride(), x.dtype, x.device, x.requires_grad
        return *layout, x.is_neg(), alignment(x)
    return (kind, *x, *map(type, x)) if kind in SEQUENCES else (kind, x)


def _hit(
    plan: Plan, backend: str, options: dict[str, Any], values: tuple[Any, ...]
) -> Callable[[str, dict[str, Any], tuple[Any, ...]], Any]:
    """Return a function that makes a call by a plan if its arguments have the key of this call, and
    else returns NotImplemented, as it also may if they do.

    It is what every call pays for, so that it is made for this number of arguments, these types and
    alignments: with x0, x2 tensors, "if backend != own or ... or not fit(x0, x2): .. run(x0, x2)".
    """
    n, kernels = len(values), backend == "triton" or not values[0].is_cpu
    known: dict[str, Any] = dict(own=backend, names=[*options], key=_as_key, grad_mode=_grad_mode)
    tests, tensors = [f"grad_mode() is not {_grad_mode()}"], dict[str, Tensor]()
    for i, x in enumerate(values):
        if type(x) not in TENSORS:
            known[f"c{i}"] = x
            tests.append(f"x{i} is not c{i} and key(x{i}) != key(c{i})")
            continue
        same = next((k for k, y in tensors.items() if y is x), None)
        if same is not None:  # torch's guards refuse a tensor in two places
            tests.append(f"x{i} is not {same}")
            continue
        tensors[f"x{i}"] = x
        tests.append(f"type(x{i}) is not t{i} or x{i}.is_nested")
        known[f"t{i}"] = type(x)
    tests.append(f"not fit({', '.join(tensors)})")
    known["fit"] = guard([*tensors.values()])
    for name, x in tensors.items() if kernels else ():
        place = f"{name}.data_ptr()"
        off = alignment(x)
        tests.append(place if off < 0 else f"not (p := {place}) or p & 15 != {off}")
    if kernels and values[0].dtype is torch.float32:
        known |= dict(allow_tf32=allow_tf32, tf32=allow_tf32())
        tests.append("allow_tf32() is not tf32")
    arguments = [*(f"x{i}" for i in range(n)), "None", "draw()"]
    result = f"run({', '.join(arguments[i] for i in plan.places)})"
    if plan.kept is not None:
        result = f"kept({result})"
    checks = [f"check{i}(values)" for i in range(len(plan.checks))]
    known |= zip((f"check{i}" for i in range(n)), plan.checks)
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


def check_values(check: Callable[..., Any], name: str, x: Tensor, *constants: Any) -> None:
    """Make check(name, x, *constants), which reads values of an argument of the public function if
    it may. Each call with the plan of this call makes it again.
    """
    before = readings.count
    check(name, x, *constants)
    if state.call is not None and (x.is_cpu or readings.count > before):
        state.call.checks.append((check, name, x, constants))
        readings.count = before


class FirstCall:
    """The first call with a key. names: the arguments that the values are given for."""

    def __init__(self, names: list[str], values: tuple[Any, ...]) -> None:
        self.names, self.values = names, values
        self.checks: list[tuple[Callable[..., Any], str, Tensor, tuple[Any, ...]]] = []
        self.plan: Plan | None = None
        self.result: Any = None

    def make(
        self, contract: Callable[..., Any], key: tuple[Any, ...], args: Any, options: Any
    ) -> Any:
        """Make the call with all checks, and remember its plan if there is one."""
        if not all(map(_is_known, self.values)):
            return contract(*args, **options)
        before = readings.count
        state.set(call=self)
        try:
            result = contract(*args, **options)
        finally:
            state.set(call=None)
        if self.plan is not None and result is self.result and readings.count == before:
            front.remember(key, self.plan)
        return result

    def run(
        self,
        named: list[tuple[str, Any]],
        make: Callable[[], tuple[Any, Any, Any]],
        finish: Callable[[Any], Any] | None = None,
    ) -> bool:
        """Make the plan of an op and run it, which leaves a `result`. Return False if it has none.

        named: the tensors of the op, some of them None. make: returns `Plan.run`, `Plan.kept` and
        which of the tensors the plan takes, None for all. finish: as in `backends.run`.
        """
        places = [self._place(name, x) for name, x in named]
        arguments = enumerate(zip(self.names, self.values))
        needed = {i for i, (name, x) in arguments if isinstance(x, Tensor) and name not in _UNUSED}
        checks = [self._checked(*check) for check in self.checks]
        if None in places or needed.difference(places) or None in checks:
            return False
        run, kept, given = make()
        if finish is not None:
            kept = finish if kept is None else _both(kept, finish)
        chosen = [i for k, i in enumerate(places) if given is None or k in given]
        n, device = len(self.values), self.values[0].device
        plan = self.plan = Plan(run, kept, cast("list[int]", chosen), n, device, checks)
        seed = next((x for name, x in named if name == "dropout_seed"), None)
        before = readings.count
        values = *self.values, None, seed
        outputs = run(*[values[i] for i in plan.places])
        readings.count = before  # what the op reads, it reads again in each call
        self.result = outputs if plan.kept is None else plan.kept(outputs)
        return True

    def _place(self, name: str, x: Tensor | None) -> int | None:
        """Return the place of a tensor of the op in (*values, None, seed), for a seed that was
        drawn; None if it is none of these.
        """
        if x is None:
            return len(self.values)
        same = [i for i, y in enumerate(self.values) if y is x]
        if len(same) > 1:  # attention(x, x, x), where later calls may have three tensors
            same = [i for i in same if self.names[i] == name]
        if len(same) == 1:
            return same[0]
        drawn = name == "dropout_seed" and self._given(name) is None
        return len(self.values) + 1 if drawn else None

    def _given(self, name: str) -> Any:
        return dict(zip(self.names, self.values)).get(name)

    def _checked(
        self, check: Callable[..., Any], name: str, x: Tensor, constants: tuple[Any, ...]
    ) -> Callable[[Sequence[Any]], None] | None:
        """Return a check as a function of the values, or None if it reads another tensor."""
        place = self._place(name, x)
        if place is None:
            return None
        return lambda values: check(name, values[place], *constants)


def _both(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: then(first(x))


def _is_known(x: Any) -> bool:
    """Return whether a key describes an argument: a tensor that can be read as it is, a plain
    value, or a sequence of these.
    """
    if type(x) in TENSORS:
        if x.layout is not torch.strided or x.is_nested or x.is_neg():
            return False
        return x.data_ptr() != 0 or x.numel() == 0
    return type(x) in _PLAIN or (type(x) in SEQUENCES and _PLAIN.issuperset(map(type, x)))


class Plan:
    """What a call does that has passed the checks. It is called with all arguments of the call.

    run: the op, a function of its tensors. kept: a function that returns those of its outputs that
    the caller gets; None for all. places: where the tensors of the op are among the n arguments;
    n for None, n + 1 for a seed that is drawn. checks: those that read tensors. hit: what `_hit`
    returns, None before the second call.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        kept: Callable[[Any], Any] | None,
        places: list[int],
        n: int,
        device: torch.device,
        checks: list[Any],
    ) -> None:
        self.run, self.kept, self.checks, self.places = run, kept, checks, places
        self.hit: Any = None
        self.draw = None
        if max(places) > n:
            self.draw = functools.partial(random_seeds, (1,), device=device)

    def __call__(self, values: tuple[Any, ...]) -> Any:
        for check in self.checks:
            check(values)
        values = (*values, None, None if self.draw is None else self.draw())
        outputs = self.run(*[values[i] for i in self.places])
        return outputs if self.kept is None else self.kept(outputs)
