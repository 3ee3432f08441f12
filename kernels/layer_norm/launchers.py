"""The tiles of the norms, their launchers, and the ops that these are registered as."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
    unbiased: bool = False
    rms: bool = False
    dropout_p: float = 0.0


def _tiles(kernel: str, x: Tensor, n: int, case: NamedTuple) -> NormTiles:
    """Return the fastest measured tiles for rows like those in x, or else the shipped tiles."""
    shipped = configuration(n, architecture(x.device))
    name = f"{named(x.dtype, rows=x.numel() // n, features=n)} {flags(case, 'one', 'acc')}"
    options = functools.partial(others, shipped, kernel == "backward")
    return choose(x.device, TuningKey(f"layer_norm {kernel}", name, shipped, options))


def forward_plan(
    options: Options,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
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
    bias: bool = False
    input_bias: bool = False


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


# --------------------------------------------------------------------------------------- LayerNorm


def _rows(x: Tensor | None, n: int) -> Tensor | None:
    return x if x is None or x.numel() == 0 else as_rows(x, n)


def _prepare(input, normalized_shape, *rest):
    """Return the arguments of a norm with tensors as the kernels read them."""
    parameters = (x.contiguous() if isinstance(x, Tensor) else x for x in rest)
    return _rows(input, math.prod(normalized_shape)), normalized_shape, *parameters


def _prepare_backward(grad, input, normalized_shape, *rest):
    return _rows(grad, math.prod(normalized_shape)), *_prepare(input, normalized_shape, *rest)


def _statistics(input: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return mean and r without their values, of rows of a shape."""
    rows, dtype = math.prod(input.shape[: input.dim() - len(shape)]), accumulator(input)
    return [input.new_empty(rows, dtype=dtype) for _ in range(2)]


@register(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
    "bool unbiased) "
    "-> (Tensor output, Tensor mean, Tensor reciprocal)",
    lambda input, shape, *_: (input.new_empty(input.shape), *_statistics(input, shape)),
    _prepare,
)
def forward(input, normalized_shape, weight, bias, eps, unbiased):
    """Launch the forward: (output, mean [M], r [M])."""
    options = Options(math.prod(normalized_shape), eps, unbiased)
    plan = forward_plan(options, input, None, weight, bias)
    return adapted(plan, (0, -1, 1, 2, -1, -1), (0, 2, 3))


@register(
    "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
    "Tensor? weight, Tensor? bias, float eps, bool unbiased, Tensor mean, Tensor reciprocal, "
    "bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    lambda _, input, __, weight, bias, *rest: gradients_like(rest[-1], input, weight, bias),
    _prepare_backward,
)
def backward(grad_output, input, normalized_shape, weight, bias, eps, unbiased, *rest):
    """Launch the kernels of dx and of the partial weight gradients, and add up the partial sums."""
    options, needs = Options(math.prod(normalized_shape), eps, unbiased), Needs(False, *rest[-1])
    plan = Backward(options, needs, grad_output, None, input, weight)
    return adapted(plan, (0, -1, 1, 2, -1, 4, 5, 2, 3), (0, 2, 3))


# ----------------------------------------------------------------------------------------- RMSNorm


@register(
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps) "
    "-> (Tensor output, Tensor reciprocal)",
    lambda input, shape, *_: (input.new_empty(input.shape), _statistics(input, shape)[0]),
    _prepare,
)
def rms_forward(input, normalized_shape, weight, eps):
    """Launch the forward: (output, r [M])."""
    plan = forward_plan(Options(math.prod(normalized_shape), eps, rms=True), input, None, weight)
    return adapted(plan, (0, -1, 1, -1, -1, -1), (0, 3))


@register(
    "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
    "Tensor? weight, float eps, Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_weight)",
    lambda _, input, __, weight, *rest: gradients_like(rest[-1], input, weight),
    _prepare_backward,
)
def rms_backward(grad_output, input, normalized_shape, weight, eps, reciprocal, needs):
    """Launch as `backward` does. r is passed for the mean, which no kernel reads."""
    options = Options(math.prod(normalized_shape), eps, rms=True)
    plan = Backward(options, Needs(False, *needs), grad_output, None, input, weight)
    return adapted(plan, (0, -1, 1, 2, -1, 3, 3, 2), (0, 2))


# ------------------------------------------------------------------------ residual, dropout, norm

_REST = "Tensor? dropout_seed, Tensor? input_bias"
_ARGUMENTS = f"float dropout_p, float eps, bool unbiased, {_REST}"


def _prepare_add(x, y, weight, *rest):
    """Return the arguments of a forward or a backward with tensors as the kernels read them."""
    given = (t.contiguous() if isinstance(t, Tensor) else t for t in (weight, *rest))
    return _rows(x, weight.numel()), _rows(y, weight.numel()), *given


def _fake_add(input, residual, weight, *_):
    return *(input.new_empty(input.shape) for _ in range(2)), *_statistics(input, weight.shape)


@register(
    "dropout_add_layer_norm(Tensor input, Tensor residual, Tensor weight, Tensor? bias, "
    f"{_ARGUMENTS}) "
    "-> (Tensor normalized, Tensor residual_out, Tensor mean, Tensor reciprocal)",
    _fake_add,
    _prepare_add,
)
def add_forward(input, residual, weight, bias, dropout_p, eps, unbiased, dropout_seed, input_bias):
    """Launch the forward: (normalized, residual_out, mean [M], r [M])."""
    options = Options(weight.numel(), eps, unbiased, dropout_p=dropout_p)
    return forward_plan(options, input, residual, weight, bias, input_bias)


def _with_rows(needs):
    """Return which gradients are wanted: those of the rows are computed together."""
    rows = needs[0] or needs[1] or needs[-1]
    return rows, rows, *needs[2:]


def _fake_add_backward(grad_normalized, grad_residual_out, weight, bias, *rest):
    input_bias, s, _, _, needs = rest[-5:]
    return gradients_like(_with_rows(needs), s, s, weight, bias, input_bias)


@register(
    "dropout_add_layer_norm_backward(Tensor grad_normalized, Tensor? grad_residual_out, "
    f"Tensor weight, Tensor? bias, {_ARGUMENTS}, Tensor residual_out, Tensor mean, "
    "Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias, "
    "Tensor grad_input_bias)",
    _fake_add_backward,
    _prepare_add,
)
def add_backward(
    grad_normalized, grad_residual_out, weight, bias, dropout_p, eps, unbiased, seed, *rest
):
    """Launch one pass for all gradients, and add up the partial sums of the parameters'."""
    options = Options(weight.numel(), eps, unbiased, dropout_p=dropout_p)
    needs = Needs(True, *_with_rows(rest[-1])[1:])
    plan = Backward(options, needs, grad_normalized, grad_residual_out, rest[1], weight)
    return adapted(plan, (0, 1, 6, 2, 4, 7, 8, 2, 3, 5), (1, 0, 2, 3, 4))


@register(
    "dropout_add_rms_norm(Tensor input, Tensor residual, Tensor weight, float dropout_p, "
    f"float eps, {_REST}) "
    "-> (Tensor normalized, Tensor residual_out, Tensor reciprocal)",
    lambda *given: _fake_add(*given)[:3],
    _prepare_add,
)
def add_rms_forward(input, residual, weight, dropout_p, eps, dropout_seed, input_bias):
    """Launch the forward: (normalized, residual_out, r [M])."""
    options = Options(weight.numel(), eps, rms=True, dropout_p=dropout_p)
    plan = forward_plan(options, input, residual, weight, input_bias=input_bias)
    return adapted(plan, (0, 1, 2, -1, 3, 4), (0, 1, 3))


def _fake_add_rms_backward(grad_normalized, grad_residual_out, weight, *rest):
    input_bias, s, _, needs = rest[-4:]
    return gradients_like(_with_rows(needs), s, s, weight, input_bias)


@register(
    "dropout_add_rms_norm_backward(Tensor grad_normalized, Tensor? grad_residual_out, "
    f"Tensor weight, float dropout_p, float eps, {_REST}, "
    "Tensor residual_out, Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_input_bias)",
    _fake_add_rms_backward,
    _prepare_add,
)
def add_rms_backward(
    grad_normalized, grad_residual_out, weight, dropout_p, eps, seed, input_bias, *rest
):
    """Launch as `add_backward` does. r is passed for the mean, which no kernel reads."""
    options = Options(weight.numel(), eps, rms=True, dropout_p=dropout_p)
    _, rows, weights, bias = _with_rows(rest[-1])
    needs = Needs(True, rows, weights, input_bias=bias)
    plan = Backward(options, needs, grad_normalized, grad_residual_out, rest[0], weight)
    return adapted(plan, (0, 1, 5, 2, 3, 6, 6, 2, -1, 4), (1, 0, 2, 4))
