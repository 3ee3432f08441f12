"""The Triton kernels. Each file or folder holds one op, or a few that share their kernels: forward,
backward, launchers, registration, `supports`. docs/architecture.md lists them.

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
