"""A call of each op, at sizes that are common: what `fastformer tune` measures, and at small sizes
what `fastformer info` explains; and copies of calls, which can be checked in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastformer.description import Attention
from fastformer.dispatch.operation import Arguments, flat
from fastformer.mask_tiles import BlockMask

P, SEED = 0.1, 7  # of dropout


def calls(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    gradient: bool = True,
    B: int = 4,
    S: int = 4096,
    H: int = 16,
    D: int = 64,
    V: int = 32768,
) -> Iterator[tuple[str, Arguments]]:
    """Yield (op, arguments) of calls with B sequences of S tokens, H heads of D features, and V
    classes. gradient: the inputs require gradients, but for decoding, which has none.
    """
    N, G = H * D, max(1, H // 4)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, device=device) * scale
        return x.to(dtype).requires_grad_(gradient)

    def heads(n: int, length: int, width: int = D) -> Tensor:  # [B, n, length, width]
        x = torch.randn(B, length, n, width, device=device).to(dtype).transpose(1, 2)
        return x.requires_grad_(gradient and length > 1)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=device)

    def inputs(n: int = H, width: int = D) -> Arguments:
        return {name: heads(n, S, width) for name in ("query", "key", "value")}

    attention, lengths = "scaled_dot_product_attention", integers(S // 2, S + 1, B)
    dropout: Arguments = dict(dropout_p=P, dropout_seed=SEED)
    yield attention, dict(inputs(), is_causal=True)
    yield attention, dict(inputs(max(1, H // 2), 2 * D), is_causal=True)
    yield attention, dict(inputs(), key_lengths=lengths) | dropout
    mask = torch.arange(S, device=device) < lengths.view(B, 1, 1, 1)
    yield attention, dict(inputs(), attn_mask=mask) | dropout
    blocks = BlockMask.longformer(S, S // 16, 64, device="cpu")  # which may be needed on meta
    yield attention, dict(inputs(), attn_mask=blocks.to(device)) | dropout
    offsets = S * torch.arange(B + 1, dtype=torch.int32, device=device)
    packed: Arguments = {n: normal(B * S, H, D) for n in ("query", "key", "value")}
    packed |= dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=S, max_k=S)
    yield "packed_attention", dict(packed, is_causal=True)
    with torch.no_grad():
        cached = {name: x.detach() for name, x in zip(("key", "value"), (heads(G, S), heads(G, S)))}
        one = dict(is_causal=True, causal_alignment="bottom_right", enable_gqa=G != H)
        yield attention, dict(query=heads(H, 1), **cached, key_lengths=lengths, **one)

    angles = torch.randn(S, D // 2, device=device).repeat(1, 2)
    rotated = dict(query=heads(H, S), key=heads(G, S), cos=angles.cos(), sin=angles.sin())
    yield "rotary_embedding", rotated

    rows = normal(B, S, N)
    weight, bias = normal(N), normal(N)
    yield "layer_norm", dict(input=rows, normalized_shape=N, weight=weight, bias=bias)
    yield "rms_norm", dict(input=rows, normalized_shape=N, weight=weight)
    added: Arguments = dict(input=rows, residual=normal(B, S, N), weight=weight) | dropout
    for own in ({}, {"input_bias": normal(N)}):  # the second as after a linear layer with a bias
        yield "dropout_add_layer_norm", dict(added, bias=bias) | own
        yield "dropout_add_rms_norm", added | own

    first, second = normal(4 * N, N, scale=N**-0.5), normal(N, 4 * N, scale=(4 * N) ** -0.5)
    given: Arguments = dict(input=rows, w_1=first, b_1=normal(4 * N), w_2=second, b_2=bias)
    for activation in ("relu", "gelu"):
        yield "feed_forward", dict(given, activation=activation) | dropout
    both = normal(8 * N, N, scale=N**-0.5)
    yield "geglu", dict(input=rows, w=both, b=normal(8 * N), w_2=second, b_2=bias) | dropout
    yield "swiglu", dict(input=rows, w=both, b=None, w_2=second, b_2=None)
    halves = normal(B, S, 4 * N), normal(B, S, 4 * N)
    yield "gated_activation", dict(gate=halves[0], value=halves[1], activation="silu")

    tokens, table = integers(0, V, B, S), normal(V, N, scale=2 * N**-0.5)
    yield "embed", dict(tokens=tokens, weight=table, positional=normal(S, N)) | dropout
    yield "linear_cross_entropy", dict(input=rows, linear_weight=table, target=tokens)
    teacher = dict(teacher_input=normal(B, S, N), teacher_weight=normal(V, N, scale=2 * N**-0.5))
    yield "linear_kl_div", dict(input=rows, linear_weight=table, temperature=2.0, **teacher)
    yield "cross_entropy", dict(logits=normal(B * S, V, scale=2.0), target=tokens.flatten())


def copied(arguments: Arguments, change: Callable[[Tensor], Tensor] = Tensor.detach) -> Arguments:
    """Return the arguments of a call with changed tensors, which have no graph."""

    def copy(x: Tensor) -> Tensor:
        return change(x).detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())

    return tree_map_only(Tensor, copy, arguments)


def part(arguments: Arguments) -> Arguments:
    """Return a part of a checked call of attention for which the scores fit in memory in float64:
    the first head of keys and values of the first sequence, with its heads of queries.
    """
    attention = arguments.get("attention")
    if attention is None or attention.cu_seqlens_q is not None or attention.mask_spans is not None:
        return arguments
    given, share = flat(arguments), arguments["query"].shape[1] // arguments["key"].shape[1]
    for name, x in given.items():
        heads = 1 if name in ("key", "value", "key_lengths") else share
        if isinstance(x, Tensor) and x.dim() > 2:
            given[name] = (x[:1] if x.dim() == 4 else x)[..., :heads, :, :]
        elif x is not None and name in ("key_lengths", "sinks", "alibi_slopes"):
            given[name] = x.flatten()[:heads]
    attention = Attention(*(given[name] for name in Attention._fields))
    return {name: given.get(name, attention) for name in arguments}
