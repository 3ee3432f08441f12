"""The tiles of the norms, their launchers, and the ops that these are registered as."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common import Size, dropout_arguments
from ..launch import (
    Launch,
    accumulator,
    architecture,
    as_rows,
    constants,
    dense,
    next_power_of_2,
    on_device,
    row_stride,
    triton_dtype,
    unsupported_dtype,
)
from ..partial_sums import sums_launch
from ..registration import adapted, gradients_like, register
from ..tuned import TuningKey, choose, flags, named
from .kernels import (
    BackwardCase,
    BackwardStrides,
    ForwardCase,
    ForwardStrides,
    Gradients,
    Inputs,
    Statistics,
    Sums,
    backward_kernel,
    backward_wide_dx_kernel,
    backward_wide_weights_kernel,
    forward_kernel,
)

MAX_FEATURES = 65536
ONE_BLOCK = 8192  # features that one program holds in registers
THREE_SUMS = 4096  # features that it holds beside the sums of weight, bias and input_bias
PARTIAL_SUMS = 256  # the most ranges of rows, each with a partial weight gradient


class NormTiles(NamedTuple):
    """A program's rows and columns, its warps, and the stages of the backward's loop over rows."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


WIDE_WEIGHTS = NormTiles(8, 256, 4)  # of the weight gradients, if a row is several blocks


def configuration(n: int, arch: str) -> NormTiles:
    """Choose tiles of full rows (several, if short); for wider rows, blocks of 4096 features."""
    block = max(16, min(next_power_of_2(n), ONE_BLOCK if n <= ONE_BLOCK else 4096))
    if arch == "interpreter":  # few programs: each interpreted operation has a fixed cost
        return NormTiles(max(1, min(64, 65536 // block)), block, 4)
    warps = 4 if block <= 2048 else 8 if block <= 4096 or arch == "other" else 16
    # One small tile in each of PARTIAL_SUMS programs is too few bytes to hide the memory latency.
    stages = 3 if block <= 4096 and arch.startswith("sm_") else 1
    return NormTiles(max(1, 2048 // block), block, warps, stages)


def others(tiles: NormTiles, backward: bool) -> list[NormTiles]:
    """Return the tiles that a measurement may choose: other rows, warps and, backward, stages."""
    rows = (n for n in (1, 2, 4, 8, 16, 32, 64) if 1024 <= n * tiles.columns <= 8192)
    return [
        tiles._replace(rows=n, warps=warps, stages=stages)
        for n in {tiles.rows: None} | dict.fromkeys(rows)
        for warps in (4, 8, 16)
        for stages in ((1, 3) if backward else (tiles.stages,))
    ]


# --------------------------------------------------------------------------------------- launchers

GROUPS = dict(inputs=Inputs, statistics=Statistics, gradients=Gradients, sums=Sums)


class Options(NamedTuple):
    """The options of a call, all but its tensors. n: the features of a row."""

    n: int
    eps: float
    unbiased: bool
    rms: bool
    dropout_p: float


def _tiles(kernel: str, x: Tensor, n: int, case: NamedTuple) -> NormTiles:
    """Return the fastest measured tiles for rows like those in x, or else the shipped tiles."""
    shipped = configuration(n, architecture(x.device))
    name = f"{named(x.dtype, rows=x.numel() // n, features=n)} {flags(case, 'one', 'acc')}"
    options = functools.partial(others, shipped, kernel == "backward")
    return choose(x.device, TuningKey(f"layer_norm {kernel}", name, shipped, options))


def forward_plan(
    options: Options,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    input_bias: Tensor | None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the plan of a forward: it returns y, s (x without a residual), mean [M] and r [M],
    which RMSNorm also returns for the mean.
    """
    n, dtype = options.n, accumulator(x)
    rows = x.numel() // max(1, n)
    like, of_rows = dense(x.shape), dense([rows if n else 0])
    launch: Launch | None = None
    if x.numel():  # so that n is not 0
        case = ForwardCase(
            one=True,
            unbiased=options.unbiased,
            rms=options.rms,
            residual=residual is not None,
            dropout=options.dropout_p > 0,
            weight=weight is not None,
            bias=bias is not None,
            input_bias=input_bias is not None,
            acc=triton_dtype(dtype),
        )
        tiles = _tiles("forward", x, n, case)
        case = case._replace(one=n <= tiles.columns)
        strides = row_stride(x, n), row_stride(x if residual is None else residual, n)
        arguments = dict(
            strides=ForwardStrides(*strides),
            size=Size(rows, n),
            eps=options.eps,
            dropout=dropout_arguments(options.dropout_p),
            tile=constants(tiles),
            case=constants(case),
        )
        grid = (triton.cdiv(rows, tiles.rows),)
        launch = Launch(forward_kernel, grid, arguments, tiles.warps, groups=GROUPS)

    def run(x, residual, weight, bias, seed, input_bias):
        y = x.new_empty_strided(*like)
        s = x if residual is None else x.new_empty_strided(*like)
        reciprocal = x.new_empty_strided(*of_rows, dtype=dtype)
        mean = reciprocal if options.rms else torch.empty_like(reciprocal)
        if launch is not None:
            # x stands in for each absent tensor: a kernel compiled without it never reads it.
            inputs = x, x if residual is None else residual, x if input_bias is None else input_bias
            w, b = x if weight is None else weight, x if bias is None else bias
            with on_device(x):
                launch(inputs, w, b, y, s, (mean, reciprocal), x if seed is None else seed)
        return y, s, mean, reciprocal

    return run


class Needs(NamedTuple):
    """Whether there was a residual, and which gradients are wanted."""

    residual: bool
    x: bool
    weight: bool
    bias: bool
    input_bias: bool


NOTHING = (0,), (1,)  # the shape and the strides of a gradient that is not needed


class Backward:
    """The plan of a backward, from the gradient of y, that of the saved sum s, if it has one, s and
    the weight. One kernel if a row fits into a tile, else one for dx and one for the sums over
    rows. Of a row wider than THREE_SUMS in one tile, the latter computes that of input_bias.
    """

    def __init__(
        self,
        options: Options,
        needs: Needs,
        grad: Tensor,
        grad_sum: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
    ) -> None:
        n, acc = options.n, triton_dtype(accumulator(x))
        self.rows_kernel: Any = None
        self.weights_kernel: Launch | None = None
        self.needs, self.like = needs, dense(x.shape)
        self.wanted = [i for i, need in enumerate(needs[2:]) if need]  # of the parameters
        self.runs = 0  # programs that sum over rows
        if x.numel() == 0:
            return
        rows = x.numel() // n
        size = Size(rows, n)
        case = BackwardCase(
            unbiased=options.unbiased,
            rms=options.rms,
            residual=needs.residual,
            dropout=options.dropout_p > 0,
            ds=grad_sum is not None,
            weight=weight is not None,
            need_x=needs.x,
            need_weight=needs.weight,
            need_bias=needs.bias,
            need_input_bias=needs.input_bias,
            acc=acc,
        )
        tiles, wide = _tiles("backward", x, n, case), WIDE_WEIGHTS
        per_program = max(tiles.rows, triton.cdiv(rows, PARTIAL_SUMS))
        runs = self.runs = triton.cdiv(rows, per_program)
        self.partial = dense((len(self.wanted), runs, n))
        self.add_up = sums_launch(*self.partial[0])
        tensors = x, grad, grad if grad_sum is None else grad_sum
        strides = BackwardStrides(*(row_stride(t, n) for t in tensors))
        arguments = dict(
            strides=strides,
            size=size,
            eps=options.eps,
            dropout=dropout_arguments(options.dropout_p),
            tile=constants(tiles),
            case=constants(case),
        )
        self.one = n <= tiles.columns
        apart = needs[2:]  # the sums that a kernel of their own computes
        kernel, programs = backward_wide_dx_kernel, triton.cdiv(rows, tiles.rows)
        if self.one:
            kernel, programs = backward_kernel, runs
            apart = (False, False, needs.input_bias and n > THREE_SUMS)
            case = case._replace(need_input_bias=needs.input_bias and not apart[2])
            arguments |= dict(rows_per_program=per_program, case=constants(case))
        if self.one or needs.x:
            self.rows_kernel = Launch(kernel, (programs,), arguments, tiles.warps, groups=GROUPS)
        if any(apart):
            sums = dict(zip(("need_weight", "need_bias", "need_input_bias"), apart))
            none = BackwardCase(*[False] * len(case))  # the other fields are for dx
            arguments = dict(
                stride_x=strides.x,
                stride_dy=strides.dy,
                size=size,
                rows_per_program=per_program,
                tile=constants(wide),
                case=constants(none._replace(rms=options.rms, acc=acc, **sums)),
            )
            grid = (runs, triton.cdiv(n, wide.columns))
            self.weights_kernel = Launch(
                backward_wide_weights_kernel, grid, arguments, wide.warps, groups=GROUPS
            )

    def __call__(self, grad, grad_sum, x, weight, seed, mean, reciprocal, *parameters):
        """Return the gradient of the residual (of x without one), the gradient of x with a
        residual, and those of the parameters: weight, bias and the bias of x. What is not needed is
        empty.
        """
        needs = self.needs
        dx = x.new_empty_strided(*(self.like if needs.x else NOTHING))
        dinput = x.new_empty_strided(*self.like) if needs.x and needs.residual else dx
        results = [
            torch.empty_like(p) if need and p is not None else x.new_empty_strided(*NOTHING)
            for need, p in zip(needs[2:], parameters)
        ]
        if not self.runs:
            return [dx, dinput, *(t.zero_() for t in results)]
        statistics = mean, reciprocal
        sums: tuple[Tensor, ...] = (mean, mean, mean)
        if self.wanted:
            partial = mean.new_empty_strided(*self.partial)
            parts = iter(partial.unbind())
            sums = tuple([next(parts) if need else mean for need in needs[2:]])
        gradients = grad if grad_sum is None else grad_sum, dx, dinput
        read = x, x if weight is None else weight, grad
        seed = x if seed is None else seed
        with on_device(x):
            if self.one:
                self.rows_kernel(*read, gradients, sums, statistics, seed)
            elif needs.x:
                self.rows_kernel(*read, gradients, statistics, seed)
            if self.weights_kernel is not None:
                self.weights_kernel(x, grad, dinput if needs.input_bias else x, sums, statistics)
            if self.wanted:
                of_sums = [results[i] for i in self.wanted]
                self.add_up(partial, (*of_sums, of_sums[0], of_sums[0])[:3])
        return [dx, dinput, *results]


def supports(input, normalized_shape=None, weight=None, **_) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    n = math.prod(weight.shape if normalized_shape is None else normalized_shape)
    if n > MAX_FEATURES:
        return f"a row has {n} features; the kernels take up to {MAX_FEATURES}"
    return unsupported_dtype(input)


# ----------------------------------------------------------------------------------------- the ops

# An op has some of the arguments and outputs of a norm: those that its schema names.
_ROWS = "input", "residual", "residual_out", "grad_output", "grad_normalized", "grad_residual_out"
_OUTPUTS = dict(output=0, normalized=0, residual_out=1, mean=2, reciprocal=3)  # of `forward_plan`


class Schema:
    """The names in the schema of an op: its arguments, the tensors among them, and its outputs."""

    def __init__(self, schema: str) -> None:
        parsed = torch._C.parse_schema(schema)
        self.names = [x.name for x in parsed.arguments]
        self.tensors = [x.name for x in parsed.arguments if "Tensor" in str(x.type)]
        self.outputs = [x.name for x in parsed.returns]

    def given(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """Return the arguments by name, with the shape of a row."""
        given = dict(zip(self.names, arguments))
        if "normalized_shape" not in given:
            given["normalized_shape"] = given["weight"].shape
        return given

    def prepare(self, *arguments: Any) -> list[Any]:
        """Return the arguments with tensors as the kernels read them."""
        n = math.prod(self.given(arguments)["normalized_shape"])
        return [
            _rows(x, n) if name in _ROWS else x.contiguous() if isinstance(x, Tensor) else x
            for name, x in zip(self.names, arguments)
        ]

    def places(self, inputs: Iterable[str]) -> list[int]:
        """Return the places of a plan's inputs among the tensors, -1 for those that are missing."""
        return [self.tensors.index(x) if x in self.tensors else -1 for x in inputs]


def _rows(x: Tensor | None, n: int) -> Tensor | None:
    return x if x is None or x.numel() == 0 else as_rows(x, n)


def _options(given: dict[str, Any]) -> Options:
    """Return the options of a call. The ops of RMSNorm have no `unbiased`."""
    n, unbiased = math.prod(given["normalized_shape"]), given.get("unbiased")
    return Options(n, given["eps"], bool(unbiased), unbiased is None, given.get("dropout_p", 0.0))


def _register_forward(text: str) -> Any:
    """Register the forward with this schema."""
    schema = Schema(text)
    inputs = "input", "residual", "weight", "bias", "dropout_seed", "input_bias"
    places, kept = schema.places(inputs), [_OUTPUTS[name] for name in schema.outputs]

    def fake(*arguments):
        given = schema.given(arguments)
        x, shape = given["input"], given["normalized_shape"]
        rows, dtype = math.prod(x.shape[: x.dim() - len(shape)]), accumulator(x)
        return [x.new_empty(x.shape) if i < 2 else x.new_empty(rows, dtype=dtype) for i in kept]

    def launch(*arguments):
        """Launch the forward: what the op returns of y, s, mean [M] and r [M]."""
        given = schema.given(arguments)
        plan = forward_plan(_options(given), *map(given.get, inputs))
        return plan if len(kept) == 4 else adapted(plan, places, kept)

    return register(text, fake, schema.prepare)(launch)


def _register_backward(text: str) -> Any:
    """Register the backward with this schema."""
    schema = Schema(text)
    added = "residual_out" in schema.names
    grad, s = ("grad_normalized", "residual_out") if added else ("grad_output", "input")
    mean = "mean" if "mean" in schema.names else "reciprocal"  # RMSNorm: no kernel reads it
    parameters = "weight", "bias", "input_bias"
    inputs = grad, "grad_residual_out", s, "weight", "dropout_seed", mean, "reciprocal", *parameters
    results = ["grad_residual" if added else "grad_input", "grad_input"]
    results += [f"grad_{name}" for name in parameters]
    places, kept = schema.places(inputs), [results.index(name) for name in schema.outputs]
    while places[-1] < 0:  # a parameter that no call has
        places.pop()

    def needs_of(needs):
        """Return `Needs`: the gradients of the rows are computed together."""
        wanted = dict(zip(schema.outputs, needs))
        rows = [wanted.get(f"grad_{name}") for name in ("input", "residual", "input_bias")]
        return Needs(added, any(rows), *(wanted.get(name, False) for name in results[2:]))

    def fake(*arguments):
        given, needs = schema.given(arguments), needs_of(arguments[-1])
        likes = map(given.get, (s, s, *parameters))
        grads = gradients_like((needs.x, *needs[1:]), *likes)
        return [grads[i] for i in kept]

    def launch(*arguments):
        """Launch the kernels of dx and of the partial sums of the parameters' gradients, and add up
        the partial sums.
        """
        given, needs = schema.given(arguments), needs_of(arguments[-1])
        plan = Backward(_options(given), needs, *map(given.get, inputs[:4]))
        return adapted(plan, places, kept)

    return register(text, fake, schema.prepare)(launch)


_LAYER = (
    "Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
    "bool unbiased"
)
_RMS = "Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps"
_ADD_OPTIONS = "Tensor? dropout_seed, Tensor? input_bias"
_ADD_LAYER = (
    f"Tensor weight, Tensor? bias, float dropout_p, float eps, bool unbiased, {_ADD_OPTIONS}"
)
_ADD_RMS = f"Tensor weight, float dropout_p, float eps, {_ADD_OPTIONS}"
_ADD_GRADS = "Tensor grad_normalized, Tensor? grad_residual_out"

forward = _register_forward(
    f"layer_norm({_LAYER}) -> (Tensor output, Tensor mean, Tensor reciprocal)"
)
backward = _register_backward(
    f"layer_norm_backward(Tensor grad_output, {_LAYER}, Tensor mean, Tensor reciprocal, "
    "bool[] needs) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)
rms_forward = _register_forward(f"rms_norm({_RMS}) -> (Tensor output, Tensor reciprocal)")
rms_backward = _register_backward(
    f"rms_norm_backward(Tensor grad_output, {_RMS}, Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_weight)"
)
add_forward = _register_forward(
    f"dropout_add_layer_norm(Tensor input, Tensor residual, {_ADD_LAYER}) "
    "-> (Tensor normalized, Tensor residual_out, Tensor mean, Tensor reciprocal)"
)
add_backward = _register_backward(
    f"dropout_add_layer_norm_backward({_ADD_GRADS}, {_ADD_LAYER}, Tensor residual_out, "
    "Tensor mean, Tensor reciprocal, bool[] needs) -> (Tensor grad_input, Tensor grad_residual, "
    "Tensor grad_weight, Tensor grad_bias, Tensor grad_input_bias)"
)
add_rms_forward = _register_forward(
    f"dropout_add_rms_norm(Tensor input, Tensor residual, {_ADD_RMS}) "
    "-> (Tensor normalized, Tensor residual_out, Tensor reciprocal)"
)
add_rms_backward = _register_backward(
    f"dropout_add_rms_norm_backward({_ADD_GRADS}, {_ADD_RMS}, Tensor residual_out, "
    "Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_input_bias)"
)
