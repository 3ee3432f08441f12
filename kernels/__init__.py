"""The Triton kernels. Each file holds one op, or a few that share their kernels: forward, backward,
launchers, registration, `supports`.

    attention/          softmax(scale q k^T + bias) v with masks, lengths, bands, dropout; packed:
                        configurations, scores, forward, backward, launchers
    layer_norm.py       LayerNorm, both variance forms; RMSNorm; residual + dropout + LayerNorm
    feed_forward.py     the FFN: first GEMM with bias, activation and dropout in its epilogue; gated
    embedding.py        embedding, scale, positions and dropout
    cross_entropy.py    the label-smoothed loss, of logits or of a linear layer
    common.py           what the kernels share: the words of dropout, constants
    launch.py           what the launchers share: remembered launches, facts about the device
    tuned.py            what a measurement has chosen, in place of the tables of configurations
    registration.py     what makes a launcher an op of torch; a corrupt cache of Triton's
    interpreter.py      repairs of Triton's CPU interpreter

`register("<op>(...)", fake)` makes the launcher below it `torch.ops.fastformer.<op>`, by which name
fastformer/dispatch/autograd.py calls it.

Importing this package imports triton; fastformer does so at the first call that needs a kernel.

Kernels take their arguments in groups with names, as strides.key_row, band.left, tile.rows. The
fields of the groups `tile` and `has` are compile-time constants. Other names: B batch, H query
heads, G key-value heads, Sq and Sk lengths, D and DV head dims, M rows, N columns; BM, BN, BK, BD
block sizes, in shapes; i a query or row index, j a key or column index, r a row index clamped to
what exists; b, h, g one batch, head, key-value head. A pointer that is an argument of its own has a
name in upper case; x_base is a pointer moved to what the program owns.
"""
