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
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.dispatch import backends
from fastformer.eager import may_read
from fastformer.ops import functional

NAME = "fastformer"
_Sides = tuple[int | None, int | None]  # left and right bound of a band

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
# Keywords that describe packed sequences: accepted only if the mask separates the sequences.
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
        told = (
            "which is not installed: python -m pip install 'transformers>=5.17', or, in a checkout "
            "of fastformer, python -m pip install -c constraints.txt '.[hf]'"
            if absent
            else f"5.17 or newer, and its import fails: {error}"
        )
        raise ImportError(f"register_transformers needs transformers, {told}") from error
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
    """Add "fastformer" to the tables that map implementation names to attention classes.

    models: the module that defines the model's class.
    """
    for name, table in vars(models).items():
        known = isinstance(table, dict) and name.endswith("ATTENTION_CLASSES")
        if known and "eager" in table and NAME not in table:
            sdpa = table.get("sdpa", table["eager"])
            table[NAME] = _refusal(name, table) if sdpa is table["eager"] else _overridden(sdpa)


def _overridden(sdpa: type) -> type:
    """Return a subclass of `sdpa` whose F.scaled_dot_product_attention calls run on fastformer."""
    from fastformer.drop_in.sdpa import sdpa_override

    class Overridden(sdpa):
        def forward(self, *args: object, **kwargs: object) -> object:
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
            them.
        s_aux: [H], the `sinks` of `scaled_dot_product_attention`. They receive a gradient.
        kwargs: other keywords that transformers passes to every implementation. Each has to be one
            that changes nothing here (`KNOWN`, such as `sliding_window`, which the mask holds).

    Returns:
        (output [B, Sq, H, Dv], weights [B, H, Sq, Sk] or None). The output of a query that sees no
        key is zero.

    Raises:
        ValueError: a keyword is unknown and neither None nor False; the mask does not separate the
            packed sequences that a keyword describes; the mask does not match Sq and Sk;
            `scaled_dot_product_attention` rejects an argument.
        TypeError: the mask is of another type, such as flex attention's, or has an integer dtype.
        RuntimeError: `mask` is not registered under the implementation's name. transformers would
            then silently create no masks.
    """
    _require_registered(module)
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    q_length, k_length = query.shape[2], key.shape[2]
    visible, bias, (left, right) = _read_mask(attention_mask, bool(is_causal), q_length, k_length)
    complete = any(x is not None and x.shape[2] == q_length for x in (visible, bias))
    _require_known(module, kwargs, complete)
    if bias is not None and position_bias is not None:
        bias = bias + position_bias
    if right == 0 and q_length == 1:  # causality lets the last query see every key
        right = None
    causal = left is None and right == 0
    held = _held_keys(attention_mask, query.shape[0])
    if held is not None and _cuts(held, query):  # skip the empty end of the buffer
        n, held = int(held[0]), None
        key, value = key[:, :, :n], value[:, :, :n]
        visible, position_bias = (_of_first(n, x) for x in (visible, position_bias))
    aligned = q_length == key.shape[2] and held is None  # both begin at the same position
    arguments: dict[str, Any] = dict(
        attn_mask=visible,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        bias=position_bias if bias is None else bias,
        window=None if causal else (left, right),
        causal_alignment="top_left" if aligned else "bottom_right",
        softcap=softcap,
        sinks=s_aux,
        key_lengths=held,
    )
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **arguments)
    weights = functional.attention_weights(query, key, **arguments) if output_attentions else None
    if weights is not None and weights.shape[3] < k_length:
        weights = F.pad(weights, (0, k_length - weights.shape[3]))
    return out.transpose(1, 2).contiguous(), weights


def _require_registered(module: nn.Module) -> None:
    from transformers.masking_utils import AttentionMaskInterface

    name = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    if AttentionMaskInterface._global_mapping.get(name) is not mask:
        raise RuntimeError(
            f"fastformer's mask function is not registered for attn_implementation={name!r}: the "
            "masks of the model would be missing; call fastformer.register_transformers()"
        )


def _require_known(module: nn.Module, given: Mapping[str, object], complete: bool) -> None:
    """Raise for keywords that `attention` does not know.

    complete: whether the mask has a row for each query, [.., Sq, Sk].
    """
    for name, x in given.items():
        if x is None or x is False or name in KNOWN:
            continue
        where = f"by attn_implementation={NAME!r} and was given to {type(module).__name__}"
        if name not in PACKED:
            what = REFUSED.get(name, "a keyword that fastformer does not know")
            raise ValueError(f"{name} ({what}) is not supported {where}; take 'eager' or 'sdpa'")
        if not complete:
            raise ValueError(
                f"{name} (packed sequences) is not read {where}, whose mask does not hold them; "
                "give the model position_ids that begin at 0 in each sequence, and no "
                "attention_mask"
            )


def _read_mask(
    attention_mask: object, is_causal: bool, q_length: int, k_length: int
) -> tuple[Tensor | None, Tensor | None, _Sides]:
    """Return (boolean mask, bias, bounds of the band) from the mask that a layer was given."""
    if attention_mask is None:
        return None, None, (None, 0 if is_causal else None)
    if not isinstance(attention_mask, Mask):
        return *_read_tensor(attention_mask), (None, None)
    shape, visible = attention_mask.shape, attention_mask.visible
    sides = (attention_mask.left, attention_mask.right)
    alike = sides == (None, None) and (visible is None or visible.shape[2] == 1)  # all queries
    if len(shape) != 4 or shape[3] != k_length or not (alike or shape[2] in (1, q_length)):
        raise ValueError(
            f"attention_mask has shape {tuple(shape)}; expected [B, 1, {q_length}, {k_length}],"
            " of the queries and keys of the layer"
        )
    return visible, None, sides


def _held_keys(attention_mask: object, batch: int) -> Tensor | None:
    """Return how many keys a buffer holds, [batch], or None if it is full."""
    held = attention_mask.held if isinstance(attention_mask, Mask) else None
    return held if held is None or held.shape[0] == batch else held[:1].expand(batch)


def _cuts(held: Tensor, query: Tensor) -> bool:
    """Return whether to slice the keys of a buffer to the filled ones before the call.

    The kernels skip the others by themselves; elsewhere the slice saves time, but needs their
    number on the host.
    """
    return may_read(held) and not backends.prefers_kernels(query)


def _of_first(n: int, x: Tensor | None) -> Tensor | None:
    """Return a mask or bias [.., Sk or 1] cut to the first n keys."""
    return x if x is None or x.shape[-1] == 1 else x[..., :n]


def _read_tensor(attention_mask: object) -> tuple[Tensor | None, Tensor | None]:
    """Return (boolean mask, bias), one of them None, from a mask tensor that the user gave."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        kind = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            kind += f" of {attention_mask.dim()} dimensions"
        raise TypeError(f"attention_mask is a {kind}; expected a tensor [B, 1, Sq, Sk]")
    if attention_mask.is_floating_point():
        return None, attention_mask
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}; expected torch.bool (True keeps a "
            "key), or a floating mask that is added to the scores"
        )
    return attention_mask, None


# ------------------------------------------------------------------------------------------ masks


class _UnsupportedError(ValueError, AttributeError):
    """A ValueError, and an AttributeError so that hasattr returns False."""


class Mask:
    """Which keys each query sees in a forward, for `attention` to read. `shape` is [B, 1, Sq, Sk].

    It is not a tensor, so that no code can mistake it for another kind of mask: integers 1 and 0,
    or floats that are added to the scores. A model may apply the operations that a boolean mask of
    PyTorch (True keeps a key) supports: index it, change its shape or device, combine it with & and
    |, invert it, concatenate several, use it as the condition of torch.where. Anything else raises
    an error that names the model.

    visible: boolean [B or 1, 1, 1 or Sq, Sk], True for a visible key, or None for all keys.
    left, right: query i sees only the keys from i - left to i + right, where positions are counted
    so that the last query has the position of the last key; None is no bound. held: [B] int32, all
    equal: the number of keys that a buffer holds at its beginning. No other key is visible, and the
    last query has the position of the last held key. None if the buffer is full.
    """

    dtype = torch.bool

    def __init__(
        self,
        shape: tuple[int, ...],
        visible: Tensor | None,
        left: int | None,
        right: int | None,
        device: torch.device | str,
        owner: str,
        held: Tensor | None = None,
    ) -> None:
        self.shape, self.visible, self.left, self.right = shape, visible, left, right
        self.device, self.owner, self.held = device, owner, held

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self.shape if dim is None else self.shape[dim]

    def complete(self) -> Tensor:
        """Return the mask as a boolean tensor of shape `self.shape`."""
        bounds = (self.left, self.right, self.held)
        if self.visible is not None and all(bound is None for bound in bounds):
            return self.visible.expand(self.shape)
        q_length, k_length = self.shape[2:]
        end = k_length if self.held is None else self.held[0]
        j = torch.arange(k_length, device=self.device)
        i = torch.arange(-q_length, 0, device=self.device)[:, None] + end
        seen = (j < end).expand(q_length, k_length)
        if self.left is not None:
            seen = seen & (j >= i - self.left)
        if self.right is not None:
            seen = seen & (j <= i + self.right)
        return (seen if self.visible is None else seen & self.visible).expand(self.shape)

    def _of(self, visible: Tensor) -> Mask:
        shape = tuple(visible.shape)
        return type(self)(shape, visible, None, None, visible.device, self.owner)

    def to(self, *args: Any, **kwargs: Any) -> Mask:
        """Return the mask on another device. A dtype argument is ignored."""
        device = kwargs.get("device", args[0] if args else None)
        device = device.device if isinstance(device, Tensor) else device
        if device is None or isinstance(device, torch.dtype):
            return self
        visible, held = (None if x is None else x.to(device) for x in (self.visible, self.held))
        return type(self)(self.shape, visible, self.left, self.right, device, self.owner, held)

    def contiguous(self) -> Mask:
        return self

    clone = detach = contiguous

    def __getitem__(self, index: Any) -> Mask:
        parts = index if isinstance(index, tuple) else (index,)
        for part, n in zip(parts, self.shape):
            is_full = isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)
            if not (is_full and (part.stop is None or part.stop >= n)):
                return self._of(self.complete()[index])
        return self

    def __and__(self, other: object) -> Mask:
        return self._of(self.complete() & _boolean(other, self))

    def __or__(self, other: object) -> Mask:
        return self._of(self.complete() | _boolean(other, self))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Tensor:
        return ~self.complete()

    logical_not = __invert__

    def __getattr__(self, name: str) -> NoReturn:
        if name[:2] == "__":
            raise AttributeError(name)
        raise _UnsupportedError(_unsupported(self.owner, name))


def _unsupported(owner: str, what: str) -> str:
    return (
        f"{owner} computes with its attention mask by itself ({what}): it is not supported by "
        f"attn_implementation={NAME!r}, whose masks are read by fastformer's attention alone; take "
        "'eager' or 'sdpa' for this model"
    )


def _boolean(x: object, mask: Mask) -> Tensor:
    x = x.complete() if isinstance(x, Mask) else x
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        raise _UnsupportedError(_unsupported(mask.owner, "it is joined with what is not boolean"))
    return x


def _tensor_method(name: str) -> Callable[..., Mask]:
    """Return a method of Mask that applies the Tensor method `name` to the complete mask."""

    def method(self: Mask, *args: object, **kwargs: object) -> Mask:
        return self._of(getattr(self.complete(), name)(*args, **kwargs))

    return method


def _unsupported_method(name: str) -> Callable[..., NoReturn]:
    """Return a method of Mask that raises an error for the operation `name`."""

    def method(self: Mask, *args: object) -> NoReturn:
        raise _UnsupportedError(_unsupported(self.owner, name))

    return method


for _name in ("expand", "flatten", "index_select", "repeat", "repeat_interleave", "reshape"):
    setattr(Mask, _name, _tensor_method(_name))
for _name in ("squeeze", "transpose", "unsqueeze", "view"):
    setattr(Mask, _name, _tensor_method(_name))
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    setattr(Mask, f"__{_name}__", _unsupported_method(_name))
    setattr(Mask, f"__r{_name}__", _unsupported_method(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "bool", "len", "iter", "setitem"):
    setattr(Mask, f"__{_name}__", _unsupported_method(_name))


class _FunctionMask(Mask):
    """A Mask that PyTorch's functions accept, by `__torch_function__`.

    Under torch.compile a plain Mask is used instead: the tracer would treat every call with a
    `_FunctionMask` argument, for example a checkpoint, as a PyTorch function.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Mask | Tensor | tuple[Tensor, ...]:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is torch.cat and args and all(isinstance(x, Mask) for x in args[0]):
            parts = [x.complete() for x in args[0]]
            return args[0][0]._of(torch.cat(parts, *args[1:], **kwargs))
        if func is torch.where and args and isinstance(args[0], Mask):
            return torch.where(args[0].complete(), *args[1:], **kwargs)
        masks = _masks_in((*args, *kwargs.values()))
        if masks and name in _JOINS:
            return _JOINS[name](masks[0], next(x for x in args if x is not masks[0]))
        if masks and name in _INVERSIONS:
            return ~masks[0]
        for sequence in args:
            if isinstance(sequence, (list, tuple)):
                masks += _masks_in(sequence)
        raise _UnsupportedError(_unsupported(masks[0].owner if masks else "the model", name))


_JOINS = {
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), operator.and_),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), operator.or_),
}
_INVERSIONS = ("bitwise_not", "logical_not")


def _masks_in(values: Iterable[object]) -> list[Mask]:
    return [x for x in values if isinstance(x, Mask)]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: Mask | Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: object = None,
    **kwargs: Any,
) -> Mask:
    """Return a `Mask` of the keys that each query sees in a forward.

    The `Mask` holds the padding, a band, both or neither, if the pattern is transformers' own
    causal, bidirectional or sliding-window pattern and the last query has the position of the last
    key. For a static cache that is not full it also holds the number of filled keys. For any other
    pattern it holds the complete mask [B, 1, Sq, Sk] of transformers' sdpa: packed sequences,
    chunks, patterns combined by `and` and `or`; under torch.compile, also sliding windows. Only for
    an eager tensor on the CPU does the function check whether there is padding at all: on a GPU the
    check would synchronize, and under torch.compile the values are not available.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: (b, h, i, j) -> whether position i sees position j; causal by default.
        attention_mask: boolean [B, n], False at padding, where n may differ from kv_offset + Sk;
            None is no padding. A `Mask` is returned unchanged.
        allow_is_causal_skip, allow_is_bidirectional_skip: if both are False, the complete mask is
            wanted. transformers passes at most one of them as True, depending on the pattern. Both
            are False when decoding with a static cache; the number of filled keys is enough there.
        config: the model's config, for its name in error messages.
        kwargs: the other arguments of `sdpa_mask`.

    Source: `sdpa_mask` of huggingface/transformers.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, Mask):
        return attention_mask
    owner = getattr(config, "model_type", None) or "the model"
    kind = Mask if torch.compiler.is_compiling() else _FunctionMask
    shape, device = (batch_size, 1, q_length, kv_length), kwargs.get("device", "cpu")
    mask_function = causal_mask_function if mask_function is None else mask_function
    keys = slice(kv_offset, kv_offset + kv_length)
    sides = _sides(mask_function)
    aligned = isinstance(q_offset, int) and q_offset + q_length == keys.stop
    if sides is not None and sides[1] == 0 and kv_offset == 0 and not aligned:
        held = _held(q_offset, shape, device)
        if held is not None and _is_padding_mask(attention_mask, 0):
            left, right = _within(sides, q_length, kv_length)
            visible = _padding_of_buffer(attention_mask, kv_length, held)
            return kind(shape, visible, left, right, device, owner, held)
    banded = sides == (None, None) or (sides is not None and aligned)
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if not (banded and skip and _is_padding_mask(attention_mask, keys.stop)):
        kwargs.update(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function)
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        full = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **kwargs)
        return kind(shape, full, None, None, device, owner)
    assert sides is not None
    left, right = _within(sides, q_length, kv_length)
    return kind(shape, _padding(attention_mask, keys), left, right, device, owner)


def _within(sides: _Sides, q_length: int, kv_length: int) -> _Sides:
    """Return the bounds of the band, with None for a bound that excludes no key."""
    left, right = sides
    if left is not None and left >= kv_length - 1:
        left = None
    if right is not None and right >= q_length - 1:
        right = None
    return left, right


def _held(
    q_offset: int | Tensor, shape: tuple[int, ...], device: torch.device | str
) -> Tensor | None:
    """Return how many keys a buffer holds, [B] int32, if the queries are the last of these keys.

    Return None if q_offset is neither an int nor a tensor of one number, or if it is an int and
    the queries end past the buffer.
    """
    batch, _, q_length, k_length = shape
    if isinstance(q_offset, Tensor):
        if q_offset.numel() != 1:
            return None
        return (q_offset.reshape(1) + q_length).to(torch.int32).repeat(batch)
    if not isinstance(q_offset, int) or q_offset + q_length > k_length:
        return None
    return torch.full((batch,), q_offset + q_length, dtype=torch.int32, device=device)


def _padding_of_buffer(attention_mask: Tensor | None, k_length: int, held: Tensor) -> Tensor | None:
    """Return the padding mask [B, 1, 1, Sk] from boolean [B, n], as `_padding` does, for any n.

    Return None if the held keys are known to contain no padding.
    """
    if attention_mask is None:
        return None
    n = min(int(held[0]), k_length) if may_read(held) else k_length + 1
    if attention_mask.shape[1] >= n and _padding(attention_mask, slice(0, n)) is None:
        return None
    padding = attention_mask[:, None, None, :k_length]
    return F.pad(padding, (0, k_length - padding.shape[3]))


def _is_padding_mask(attention_mask: Tensor | None, positions: int) -> bool:
    """Return whether attention_mask is None or boolean [B, n] with n >= positions."""
    return attention_mask is None or (
        attention_mask.dtype == torch.bool
        and attention_mask.dim() == 2
        and attention_mask.shape[1] >= positions
    )


def _padding(attention_mask: Tensor | None, keys: slice) -> Tensor | None:
    """Return the padding mask [B, 1, 1, Sk] from boolean [B, n], or None if it has no padding.

    The values are read only where that does not wait for a device.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, None, None, keys]
    return None if may_read(padding) and padding.all() else padding


def _sides(mask_function: Callable[..., object]) -> _Sides | None:
    """Return how far a query sees to the left and to the right, or None for an unknown pattern."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    bidirectional = masking_utils.bidirectional_mask_function
    if mask_function is causal:
        return None, 0
    if mask_function is bidirectional:
        return None, None
    if torch.compiler.is_compiling():  # dynamo cannot trace reads of a closure
        return None
    overlay, base = (*_captured(mask_function, "mask_functions", ()), None, None)[:2]
    window = _captured(overlay, "sliding_window", None)
    kind = getattr(overlay, "__qualname__", "").partition(".")[0]
    if kind == "sliding_window_overlay" and base is causal:
        return window - 1, 0
    if kind == "sliding_window_bidirectional_overlay" and base is bidirectional:
        return window, window
    return None


def _captured(function: Any, name: str, default: Any) -> Any:
    """Return the variable `name` from the function's closure, or the default."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else default
