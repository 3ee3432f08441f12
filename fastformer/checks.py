"""Checks of arguments, for all modules.

Each `require_...` raises an error that names the argument, what was given and what is expected: a
TypeError for a wrong type, a ValueError for an invalid value. A check reads the values of a tensor
only if `may_read` allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fastformer.eager import may_read, requires_gradient

F = TypeVar("F", bound=Callable[..., Any])
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
STRIDED, autocasts = torch.strided, torch._C._is_any_autocast_enabled
INTS, FLAGS = (int, torch.SymInt), (bool, np.bool_, torch.SymBool)


def shape_of(x: Tensor) -> str:
    """Return the shape of x as the error messages write it."""
    return "[" + ", ".join(str(n) for n in x.shape) + "]"


def wrong_shape(name: str, x: Tensor, expected: str) -> ValueError:
    """Return the error of a tensor with another shape than the expected one."""
    return ValueError(f"{name} has shape {shape_of(x)}; expected {expected}")


def require_tensor(name: str, x: object, expected: str = "a tensor") -> None:
    """Require a dense, strided tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; expected {expected}")
    if x.layout is not STRIDED or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} is a {kind} tensor; expected a dense one (to_dense, to_padded)")


def require_instance(name: str, x: object, kind: Any, expected: str) -> None:
    """Require an instance of a class, or of one of several."""
    if not isinstance(x, kind):
        raise TypeError(f"{name} is a {type(x).__name__}; expected {expected}")


def require_floating(optional: Sequence[str] = (), /, **tensors: Tensor | None) -> None:
    """Require tensors of one floating dtype and on one device; those in `optional` may be None."""
    first: Tensor | None = None
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, Tensor) or x.layout is not STRIDED or x.is_nested:
            require_tensor(name, x)
        assert x is not None
        if first is None:
            first, first_name, dtype, device = x, name, x.dtype, x.device
            if dtype not in FLOATING:
                raise TypeError(
                    f"{name} has dtype {dtype}; expected float32, float16, bfloat16 or float64"
                )
        elif x.dtype != dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; expected that of {first_name}, {dtype}")
        elif x.device != device:
            require_device(name, x, first_name, first)


def require_integers(name: str, x: Tensor) -> None:
    """Require a dense tensor of integers."""
    require_tensor(name, x, "an integer tensor")
    if x.dtype not in INTEGERS:
        raise TypeError(f"{name} has dtype {x.dtype}; expected integers")


def require_values(name: str, x: Tensor, last: int, expected: str, what: str = "") -> None:
    """Require integers from 0 to `last`, if they may be read. what: is said before a wrong one."""
    if may_read(x) and x.numel():
        low, high = map(int, x.aminmax())
        if low < 0 or high > last:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} holds {what}{wrong}; expected {expected}")


def without_gradient(x: Tensor | None) -> Tensor | None:
    """Return x, detached if it requires a gradient."""
    return x if x is None or not requires_gradient(x) else x.detach()


def refuse_gradients(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient, which an op does not compute."""
    for name, x in tensors.items():
        if x is not None and requires_gradient(x) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires a gradient, which {op} does not compute; "
                "expected a tensor that requires none, or a call under torch.no_grad()"
            )


def require_device(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Require that x is on the device of `like`."""
    if x.device != like.device:
        raise ValueError(
            f"{name} is on {x.device}; expected the device of {like_name}, {like.device}"
        )


def plain_number(x: Any) -> Any:
    """Return a number of NumPy, or a tensor of no dimension and without a gradient, as Python's."""
    scalar = isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad
    return x.item() if scalar or isinstance(x, np.number) else x


def require_number(name: str, x: float, expected: str = "a number") -> float:
    """Require a number, and return it as a float."""
    if type(x) is float:
        return x
    x = plain_number(x)
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}; expected {expected}")
    try:
        return float(x)
    except OverflowError as error:
        raise ValueError(f"{name} is too large an int; expected {expected}") from error


def require_positive(name: str, x: float, expected: str = "a positive number") -> float:
    """Require a positive, finite number."""
    x = require_number(name, x, expected)
    if not 0.0 < x < float("inf"):
        raise ValueError(f"{name} is {x}; expected {expected}")
    return x


def checked_softcap(softcap: float | None) -> float | None:
    """Require a positive, finite number or None."""
    return None if softcap is None else require_positive("softcap", softcap)


def require_not_negative(name: str, x: float) -> float:
    """Require a finite number that is not negative."""
    x = require_number(name, x)
    if not 0.0 <= x < float("inf"):
        raise ValueError(f"{name} is {x}; expected a finite number that is not negative")
    return x


def require_probability(name: str, p: float) -> float:
    """Require a number in [0, 1]."""
    p = require_number(name, p, "a number in [0, 1]")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} is {p}; expected a number in [0, 1]")
    return p


def require_dropout(name: str, p: float) -> float:
    """Return p in [0, 1], rounded to a multiple of 2^-16: dropout compares words of 16 bits."""
    p = require_probability(name, p)
    return round(p * 65536) / 65536 if p else p


def require_int(name: str, x: int, expected: str = "an int") -> int:
    """Require an integer that fits in int64, and return it as an int."""
    x = plain_number(x)
    if not isinstance(x, INTS) or isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}; expected {expected}")
    if not -(2**63) <= x < 2**63:
        raise ValueError(f"{name} is {x}; expected an int of 64 bits")
    return x


def require_flag(name: str, x: bool) -> bool:
    """Require a bool, because a string such as "no" would count as True."""
    if x is True or x is False:
        return x
    if not isinstance(x, FLAGS):
        raise TypeError(f"{name} is {x!r}; expected True or False")
    return bool(x)


def require_choice(name: str, x: str, choices: Iterable[str]) -> str:
    """Require one of several strings."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name} is {x!r}; expected one of {', '.join(choices)}")
    return x


# Called with (sizes, device=...).
random_seeds = functools.partial(torch.randint, -(2**63), 2**63 - 1, dtype=torch.int64)


def draw_seeds(n: int, device: torch.device | None = None) -> Tensor:
    """Return n seeds [n] of torch's generator; on a CPU they are those of n calls for one. On a GPU
    they lie 16 bytes apart: a kernel is compiled for the alignment of its pointers.
    """
    spaced = n > 1 and device is not None and device.type != "cpu"
    seeds = random_seeds((n, 2) if spaced else (n,), device=device)
    return seeds[:, 0] if spaced else seeds


def seed_tensor(
    dropout_seed: int | Tensor | None, dropout_p: float, device: torch.device
) -> Tensor | None:
    """Return the seed, or one that torch draws, as a tensor of one int64; None without dropout."""
    if dropout_seed is None:
        return None if dropout_p == 0 else draw_seeds(1, device)
    if isinstance(dropout_seed, np.integer):
        dropout_seed = int(dropout_seed)
    if isinstance(dropout_seed, int) and not isinstance(dropout_seed, bool):
        if not -(2**63) <= dropout_seed < 2**64:
            raise ValueError(f"dropout_seed is {dropout_seed}; expected an int of 64 bits")
        if dropout_p == 0:
            return None
        wrapped = (dropout_seed + 2**63) % 2**64 - 2**63  # the 64 bits as a signed number
        return torch.full((1,), wrapped, dtype=torch.int64, device=device)  # no copy from the host
    require_tensor("dropout_seed", dropout_seed, "an int, a tensor of one int64, or None")
    assert isinstance(dropout_seed, Tensor)
    if dropout_seed.numel() != 1 or dropout_seed.dtype != torch.int64:
        raise ValueError(
            f"dropout_seed has shape {shape_of(dropout_seed)} and dtype {dropout_seed.dtype}; "
            "expected one element of int64"
        )
    if dropout_seed.device != device:
        raise ValueError(f"dropout_seed is on {dropout_seed.device}; expected the inputs' {device}")
    if dropout_p == 0:
        return None
    return dropout_seed if dropout_seed.dim() == 1 else dropout_seed.reshape(1)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the surrounding torch.autocast on the device of x, or None."""
    if not autocasts():
        return None
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def require_token(name: str, token: int, classes: int) -> int:
    """Require a token in [-classes, classes), and return it in [0, classes)."""
    token = require_int(name, token)
    if not -classes <= token < classes:
        raise ValueError(f"{name} is {token}; expected a token of the {classes}")
    return token % classes


def require_eps(eps: float) -> float:
    """Require a number that is not negative."""
    eps = plain_number(eps)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not eps >= 0:
        raise ValueError(f"eps is {eps!r}; expected a number that is not negative")
    return require_number("eps", eps, "a number that is not negative")


def require_size(least: int = 1, **sizes: int) -> list[int]:
    """Require integers in [least, 2^31), and return them as ints."""
    given = [require_int(name, n) for name, n in sizes.items()]
    for name, n in zip(sizes, given):
        if n < least:
            raise ValueError(f"{name} is {n}; expected {least} or more")
        if n >= 2**31:
            raise ValueError(f"{name} is {n}; expected less than 2^31")
    return given


def require_callable(expected: str = "a module", **functions: object) -> None:
    """Require callables."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}; expected {expected}")


def refuse_keywords(given: Iterable[str], **hints: str) -> NoReturn:
    """Refuse the keywords given, with what to write instead if they are known from elsewhere."""
    name = next(iter(given))
    raise TypeError(f"{name} is no argument here; expected {hints.get(name, 'what help() lists')}")


def refuse(**hints: str) -> Callable[[F], F]:
    """Let a function refuse keywords known from elsewhere, with what to write instead."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if wrong := hints.keys() & options.keys():
                refuse_keywords(wrong, **hints)
            return function(*arguments, **options)

        return cast(F, call)

    return decorated


def require_token_ids(name: str, x: Tensor) -> None:
    """Require integers [B, length]."""
    require_tensor(name, x, "a tensor of token ids")
    if x.dim() != 2:
        raise wrong_shape(name, x, "two dimensions [B, length]")
    require_integers(name, x)
