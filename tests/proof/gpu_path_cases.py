"""The calls that test_gpu_path.py makes: each public op, its inputs in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastformer as ff
from fastformer.dispatch import backends

SEED = 20170612
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Tensors = dict[str, Tensor]

# ---------------------------------------------------------------------------------------- layouts


def shifted(x: Tensor, by: int = 1) -> Tensor:
    """The same values, `by` elements behind an address that 16 divides."""
    flat = torch.empty(x.numel() + 16, dtype=x.dtype)
    return flat[by : by + x.numel()].view(x.shape).copy_(x)


def padded(x: Tensor) -> Tensor:
    """Rows further apart than they are wide, by an odd number."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    return wide[..., : x.shape[-1]].copy_(x)


def strided(x: Tensor) -> Tensor:
    """Every other element."""
    return torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2].copy_(x)


def swapped(x: Tensor) -> Tensor:
    """[B, H, S, D] with [B, S, H, D] in memory, as a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "shifted": shifted,
    "shifted by 8 bytes": lambda x: shifted(x, 8 // x.element_size()),
    "padded": lambda x: padded(x) if x.dim() > 1 else x,
    "strided": lambda x: strided(x) if x.dim() > 1 else x,
    "swapped": lambda x: swapped(x) if x.dim() == 4 else x,
}


def laid_out(tensors: Tensors, layout: str) -> Tensors:
    """The floating tensors in a layout of `LAYOUTS`; or, for "only NAME", that tensor shifted. See
    `watched` for the others.
    """
    if layout.startswith("only "):
        return {n: shifted(x) if n == layout[5:] else x for n, x in tensors.items()}
    move = LAYOUTS.get(layout, LAYOUTS["dense"])
    return {n: move(x) if x.is_floating_point() else x for n, x in tensors.items()}


def watched(call: Callable[..., Tensor], layout: str) -> Callable[..., Tensor]:
    """The call; for "saved WHAT" and "gradient" what the backward gets is shifted.

    Saved-tensor hooks do such a thing: what the forward saved comes back from elsewhere. WHAT is
    "inputs", "output", or "lse" or "statistics", float32 of three and of four dimensions.
    """
    kind, _, what = layout.partition(" ")
    if kind == "gradient":

        def with_gradient(**given: Any) -> Tensor:
            output = call(**given)
            if output.requires_grad:
                output.register_hook(shifted)
            return output

        return with_gradient
    if kind != "saved":
        return call

    def moved(**given: Any) -> Tensor:
        inputs = {x.data_ptr() for x in given.values() if isinstance(x, Tensor)}

        def back(x: Tensor) -> Tensor:
            rows = "lse" if x.dim() == 3 else "statistics"
            made = rows if x.dtype == FP32 else "output"
            return shifted(x) if what == ("inputs" if x.data_ptr() in inputs else made) else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, back):
            return call(**given)

    return moved


# ------------------------------------------------------------------------------------------ cases


class Case(NamedTuple):
    """`call` of the tensors and the options gives one tensor. `fixed` has no gradient."""

    op: str
    call: Callable[..., Tensor]
    make: Callable[[], Tensors]
    layouts: tuple[str, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    fixed: Callable[[], Tensors] = dict
    sampled: bool = False  # else with --slow


CASES: dict[str, Case] = {}
DENSE, TWO, FOUR = ("dense",), ("dense", "shifted"), ("dense", "shifted", "padded", "swapped")
MOVED = ("dense", "saved output", "saved lse", "saved inputs", "gradient")


def case(
    op: str,
    name: str,
    make: Callable[[], Tensors],
    layouts: tuple[str, ...] = TWO,
    *,
    call: Callable[..., Tensor] | None = None,
    fixed: Callable[[], Tensors] = dict,
    sampled: bool = False,
    **options: Any,
) -> None:
    assert name not in CASES
    call = call or getattr(ff, op)
    CASES[name] = Case(op, call, make, layouts, options, fixed, sampled)


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def qkv(
    b: int, h: int, s: int, d: int, dtype: torch.dtype = BF16, g: int = 0, sk: int = 0, dv: int = 0,
    **more: Callable[[], Tensor],
) -> Callable[[], Tensors]:  # fmt: skip
    def make() -> Tensors:
        tensors = {
            "query": normal(b, h, s, d, dtype=dtype),
            "key": normal(b, g or h, sk or s, d, dtype=dtype),
            "value": normal(b, g or h, sk or s, dv or d, dtype=dtype),
        }
        return tensors | {name: x() for name, x in more.items()}

    return make


def with_lse(**given: Any) -> Tensor:
    output, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
    return torch.cat([output, lse.unsqueeze(-1).to(output.dtype)], -1)


def summed(**given: Any) -> Tensor:
    """Its gradient is expanded: no stride but zero."""
    return ff.scaled_dot_product_attention(**given).sum((0, 1, 2))


def one_tensor(x: Tensor, **options: Any) -> Tensor:
    """Query, key and value as slices of one tensor."""
    query, key, value = x.chunk(3, -1)
    return ff.scaled_dot_product_attention(query, key, value, **options)


SDPA = "scaled_dot_product_attention"
S = 70
LENGTHS = {"key_lengths": lambda: torch.tensor([37, S], dtype=torch.int32)}
MASK = {"attn_mask": lambda: torch.rand(2, 1, S, S) > 0.2}
KEY_MASK = {"attn_mask": lambda: torch.rand(2, 1, 1, S) > 0.2}
SEEDED = {"dropout_seed": lambda: torch.tensor([0, SEED])[1:]}  # 8 bytes behind
DROPOUT = dict(dropout_p=0.1, dropout_seed=SEED)


def bias(*shape: int, dtype: torch.dtype = BF16) -> dict[str, Callable[[], Tensor]]:
    return {"bias": lambda: normal(*shape, dtype=dtype)}


case(SDPA, "attention, lengths and dropout", qkv(2, 2, S, 64, **LENGTHS),
     ("dense", "shifted", "swapped"), sampled=True, **DROPOUT)  # fmt: skip
case(SDPA, "attention, causal, 128", qkv(1, 2, 130, 128), is_causal=True)
case(SDPA, "attention, moved", qkv(2, 2, 40, 64), MOVED, sampled=True)
case(SDPA, "attention, sinks", qkv(2, 2, 40, 64, sinks=lambda: normal(2)),
     ("dense", "only sinks"))  # fmt: skip
case(SDPA, "attention, one gradient for all", qkv(2, 2, 40, 64), call=summed, is_causal=True)
case(SDPA, "attention, plain", qkv(2, 2, S, 64), (*FOUR, "strided", "shifted by 8 bytes"))
case(SDPA, "attention, seed in a tensor", qkv(2, 2, S, 64, **SEEDED), dropout_p=0.1)
case(SDPA, "attention, key mask", qkv(2, 2, S, 64, **KEY_MASK))
case(SDPA, "attention, mask", qkv(2, 2, S, 64, **MASK))
case(SDPA, "attention, bias", qkv(2, 2, S, 64, **bias(2, S, S)), FOUR)
case(SDPA, "attention, key bias", qkv(2, 2, S, 64, **bias(2, 1, 1, S, dtype=FP32)))
case(SDPA, "attention, row bias", qkv(2, 2, S, 64, **bias(2, 1, S, 1, dtype=FP32)))
case(SDPA, "attention, log-sum-exp", qkv(2, 2, 40, 64, **bias(2, 40, 40)), 
     (*TWO, "saved statistics"),
     call=with_lse, is_causal=True, sampled=True)  # fmt: skip
case(SDPA, "attention, window and slopes", qkv(2, 2, S, 64, sk=90), window=(20, 3),
     causal_alignment="bottom_right",
     fixed=lambda: {"alibi_slopes": torch.tensor([0.5, 0.25])})  # fmt: skip
case(SDPA, "attention, softcap, grouped", qkv(2, 4, S, 64, g=2), ("dense", "swapped"),
     softcap=20.0, is_causal=True, enable_gqa=True)  # fmt: skip
case(SDPA, "attention, one query",
     qkv(2, 2, 1, 64, sk=S, **LENGTHS), ("dense", "swapped"))  # fmt: skip
case(SDPA, "attention, few queries",
     qkv(2, 4, 3, 64, g=2, sk=300, key_lengths=lambda: torch.tensor([37, 300])),
     ("dense", "only key", "swapped"), enable_gqa=True, is_causal=True,
     causal_alignment="bottom_right", sampled=True)  # fmt: skip
case(SDPA, "attention, few queries, all",
     qkv(1, 4, 16, 128, g=4, sk=260, **bias(4, 1, 260), sinks=lambda: normal(4)),
     TWO, window=(200, 9), softcap=20.0)  # fmt: skip
case(SDPA, "attention, one head", qkv(1, 1, S, 64), ("dense", "swapped"))
case(SDPA, "attention, 40 and 24 wide", qkv(2, 2, S, 40, FP16, dv=24), ("dense", "padded"))
case(SDPA, "attention, float32", qkv(1, 2, 40, 64, FP32), **DROPOUT)
case(SDPA, "attention, 256", qkv(1, 1, 40, 256), DENSE, **DROPOUT)
case(SDPA, "attention, of one tensor", lambda: {"x": normal(2, 2, S, 192)}, call=one_tensor)
case(SDPA, "attention, everything",
     qkv(2, 2, S, 64, **bias(1, 2, S, S), **MASK, **LENGTHS, **SEEDED),
     ("dense", "swapped", *(f"only {n}" for n in ("query", "key", "value", "bias", "attn_mask",
      "key_lengths", "dropout_seed"))), dropout_p=0.1, is_causal=True)  # fmt: skip


class InGluon(dict):
    """Measurements that chose these rows for Hopper, by kernel, for every class of calls."""

    def __init__(self, **rows: str) -> None:
        self.rows = {f"attention {kernel}": row for kernel, row in rows.items()}

    def get(self, name: str, default: Any = None) -> Any:
        return self.rows.get(name.partition(": ")[0], default)


def by_gluon(row: str = "Gluon 128 128", rows: Any = (), **given: Any) -> Tensor:
    """Output and lse; in 16 bits, of the forward for Hopper, and of other kernels by their rows."""
    from fastformer.kernels import launch, tuned

    backends._load(SDPA)  # which sets the source
    before, tuned.source = tuned.source, lambda device: InGluon(forward=row, **dict(rows))
    try:
        output = with_lse(**given)
    finally:
        tuned.source = before
    if torch.is_grad_enabled() and output.dtype == BF16 and ff.current_backend() == "triton":
        plans = [getattr(plan, "forward", None) for plan in launch.plans.values()]
        assert any(isinstance(plan, (launch.TMALaunch, launch.MappedLaunch)) for plan in plans)
    return output


case(SDPA, "attention, Gluon, forward and backward", qkv(2, 4, 71, 64, g=2, sk=130),
     ("dense", "swapped"), call=by_gluon, rows=dict(dq="Gluon 128 128", dkdv="Gluon 64 128"),
     enable_gqa=True, is_causal=True, sampled=True, **DROPOUT)  # fmt: skip
HOPPER_MASK = {"attn_mask": lambda: torch.rand(2, 1, 1, 130) > 0.2}
case(SDPA, "attention, Gluon", qkv(2, 4, 71, 64, g=2, sk=130), ("dense", "swapped"),
     call=by_gluon, enable_gqa=True, is_causal=True, causal_alignment="bottom_right",
     sampled=True)  # fmt: skip
case(SDPA, "attention, Gluon, key mask",
     qkv(2, 2, 71, 64, sk=130, dv=24, sinks=lambda: normal(2), **HOPPER_MASK), ("dense", "swapped"),
     call=by_gluon)  # fmt: skip
case(SDPA, "attention, Gluon, lengths and dropout",
     qkv(2, 2, 71, 128, sk=130, key_lengths=lambda: torch.tensor([33, 77])), ("dense", "swapped"),
     call=by_gluon, **DROPOUT)  # fmt: skip
OFFSETS = torch.tensor([0, 17, 17, S], dtype=torch.int32)


def packed(**given: Any) -> Tensor:
    return ff.packed_attention(**given, max_q=S - 17, max_k=S - 17)


def tokens(**more: Any) -> Callable[[], Tensors]:
    offsets = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    return lambda: {n: normal(S, 2, 64) for n in ("query", "key", "value")} | offsets


case("packed_attention", "packed", tokens(), ("dense", "shifted", "only cu_seqlens_k"),
     call=packed, is_causal=True, sampled=True, **DROPOUT)  # fmt: skip
case("packed_attention", "packed, window", tokens(), ("padded", "strided"), call=packed,
     window=(9, 0), causal_alignment="bottom_right")  # fmt: skip
case("packed_attention", "packed, terms", lambda: {**tokens()(), "bias": normal(S)},
     ("dense", "only bias"), call=packed, softcap=9.0, is_causal=True,
     alibi_slopes=torch.tensor([0.3, 0.1]))  # fmt: skip


def both(**given: Any) -> Tensor:
    return torch.cat(ff.dropout_add_layer_norm(**given))


def both_rms(**given: Any) -> Tensor:
    return torch.cat(ff.dropout_add_rms_norm(**given))


def rows(m: int, n: int, dtype: torch.dtype, *names: str) -> Callable[[], Tensors]:
    shapes = {"input": (m, n), "residual": (m, n), "weight": (n,), "bias": (n,)}
    return lambda: {name: normal(*shapes[name], dtype=dtype) for name in names}


AFFINE = ("input", "weight", "bias")
for m, n, dtype in ((30, 80, BF16), (300, 77, FP16), (9, 1000, FP32), (9, 9000, BF16)):
    which = TWO if n == 80 else ("dense", "shifted", "padded")
    case("rms_norm", f"rms_norm, {n}", rows(m, n, dtype, "input", "weight"), which,
         normalized_shape=n, sampled=n == 80)  # fmt: skip
    case("layer_norm", f"layer_norm, {n}", rows(m, n, dtype, *AFFINE), which,
         normalized_shape=n, sampled=n == 80)  # fmt: skip
    case("dropout_add_layer_norm", f"dropout_add_layer_norm, {n}",
         rows(m, n, dtype, *AFFINE, "residual"), which, call=both,
         sampled=n == 80, **DROPOUT)  # fmt: skip
    case("dropout_add_rms_norm", f"dropout_add_rms_norm, {n}",
         rows(m, n, dtype, "input", "weight", "residual"), DENSE, call=both_rms,
         sampled=n == 80, **DROPOUT)  # fmt: skip
case("layer_norm", "layer_norm, no weight", lambda: {"input": normal(2, 3, 64)},
     ("dense", "strided"), normalized_shape=64, unbiased=True)  # fmt: skip
case("layer_norm", "layer_norm, one row", rows(1, 64, BF16, *AFFINE), normalized_shape=64)


def hidden(**given: Any) -> Callable[[], Tensors]:
    return lambda: {
        "input": normal(2, 35, 64), "w_1": normal(144, 64, scale=1 / 8), "b_1": normal(144),
        "w_2": normal(64, 144, scale=1 / 12), "b_2": normal(64),
    }  # fmt: skip


for activation in ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "relu2"):
    case("feed_forward", f"feed_forward, {activation}", hidden(),
         ("dense", "shifted") if activation == "gelu" else ("dense", "padded", "strided"),
         activation=activation, sampled=activation == "gelu", **DROPOUT)  # fmt: skip


def gate(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, w_2, **options: op(x, w, None, w_2, None, **options)


for op in ("geglu", "swiglu"):
    case(op, op, lambda: {"x": normal(70, 64), "w": normal(144, 64, scale=1 / 8),
                          "w_2": normal(64, 72, scale=1 / 8)},
         call=gate(getattr(ff, op)), sampled=True, **DROPOUT)  # fmt: skip


case("gated_activation", "gated_activation",
     lambda: {"gate": normal(70, 144), "value": normal(70, 144)},
     activation="gelu", sampled=True)  # fmt: skip


def vocabulary(dtype: torch.dtype = torch.int64) -> Callable[[], Tensors]:
    return lambda: {
        "tokens": torch.randint(0, 50, (2, 35)).to(dtype), "weight": normal(50, 64),
        "positional": normal(40, 64),
    }  # fmt: skip


case("embed", "embed", vocabulary(), sampled=True, **DROPOUT)
case("embed", "embed, int32", vocabulary(torch.int32), ("dense", "only tokens"), **DROPOUT)
case("embed", "embed, padded", vocabulary(), ("padded", "strided"))


def classes(v: int, dtype: torch.dtype, n: int = 0) -> Callable[[], Tensors]:
    """Logits, or what a linear layer makes them of; the fourth row is ignored."""

    def make() -> Tensors:
        target = torch.randint(1, v, (21,))
        target[3] = 0
        if not n:
            return {"logits": normal(21, v, dtype=dtype), "target": target}
        linear = normal(v, n, dtype=dtype, scale=1 / 6)
        return {"input": normal(21, n, dtype=dtype), "target": target, "linear_weight": linear,
                "linear_bias": normal(v, dtype=dtype)}  # fmt: skip

    return make


LOSS = dict(label_smoothing=0.1, ignore_index=0)
for v, dtype in ((64, BF16), (5000, BF16), (33, FP32)):
    for reduction in ("mean", "none"):
        chosen = v == 64 and reduction == "mean"
        case("cross_entropy", f"cross_entropy, {v}, {reduction}", classes(v, dtype),
             ("dense", "shifted", "padded") if v != 64 else TWO,
             reduction=reduction, sampled=chosen, **LOSS)  # fmt: skip
        case("linear_cross_entropy", f"linear_cross_entropy, {v}, {reduction}",
             classes(v, dtype, 32), reduction=reduction, sampled=chosen, **LOSS)  # fmt: skip
case("cross_entropy", "cross_entropy, kl", classes(64, BF16), smoothing="kl", **LOSS)
case("cross_entropy", "cross_entropy, z-loss, softcap, temperature", classes(64, BF16),
     z_loss=1e-2, softcap=5.0, temperature=0.7, **LOSS)  # fmt: skip


def rows_and_weight(*names: str) -> Callable[[], Tensors]:
    return lambda: dict(zip(names, (normal(21, 32), normal(64, 32, scale=1 / 6))))


case("linear_kl_div", "linear_kl_div", rows_and_weight("input", "linear_weight"),
     fixed=rows_and_weight("teacher_input", "teacher_weight"), sampled=True)  # fmt: skip


def turned(**given: Any) -> Tensor:
    return torch.cat(ff.rotary_embedding(**given), 1)


def tables(length: int, width: int) -> Callable[[], Tensors]:
    return lambda: dict(zip(("cos", "sin"), ff.rotary_frequencies(width, length)))


for norm in (False, True):
    norms = ("query_norm", "key_norm") if norm else ()
    case("rotary_embedding", f"rotary_embedding{', norms' * norm}", lambda norms=norms: {
        "query": normal(2, 4, 40, 64), "key": normal(2, 2, 40, 64),
        **{n: normal(64) for n in norms}}, ("dense", "shifted", "padded", "swapped", "strided"),
         call=turned, fixed=tables(40, 64), sampled=norm)  # fmt: skip
case("rotary_embedding", "rotary_embedding, packed, part",
     lambda: {"query": normal(70, 4, 64), "key": normal(70, 2, 64)}, DENSE, call=turned,
     fixed=tables(70, 16), interleaved=True)  # fmt: skip

# ------------------------------------------------------------------------------------------ model


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return ff.make_model(40, 40, N=1, d_model=64, d_ff=128, h=2, dropout=0.0)


def batch() -> Tensors:
    parameters = {n.replace(".", "/"): x.detach() for n, x in network().named_parameters()}
    source, target = torch.randint(1, 40, (2, 20)), torch.randint(1, 40, (2, 21))
    source[0, 15:] = 0
    return parameters | {"source": source, "target": target}


def step(source: Tensor, target: Tensor, **parameters: Tensor) -> Tensor:
    data, model = ff.Batch(source, target), network()
    dtype = next(iter(parameters.values())).dtype
    state = {n: x.to(dtype) for n, x in model.named_buffers()}
    state |= {n.replace("/", "."): x for n, x in parameters.items()}
    given = data.src, data.tgt, data.src_mask, data.tgt_mask
    output = torch.func.functional_call(model, state, given)
    last = {n.removeprefix("generator."): x for n, x in state.items() if "generator." in n}
    return torch.func.functional_call(model.generator, last, (output,))


case("transformer", "a whole model", batch, DENSE, call=step)
