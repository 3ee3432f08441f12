"""The public functions of the loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastformer.checks import (
    autocast_dtype,
    checked_softcap,
    refuse_gradients,
    require_choice,
    require_device,
    require_flag,
    require_floating,
    require_int,
    require_not_negative,
    require_positive,
    require_probability,
    require_tensor,
    require_values,
    shape_of,
    without_gradient,
    wrong_shape,
)
from fastformer.dispatch import backends, operation
from fastformer.dispatch.front import autocast, check_values, front_door
from fastformer.eager import may_read
from fastformer.ops.loss import reference

REDUCTIONS = ("mean", "sum", "none")
SMOOTHINGS = ("uniform", "kl")


@front_door
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    *,
    weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Any:
    """Compute -sum_c w_c q_c log softmax(logits)_c, with a smoothed target distribution q.

    `linear_cross_entropy` computes the logits too, and never holds them all. For class
    probabilities as the target, use torch.nn.functional.cross_entropy.

    For "mean", in eager mode, the kernel writes the gradient of the logits together with the loss.
    The backward returns it as it is if the gradient of the loss is 1. It reads the logits again if
    that is another number, if the graph is retained, in float16, where losses are scaled, and with
    return_entropy.

    Args:
        logits: [..., V], float32, float16, bfloat16 or float64, any strides. Or, as in torch,
            [N, V, ...] with target [N, ...]; [N, V, V], which could be either, is refused.
        target: [...] int64, the class of each row, 0 .. V - 1, or ignore_index.
        reduction: "mean" over the rows whose target is not ignore_index, "sum", or "none".
        ignore_index: rows with this target have loss 0, and gradient 0 if their logits are finite.
            It may be a class. None ignores no row.
        label_smoothing: e in [0, 1].
        smoothing: "uniform", as in torch: q_c = e/V, plus 1 - e at the target. "kl", the loss of
            the Annotated Transformer's LabelSmoothing: q_c is 1 - e at the target, 0 at the padding
            class ignore_index, and e/(V-2) at every other class; if ignore_index is no class, q_c
            is e/(V-1) at every class but the target. The loss is the Kullback-Leibler divergence,
            sum_c w_c q_c (log q_c - log softmax(logits)_c).
        weight: [V], the weights w of the classes, of any floating dtype; None for 1. It gets no
            gradient, and may require none. "mean" then divides by the sum of w over the targets,
            as in torch.
        z_loss: adds z_loss * logsumexp(logits)^2 to each row that is not ignored, which keeps the
            logits from drifting. Class weights do not apply to it: "mean" divides it by the number
            of rows that are not ignored.
        softcap: a positive number s, which replaces the logits by s * tanh(logits / s), or None.
        temperature: a positive number, by which the logits are divided after the softcap.
        return_entropy: if True, also return the entropy of softmax(logits) of each row, with the
            softcap and the temperature, but without weight and smoothing. It has a gradient.

    Returns:
        A scalar, or [...] for "none", in the dtype of the logits, summed in float32 (float64 for
        float64); in float32 under torch.autocast. The mean is nan if every target is ignored, or if
        the weights of the targets add up to 0. All of this is as in torch. With return_entropy,
        (loss, entropy), the entropy [...] in the same dtype, in nats, 0 in the rows whose target is
        ignore_index.

    Raises:
        ValueError: shapes that do not fit; logits [N, V, V], whose classes could be in either
            dimension (flatten them to [M, V]); a target outside [0, V);
            label_smoothing outside [0, 1]; an unknown reduction or smoothing; "kl" with fewer than
            two classes beside the padding; a weight that is not [V]; a z_loss that is negative or
            not finite; a softcap or a temperature that is not positive; one of these options, or
            return_entropy, with DTensors.
        TypeError: logits or a weight that are not floating, a target that is not int64, a z_loss, a
            softcap or a temperature that is no number.
        RuntimeError: a weight that requires a gradient, outside of torch.no_grad().

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision",
    section 7; "kl": harvardnlp/annotated-transformer; z_loss: Chowdhery et al. 2022, "PaLM",
    section 5.
    """
    require_floating(logits=logits)
    if logits.dim() < 1:
        raise ValueError("logits is a scalar; expected [..., V]")
    # In an export, the comparison would restrict the sizes that the program accepts.
    compares = logits.dim() > 2 and not torch.compiler.is_exporting()
    if compares and logits.shape[1:-1] == logits.shape[2:] and logits.shape[-1] > 1:
        raise ValueError(
            f"logits has shape {shape_of(logits)}, which could be torch's [N, C, ...] as well; "
            "expected logits.flatten(0, -2) and target.flatten(), the classes in the last dimension"
        )
    rows, sizes = getattr(target, "shape", None), logits.shape
    if logits.dim() > 2 and rows != sizes[:-1] and rows == sizes[:1] + sizes[2:]:
        logits = logits.movedim(1, -1)
    labels = reduction, ignore_index, label_smoothing, smoothing
    given = dict(logits=logits, target=target)
    options = weight, z_loss, softcap, temperature, return_entropy
    narrow = logits.dtype in (torch.float16, torch.bfloat16) and not autocast_dtype(logits)
    finish = functools.partial(_as_dtype, logits.dtype) if narrow else None
    return _loss("cross_entropy", given, logits.shape[-1], labels, *options, finish=finish)


@front_door
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
) -> Any:
    """Compute cross_entropy(input linear_weight^T + linear_bias, target), chunk by chunk.

    It never holds all the logits: torch's GEMM computes the logits of one chunk of tokens, and one
    kernel their losses. For "mean" and "sum", if gradients are needed, that kernel overwrites the
    logits with their gradient, from which two GEMMs compute the gradients of input and weight; the
    backward only multiplies them by the gradient of the loss. For "none", and with return_entropy,
    the backward computes the logits again.

    Args:
        input: [..., N], float32, float16, bfloat16 or float64.
        linear_weight: [V, N], as nn.Linear stores it. linear_bias: [V] or None.
        target: [...] int64, 0 .. V - 1, or ignore_index.
        reduction, ignore_index, label_smoothing, smoothing: as in `cross_entropy`.
        weight, z_loss: as in `cross_entropy`; weight has the classes' weights, [V].
        softcap, temperature, return_entropy: as in `cross_entropy`.
        return_argmax: if True, also return the class with the largest logit of each row, ignored
            rows included, from which follows the accuracy; the first of equal ones, as in torch.

    Returns:
        A scalar, or [...] for "none", in float32 (float64 for float64). The loss, and the gradients
        of weight and bias, are summed in this dtype. With return_entropy, (loss, entropy), as in
        `cross_entropy`. With return_argmax, the last of them is [...] int64, without a gradient.

    Raises:
        ValueError: as `cross_entropy`; a weight whose width is not N; return_argmax with DTensors.
        TypeError: dtypes that differ or are not floating, a target that is not int64.
        RuntimeError: as `cross_entropy`.

    Source: as `cross_entropy`; the chunks: Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    input, linear_weight, linear_bias = autocast(input, linear_weight, linear_bias)
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    classes = _require_linear(**tensors)
    labels = reduction, ignore_index, label_smoothing, smoothing
    given = dict(input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias)
    options = weight, z_loss, softcap, temperature, return_entropy
    found = require_flag("return_argmax", return_argmax)
    return _loss("linear_cross_entropy", given, classes, labels, *options, return_argmax=found)


@front_door
def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    reverse: bool = False,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute KL(p || q) = sum_c p_c (log p_c - log q_c) of a teacher's probabilities p and a
    student's q, chunk by chunk, from their hidden states; with reverse, KL(q || p).

        q = softmax(softcap tanh((input linear_weight^T + linear_bias) / softcap) / temperature)
        p = the same of teacher_input, teacher_weight and teacher_bias

    As in `linear_cross_entropy`, the logits of a chunk of tokens are held, and never all of them.
    The loss is not multiplied by temperature^2. The teacher gets no gradient.

    Args:
        input: [..., N], float32, float16, bfloat16 or float64, of the student.
        linear_weight: [V, N]. linear_bias: [V] or None.
        teacher_input: [..., K], with as many rows, in any floating dtype.
        teacher_weight: [V, K], teacher_bias: [V] or None, in the dtype of teacher_input.
        mask: [...] bool, True for the rows that count; None for all rows. The others have loss 0.
        reduction: "mean" over the rows that count, "sum", or "none".
        reverse: if True, KL(student || teacher), which seeks the teacher's modes.
        softcap, temperature: as in `cross_entropy`, for both.

    Returns:
        A scalar, or [...] for "none", in float32 (float64 for float64), in nats. The mean is nan if
        no row counts.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, a temperature or a softcap that is
            not positive, tensors on several devices.
        TypeError: dtypes that differ within the student or the teacher, or are not floating; a mask
            that is not bool; a reverse that is no bool.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; reversed: Gu et al.
    2024, "MiniLLM", section 2; the chunks: Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    input, linear_weight, linear_bias = autocast(input, linear_weight, linear_bias)
    given = teacher_input, teacher_weight, teacher_bias
    teacher_input, teacher_weight, teacher_bias = autocast(*given)
    student = dict(input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    teacher = dict(
        teacher_input=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias
    )
    classes = _require_linear(**student)
    if _require_linear(**teacher) != classes:
        raise wrong_shape("teacher_weight", teacher_weight, f"[V, K] with V = {classes}")
    rows = input.shape[:-1]
    if teacher_input.shape[:-1] != rows:
        expected = f"[..., K] with the rows of input {shape_of(input)}"
        raise wrong_shape("teacher_input", teacher_input, expected)
    require_device("teacher_input", teacher_input, "input", input)
    if mask is not None:
        require_tensor("mask", mask, "a bool tensor")
        if mask.dtype != torch.bool:
            raise TypeError(f"mask has dtype {mask.dtype}; expected torch.bool")
        if mask.shape != rows:
            raise wrong_shape("mask", mask, f"{list(rows)}, one for each row of input")
        require_device("mask", mask, "input", input)
    if classes < 1:
        raise ValueError("linear_weight has no classes; expected V of 1 or more")
    return backends.run(
        "linear_kl_div",
        input=input,
        linear_weight=linear_weight,
        teacher_input=without_gradient(teacher_input),
        teacher_weight=without_gradient(teacher_weight),
        linear_bias=linear_bias,
        teacher_bias=without_gradient(teacher_bias),
        mask=mask,
        reduction=require_choice("reduction", reduction, REDUCTIONS),
        reverse=require_flag("reverse", reverse),
        softcap=checked_softcap(softcap),
        temperature=require_positive("temperature", temperature),
    )


def _require_linear(**tensors: Any) -> int:
    """Require the input, the weight [V, N] and the bias [V] or None of a linear layer, and return
    V.
    """
    (name, x), (weight_name, weight), (bias_name, bias) = tensors.items()
    require_floating((bias_name,), **tensors)
    if x.dim() < 1:
        raise ValueError(f"{name} is a scalar; expected [..., N]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} has shape {shape_of(weight)}; "
            f"expected [V, N] with N = {x.shape[-1]}, as {name} {shape_of(x)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise wrong_shape(bias_name, bias, f"[V] = [{weight.shape[0]}]")
    return weight.shape[0]


def _loss(
    op: str,
    given: dict[str, Any],
    classes: int,
    labels: tuple[str, int | None, float, str],
    weight: Tensor | None,
    z_loss: float,
    softcap: float | None,
    temperature: float,
    return_entropy: bool,
    finish: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Any:
    """Check the arguments that both losses have, and run the op.

    given: the tensors by name, the logits or the input first. labels: reduction, ignore_index,
    label_smoothing and smoothing. finish: as in `backends.run`. more: options of this op alone,
    which are checked.
    """
    (name, x), target = next(iter(given.items())), given["target"]
    reduction, ignore_index, label_smoothing, smoothing = labels
    require_tensor("target", target, "an int64 tensor")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target has dtype {target.dtype}; expected torch.int64, the class of each row "
            "(torch.nn.functional.cross_entropy takes class probabilities)"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target has shape {shape_of(target)}; "
            f"expected {list(x.shape[:-1])}, one class for each row of {name} {shape_of(x)}"
        )
    require_device("target", target, name, x)
    require_choice("reduction", reduction, REDUCTIONS)
    require_choice("smoothing", smoothing, SMOOTHINGS)
    every = ignore_index is None
    ignored = -100 if ignore_index is None else ignore_index
    ignored = require_int("ignore_index", ignored)
    e = require_probability("label_smoothing", label_smoothing)
    if classes < 1:
        raise ValueError("there are no classes; expected V of 1 or more")
    least = 3 if 0 <= ignored < classes else 2
    if smoothing == "kl" and classes < least:
        raise ValueError(
            f"there are {classes} classes; expected {least} or more with smoothing='kl'"
        )
    check_values(_require_classes, "target", target, classes, None if every else ignored)
    options: dict[str, Any] = dict(
        reduction=reduction, ignore_index=ignored, label_smoothing=e, smoothing=smoothing
    )
    constant = None
    if smoothing == "kl" and least == 2:  # no class is padding: a cross entropy and a constant
        off = e / (classes - 1)
        options |= dict(label_smoothing=e + off, smoothing="uniform")
        constant = _negative_entropy(target, ignored, reduction, (1 - e, off, classes), weight)
    options |= dict(
        weight=None if weight is None else _require_weight(weight, classes, name, x),
        z_loss=require_not_negative("z_loss", z_loss),
        softcap=checked_softcap(softcap),
        temperature=require_positive("temperature", temperature),
        return_entropy=require_flag("return_entropy", return_entropy),
    )
    if constant is None:
        return backends.run(op, finish=finish, **given, **options, **more)
    result = backends.run(op, **given, **options, **more)
    loss, *others = result if isinstance(result, tuple) else (result,)
    loss = loss + constant.to(loss.dtype)
    result = (loss, *others) if others else loss
    return result if finish is None else finish(result)


def _as_dtype(dtype: torch.dtype, result: Any) -> Any:
    return tuple(x.to(dtype) for x in result) if isinstance(result, tuple) else result.to(dtype)


def _require_classes(name: str, target: Tensor, classes: int, ignored: int | None) -> None:
    """Require classes of the rows that are not ignored, if they may be read."""
    if not may_read(target) or target.numel() == 0:
        return
    low, high = target.aminmax()
    if low.item() < 0 or high.item() >= classes:
        kept = target if ignored is None else target.where(target != ignored, 0)  # 0 is a class
        require_values(name, kept, classes - 1, f"classes from 0 to {classes - 1}")


def _require_weight(weight: Tensor, classes: int, name: str, x: Tensor) -> Tensor | None:
    """Require the weights [V] of the classes, and return them without a gradient."""
    require_floating(weight=weight)
    if weight.shape != (classes,):
        raise wrong_shape("weight", weight, f"[V] = [{classes}]")
    require_device("weight", weight, name, x)
    refuse_gradients("the loss", weight=weight)
    return without_gradient(weight)


def _negative_entropy(
    target: Tensor,
    ignore_index: int,
    reduction: str,
    labels: tuple[float, float, int],
    weight: Tensor | None,
) -> Tensor:
    """Return what the Kullback-Leibler divergence has more than the cross entropy of its labels:
    sum_c w_c q_c log q_c of each row, reduced. labels: q of the target, q of each other class, V.
    """
    on, off, classes = labels
    at_target, at_others = (q * math.log(q) if q > 0 else 0.0 for q in (on, off))
    kept = target != ignore_index
    w: Tensor = kept.double()
    rows = w * (at_target + (classes - 1) * at_others)
    if weight is not None:
        w = weight.detach().double()
        total, w = w.sum(), w[target.where(kept, 0)] * kept
        rows = (w * at_target + (total - w) * at_others) * kept
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / w.sum()


# ----------------------------------------------------------------------- the record of the dispatch


_OF_LOGITS = operation.Operation(
    "cross_entropy",
    cross_entropy,
    reference.cross_entropy,
    rows=("logits", "target"),
    batched=dict(logits=0, target=0, loss=0, entropy=0, lse=2),
    direct=reference.direct_cross_entropy,
)
backends.register(
    _OF_LOGITS,
    _OF_LOGITS._replace(
        contract=linear_cross_entropy,
        reference=reference.linear_cross_entropy,
        rows=("input", "target"),
        batched=dict(input=0, target=0, loss=0, entropy=0, argmax=0, lse=2),
        direct=None,
    ),
    operation.Operation(
        "cross_entropy",
        linear_kl_div,
        reference.linear_kl_div,
        batched=dict(input=0, teacher_input=0, mask=0, loss=0),
    ),
)
