"""The rules of torch.vmap for the kernels: one call for all examples, or one for each of them.

One call serves all examples if the op computes rows or sequences one by one: the dimension of the
examples is merged into that of the rows or sequences. `Operation.batched` names the tensors that
have one. In any of these cases the op runs once for each example, and its outputs are stacked:

    Another tensor is mapped, such as a weight.
    A backward has to return the gradient of a weight, or of a bias that sequences may share. Each
        example has a gradient of its own, and the kernel would sum over all of them.
    There is dropout (`dropout_p`). The mask depends on the place of a row in the call.
    A loss is reduced (`reduction`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class Call:
    """A call of an op for n examples.

    arguments: those of the op, by their names. dims: the dimension of the examples in each of them,
    None if all examples share it. batched: that of the record of the op.
    """

    def __init__(
        self, n: int, arguments: Mapping[str, Any], dims: Sequence[Any], batched: Mapping[str, int]
    ) -> None:
        self.n, tensors = n, [k for k, x in arguments.items() if isinstance(x, Tensor)]
        mapped = {k: d for k, d in zip(arguments, dims) if k in tensors and d is not None}
        self.mapped = {k: arguments[k].movedim(d, 0) for k, d in mapped.items()}
        self.arguments = {**arguments, **self.mapped}
        # The tensors that `_fold` merges, and their entry in `Operation.batched`.
        names = [name.removeprefix("grad_") for name in tensors]
        self.folded = {k: batched[name] for k, name in zip(tensors, names) if name in batched}
        self.batched = batched

    def run(
        self, op: Callable[..., Outputs], results: Sequence[str], wanted: Sequence[str] = ()
    ) -> tuple[Outputs, tuple[int | None, ...]]:
        """Return the outputs of the op, whose names are `results`, and their `out_dims`.

        wanted: the inputs whose gradients a backward is asked for.
        """
        if not self._is_foldable(wanted):
            outputs = self._by_example(op)
            return outputs, (0,) * len(outputs)
        outputs = op(*{**self.arguments, **{k: self._fold(k) for k in self.folded}}.values())
        names = [name.removeprefix("grad_") for name in results]
        found = [self._unfold(name, x) for name, x in zip(names, outputs, strict=True)]
        return tuple([x for x, _ in found]), tuple([d for _, d in found])

    def _is_foldable(self, wanted: Sequence[str]) -> bool:
        given, folded = self.arguments, self.folded
        return (
            self.n > 0
            and self.mapped.keys() <= folded.keys()
            and all(self.batched.get(name, -1) >= 0 for name in wanted)
            and not given.get("dropout_p")
            and given.get("reduction", "none") == "none"
            and all(
                d <= 0 or self._is_left_out(k) or len(self._shape(k)) == d
                for k, d in folded.items()
            )
        )

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor of one example."""
        return self.arguments[name].shape[name in self.mapped :]

    def _is_left_out(self, name: str) -> bool:
        """Return whether an output of the forward has no elements because the call needs none, as
        the statistics of attention without a bias.
        """
        return self.folded[name] > 1 and self._shape(name) == (0,)

    def _fold(self, name: str) -> Tensor:
        """Return a tensor of all examples."""
        x, shape, n_dims = self.arguments[name], self._shape(name), self.folded[name]
        is_mapped = name in self.mapped
        if self._is_left_out(name):
            return x.flatten()
        if n_dims < 0 and not is_mapped and (len(shape) < -n_dims or shape[0] == 1):
            return x if len(shape) < -n_dims else x[0]  # the same for all sequences
        x = x if is_mapped else x.expand(self.n, *shape)
        if n_dims == 0:
            return x
        x = x.view(self.n, *[1] * (abs(n_dims) - len(shape)), *shape)
        batch = next(self._shape(k)[0] for k, d in self.folded.items() if d > 0)
        x = x.expand(self.n, batch, *x.shape[2:]).flatten(0, 1)
        return x.contiguous() if n_dims == 1 else x  # kernels read vectors without a stride

    def _unfold(self, name: str, x: Tensor) -> tuple[Tensor, int | None]:
        """Return an output of all examples, and its dimension of examples."""
        if name not in self.batched or x.shape == (0,):  # the call does not need it
            return x, None
        return (x if self.batched[name] == 0 else x.unflatten(0, (self.n, -1))), 0

    def _by_example(self, op: Callable[..., Outputs]) -> Outputs:
        """Return the outputs of one call for each example, stacked."""
        each = self.mapped
        if self.n == 0:  # one example of zeros, for the shapes of the outputs
            each = {k: x.new_zeros(1, *x.shape[1:]) for k, x in each.items()}
        rows = zip(*[x.unbind(0) for x in each.values()])
        outputs = [op(*{**self.arguments, **dict(zip(each, row))}.values()) for row in rows]
        stacked = [torch.stack(column) for column in zip(*outputs)]
        return tuple([x[:0] for x in stacked] if self.n == 0 else stacked)
