"""The Triton kernels. Each file or folder holds one op, or a few that share their kernels: forward,
backward, launchers, registration, `supports`. The `__init__.py` of a folder lists its files.

    attention/          softmax(scale q k^T + bias) v with masks, lengths, bands and dropout, for
                        padded and packed batches
    layer_norm/         LayerNorm, both variance forms; RMSNorm; residual + dropout + either norm
    feed_forward.py     the FFN: first GEMM with bias, activation and dropout in its epilogue; gated
    embedding.py        embedding, scale, positions and dropout
    cross_entropy/      the label-smoothed loss, from logits or from a linear layer's input
    common.py           what the kernels share: constants and dropout
    launch.py           what the launchers share: cached launches, facts about the device
    tuned.py            the options that were measured to be faster than the configuration tables
    registration.py     registers launchers as ops of PyTorch; retries if Triton's cache is corrupt
    interpreter.py      repairs of Triton's CPU interpreter

`register("<op>(...)", fake)` registers the launcher below it as `torch.ops.fastformer.<op>`;
fastformer/dispatch/autograd.py calls it by that name.

Importing this package imports triton; fastformer does so at the first call that needs a kernel.

Kernels take their arguments in NamedTuples: strides.key_row, band.left, tile.rows. The fields of
the groups `tile`, `has` and `case` are compile-time constants. Other names: B batch, H query
heads, G key-value heads, Sq and Sk lengths, D and DV head dims, M rows, N columns; BM, BN, BK, BD
block sizes, in shapes; i a query or row index, j a key or column index, r a row index clamped to
the rows that exist; b, h, g one batch, head, key-value head. A pointer that is an argument of its
own has a name in upper case; x_base is a pointer moved to the first element that the program owns.
"""
