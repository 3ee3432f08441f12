"""The FLOPs of the ops for torch.utils.flop_counter: 2 m k n for a product of [m, k] and [k, n].

As for torch's own ops, attention counts each query with each key of its sequence, masked out or
not, and its backward computes the scores again. Ops without products, such as norms, count 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from fastformer.description import parts


def _attention(x: dict[str, Any]) -> int:
    if "projected" in x:
        query, key, value = parts(x["projected"], x["memory"], x["heads"], x["order"])
    else:
        query, key, value = (x[n] for n in ("query", "key", "value"))
    if "max_q" in x:
        both = [x["cu_seqlens_" + n] for n in "qk"]
        pairs = (len(both[0]) - 1) * x["max_q"] * x["max_k"]
        if type(both[0]) is torch.Tensor and not both[0].is_meta:  # the lengths are known
            pairs = int((both[0].diff() * both[1].diff()).sum())
    else:
        pairs = query.shape[0] * query.shape[2] * key.shape[2]
    of_keys, of_values = (3, 2) if "grad_output" in x else (1, 1)
    return 2 * query.shape[1] * pairs * (of_keys * query.shape[-1] + of_values * value.shape[-1])


def _feed_forward(x: dict[str, Any]) -> int:
    w_1, w_2 = (x[n] for n in x if n.startswith("w"))
    needs = x.get("needs", (1, 0, 0, 0))  # the forward has the products of the input's gradient
    saved = x.get("activation") == "relu"  # the hidden layer, so that w_2's gradient is one product
    of_w_1, of_w_2 = needs[0] + needs[1], needs[3] + any(needs[: 3 if saved else 4])
    return 2 * x["input"].shape[:-1].numel() * (of_w_1 * w_1.numel() + of_w_2 * w_2.numel())


def _linear_loss(x: dict[str, Any]) -> int:
    backward, late = "grad_loss" in x, x["reduction"] == "none" or x.get("return_entropy", False)
    if backward and not late:  # the forward has computed the gradients
        return 0
    products = 1 + (x["needs"][0] + x["needs"][1]) * (backward == late)
    teacher = x["teacher_weight"].numel() if "teacher_weight" in x else 0
    return 2 * x["input"].shape[:-1].numel() * (products * x["linear_weight"].numel() + teacher)


# From the arguments of <op>, joint_<op> or <op>_backward by name.
_ATTENTION = "scaled_dot_product_attention", "packed_attention"
_FORMULAS = dict.fromkeys(_ATTENTION, _attention)
_FORMULAS |= dict.fromkeys(("feed_forward", "geglu", "swiglu"), _feed_forward)
_FORMULAS |= dict.fromkeys(("linear_cross_entropy", "linear_kl_div"), _linear_loss)


def register_flops(name: str) -> None:
    """Register the formula of an op, if it has products."""
    formula = _FORMULAS.get(name.removeprefix("joint_").removesuffix("_backward"))
    if formula is None:
        return
    op = getattr(torch.ops.fastformer, name)
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula({**dict(zip(names, args)), **kwargs})

    register_flop_formula(op, get_raw=True)(count)
    for mode in _get_current_dispatch_mode_stack():  # a counter copies the formulas when it is made
        if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
            counter.flop_registry[op] = count
