"""The calls that test_gpu_path.py makes beside those of calls.py: each public op, its inputs in
several layouts, and launches of every kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import fastformer as ff
from fastformer.dispatch import backends

SEED = 20170612

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
            made = rows if x.dtype == torch.float32 else "output"
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
    **options: Any,
) -> None:
    assert name not in CASES
    call = call or getattr(ff, op)
    CASES[name] = Case(op, call, make, layouts, options, fixed)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def qkv(
    b: int, h: int, s: int, d: int, g: int = 0, sk: int = 0, **more: Callable[[], Tensor]
) -> Callable[[], Tensors]:  # fmt: skip
    def make() -> Tensors:
        tensors = {"query": normal(b, h, s, d)}
        tensors |= {name: normal(b, g or h, sk or s, d) for name in ("key", "value")}
        return tensors | {name: x() for name, x in more.items()}

    return make


def with_lse(**given: Any) -> Tensor:
    output, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
    return torch.cat([output, lse.unsqueeze(-1).to(output.dtype)], -1)


SDPA = "scaled_dot_product_attention"
S = 70
LENGTHS = {"key_lengths": lambda: torch.tensor([37, S], dtype=torch.int32)}
MASK = {"attn_mask": lambda: torch.rand(2, 1, S, S) > 0.2}
SEEDED = {"dropout_seed": lambda: torch.tensor([0, SEED])[1:]}  # 8 bytes behind
DROPOUT = dict(dropout_p=0.1, dropout_seed=SEED)


def bias(*shape: int) -> dict[str, Callable[[], Tensor]]:
    return {"bias": lambda: normal(*shape)}


case(SDPA, "attention, lengths and dropout", qkv(2, 2, S, 64, **LENGTHS),
     ("dense", "shifted", "swapped"), **DROPOUT)  # fmt: skip
case(SDPA, "attention, moved", qkv(2, 2, 40, 64), MOVED)
case(SDPA, "attention, log-sum-exp", qkv(2, 2, 40, 64, **bias(2, 40, 40)),
     (*TWO, "saved statistics"), call=with_lse, is_causal=True)  # fmt: skip
case(SDPA, "attention, few queries",
     qkv(2, 4, 3, 64, g=2, sk=300, key_lengths=lambda: torch.tensor([37, 300])),
     ("dense", "only key", "swapped"), enable_gqa=True, is_causal=True,
     causal_alignment="bottom_right")  # fmt: skip
case(SDPA, "attention, one head", qkv(1, 1, S, 64), ("dense", "swapped"))
case(SDPA, "attention, everything",
     qkv(2, 2, S, 64, **bias(1, 2, S, S), **MASK, **LENGTHS, **SEEDED),
     ("dense", *(f"only {n}" for n in ("bias", "attn_mask", "key_lengths", "dropout_seed"))),
     dropout_p=0.1, is_causal=True)  # fmt: skip


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
        with launches_of(launch.TMALaunch) as by_tma, launches_of(launch.MappedLaunch) as by_maps:
            output = with_lse(**given)
    finally:
        tuned.source = before
    launched = torch.is_grad_enabled() and ff.current_backend() == "triton"
    if launched and output.dtype == torch.bfloat16:
        assert by_tma or by_maps
    return output


@contextlib.contextmanager
def launches_of(kind: type) -> Iterator[list[Any]]:
    """The launches of a kind that are made within it."""
    made: list[Any] = []

    def launch(self: Any, *pointers: Any, former: Any = kind.__call__) -> None:
        made.append(self)
        former(self, *pointers)

    with mock.patch.object(kind, "__call__", launch):
        yield made


case(SDPA, "attention, Gluon, forward and backward", qkv(2, 4, 71, 64, g=2, sk=130),
     ("dense", "swapped"), call=by_gluon, rows=dict(dq="Gluon 128 128", dkdv="Gluon 64 128"),
     enable_gqa=True, is_causal=True, **DROPOUT)  # fmt: skip
case(SDPA, "attention, Gluon", qkv(2, 4, 71, 64, g=2, sk=130), ("dense", "swapped"),
     call=by_gluon, enable_gqa=True, is_causal=True, causal_alignment="bottom_right")  # fmt: skip
case(SDPA, "attention, Gluon, lengths and dropout",
     qkv(2, 2, 71, 128, sk=130, key_lengths=lambda: torch.tensor([33, 77])), ("dense", "swapped"),
     call=by_gluon, **DROPOUT)  # fmt: skip
OFFSETS = torch.tensor([0, 17, 17, S], dtype=torch.int32)


def packed(**given: Any) -> Tensor:
    return ff.packed_attention(**given, max_q=S - 17, max_k=S - 17)


def tokens() -> Tensors:
    offsets = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    return {n: normal(S, 2, 64) for n in ("query", "key", "value")} | offsets


case("packed_attention", "packed", tokens, ("dense", "shifted", "only cu_seqlens_k"),
     call=packed, is_causal=True, **DROPOUT)  # fmt: skip


def joined(op: Callable[..., tuple[Tensor, ...]], dim: int = 0) -> Callable[..., Tensor]:
    return lambda **given: torch.cat(op(**given), dim)


def rows(*names: str) -> Callable[[], Tensors]:
    shapes = {"input": (30, 80), "residual": (30, 80), "weight": (80,), "bias": (80,)}
    return lambda: {name: normal(*shapes[name]) for name in names}


AFFINE = ("input", "weight", "bias")
case("rms_norm", "rms_norm", rows("input", "weight"), normalized_shape=80)
case("layer_norm", "layer_norm", rows(*AFFINE), normalized_shape=80)
case("dropout_add_layer_norm", "dropout_add_layer_norm", rows(*AFFINE, "residual"),
     call=joined(ff.dropout_add_layer_norm), **DROPOUT)  # fmt: skip
case("dropout_add_rms_norm", "dropout_add_rms_norm", rows("input", "weight", "residual"), DENSE,
     call=joined(ff.dropout_add_rms_norm), **DROPOUT)  # fmt: skip


def hidden() -> Tensors:
    return {
        "input": normal(2, 35, 64), "w_1": normal(144, 64, scale=1 / 8), "b_1": normal(144),
        "w_2": normal(64, 144, scale=1 / 12), "b_2": normal(64),
    }  # fmt: skip


case("feed_forward", "feed_forward", hidden, activation="gelu", **DROPOUT)


def gate(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, w_2, **options: op(x, w, None, w_2, None, **options)


for op in ("geglu", "swiglu"):
    case(op, op, lambda: {"x": normal(70, 64), "w": normal(144, 64, scale=1 / 8),
                          "w_2": normal(64, 72, scale=1 / 8)},
         call=gate(getattr(ff, op)), **DROPOUT)  # fmt: skip


case("gated_activation", "gated_activation",
     lambda: {"gate": normal(70, 144), "value": normal(70, 144)},
     activation="gelu")  # fmt: skip


def vocabulary() -> Tensors:
    tokens = torch.randint(0, 50, (2, 35))
    return {"tokens": tokens, "weight": normal(50, 64), "positional": normal(40, 64)}


case("embed", "embed", vocabulary, **DROPOUT)


def target() -> Tensor:
    """Whose fourth row is ignored."""
    return torch.randint(1, 64, (21,)).index_fill(0, torch.tensor([3]), 0)


LOSS = dict(label_smoothing=0.1, ignore_index=0)
case("cross_entropy", "cross_entropy", lambda: {"logits": normal(21, 64), "target": target()},
     **LOSS)  # fmt: skip
case("linear_cross_entropy", "linear_cross_entropy",
     lambda: {"input": normal(21, 32), "target": target(), "linear_bias": normal(64),
              "linear_weight": normal(64, 32, scale=1 / 6)}, **LOSS)  # fmt: skip


def rows_and_weight(*names: str) -> Callable[[], Tensors]:
    return lambda: dict(zip(names, (normal(21, 32), normal(64, 32, scale=1 / 6))))


case("linear_kl_div", "linear_kl_div", rows_and_weight("input", "linear_weight"),
     fixed=rows_and_weight("teacher_input", "teacher_weight"))  # fmt: skip


case("rotary_embedding", "rotary_embedding", lambda: {
    "query": normal(2, 4, 40, 64), "key": normal(2, 2, 40, 64), "query_norm": normal(64),
    "key_norm": normal(64)}, (*FOUR, "strided"), call=joined(ff.rotary_embedding, 1),
     fixed=lambda: dict(zip(("cos", "sin"), ff.rotary_frequencies(64, 40))))  # fmt: skip
