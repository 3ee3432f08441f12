"""The front door: a table of plans that each public function asks before anything else.

A key holds all that the checks, the choice of a backend and a launch depend on: the function, the
backend of the thread, the grad mode, the dtype of torch.autocast, the other arguments with their
types, and of each tensor its shape, strides, dtype, device, alignment, whether it is to be negated,
and whether it requires a gradient. The first call with a key makes all checks and chooses. If the
tensors of the op are those that the function was given, or casts of these for torch.autocast, it
leaves a plan, and later calls cast, allocate, launch and save.

A key takes longer than the guards of the last few plans of the function, which are asked first.

Where something watches or changes calls, they take the long way, through all checks and PyTorch's
dispatcher: see `unwatched_backend` and `is_transformed` in state.py. So do calls that no plan can
describe: those that make another copy of a tensor, or whose choices depend on the values in one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fastformer.checks import autocast_dtype, autocasts
from fastformer.dispatch.hits import NO_OPTIONS, Plan, as_key, first_tensor, is_known, with_hit
from fastformer.dispatch.state import is_transformed, state, unwatched_backend
from fastformer.eager import readings
from fastformer.plans import allow_tf32, front, recent

F = TypeVar("F", bound=Callable[..., Any])

_UNUSED = frozenset({"dropout_seed"})  # which the op does not get if dropout_p is 0
_grad_mode = torch.is_grad_enabled


def front_door(contract: F) -> F:
    """Decorate a public function, so that it asks the table of plans first. Its attribute `hit`, of
    positional arguments, asks only the last plans, and returns NotImplemented if none of them fits.
    """
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
        if is_compiling() or is_transformed(by_autocast=False):
            return contract(*args, **options)
        try:
            first = first_tensor(values)
            state_of_thread = backend, _grad_mode(), autocast_dtype(first)
            key = (op, *state_of_thread, *options, *map(as_key, values))
            if backend != "reference" and first.dtype is torch.float32:
                key = *key, allow_tf32()
            plan = front.get(key)
        except (AttributeError, RuntimeError, TypeError):
            return contract(*args, **options)  # no dense tensor, or a value without a hash
        if plan is None:
            call = FirstCall([*names[: len(args)], *options], values)
            return call.make(contract, key, args, options)
        recent[op] = with_hit(plan, last, backend, options, values)
        return plan(values)

    def hit(*args: Any) -> Any:
        backend = unwatched_backend()
        for plan in recent.get(op, ()) if backend is not None else ():
            result = plan.hit(backend, NO_OPTIONS, args)
            if result is not NotImplemented:
                return result
        return NotImplemented

    # What torch.compile traces in place of the call.
    call.__dict__.update(hit=hit, _torchdynamo_inline=contract)
    return cast(F, call)


def check_values(check: Callable[..., Any], name: str, x: Tensor, *constants: Any) -> None:
    """Call check(name, x, *constants), which reads values of an argument of the public function if
    it may. If it has read some, or x is on a CPU, each call with the plan of this call repeats it.
    """
    before = readings.count
    check(name, x, *constants)
    if state.call is not None and (x.is_cpu or readings.count > before):
        state.call.checks.append((check, name, x, constants))
        readings.count = before


def cast_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), for an argument of the public function that torch.autocast casts. Each
    call with the plan of this call casts it again.
    """
    result = x.to(dtype)
    if state.call is not None and result is not x:
        state.call.casts.append((result, x))
    return result


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast tensors to the dtype of the surrounding torch.autocast, if any; float64 stays."""
    if not autocasts():
        return tensors
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    dtype = None if first is None else autocast_dtype(first)
    if dtype is None:
        return tensors
    low = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(
        cast_to(x, dtype) if isinstance(x, Tensor) and x.dtype in low else x for x in tensors
    )


class FirstCall:
    """A call whose key has no plan yet. names: the arguments that the values are given for."""

    def __init__(self, names: list[str], values: tuple[Any, ...]) -> None:
        self.names, self.values = names, values
        self.checks: list[tuple[Callable[..., Any], str, Tensor, tuple[Any, ...]]] = []
        self.autocast = autocast_dtype(first_tensor(values)) is not None
        self.casts: list[tuple[Tensor, Tensor]] = []  # (result, argument) of `cast_to`
        self.plan: Plan | None = None
        self.result: Any = None

    def make(
        self, contract: Callable[..., Any], key: tuple[Any, ...], args: Any, options: Any
    ) -> Any:
        """Make the call with all checks, and remember its plan if there is one."""
        if not all(map(is_known, self.values)):
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
        """Make the plan of an op, run it and set `result`. Return False if no plan can describe it.

        named: the tensors of the op, some of them None. make: returns `Plan.run`, `Plan.kept` and
        which of the tensors the plan takes, None for all. finish: as in `backends.run`.
        """
        places = [self._place(name, x) for name, x in named]
        arguments = enumerate(zip(self.names, self.values))
        needed = {i for i, (name, x) in arguments if isinstance(x, Tensor) and name not in _UNUSED}
        checks = [self._checked(*check) for check in self.checks]
        known = [check for check in checks if check is not None]
        if None in places or needed.difference(places) or len(known) < len(checks):
            return False
        run, kept, given = make()
        taken = [k for k in range(len(named)) if given is None or k in given]
        chosen = [places[k] for k in taken]
        n, device = len(self.values), first_tensor(self.values).device
        if self.autocast or self.casts:
            tensors = [named[k][1] for k in taken]
            dtypes = [x.dtype if any(x is y for y, _ in self.casts) else None for x in tensors]
            run = _outside_autocast(run, device.type, dtypes)
        if finish is not None:
            kept = finish if kept is None else _both(kept, finish)
        plan = self.plan = Plan(run, kept, cast("list[int]", chosen), n, device)
        seed = next((x for name, x in named if name == "dropout_seed"), None)
        before = readings.count
        self.result = plan(self.values, seed)
        plan.checks = known  # the contract has made them for this call
        readings.count = before  # an op that reads has a plan: it reads again in each call
        return True

    def _place(self, name: str, x: Tensor | None) -> int | None:
        """Return the index of x, or of what it is a cast of, in (*values, None, drawn seed). Return
        None if it is not there.
        """
        if x is None:
            return len(self.values)
        x = next((given for result, given in self.casts if result is x), x)
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


def _outside_autocast(
    run: Callable[..., Any], device: str, dtypes: list[torch.dtype | None]
) -> Callable[..., Any]:
    """Return a function that casts its tensors to these dtypes, unless they are None, and calls
    `run` with torch.autocast off.
    """
    casts = [(i, dtype) for i, dtype in enumerate(dtypes) if dtype]

    def outside(*given: Any) -> Any:
        tensors = list(given)
        for i, dtype in casts:
            tensors[i] = tensors[i].to(dtype)
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        try:
            return run(*tensors)
        finally:
            torch.set_autocast_enabled(device, before)

    return outside


def _both(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: then(first(x))
