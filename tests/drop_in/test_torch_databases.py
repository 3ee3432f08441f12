"""accelerate, sdpa_override and the ops held to PyTorch's own databases of samples.

torch.testing._internal lists inputs for each module and each operator. Every sample runs through
the stock module and through the accelerated one: in training and in evaluation, with gradients and
without, in each dtype. Outputs, gradients, dtypes, strides, requires_grad and whether an error is
raised have to be the same. The differences that are meant stand in `MEANT`, each with its reason;
with --slow, where every sample runs, one that no longer occurs is a failure as well.
"""

import copy
import functools
import itertools
import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer as ff

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
# The relative error that is rounding, of the largest element: as in conftest.py.
ROUNDING = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),  # torch's own
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
]

# What is differentiated: the inputs and the parameters, or nothing, because of no_grad or because
# no parameter wants a gradient; and nothing with torch's fast path switched off.
GRADS = ("grad", "no_grad", "frozen", "no fast path")


@functools.cache
def databases():
    """PyTorch's samples: of modules and of operators, by name."""
    frozen = torch.backends.flags_frozen()
    try:
        with mock.patch.dict(os.environ):
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
    except ImportError as error:
        pytest.skip(f"torch.testing._internal cannot be imported: {error}")
    if not frozen:  # the import forbids the setting of torch.backends' flags
        torch.backends.__allow_nonbracketed_mutation_flag = True
    return {m.name: m for m in module_db}, {o.name: o for o in op_db if not o.variant_test_name}


class Call(NamedTuple):
    """`make(ours, dtype)` gives what is called, the stock module or function, or ours."""

    sample: str
    training: bool
    grad: str
    dtype: str
    make: Callable
    args: tuple
    kwargs: dict

    def __str__(self):
        mode = "train" if self.training else "eval"
        return f"{self.sample} ({mode}, {self.grad}, {self.dtype})"


# ------------------------------------------------------------------------------------- comparison


def leaf(x, call, dtype, nearby):
    """x rounded to the dtype of the call, in `dtype`, with the strides of x; or near to it."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    wants_grad = call.grad == "grad" and x.requires_grad
    x = x.detach()
    if nearby:
        generator = torch.Generator().manual_seed(nearby)
        x = x * (1 + torch.randn(x.shape, generator=generator) / 100).to(x.dtype)
    x = x.to(DTYPES[call.dtype])
    if not any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride())):  # expanded
        x = x.clone()
    return x.to(dtype).requires_grad_(wants_grad)


def outcome(call, ours, dtype, nearby=0):
    """The exception; or the outputs and the gradients, by name."""
    function = call.make(ours, dtype)
    given = {**dict(enumerate(call.args)), **call.kwargs}
    leaves = {id(x): leaf(x, call, dtype, nearby) for x in given.values()}  # one tensor stays one
    given = {name: leaves[id(x)] for name, x in given.items()}
    wanted = {f"input {name}": x for name, x in given.items() if isinstance(x, Tensor)}
    args = [given.pop(i) for i in range(len(call.args))]
    if isinstance(function, nn.Module):
        function.requires_grad_(call.grad != "frozen")
        wanted |= dict(function.named_parameters())
    torch.backends.mha.set_fastpath_enabled(call.grad != "no fast path")
    try:
        with torch.set_grad_enabled(call.grad in ("grad", "frozen")):
            out = function(*args, **given)
    except Exception as error:
        return error
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    outs = out if isinstance(out, tuple) else (out,)
    found = {f"output {i}": x for i, x in enumerate(outs)}
    if call.grad == "grad":
        generator = torch.Generator().manual_seed(1)
        roots = [x for x in outs if isinstance(x, Tensor) and x.requires_grad]
        cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in roots]
        torch.autograd.backward(roots, cotangents)
        found |= {f"grad of {n}": x.grad for n, x in wanted.items() if x.requires_grad}
    return found


def strides(x):
    return [s for n, s in zip(x.shape, x.stride()) if n > 1]


def differences(call):
    """(kind, in words) of each thing in which ours differs from torch's."""
    dtype = DTYPES[call.dtype]
    want, have = outcome(call, False, dtype), outcome(call, True, dtype)
    if isinstance(want, Exception) and isinstance(have, Exception):
        if type(want) is not type(have):
            yield "error type", f"{have!r}, torch {want!r}"
    elif isinstance(want, Exception) or isinstance(have, Exception):
        yield "error", f"{have!r}, torch {want!r}"[:300]
    else:
        assert have.keys() == want.keys()
        oracle = outcome(call, False, torch.float64)
        size = {name: largest(x) for name, x in oracle.items()}
        of_grads = max((n for name, n in size.items() if "grad" in name), default=0.0)
        for name, theirs in want.items():
            size[name] = max(size[name], of_grads) if "grad" in name else size[name]
            yield from compared(call, name, have[name], theirs, oracle[name], size[name])


def largest(x):
    return float(x.detach().nan_to_num().abs().max()) if x is not None and x.numel() else 0.0


def error_of(x, oracle):
    """The largest, where both are finite."""
    return largest((x.detach().double() - oracle.detach()).nan_to_num(posinf=0.0, neginf=0.0))


def torchs_error(call, name):
    """Of torch, in the dtype of the call: the largest of four, at inputs near the call's. That at
    its own few numbers may be small by luck.
    """
    found = []
    for i in range(1, 5):
        low = outcome(call, False, DTYPES[call.dtype], i)
        found.append(error_of(low[name], outcome(call, False, torch.float64, i)[name]))
    return max(found)


def compared(call, name, ours, theirs, oracle, size):
    """(kind, in words) of what is different in one output or gradient, of this largest element."""
    what = name.split()[0]
    if ours is None or theirs is None:
        if ours is not theirs:
            yield f"{what} or None", f"{name}: {ours}, torch {theirs}"
        return
    for kind in ("shape", "dtype", "requires_grad"):
        a, b = getattr(ours, kind), getattr(theirs, kind)
        if a != b:
            yield f"{what} {kind}", f"{name}: {a}, torch {b}"
    if ours.shape != theirs.shape:
        return
    if strides(ours) != strides(theirs):
        kind = "contiguous" if ours.is_contiguous() else "strides"
        yield f"{what} {kind}", f"{name}: {ours.stride()}, torch {theirs.stride()}"
    if not torch.equal(ours.isnan(), theirs.isnan()):
        yield f"{what} nan", f"{name}: {int(ours.isnan().sum())}, torch {int(theirs.isnan().sum())}"
    factor, rounding = 3 if what == "grad" else 2, ROUNDING[call.dtype] * size
    error, peer = error_of(ours, oracle), error_of(theirs, oracle)
    if error > factor * peer + rounding and "16" in call.dtype:
        peer = max(peer, torchs_error(call, name))
    if error > factor * peer + rounding:
        yield f"{what} value", f"{name}: error {error:.1e}, torch {peer:.1e}, size {size:.1e}"


# ---------------------------------------------------------------------------------------- modules


def described(x):
    if isinstance(x, Tensor):
        return f"{str(x.dtype)[6:]}{list(x.shape)}"
    return type(x).__name__ if isinstance(x, nn.Module) else getattr(x, "__name__", repr(x))


def spelled(args, kwargs):
    named = [f"{name}={described(x)}" for name, x in kwargs.items() if x is not None]
    return ", ".join([described(x) for x in args] + named)


def batched(x, name, form, batch_first):
    """An argument of an unbatched sample, for a batch of two."""
    if not isinstance(x, Tensor):
        return x
    if "padding" in name:
        other = torch.full_like(x, form == "nothing seen")
        x = x.flip(0) if form == "left" else x
        x = torch.stack([x, other])
        return torch.zeros(x.shape).masked_fill(x, -torch.inf) if form == "float" else x
    if "mask" in name:
        x = x if x.dim() == 2 else x.repeat(2, 1, 1)
        return torch.linspace(-1, 1, x.numel()).view(x.shape) if form == "float" else x
    both = torch.stack([x.detach(), 2 * x.detach().flip(0)], 0 if batch_first else 1)
    return both.requires_grad_(x.requires_grad)


def forms(name, made, args, kwargs):
    """The sample's own arguments, and what the database has not: batches, kinds of masks."""
    yield "as it is", args, kwargs
    if name == "nn.MultiheadAttention":
        yield "no weights", args, {**kwargs, "need_weights": False}
        yield "each head's weights", args, {**kwargs, "average_attn_weights": False}
    if name == "nn.Transformer" and kwargs["src_key_padding_mask"] is not None:
        hidden = {"memory_key_padding_mask": kwargs["src_key_padding_mask"]}
        yield "memory mask", args, {**kwargs, **hidden}
    if args[0].dim() == 3 or not name.startswith(("nn.Multihead", "nn.TransformerE")):
        return
    padded = any("padding" in key and x is not None for key, x in kwargs.items())
    masked = any(x is not None for x in kwargs.values())
    batch_first = made["batch_first"]
    for form in ("batch", "left", "nothing seen", "float"):
        if form == "batch" or padded or (form == "float" and masked):
            args_of = tuple(batched(x, "", form, batch_first) for x in args)
            kwargs_of = {key: batched(x, key, form, batch_first) for key, x in kwargs.items()}
            yield form, args_of, kwargs_of
            if name == "nn.MultiheadAttention":
                yield f"{form}, no weights", args_of, {**kwargs_of, "need_weights": False}
    if name == "nn.MultiheadAttention" and args[0] is not args[1]:
        x = batched(args[0], "", "batch", batch_first)
        yield "self-attention", (x, x, x), {}


def module(cls, constructor, training, dtype, change=lambda made: None):
    def make(ours, to):
        torch.manual_seed(0)
        made = cls(*copy.deepcopy(constructor.args), **constructor.kwargs).train(training)
        for p in made.parameters():
            nn.init.normal_(p, std=0.5)
        made.to(DTYPES[dtype]).to(to)
        change(made)
        if ours:
            ff.accelerate(made)
        return made

    return make


def module_calls(name):
    listed = "nn.TransformerDecoderLayer" if name == "nn.TransformerDecoder" else name
    info = databases()[0][listed]
    for training, grad, dtype in itertools.product((True, False), GRADS, DTYPES):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
        for sample in samples:
            made, given = sample.constructor_input, sample.forward_input
            cls, known = info.module_cls, made.kwargs
            if name == "nn.TransformerEncoder":
                known = {"batch_first": made.args[0].self_attn.batch_first}
            if name == "nn.TransformerDecoder":
                made.kwargs["dtype"] = torch.float64
                made = type(made)(cls(*made.args, **made.kwargs), 2)
                cls = nn.TransformerDecoder
            make = module(cls, made, training, dtype)
            for form, args, kwargs in forms(name, known, given.args, given.kwargs):
                text = f"{spelled(made.args, known)} | {form}: {spelled(args, kwargs)}"
                yield Call(text, training, grad, dtype, make, args, kwargs)


# ------------------------------------------------------------------------------------------- ops


def overridden(*args, **kwargs):
    with ff.sdpa_override():
        return F.scaled_dot_product_attention(*args, **kwargs)


def cross_entropy(input, target, **options):
    """Ours has the classes last, in the probabilities too."""
    target = target.movedim(1, -1) if target.is_floating_point() else target
    return ff.cross_entropy(input.movedim(1, -1), target, **options)


OPERATORS = {
    "nn.functional.scaled_dot_product_attention": (F.scaled_dot_product_attention, overridden),
    "nn.functional.layer_norm": (F.layer_norm, ff.layer_norm),
    "nn.functional.rms_norm": (F.rms_norm, ff.rms_norm),
    "nn.functional.cross_entropy": (F.cross_entropy, cross_entropy),
}


def operator_calls(name):
    info, (stock, ours) = databases()[1][name], OPERATORS[name]

    def make(mine, _):
        return ours if mine else stock

    for grad, dtype in itertools.product(GRADS[:3], DTYPES):
        torch.manual_seed(0), random.seed(0)
        samples = list(info.sample_inputs("cpu", DTYPES[dtype], requires_grad=True))
        if info.error_inputs_func is not None:
            samples += [error.sample_input for error in info.error_inputs("cpu")]
        for sample in samples:
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0  # each draws its own mask
            yield Call(spelled(args, kwargs), True, grad, dtype, make, args, kwargs)


# ------------------------------------------------------------------------- what is in no database


def odd_calls():
    """Wrong arguments, and what torch takes although it is odd."""

    def made(cls, *args, change=lambda made: None, **kwargs):
        return cls, SimpleNamespace(args=args, kwargs=kwargs), change

    attention = functools.partial(made, nn.MultiheadAttention, 4, 2, batch_first=True)
    layer = functools.partial(made, nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)

    def wide_bias(m):
        m.in_proj_bias.data = m.in_proj_bias.data.double()

    def odd_heads(m):
        m.self_attn.num_heads = 3

    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    wrong = torch.zeros(4, 2)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    calls = {
        "one dimension": (attention(), (x[0, 0],) * 3, {}),
        "batches": (attention(), (x, x[:1], x[:1]), {}),
        "kdim": (attention(kdim=2, vdim=3), (x, x[..., :2], x[..., :3]), {}),
        "no queries": (attention(), (x[:, :0], x, x), {}),
        "no keys": (attention(), (x, x[:, :0], x[:, :0]), {}),
        "no batch": (attention(), (x[:0],) * 3, {}),
        "bias of a projection": (attention(change=wide_bias), (x, x, x), {}),
        "layer: hint, no mask": (layer(), (x,), dict(is_causal=True)),
        "layer: hint, wrong mask": (layer(), (x,), dict(src_mask=wrong, is_causal=True)),
        "layer: features": (layer(), (x[..., :2],), {}),
        "layer: one eps": (layer(change=lambda m: setattr(m.norm1, "eps", 0.5)), (x,), {}),
        "layer: odd heads": (layer(change=odd_heads), (x,), {}),
        "layer: tanh": (layer(activation=torch.tanh), (x,), dict(src_key_padding_mask=padding)),
        "norm: features": (made(nn.LayerNorm, 4), (x[..., :2],), {}),
        "norm: integers": (made(nn.LayerNorm, 4), (padding,), {}),
        "root mean square: negative eps": (made(nn.RMSNorm, 4, eps=-0.5), (x,), {}),
        "root mean square: features": (made(nn.RMSNorm, 4), (x[..., :2],), {}),
    }
    for training, grad, dtype in itertools.product((True, False), GRADS, DTYPES):
        for name, ((cls, constructor, change), args, kwargs) in calls.items():
            make = module(cls, constructor, training, dtype, change)
            text = f"{name} | {spelled(args, kwargs)}"
            yield Call(text, training, grad, dtype, make, args, kwargs)


# ---------------------------------------------------------------------------------- the test itself

MODULES = (
    "nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.TransformerEncoder",
    "nn.TransformerDecoderLayer", "nn.TransformerDecoder", "nn.Transformer", "nn.LayerNorm",
    "nn.RMSNorm",
)  # fmt: skip
ODD = "what is in no database"


class Meant(NamedTuple):
    """A difference that is meant, and stays: where it is found, and why."""

    reason: str
    entries: tuple
    found: Callable  # of the call and the kind


ENCODERS = ("nn.TransformerEncoderLayer", "nn.TransformerEncoder")
MEANT = {
    "zeros": Meant(
        "a query that sees no key gives zeros, and finite gradients, where torch gives NaN",
        ("nn.MultiheadAttention", *ENCODERS),
        lambda call, kind: " nan" in kind and "| nothing seen" in call.sample,
    ),
    "contiguous": Meant(
        "an output is contiguous where torch's, outside of its fast path with batch_first, is a "
        "transposed view, or has the order of an input that is one",
        ("nn.MultiheadAttention", "nn.TransformerDecoderLayer", "nn.TransformerDecoder", ODD),
        lambda call, kind: kind == "output contiguous",
    ),
    "error types": Meant(
        "what torch refuses is a ValueError or a TypeError that names the argument",
        ("nn.functional.rms_norm", ODD),
        lambda call, kind: kind == "error type",
    ),
    "floating masks at inference": Meant(
        "torch's layer in one op takes a floating mask for a boolean one, so that every score to "
        "which something is added is left out; ours adds it, as torch does in training",
        ENCODERS,
        lambda call, kind: (
            kind in ("output nan", "output value")
            and ("src_mask=float32" in call.sample or " mask=float32" in call.sample)
            and not call.training
            and call.grad in ("no_grad", "frozen")
        ),
    ),
    "weights of nothing": Meant(
        "of an empty batch torch's attention in one op returns None for the weights",
        (ODD,),
        lambda call, kind: kind == "output or None" and call.sample.startswith("no batch |"),
    ),
    "negative eps": Meant(
        "the functions refuse a negative eps; an accelerated module leaves it to torch",
        ("nn.functional.layer_norm", "nn.functional.rms_norm"),
        lambda call, kind: kind == "error" and "eps=-" in call.sample,
    ),
    "class weights and probabilities": Meant(
        "cross_entropy takes classes, all of one weight, and refuses the others by name",
        ("nn.functional.cross_entropy",),
        lambda call, kind: (
            kind == "error" and ("weight=" in call.sample or "int64" not in call.sample)
        ),
    ),
}


def meant(entry, call, kind):
    """The name of the difference in the list, or None."""
    found = (n for n, x in MEANT.items() if entry in x.entries and x.found(call, kind))
    return next(found, None)


@pytest.mark.with_all
@pytest.mark.parametrize("entry", [*MODULES, *OPERATORS, ODD])
def test_as_torch(entry, backend, request):
    """A sample of the calls; with --slow all of them, and of those of the interpreter one in 11.
    Where all run, that every difference that is listed occurs.
    """
    slow = request.config.getoption("slow")
    few, many = (331, 11) if backend == "triton" else (5 if entry == ODD else 61, 1)
    step = many if slow else few
    if entry == ODD:
        calls = odd_calls()
    else:
        calls = operator_calls(entry) if entry in OPERATORS else module_calls(entry)
    unlisted, occurred = [], set()
    for call in itertools.islice(calls, 0, None, step):
        for kind, words in differences(call):
            name = meant(entry, call, kind)
            occurred.add(name)
            if name is None:
                unlisted.append(f"{kind}: {call}\n    {words}")
    assert not unlisted, f"{len(unlisted)} differences:\n" + "\n".join(unlisted[:20])
    if step == 1:
        gone = {name for name, known in MEANT.items() if entry in known.entries} - occurred
        assert not gone, f"listed, and no longer there: {', '.join(gone)}"
