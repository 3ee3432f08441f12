"""How a random call of each op is drawn: shapes, dtypes, strides and options.

A function of the op's name makes (tensors, options) of a `Draw`. Tensors are views of larger memory
that holds NaN, in any order of dimensions, with steps; sizes stand on and beside the edges of
tiles; hidden keys hold NaN.
"""

import math

import numpy as np
import torch

import fastformer as ff
from fastformer.ops.feed_forward.reference import ACTIVATIONS


class Draw:
    """One case: random numbers, and tensors made of them, of at most `most` rows and keys."""

    def __init__(self, seed, device, most=40):
        self.random, self.device, self.most = np.random.default_rng(seed), device, most
        kinds = [torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16]
        self.dtype = self.one(*kinds)
        # Interpreted programs have a cost each: half of the cases are one tile, however large.
        self.tiles = self.one(None, None, None, (16, 16), (16, 32), (32, 16))

    def one(self, *choices):
        return choices[self.random.integers(len(choices))]

    def often(self, p=0.5):
        return self.random.random() < p

    def size(self, *, most):
        """Small sizes, and in tiles those around their edges."""
        most = min(most, self.most)
        edges = [n for n in (1, 15, 16, 17, 31, 32, 33) if n <= most]
        return self.one(*edges) if self.often() else int(self.random.integers(1, most + 1))

    def view(self, x, around):
        """x, inside of something larger: its dimensions in any order, a step between neighbours."""
        x = torch.as_tensor(x, device=self.device)
        if self.often(0.3) or not x.ndim:
            return x
        order = self.random.permutation(x.ndim)
        steps = np.ones(x.ndim, int)
        steps[order[-1]] = self.one(1, 1, 2)
        stored = [x.shape[n] * steps[n] + self.one(0, 0, 3) for n in order]
        view = x.new_full(stored, around).permute(*np.argsort(order).tolist())
        view = view[tuple(slice(0, n * step, step) for n, step in zip(x.shape, steps))]
        return view.copy_(x)

    def normal(self, *shape, scale=1.0, dtype=None):
        x = torch.as_tensor(self.random.standard_normal(shape) * scale)
        return self.view(x.to(dtype or self.dtype), math.nan)

    def parameter(self, *shape, scale=1.0):
        """In the dtype of the input, or in float32."""
        return self.normal(*shape, scale=scale, dtype=self.one(self.dtype, torch.float32))

    def integers(self, low, high, *shape, dtype=np.int64):
        return self.view(self.random.integers(low, high, shape).astype(dtype), -1)

    def dropout(self):
        p = self.one(0.0, 0.0, 0.3, 0.9, 1.0)
        return {"dropout_p": p, "dropout_seed": self.seed()} if p else {}

    def seed(self):
        return int(self.random.integers(-(2**63), 2**63, dtype=np.int64))

    def lead(self):
        """The leading dimensions of rows."""
        return self.one((), (self.size(most=33),), (2, self.size(most=9)), (2, 1, 3))

    def broadcast(self, full, *, whole=0):
        """A shape that broadcasts to the full one, the last `whole` sizes as they are."""
        kept = len(full) - whole
        shape = [self.one(1, n) for n in full[:kept]] + list(full[kept:])
        return shape[self.one(0, 0, *range(len(full))) :]


# ------------------------------------------------------ the cases: (function, tensors, options)


def band(draw):
    sides = (None, 0, 3, 15, 16, 20)
    return {
        "is_causal": draw.often(),
        "window": draw.one(None, (draw.one(*sides), draw.one(*sides))),
        "causal_alignment": draw.one("top_left", "bottom_right"),
    }


def scores(draw):
    """What attention and its weights take alike."""
    batch, groups, share = draw.one(1, 2), draw.one(1, 2), draw.one(1, 1, 2)
    heads, rows, columns = groups * share, draw.size(most=40), draw.size(most=40)
    dim, full = draw.one(3, 8, 16, 20), (batch, heads, rows, columns)
    tensors = {
        "query": draw.normal(batch, heads, rows, dim, scale=draw.one(0.5, 2.0)),
        "key": draw.normal(batch, groups, columns, dim),
    }
    options = {"enable_gqa": True, "softcap": draw.one(None, None, 5.0), **band(draw)}
    if draw.often(0.3):
        options["scale"] = 0.5
    if draw.often(0.4):
        shape = draw.broadcast(full)
        tensors["attn_mask"] = draw.view(draw.random.random(shape) < 0.7, True)
    if draw.often(0.4):  # one that is constant over the keys changes nothing but lse
        bias = draw.normal(
            *draw.broadcast(full, whole=1), dtype=draw.one(draw.dtype, torch.float32)
        )
        hidden = torch.tensor(draw.random.random(bias.shape) < draw.one(0.0, 0.2))
        tensors["bias"] = bias.masked_fill_(hidden.to(bias.device), -math.inf)
    if draw.often(0.4):
        kind = draw.one(np.int64, np.int32)
        lengths = draw.integers(0, columns + 1, batch, dtype=kind)
        tensors["key_lengths"] = lengths
        for b, n in enumerate(lengths.tolist()):  # beyond the keys anything may stand
            tensors["key"][b, :, n:] = math.nan
    if draw.often(0.3):
        slopes = draw.random.random(draw.one((heads,), (batch, heads)))
        options["alibi_slopes"] = draw.view(slopes.astype(np.float32), np.nan)
    if draw.often(0.3):
        tensors["sinks"] = draw.parameter(heads)
    return tensors, options


def scaled_dot_product_attention(draw):
    tensors, options = scores(draw)
    batch, groups, columns, _ = tensors["key"].shape
    value = draw.normal(batch, groups, columns, draw.one(5, 8, 16))
    for b, n in enumerate(tensors.get("key_lengths", torch.tensor([])).tolist()):
        value[b, :, n:] = math.nan
    options |= {"return_lse": draw.often(), **draw.dropout()}
    if "attn_mask" in tensors and draw.often():
        sizes = dict(Sq=tensors["query"].shape[2], Sk=columns)
        options["attn_mask"] = ff.block_mask(tensors.pop("attn_mask"), **sizes)
    return {**tensors, "value": value}, options


def attention_weights(draw):
    return scores(draw)


def packed_attention(draw):
    groups, share, dim = draw.one(1, 2), draw.one(1, 2), draw.one(3, 8, 16)
    batch = draw.one(1, 2, 3)
    ends = np.cumsum([(0, 0)] + [draw.random.integers(0, 21, 2) for _ in range(batch)], 0)
    (queries, keys), longest = ends[-1], np.diff(ends, axis=0).max(0)
    tensors = {
        "query": draw.normal(queries, groups * share, dim, scale=2.0),
        "key": draw.normal(keys, groups, dim),
        "value": draw.normal(keys, groups, draw.one(dim, 5)),
        "cu_seqlens_q": draw.view(ends[:, 0].astype(np.int32), -1),
        "cu_seqlens_k": draw.view(ends[:, 1].astype(np.int32), -1),
    }
    if draw.often(0.3):
        tensors["sinks"] = draw.parameter(groups * share)
    more = draw.one(0, 5)
    options = {"max_q": int(longest[0]) + more, "max_k": int(longest[1]) + more}
    options |= {**band(draw), **draw.dropout(), "return_lse": draw.often()}
    options["softcap"] = draw.one(None, None, 5.0)
    if draw.often(0.3):
        seen = draw.random.random((draw.one(1, groups * share), queries, keys)) < 0.7
        options["attn_mask"] = ff.block_mask(draw.view(seen, True))
    elif draw.often(0.3):
        slopes = draw.random.random(draw.one((groups * share,), (batch, groups * share)))
        options["alibi_slopes"] = draw.view(slopes.astype(np.float32), np.nan)
    if draw.often(0.4):
        hidden = torch.tensor(draw.random.random(keys) < draw.one(0.0, 0.2))
        bias = draw.parameter(keys)
        tensors["bias"] = bias.masked_fill_(hidden.to(bias.device), -math.inf)
        for name in ("key", "value"):  # a hidden key may be anything
            tensors[name][hidden.to(bias.device)] = math.nan
    return tensors, options


def norm(draw, *names):
    n = draw.size(most=40) + 3
    tensors = {"input": draw.normal(*draw.lead(), n, scale=draw.one(0.1, 3.0))}
    for name in names:
        if draw.often(0.7):
            tensors[name] = draw.parameter(n)
    return tensors, {"normalized_shape": n, "eps": draw.one(1e-5, 0.1)}


def layer_norm(draw):
    tensors, options = norm(draw, "weight", "bias")
    return tensors, {**options, "unbiased": draw.often()}


def rms_norm(draw):
    return norm(draw, "weight")


def dropout_add_layer_norm(draw):
    tensors, options = norm(draw, "bias")
    x = tensors["input"]
    tensors["residual"] = draw.normal(*x.shape)
    tensors["weight"] = draw.parameter(x.shape[-1])
    tensors.setdefault("bias")
    if draw.often():
        tensors["input_bias"] = draw.parameter(x.shape[-1])
    options = {"eps": options["eps"], "unbiased": draw.often(), **draw.dropout()}
    return tensors, options


def dropout_add_rms_norm(draw):
    tensors, options = dropout_add_layer_norm(draw)
    del tensors["bias"], options["unbiased"]
    return tensors, options


def fed(draw, halves, names):
    d, hidden, out = (draw.size(most=most) for most in (20, 40, 20))
    w, b = names
    tensors = {
        "input": draw.normal(*draw.lead(), d),
        w: draw.normal(halves * hidden, d, scale=d**-0.5),
        b: draw.normal(halves * hidden) if draw.often(0.7) else None,
        "w_2": draw.normal(out, hidden, scale=hidden**-0.5),
        "b_2": draw.normal(out) if draw.often(0.7) else None,
    }
    return tensors, draw.dropout()


def feed_forward(draw):
    tensors, options = fed(draw, 1, ("w_1", "b_1"))
    return tensors, {"activation": draw.one(*ACTIVATIONS), **options}


def geglu(draw):
    return fed(draw, 2, ("w", "b"))


def swiglu(draw):
    tensors, options = fed(draw, 2, ("w", "b"))
    return tensors, options | gate_form(draw, "silu")


def gate_form(draw, activation):
    """The numbers of a gated form."""
    alpha = draw.one(1.0, 1.702) if activation == "silu" else 1.0
    return {"alpha": alpha, "limit": draw.one(None, 0.7, 7), "offset": draw.one(0, 1.0)}


def gated_activation(draw):
    shape = *draw.lead(), draw.size(most=40)
    activation = draw.one(*ACTIVATIONS)
    tensors = {"gate": draw.normal(*shape, scale=2.0), "value": draw.normal(*shape)}
    return tensors, {"activation": activation, **gate_form(draw, activation)}


def embed(draw):
    lead, length = draw.one((), (1,), (3,)), draw.size(most=17)
    vocabulary, d = draw.size(most=9), draw.size(most=40)
    kind = draw.one(np.int64, np.int32, np.uint8)
    tensors = {
        "tokens": draw.view(draw.random.integers(0, vocabulary, (*lead, length)).astype(kind), 200),
        "weight": draw.normal(vocabulary, d),
        "positional": draw.parameter(length + draw.one(0, 2), d) if draw.often(0.7) else None,
    }
    options = {"padding_idx": draw.one(None, draw.random.integers(vocabulary).item())}
    if draw.often(0.3):
        options["scale"] = 0.7
    return tensors, options | draw.dropout()


def rotary_embedding(draw):
    heads, groups, length = draw.one(1, 2, 3), draw.one(1, 2), draw.size(most=17)
    dim = 2 * draw.size(most=20)
    rotary = draw.one(dim, 2 * int(draw.random.integers(1, dim // 2 + 1)))
    batch = draw.one(None, 1, 2)  # None: packed
    shapes = [(length, n, dim) if batch is None else (batch, n, length, dim)
              for n in (heads, groups)]  # fmt: skip
    tensors = {"query": draw.normal(*shapes[0], scale=draw.one(0.1, 2.0))}
    tensors["key"] = draw.normal(*shapes[1])
    lead = (batch, length) if batch is not None and draw.often() else (length,)
    kind = draw.one(draw.dtype, torch.float32)
    options = {name: draw.normal(*lead, rotary, dtype=kind) for name in ("cos", "sin")}
    for name in ("query_norm", "key_norm"):
        if draw.often():
            tensors[name] = draw.parameter(dim)
    return tensors, {**options, "interleaved": draw.often(), "eps": draw.one(1e-6, 0.1)}


def losses(draw, lead, classes):
    target = draw.random.integers(0, classes, lead)
    options = {
        "reduction": draw.one("mean", "sum", "none"),
        "label_smoothing": draw.one(0.0, 0.1, 1.0),
        "smoothing": draw.one("uniform", "kl"),
        "ignore_index": draw.one(int(draw.random.integers(classes)), -100),
    }
    if draw.often(0.3):
        options["weight"] = draw.normal(classes).abs() + 0.2
    if draw.often(0.3):
        options["z_loss"] = 0.1
    if draw.often(0.3):
        options |= {"softcap": 3.0, "temperature": 0.7}
    options["return_entropy"] = draw.often(0.3)
    if options["smoothing"] == "kl":  # whose formula in `independent` has a padding class
        options["ignore_index"] %= classes
    if options["reduction"] == "mean" and (target == options["ignore_index"]).all():
        options["reduction"] = "sum"
    return draw.view(target, -1), options


def cross_entropy(draw):
    lead, classes = draw.lead(), draw.size(most=40) + 2
    classes += len(lead) == 2 and lead[1] == classes  # could be torch's [N, C, L]: refused
    target, options = losses(draw, lead, classes)
    return {"logits": draw.normal(*lead, classes, scale=3.0), "target": target}, options


def linear_cross_entropy(draw):
    lead, classes, d = draw.lead(), draw.size(most=40) + 2, draw.size(most=12)
    target, options = losses(draw, lead, classes)
    tensors = {
        "input": draw.normal(*lead, d),
        "linear_weight": draw.normal(classes, d),
        "target": target,
        "linear_bias": draw.normal(classes) if draw.often() else None,
    }
    return tensors, options


def linear_kl_div(draw):
    lead, classes, d, k = draw.lead(), *(draw.size(most=n) for n in (40, 12, 12))
    tensors = {
        "input": draw.normal(*lead, d),
        "linear_weight": draw.normal(classes, d, scale=d**-0.5),
        "linear_bias": draw.normal(classes) if draw.often() else None,
    }
    options = {
        "teacher_input": draw.normal(*lead, k),
        "teacher_weight": draw.normal(classes, k, scale=k**-0.5),
        "teacher_bias": draw.normal(classes) if draw.often() else None,
        "mask": draw.view(draw.random.random(lead) < 0.7, False) if draw.often() else None,
        "reduction": draw.one("sum", "none"),
        "reverse": draw.often(),
        "softcap": draw.one(None, 3.0),
        "temperature": draw.one(1.0, 0.7),
    }
    return tensors, options


DRAWN = [
    scaled_dot_product_attention,
    attention_weights,
    packed_attention,
    layer_norm,
    rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    feed_forward,
    geglu,
    swiglu,
    gated_activation,
    embed,
    rotary_embedding,
    cross_entropy,
    linear_cross_entropy,
    linear_kl_div,
]


def drawn(case, draw):
    """Return the tensors and the options of a call, and the names of the tensors whose gradients
    are wanted: mostly all, else some of them, in their order.
    """
    tensors, options = case(draw)
    floating = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    if draw.often(0.3):
        some = 1 + draw.random.integers(len(floating))
        floating = [floating[n] for n in sorted(draw.random.permutation(len(floating))[:some])]
    return tensors, options, floating


def outputs_of(case, tensors, options):
    """Call the op, and return a tuple of its outputs."""
    outputs = getattr(ff, case.__name__)(**tensors, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)
