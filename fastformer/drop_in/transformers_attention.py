"""Run Hugging Face transformers models on fastformer's attention.

    fastformer.register_transformers()
    model = AutoModel.from_pretrained(..., attn_implementation="fastformer")

transformers asks an attention implementation for two functions. The mask function runs once per
forward for all layers of one kind (such as sliding-window layers). The attention function runs in
each layer and receives that mask. Here the mask function, `mask`, returns a `Mask`: a separate type
that holds only what determines which keys each query sees. The attention function, `attention`,
takes a `Mask`, or a user's tensor that follows the rules of PyTorch's attention; it raises an error
that names any keyword it does not know. A layer without a mask sees every key, as with the "eager"
implementation: the layer's own `is_causal` is not read, because some models set it wrong.

Shapes: B batch, H heads, G key-value heads, Sq queries, Sk keys, D and Dv head dims.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastformer.drop_in.masks import NAME, Mask, Sequences, Sides, mask
from fastformer.eager import may_read
from fastformer.mask_tiles import BlockMask
from fastformer.ops import functional

# Keywords that models pass to an attention function and that change nothing here: their information
# is already in the mask, or is meant for another implementation or for other modules of the model.
KNOWN = {
    "cache_position",
    "deterministic",
    "grid_thw",
    "image_grid_thw",
    "image_sizes",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "token_type_ids",
    "use_cache",
    "video_grid_thw",
}
# Keywords that describe packed sequences. In a batch of one row they say where the sequences begin;
# in any other they are accepted only if the mask separates the sequences.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Keywords that some models pass and `attention` rejects, with their meaning for the error message.
# It rejects every other unknown keyword as well.
REFUSED = {
    "sinks": "attention sinks of each query",
    "head_mask": "a factor for each head",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks of keys",
    "cache": "a paged cache, of continuous batching",
}


def register_transformers() -> None:
    """Register attn_implementation="fastformer" in transformers, for every model in the process.

    The function registers `attention` in transformers' AttentionInterface and `mask` in its
    AttentionMaskInterface. Models that take their attention from there run on fastformer with
    padding, causal masks, sliding windows, grouped-query attention, cross-attention, position bias,
    sinks, softcap, dropout and any cache of `generate`. Models that look up an attention class by
    the implementation's name get their own sdpa class with its attention calls on fastformer; if
    they have no separate sdpa class, they get an error that names the class. A model that does
    neither keeps its own attention: `explain(model, ...)` shows which layers do. `use_backend`
    selects the backend, as for every op. A second call changes nothing.

    Raises:
        ImportError: transformers is not installed, its import fails, or it is too old.

    Source: the attention interface of huggingface/transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        what = (
            "which is not installed: python -m pip install 'transformers>=5.17', or, in a checkout "
            "of fastformer, python -m pip install -c constraints.txt '.[hf]'"
            if absent
            else f"5.17 or newer, and its import fails: {error}"
        )
        raise ImportError(f"register_transformers needs transformers, {what}") from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    check = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(check, "_before_fastformer"):

        @functools.wraps(check)
        def checked(
            self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
        ) -> str:
            if requested_attention == NAME:
                _enter_classes(sys.modules[type(self).__module__])
                if all(vars(type(self)).get(flag) is False for flag in _SUPPORTS):
                    requested_attention = "eager"
            return check(self, requested_attention, *args, **kwargs)

        checked._before_fastformer = check  # type: ignore[attr-defined]
        PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


# A submodel class that sets all of these flags to False in its own body computes its own attention,
# such as the audio tower of Gemma 4. It gets "eager", which is also transformers' default for it.
_SUPPORTS = [
    f"_supports_{what}" for what in ("sdpa", "flash_attn", "flex_attn", "attention_backend")
]


def _enter_classes(models: ModuleType) -> None:
    """Enter "fastformer" in the tables of attention classes of a module with models."""
    for name, table in vars(models).items():
        known = isinstance(table, dict) and name.endswith("ATTENTION_CLASSES")
        if known and "eager" in table and NAME not in table:
            eager = table["eager"]
            sdpa = table.get("sdpa", eager)
            table[NAME] = _refusal(name, table) if sdpa is eager else _overridden(sdpa, eager)


def _overridden(sdpa: type[nn.Module], eager: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `sdpa` whose F.scaled_dot_product_attention calls run on fastformer. A
    call that asks for the weights runs `eager`, if that is a base class.
    """
    from fastformer.drop_in.sdpa import sdpa_override

    signature = inspect.signature(sdpa.forward)

    class Overridden(sdpa):  # type: ignore[misc, valid-type]
        def forward(self, *args: object, **kwargs: object) -> object:
            asked = signature.bind(self, *args, **kwargs).arguments.get("output_attentions")
            if (asked or _collects_attentions(self)) and issubclass(sdpa, eager):
                return eager.forward(self, *args, **kwargs)
            with sdpa_override():
                return super().forward(*args, **kwargs)

    Overridden.__name__ = Overridden.__qualname__ = f"Fastformer{sdpa.__name__}"
    return Overridden


def _refusal(name: str, table: Mapping[str, Any]) -> Callable[..., NoReturn]:
    """Return a function that raises, for a table of attention classes without an sdpa class."""
    own, others = table["eager"].__name__, ", ".join(repr(key) for key in table)
    hint = "; with 'sdpa' and fastformer.sdpa_override() around the call it runs on fastformer"

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            f"{own} computes its attention by itself: attn_implementation={NAME!r} is not in "
            f"{name}; take one of {others}" + hint * ("sdpa" in table)
        )

    return refuse


# -------------------------------------------------------------------------------------- attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = False,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Run `scaled_dot_product_attention` with the signature that transformers' layers call.

    Args:
        module: the layer, used in error messages.
        query: [B, H, Sq, D]; a batch of 1 broadcasts to the batch of key.
        key, value: [B, G, Sk, D] and [B, G, Sk, Dv]; the heads are not repeated.
        attention_mask: the result of `mask`, or a user's complete mask
            [B or 1, H or 1, Sq or 1, Sk]: boolean, where True keeps a key, or floating, which is
            added to the scores.
        dropout: the dropout probability of the attention weights; 0 in evaluation.
        scaling: the factor on query key^T; 1/sqrt(D) by default.
        is_causal: if True, a call without a mask is causal.
        position_bias: added to the scores; any shape that broadcasts to [B, H, Sq, Sk]. It receives
            a gradient.
        softcap: as in `scaled_dot_product_attention`.
        output_attentions: if True, also return the weights before dropout, which materializes
            them. So does a call in which transformers collects the attentions, because some models
            do not pass the keyword on.
        s_aux: [H], the `sinks` of `scaled_dot_product_attention`. They receive a gradient.
        kwargs: other keywords that transformers passes to every implementation. Each has to be one
            that changes nothing here (`KNOWN`, such as `sliding_window`, which the mask holds).

    Returns:
        (output [B, Sq, H, Dv], weights [B, H, Sq, Sk] or None). The output of a query that sees no
        key is zero.

    Raises:
        ValueError: a keyword is unknown and neither None nor False; the packed sequences that a
            keyword describes are not one row, and the mask does not separate them; the mask does
            not match Sq and Sk; `scaled_dot_product_attention` rejects an argument.
        TypeError: the mask is of another type, such as flex attention's, or has an integer dtype.
        RuntimeError: `mask` is not registered under the implementation's name. transformers would
            then silently create no masks.
    """
    _require_registered(module)
    output_attentions = output_attentions or _collects_attentions(module)
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    q_length, k_length = query.shape[2], key.shape[2]
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux)
    attention_mask = _with_sequences(attention_mask, bool(is_causal), query, key, kwargs)
    if isinstance(attention_mask, Mask) and attention_mask.sequences is not None:
        if position_bias is None and not output_attentions:
            _require_known(module, kwargs, complete=True)
            sides = attention_mask.left, attention_mask.right
            causal = sides == (None, 0)
            offsets, longest = attention_mask.sequences
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            out = functional.packed_attention(
                *(q, k, v, offsets, offsets, longest, longest),
                dropout_p=dropout,
                is_causal=causal,
                window=None if causal else sides,
                **options,
            )
            return out.unsqueeze(0), None
        attention_mask = attention_mask.complete()
    visible: Any
    visible, bias, (left, right) = _read_mask(attention_mask, bool(is_causal), q_length, k_length)
    complete = any(x is not None and x.shape[2] == q_length for x in (visible, bias))
    _require_known(module, kwargs, complete)
    if bias is not None and position_bias is not None:
        bias = bias + position_bias
    if right == 0 and q_length == 1:  # causality lets the last query see every key
        right = None
    causal = left is None and right == 0
    held = attention_mask.held if isinstance(attention_mask, Mask) else None
    if held is not None and held.shape[0] != query.shape[0]:
        held = held[:1].expand(query.shape[0])
    aligned = q_length == key.shape[2] and held is None  # both begin at the same position
    arguments: dict[str, Any] = dict(
        attn_mask=visible,
        is_causal=causal,
        enable_gqa=True,
        bias=position_bias if bias is None else bias,
        window=None if causal else (left, right),
        causal_alignment="top_left" if aligned else "bottom_right",
        key_lengths=held,
        **options,
    )
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **arguments)
    weights = functional.attention_weights(query, key, **arguments) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _collects_attentions(module: nn.Module) -> bool:
    """Return whether transformers' hooks collect the weights that attention layers return."""
    from transformers.utils import output_capturing

    if torch.compiler.is_compiling() and not module._forward_hooks:  # get() breaks the graph
        return False
    collected = output_capturing._active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _with_sequences(
    attention_mask: Mask | Tensor | None,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
    given: Mapping[str, Any],
) -> Mask | Tensor | None:
    """Return the mask with the sequences of a packed batch, which is one row of tokens.

    If the mask does not hold them, the keywords do, or position_ids that begin again: with a cache
    in use, transformers makes the mask of one sequence. Reading the positions waits for a GPU, once
    in a forward.
    """
    length, band = query.shape[2], attention_mask
    if query.shape[0] != 1 or not length == key.shape[2] > 1:
        return attention_mask
    if band is None:
        sides = None, 0 if is_causal else None
        band = Mask((1, 1, length, length), None, *sides, query.device, "the model")
    if not isinstance(band, Mask) or not band.visible is band.held is band.sequences is None:
        return attention_mask
    offsets, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
    indices, of_keys = given.get("seq_idx"), given.get("cu_seq_lens_k")
    if isinstance(offsets, Tensor):
        if of_keys is not None and may_read(of_keys) and not torch.equal(of_keys, offsets):
            raise ValueError(
                "cu_seq_lens_k differs from cu_seq_lens_q; expected the same sequences"
            )
        longest = int(offsets.diff().max()) if longest is None else int(longest)
        return band.of_sequences(Sequences(offsets.to(torch.int32), longest))
    if attention_mask is not None and band.right == 0 and indices is None:
        return _with_positions(band, given.get("position_ids"))
    sequences = Sequences.of_indices(indices) if isinstance(indices, Tensor) else None
    return attention_mask if sequences is None else band.of_sequences(sequences)


def _with_positions(mask: Mask, position_ids: object) -> Mask:
    """Return a causal mask of one row with the sequences that begin where its positions do not
    count on. All layers of a forward have the same mask, which keeps the result.
    """
    from transformers.masking_utils import find_packed_sequence_indices

    if not isinstance(position_ids, Tensor) or torch.compiler.is_compiling():
        return mask
    captures = position_ids.is_cuda and torch.cuda.is_current_stream_capturing()
    if position_ids.shape != (1, mask.shape[2]) or captures:  # a capture can read no value
        return mask
    if mask.by_positions is None or mask.by_positions[0] is not position_ids:
        indices = find_packed_sequence_indices(position_ids)
        sequences = None if indices is None else Sequences.of_indices(indices)
        found = mask if sequences is None else mask.of_sequences(sequences)
        mask.by_positions = position_ids, found
    return mask.by_positions[1]


def _require_registered(module: nn.Module) -> None:
    from transformers.masking_utils import AttentionMaskInterface

    name = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    if AttentionMaskInterface._global_mapping.get(name) is not mask:
        raise RuntimeError(
            f"fastformer's mask function is not registered for attn_implementation={name!r}: the "
            "masks of the model would be missing; call fastformer.register_transformers()"
        )


def _require_known(module: nn.Module, given: Mapping[str, object], complete: bool) -> None:
    """Refuse unknown keywords. complete: whether the mask has a row for each query."""
    for name, x in given.items():
        if x is None or x is False or name in KNOWN:
            continue
        where = f"by attn_implementation={NAME!r} and was given to {type(module).__name__}"
        if name not in PACKED:
            what = REFUSED.get(name, "a keyword that fastformer does not know")
            raise ValueError(f"{name} ({what}) is not supported {where}; take 'eager' or 'sdpa'")
        if not complete:
            raise ValueError(
                f"{name} (packed sequences) is read {where} for a batch of one row without padding "
                "alone; give the model input_ids and position_ids [1, tokens] and no attention_mask"
            )


def _read_mask(
    attention_mask: object, is_causal: bool, q_length: int, k_length: int
) -> tuple[Tensor | BlockMask | None, Tensor | None, Sides]:
    """Return (boolean mask, bias, bounds of the band) from the mask that a layer was given."""
    if attention_mask is None:
        return None, None, (None, 0 if is_causal else None)
    if isinstance(attention_mask, BlockMask):
        return attention_mask, None, (None, None)
    if not isinstance(attention_mask, Mask):
        return *_read_tensor(attention_mask, q_length, k_length), (None, None)
    shape, visible = attention_mask.shape, attention_mask.visible
    sides = (attention_mask.left, attention_mask.right)
    alike = sides == (None, None) and (visible is None or visible.shape[2] == 1)  # all queries
    if len(shape) != 4 or shape[3] != k_length or not (alike or _fits(shape[2], q_length)):
        raise _wrong_shape(shape, q_length, k_length)
    return visible, None, sides


def _fits(size: int, length: int) -> bool:
    return size == 1 or size == length  # Dynamo finds no symbolic size in a tuple


def _wrong_shape(shape: Sequence[int], q_length: int, k_length: int) -> ValueError:
    return ValueError(
        f"attention_mask has shape {tuple(shape)}; expected [B, 1, {q_length}, {k_length}],"
        " of the queries and keys of the layer"
    )


def _read_tensor(
    attention_mask: object, q_length: int, k_length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return (boolean mask, bias), one of them None, from a mask tensor that the user gave."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        kind = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            kind += f" of {attention_mask.dim()} dimensions"
        raise TypeError(f"attention_mask is a {kind}; expected a tensor [B, 1, Sq, Sk]")
    shape = attention_mask.shape
    if not (_fits(shape[2], q_length) and _fits(shape[3], k_length)):
        raise _wrong_shape(shape, q_length, k_length)
    if attention_mask.is_floating_point():
        return None, attention_mask
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}; expected torch.bool (True keeps a "
            "key), or a floating mask that is added to the scores"
        )
    return attention_mask, None
