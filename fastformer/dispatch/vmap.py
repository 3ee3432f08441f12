"""The rules of torch.vmap for the kernels: one call for all examples, or one for each of them.

The examples become rows or sequences of one call, if the op computes rows or sequences one by one:
the record of the op names the tensors that have them (`Operation.batched`). The op runs once for
each example, and its outputs are stacked,

    if another tensor is mapped, such as a weight;
    in a backward, if a gradient is a sum over rows or sequences: that of a weight or of a bias that
        sequences share is one for each example;
    with dropout: the mask depends on the place of a row, and is that of a call for one example;
    if a loss is reduced.
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
        # The tensors with rows or sequences, and the number of their dimensions; see `Operation`.
        names = [name.removeprefix("grad_") for name in tensors]
        self.folded = {k: batched[name] for k, name in zip(tensors, names) if name in batched}
        self.batched = batched

    def run(
        self, op: Callable[..., Outputs], results: Sequence[str], wanted: Sequence[str] = ()
    ) -> tuple[Outputs, tuple[int | None, ...]]:
        """Return the outputs of the op, whose names are `results`, and their dimensions of
        examples. wanted: the inputs whose gradients a backward is asked for.
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
        return x.contiguous() if n_dims == 1 else x  # lengths

    def _unfold(self, name: str, x: Tensor) -> tuple[Tensor, int | None]:
        """Return an output of all examples, and its dimension of examples."""
        if name not in self.batched or x.shape == (0,):  # not needed, or left out
            return x, None
        return (x if self.batched[name] == 0 else x.unflatten(0, (self.n, -1))), 0

    def _by_example(self, op: Callable[..., Outputs]) -> Outputs:
        """Return the outputs of one call for each example, stacked."""
        each = self.mapped
        if self.n == 0:  # nobody gets the outputs of this example, only their shapes
            each = {k: x.new_zeros(1, *x.shape[1:]) for k, x in each.items()}
        rows = zip(*[x.unbind(0) for x in each.values()])
        outputs = [op(*{**self.arguments, **dict(zip(each, row))}.values()) for row in rows]
        stacked = [torch.stack(column) for column in zip(*outputs)]
        return tuple([x[:0] for x in stacked] if self.n == 0 else stacked)
