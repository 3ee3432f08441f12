"""Cross-entropy over V classes with smoothed labels, from logits, or from the input of a linear
layer that computes the logits of one chunk of tokens at a time.

Forward, per row of logits x with target t:
    lse = max + log sum_c exp(x_c - max), stored as two numbers, whose sum would lose digits
    loss = constant + lse - (on - off) x_t - off sum_{c != pad} x_c
Backward, from g, the gradient of the row's loss:
    dx_c = g (exp(x_c - lse) - (on - off) [c = t] - off [c != pad])
    linear: x = input w^T + b      dinput = dx w      dw = dx^T input      db = sum dx
The target distribution has `on` at t and `off` at every other class but pad; its sum is 1:
    uniform (torch): off = e / V, on = 1 - e + off, no pad, constant 0
    kl (the tutorials): off = e / (V - 2), on = 1 - e, pad = ignore_index, and the constant is its
        negative entropy, on log on + (V - 2) off log off
A row whose target is ignore_index has loss 0 and g = 0; mean divides by the number of the others.

Shapes: logits [M, V], target [M] int64, loss [M], lse [M, 2]; input [M, N], w [V, N], b [V]. Any
dtype in; lse, loss and the sums of dw and db in float32 (float64 for float64).

One program owns a row, and reads it in aligned groups of 16 bytes, whatever the alignment of the
row's start. If a gradient is wanted, the program reads the row once more, from the cache, and
writes dx. From logits it does so for the mean, as if grad_loss were 1; the backward computes dx
again from the saved logits if grad_loss is not 1, or if dx may be asked for again.

The linear form holds CHUNK rows of logits at a time and never all of them. For mean and sum it
computes the gradients in the forward (three GEMMs, torch's own); for none it saves lse, and the
backward computes the logits again.
FLOPs: 2 M N V for each GEMM. Least bytes outside of the GEMMs: each logit read once and its
gradient written once.
Deterministic: each gradient has one owner, and the chunks are summed in order.
Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7, for the smoothing.
"""

from __future__ import annotations

from ..common import INTERPRETED as INTERPRETED
from .launchers import supports as supports
