"""Cross-entropy over V classes with smoothed labels, from logits, or from the input of a linear
layer that computes the logits of one chunk of tokens at a time.

Forward, per row of logits x with target t, after softcap and temperature y:
    lse = max + log sum_c exp(y_c - max), stored as two numbers, whose sum would lose digits
    loss = constant + a lse - (on - off) w_t y_t - off sum_{c != pad} w_c y_c + z_loss lse^2
    a = sum_c w_c q_c, 1 without class weights w
    entropy = lse - sum_c softmax(y)_c y_c
Backward, from g and h, the gradients of the row's loss and entropy:
    dy_c = g ((a + 2 z_loss lse) softmax(y)_c - w_c ((on - off) [c = t] + off [c != pad]))
           - h softmax(y)_c (y_c - sum_c softmax(y)_c y_c)
    dx_c = dy_c (1 - tanh^2(x_c / softcap)) / temperature
    linear: x = input w^T + b      dinput = dx w      dw = dx^T input      db = sum dx
The target distribution has `on` at t and `off` at every other class but pad; its sum is 1:
    uniform (torch): off = e / V, on = 1 - e + off, no pad, constant 0
    kl (the tutorials): off = e / (V - 2), on = 1 - e, pad = ignore_index, and the constant is its
        negative entropy, on log on + (V - 2) off log off
A row whose target is ignore_index has loss 0 and g = 0; mean divides by the number of the others,
or by the sum of the weights of their targets.

Shapes: logits [M, V], target [M] int64, loss [M], lse [M, 2]; input [M, N], w [V, N], b [V]. Any
dtype in; lse, loss and the sums of dw and db in float32 (float64 for float64).

One program owns a row, and reads it in aligned groups of 16 bytes, whatever the alignment of the
row's start. If a gradient is wanted, the program reads the row once more, from the cache, and
writes dx. From logits it does so for the mean, as if grad_loss were 1; the backward computes dx
again from the saved logits if grad_loss is not 1, or if dx may be asked for again. With entropies
the backward computes dx.

The linear form holds CHUNK rows of logits at a time and never all of them. For mean and sum it
computes the gradients in the forward (three GEMMs, torch's own); for none and with entropies it
saves lse, and the backward computes the logits again.
FLOPs: 2 M N V for each GEMM. Least bytes outside of the GEMMs: each logit read once and its
gradient written once.
Deterministic: each gradient has one owner, and the chunks are summed in order.
Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7, for the smoothing.
"""

from __future__ import annotations

from ..common import INTERPRETED as INTERPRETED
from . import divergence as divergence
from .launchers import supports as supports
