"""Caches of keys and values, with which a decoder computes each token once.

    KVCache        a tensor of keys and one of values, with room for `capacity` positions a row
    PagedKVCache   keys and values in pages, which a row takes when it needs them
    MemoryCache    the projected keys and values of a memory, for cross-attention
    DecoderCache   those of each layer of a decoder

An append writes in place behind what each row holds, and never waits for the device: the host knows
a bound of the longest row. A cache keeps no gradient.

On a CPU attention reads the part of the buffers that is filled. On other devices it reads them
whole, with `key_lengths`: all steps have the same shapes, and a CUDA graph of one step can be
replayed.

Shapes: B batch (rows), H heads, G key-value heads, S capacity, n new positions, D and Dv head dims.
"""
