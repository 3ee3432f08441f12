"""The angles of rotary positions, and the scalings of their frequencies for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checks import FLOATING, require_flag, require_positive, require_size

Scaling = Mapping[str, Any]
THETA = 10000.0  # the base of the paper


def rotary_frequencies(
    dim: int,
    length: int,
    theta: float = THETA,
    *,
    scaling: Scaling | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos(p f_i) and sin(p f_i) for the positions p = 0 .. length - 1, as
    `rotary_embedding` takes them. f_i = theta^(-2 i / dim), i = 0 .. dim / 2 - 1, or scaled.

    Args:
        dim: the features that are rotated, an even number: the head dim, or a part of it.
        length: the number of positions.
        theta: the base; a larger one turns more slowly.
        scaling: None, or the `rope_scaling` of a transformers config, with its keys: "rope_type" is
            "default", "linear" (f / factor), "dynamic" (a larger theta, if length exceeds
            "original_max_position_embeddings"), "yarn" (f / factor for slow frequencies, f for fast
            ones; cos and sin times "attention_factor") or "llama3" (the same with other bounds).
        interleaved: if True, columns 2 i and 2 i + 1 have the angle of f_i; else columns i and
            i + dim / 2.
        dtype: of the results; the angles are computed in float64.
        device: of the results; torch's default device by default.

    Returns:
        (cos, sin), each [length, dim].

    Raises:
        ValueError: a dim that is odd, a theta or a number in scaling that is not positive, a
            scaling of another type, with a key that is missing or unknown.
        TypeError: a size is not an int, scaling is no mapping, dtype is not floating.

    Source: Su et al. 2021, "RoFormer", section 3.2.2; linear: Chen et al. 2023, "Extending Context
    Window of Large Language Models via Position Interpolation", section 2.3; dynamic and yarn:
    Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections
    3.1 to 3.4; llama3: `apply_scaling` of meta-llama/llama-models, models/llama3/model.py. The
    numbers are those of transformers' ROPE_INIT_FUNCTIONS.
    """
    [dim], [length] = require_size(dim=dim), require_size(0, length=length)
    if dim % 2:
        raise ValueError(f"dim is {dim}; expected an even number")
    theta = require_positive("theta", theta)
    require_flag("interleaved", interleaved)
    if dtype not in FLOATING:
        raise TypeError(f"dtype is {dtype}; expected float32, float16, bfloat16 or float64")
    try:
        where = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; expected a device of torch: {error}") from None
    if where.type == "meta" and scaling is None:  # of any size: nothing is computed
        empty = torch.empty(length, dim, dtype=dtype, device=where)
        return empty, empty.clone()
    frequencies, factor = _scaled(dim, length, theta, scaling)
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    tables = angles.cos() * factor, angles.sin() * factor
    return tables[0].to(where, dtype), tables[1].to(where, dtype)


def _inverse(dim: int, theta: float) -> Tensor:
    """Return theta^(-2 i / dim), [dim / 2] in float64."""
    even = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    return theta ** (-even / dim)


def _linear(dim: int, length: int, theta: float, given: Scaling) -> tuple[Tensor, float]:
    return _inverse(dim, theta) / given["factor"], 1.0


def _dynamic(dim: int, length: int, theta: float, given: Scaling) -> tuple[Tensor, float]:
    """Raise theta so that the slowest frequency is divided by the growth of the length."""
    factor, trained = given["factor"], given["original_max_position_embeddings"]
    growth = factor * max(length, trained) / trained - (factor - 1)
    if dim > 2:
        theta = theta * growth ** (dim / (dim - 2))
    return _inverse(dim, theta), 1.0


def _yarn(dim: int, length: int, theta: float, given: Scaling) -> tuple[Tensor, float]:
    """Divide the frequencies that turn less than `beta_slow` times in the trained length by the
    factor, keep those that turn more than `beta_fast` times, and interpolate between them.
    """
    factor, trained = given["factor"], given["original_max_position_embeddings"]

    def index(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(given.get("beta_fast") or 32), index(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    slow = ((pairs - low) / (high - low)).clamp(0, 1)
    frequencies = _inverse(dim, theta)
    return frequencies * (slow / factor + 1 - slow), _attention_factor(factor, given)


def _attention_factor(factor: float, given: Scaling) -> float:
    """Return the factor of cos and sin, by whose square YaRN scales the scores."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return of(given["mscale"]) / of(given["mscale_all_dim"])
    return of(1.0)


def _llama3(dim: int, length: int, theta: float, given: Scaling) -> tuple[Tensor, float]:
    """Divide the frequencies that turn less than `low_freq_factor` times in the trained length by
    the factor, keep those that turn more than `high_freq_factor` times, and interpolate.
    """
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    if not low < high:
        raise ValueError(
            f"scaling has low_freq_factor {low} and high_freq_factor {high}; "
            "expected a larger high_freq_factor"
        )
    frequencies = _inverse(dim, theta)
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - fast) / given["factor"] + fast), 1.0


Scaled = Callable[[int, int, float, Scaling], tuple[Tensor, float]]
_TRAINED = "original_max_position_embeddings"
# By the type: the function, the keys that it needs, and those that it takes.
_SCALINGS: dict[str, tuple[Scaled, tuple[str, ...], tuple[str, ...]]] = {
    "default": (lambda dim, length, theta, given: (_inverse(dim, theta), 1.0), (), ()),
    "linear": (_linear, ("factor",), ()),
    "dynamic": (_dynamic, ("factor", _TRAINED), ()),
    "yarn": (
        _yarn,
        ("factor", _TRAINED),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (_llama3, ("factor", _TRAINED, "low_freq_factor", "high_freq_factor"), ()),
}


def _scaled(dim: int, length: int, theta: float, scaling: Scaling | None) -> tuple[Tensor, float]:
    """Check the scaling; return the frequencies [dim / 2], and the factor of cos and sin."""
    if scaling is None:
        return _inverse(dim, theta), 1.0
    if not isinstance(scaling, Mapping):
        kind = type(scaling).__name__
        raise TypeError(f"scaling is a {kind}; expected a mapping such as rope_scaling, or None")
    given = dict(scaling)
    old = given.pop("type", "default")  # the key of older configs
    kind = given.pop("rope_type", old)
    if kind not in _SCALINGS:
        expected = ", ".join(_SCALINGS)
        raise ValueError(f"scaling has the rope_type {kind!r}; expected one of {expected}")
    base = given.pop("rope_theta", theta)
    if base != theta:
        raise ValueError(f"scaling has the rope_theta {base}, and theta is {theta}; expected one")
    compute, needed, taken = _SCALINGS[kind]
    for name in needed:
        if given.get(name) is None:
            raise ValueError(f"scaling of the rope_type {kind!r} has no {name}")
    for name, value in given.items():
        if name not in needed + taken:
            raise ValueError(
                f"scaling of the rope_type {kind!r} has the key {name!r}; expected one of "
                f"{', '.join(('rope_type', *needed, *taken))}"
            )
        if value is not None and name != "truncate":
            given[name] = require_positive(f"scaling[{name!r}]", value)
    return compute(dim, length, theta, given)
