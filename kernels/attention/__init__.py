"""Scaled dot-product attention, tiled (Dao 2023, "FlashAttention-2"), with masks, bias, lengths, a
band (causality, windows), ALiBi, softcap and dropout in one family of kernels; padded or packed.

Forward, for query i of one (batch, head):
    x_ij = scale q_i . k_j                          or softcap tanh(scale q_i . k_j / softcap)
    s_ij = x_ij + bias_ij - slope |i + shift - j|   where i may see j, else -inf
    lse_i = log(exp(sink_h) + sum_j exp(s_ij)), the sink of its head where there is one
    P_ij = exp(s_ij - lse_i)
    o_i = sum_j P_ij Z_ij v_j        Z_ij = keep_ij / (1 - p)
Backward, from do and dlse:
    delta_i = do_i . o_i - dlse_i    dP_ij = Z_ij do_i . v_j         dS_ij = P_ij (dP_ij - delta_i)
    dX_ij = dS_ij dx_ij/d(scale q_i . k_j), which is 1, or 1 - tanh^2
    dq_i = scale sum_j dX_ij k_j     dk_j = scale sum_i dX_ij q_i    dv_j = sum_i P_ij Z_ij do_i
    dsink_h = - sum_i exp(sink_h - lse_i) delta_i: the sink is a key whose value is zero
    dbias: dS, summed over what the bias is broadcast over. A bias that is constant over the keys
    shifts a whole row: its softmax does not change, lse does, and its gradient is sum dlse exactly;
    beside a sink, sum_i (dlse_i + exp(sink_h - lse_i) delta_i).
    Under a bias or ALiBi the scores of a row may all be large (-1e9 is a usual mask), and lse then
    has no digits left for the sum: P_ij = exp((s_ij - max_j s_ij) - log sum_j exp(s_ij - max)).
Query i sees key j where j is below the length, mask and bias allow it, and the band does:
    i + shift - left <= j <= i + shift + right; causal is right = 0; shift is 0, or under
    bottom-right alignment the keys of the sequence minus its queries.

Shapes: query [B,H,Sq,D], key [B,G,Sk,D], value [B,G,Sk,DV], output [B,H,Sq,DV]; head h reads
key-value head h // (H/G). Packed: query [Tq,H,D], key [Tk,G,D], value [Tk,G,DV], and the offsets of
the B sequences. Any dtype in and out, products and sums in float32 (float64 for float64).
Saved: the inputs, the output, lse (natural logarithm, -inf for a row that sees nothing, not even a
sink), [B,H,Sq] or [H,Tq], or in its place, where P needs them, maximum and log-sum in base 2,
[B,H,Sq,2]. Recomputed: S, P and the dropout mask, a function of (seed, b, h, i, j). Nothing of size
Sq x Sk is stored but a bias gradient of that size. FLOPs: 4 B H Sq Sk D forward, 2.5 times that
backward, and 4 more for a bias gradient over queries and keys, whose kernel recomputes dS; least
bytes: q, k, v, o once forward. Tiles outside of the band or the length are skipped.
A row that sees nothing gives zeros. Deterministic: each gradient tile has one owner, no atomics.
"""

from __future__ import annotations

from ..common import INTERPRETED
from .launchers import supports

__all__ = ["INTERPRETED", "supports"]
