"""Caches of keys and values, with which a decoder computes each token once.

`append` writes in place after the positions that each row holds. It never waits for the device,
because the host knows an upper bound of the row lengths. A cache keeps no gradient.

On a CPU, attention reads only the filled positions of the buffers. On other devices it reads the
full buffers, with `key_lengths`, so that all steps have the same shapes and the CUDA graph of one
step can be replayed.

Shapes: B batch (rows), H heads, G key-value heads, S capacity, n new positions, D and Dv head dims.
"""
