"""Scaled dot-product attention in tiles (Dao 2023, "FlashAttention-2"): masks, bias, lengths, a
band (causality, windows), ALiBi, softcap, sinks and dropout in one family of kernels, for padded
and packed batches.

    configurations.py   the tiles of each kernel, by architecture, dtype and head dim
    scores.py           the groups that arguments come in; sequences, heads, the band, the scores
    forward.py          the forward kernel
    bounds.py           which tiles a mask leaves, read from the mask once
    decode.py           split-KV: the forward for few queries, which splits the keys
    backward.py         the kernels of delta, dK and dV, dQ, and the gradient of a bias
    short_backward.py   dQ, dK and dV in one kernel, for short sequences
    gluon/              the forward, dQ, and dK and dV for Hopper, exponentials beside products
    tail.py             zeros in the rows past the last sequence of a packed batch
    plan.py             the plan of a call, which holds its launches, and the key of a plan
    launchers.py        the functions that launch a plan, registered as ops of torch

The forward computes, for query i of one (batch, head):
    x_ij = scale q_i . k_j                          or softcap tanh(scale q_i . k_j / softcap)
    s_ij = x_ij + bias_ij - slope |i + shift - j|   where i may see j, else -inf
    lse_i = log(exp(sink_h) + sum_j exp(s_ij))      exp(sink_h) only if the head has a sink
    P_ij = exp(s_ij - lse_i)
    o_i = sum_j P_ij Z_ij v_j        Z_ij = keep_ij / (1 - p)
The backward computes, from do and dlse:
    delta_i = do_i . o_i - dlse_i    dP_ij = Z_ij do_i . v_j         dS_ij = P_ij (dP_ij - delta_i)
    dX_ij = dS_ij dx_ij/d(scale q_i . k_j), which is 1, or 1 - tanh^2
    dq_i = scale sum_j dX_ij k_j     dk_j = scale sum_i dX_ij q_i    dv_j = sum_i P_ij Z_ij do_i
    dsink_h = - sum_i exp(sink_h - lse_i) delta_i: the sink is a key whose value is zero
    dbias = dS, summed over what the bias is broadcast over
A bias that is constant over the keys adds one number to all scores of a row: the softmax does not
change, but lse does. So its gradient is exactly sum_i dlse_i, or, if the head has a sink,
sum_i (dlse_i + exp(sink_h - lse_i) delta_i).
A bias or ALiBi may make all scores of a row large (-1e9 is a usual mask). lse then has no digits
left for the logarithm of the sum, so the backward uses
    P_ij = exp((s_ij - max_j s_ij) - log sum_j exp(s_ij - max_j s_ij))
Query i sees key j if j is below the length, if mask and bias allow it, and if j is in the band:
    i + shift - left <= j <= i + shift + right
Causal attention has right = 0. shift is 0, or, with bottom-right alignment, the number of keys of
the sequence minus the number of its queries.

Shapes: query [B, H, Sq, D], key [B, G, Sk, D], value [B, G, Sk, DV], output [B, H, Sq, DV]; head h
reads key-value head h // (H / G). A packed batch has query [Tq, H, D], key [Tk, G, D],
value [Tk, G, DV], and the offsets of its B sequences. Inputs and outputs have any dtype; products
are summed in float32, in float64 for float64.
The backward needs the inputs, the output and lse, [B, H, Sq] or [H, Tq], which is a natural
logarithm, and -inf for a row that sees no key and has no sink. With a bias or ALiBi, it computes P
from the maximum and the log-sum of each row in base 2, [B, H, Sq, 2], instead of lse. It recomputes
S, P and the dropout mask, which is a function of (seed, b, h, i, j). Nothing of size Sq x Sk is
stored except the gradient of a bias of that size.
FLOPs: 4 B H Sq Sk D for the forward, 2.5 times that for the backward, and 4 B H Sq Sk D more for
the gradient of a bias over queries and keys, whose kernel recomputes dS. Least bytes: q, k, v and o
once for the forward. The kernels skip tiles outside of the band or the length.
The output of a row that sees no key is 0. Results are deterministic: each tile of a gradient has
one owner, and there are no atomics.
"""

from __future__ import annotations

from ..common import INTERPRETED
from .launchers import describe, supports

__all__ = ["INTERPRETED", "describe", "supports"]
