"""Register launchers as ops of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastformer.plans import getter, planned

from .flops import register_flops

_library = torch.library.Library("fastformer", "DEF")
launchers: dict[str, Callable[..., Any]] = {}  # by the name of the op
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def register(
    schema: str,
    fake: Callable[..., Any],
    prepare: Callable[..., Any] = lambda *arguments: arguments,
) -> Callable[[Callable[..., Any]], Any]:
    """Register the op `fastformer::<schema>`, given a function that makes the plan of a call from
    its arguments. A plan is called with the tensors of the schema, None for those left out, and
    returns the outputs. Calls whose tensors have the same layouts share a plan.

    The decorated function becomes one that runs the op; its attributes are `plan`, which returns
    the plan of the arguments, and `places`, those of the tensors among them.

    fake: makes empty outputs of the same shapes, strides and dtypes: the meta implementation.
    prepare: returns the arguments as plans take them: copies of tensors with strides that the
        kernels do not take, in place of these.
    """
    name = schema[: schema.index("(")]

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema, tags=_tags)
        given = getattr(torch.ops.fastformer, name).default._schema.arguments
        places = [i for i, a in enumerate(given) if "Tensor" in str(a.type)]
        tensors = getter(places)

        def make_plan(*arguments: Any) -> Any:
            prepared = prepare(*arguments)
            if all(arguments[i] is prepared[i] for i in places):
                return make(*arguments)
            constants = [None if isinstance(x, Tensor) else x for x in arguments]

            def of_copies(*tensors: Any) -> Any:
                given = constants.copy()
                for i, x in zip(places, tensors):
                    given[i] = x
                return launch(*prepare(*given))

            return of_copies

        of_many_sizes = [i for i in places if given[i].name == "mask_bits"]
        plan = planned(make_plan, name, of_many_sizes)

        def launch(*arguments: Any) -> Any:
            return plan(*arguments)(*tensors(arguments))

        launch.__dict__.update(plan=plan, places=places)
        launch.__doc__ = make.__doc__
        launchers[name] = launch
        _library.impl(name, launch, "CompositeExplicitAutograd")
        torch.library.register_fake("fastformer::" + name, fake, lib=_library)
        register_flops(name)
        return launch

    return decorate


def adapted(
    plan: Callable[..., Any], places: Sequence[int], outputs: Sequence[int]
) -> Callable[..., Any]:
    """Return a plan that calls `plan` with its tensors at these places, -1 for None, and returns
    the outputs at those.
    """
    pick, kept = getter(places), getter(outputs)
    return lambda *tensors: kept(plan(*pick((*tensors, None))))


def gradients_like(needs: Sequence[bool], *inputs: Any) -> tuple[Tensor, ...]:
    """Make uninitialised gradients of the inputs, without elements where they are not needed."""
    return tuple(
        x.new_empty(x.shape) if need and x is not None else inputs[0].new_empty(0)
        for need, x in zip(needs, inputs)
    )
