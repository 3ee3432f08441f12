"""The layers of the standard Transformer, named as in the Annotated Transformer and the tutorials,
and the models that are made of them.

A layer that an op computes holds the parameters and calls that op. The op chooses the backend, and
its docstring lists the errors.

Masks are boolean or integer, where a value that is not zero keeps the key, or they are floats that
are 0 or 1. Any other float raises a ValueError; on a GPU and in a compiled graph it fails an
assertion on the device, which the call does not wait for. A mask that is added to the scores, of 0
and -inf, would mean the opposite: pass it as `bias`.

Shapes: B batch, T queries (target length), S keys (source length), d d_model, h heads, d_k = d / h.
"""
