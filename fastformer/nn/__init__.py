"""The layers of the standard Transformer, named as in the Annotated Transformer and the tutorials,
and the models that are made of them.

A layer with an op of its own holds the parameters and calls that op. The op chooses the backend,
and its docstring lists the errors.

Masks are boolean, integer, or float with the values 0 and 1; a nonzero value keeps the key. Any
other float raises a ValueError; on a GPU and in a compiled graph it fails an assertion on the
device instead, for which the call does not wait. An additive mask, of 0 and -inf, has the opposite
meaning: pass it as `bias`.

Shapes: B batch, T queries (target length), S keys (source length), d d_model, h heads, d_k = d / h.
"""
