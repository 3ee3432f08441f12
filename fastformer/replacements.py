"""The forwards that `accelerate` puts in the place of other modules' own.

A kind below stands for one class: torch's, or one of the Annotated Transformer. It brings
`forward`, with the original's signature, and calls the ops of `fastformer.functional`; what they
cannot do goes to the original's forward, call by call, and is counted on the module.

Shapes: N batch, L queries, S keys, E features, H heads, D = E / H.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fastformer import backends, functional, reference
from fastformer.modules import (
    MultiHeadedAttention,
    PositionwiseFeedForward,
)
from fastformer.padding import Packing, _packing_of, pad, unpad
from fastformer.stream import ResidualStream, apply_feed_forward, is_unmodified

# Padding is dropped where it is at least this share of a batch, and this many tokens: below that,
# taking the tokens out and putting them back costs more.
_WORTH_DROPPING = 0.1, 16


class _Explaining(threading.local):
    def __init__(self) -> None:
        self.modules: list[Any] | None = None  # that are running, the innermost last


_explaining = _Explaining()


# ------------------------------------------------------------------------------------ what all have
class _Accelerated:
    """A module whose class was swapped; `original` is the class that it had.

    A kind derives from this and brings `forward`. The class of a module is made of a kind and the
    module's own class, so that `isinstance` and the class's other methods stay.
    """

    _kind: ClassVar[type[_Accelerated]]
    _original: ClassVar[Any]
    _base: ClassVar[Any] = None  # what is replaced, with what derives from it
    _internal: ClassVar[tuple[str, ...]] = ()  # methods of it that our forward stands for

    def _as_before(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """The original's forward."""
        _tell(self, type(self).__name__, reason)
        return self._original.forward(self, *args, **kwargs)

    def _if_it_takes(self, refusal: Exception, *args: Any) -> Any:
        """The original's forward, of arguments that ours refuses; where it refuses them as well,
        in our words.
        """
        name = str(refusal).split(" ", 1)[0]
        try:
            return self._as_before(f"{name}: torch takes what the op does not", *args)
        except Exception:
            raise refusal from None

    def __reduce_ex__(
        self, protocol: Any
    ) -> Any:  # a copy, a pickle: the class has no name of its own
        made = super().__reduce_ex__(protocol)
        if not isinstance(made, tuple) or made[1] != (type(self),):
            return made
        return _rebuilt, (self._kind, self._original), *made[2:]


_classes: dict[tuple[Any, Any], Any] = {}


def _class(kind: type[_Accelerated], original: type[nn.Module]) -> Any:
    """The class of the modules of the class `original` for which `kind` stands."""
    if (kind, original) in _classes:
        return _classes[kind, original]
    # The module's name stays the original's: tools know torch's modules by it.
    names: dict[str, Any] = dict(_kind=kind, _original=original, __module__=original.__module__)
    if hasattr(kind, "after_sum"):  # which the stream looks for in the class itself
        names["after_sum"] = kind.after_sum
    made = type(original.__name__, (kind, original), names)
    return _classes.setdefault((kind, original), made)


def _rebuilt(kind: type[_Accelerated], original: type[nn.Module]) -> Any:
    cls = _class(kind, original)
    return cls.__new__(cls)


def _note(module: Any, reason: str) -> None:
    """Counts a call that did not run on the fused ops; what is traced is not counted."""
    if not torch.compiler.is_compiling():
        module.__dict__.setdefault("_fallbacks", Counter())[reason] += 1


def _tell(module: Any, op: str, reason: str) -> None:
    """Counts it, and tells `explain` that torch ran."""
    _note(module, reason)
    if backends._state.watch is not None:
        backends._state.watch(backends.Choice(op, "torch", reason))


class _running(backends.telling):
    """Within it the ops that run are those of `module`."""

    def __init__(self, module: Any) -> None:
        super().__init__(lambda op, reason: _note(module, f"{op}: {reason}"))
        self._module = module

    def __enter__(self) -> None:
        super().__enter__()
        if _explaining.modules is not None:
            _explaining.modules.append(self._module)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if _explaining.modules is not None:
            _explaining.modules.pop()


def _foreign(*tensors: Any) -> str | None:
    """Why these are not tensors that a kernel can read, or None."""
    tracing = torch.compiler.is_compiling()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, nn.Parameter) and not (tracing or isinstance(x, FakeTensor)):
            return f"an input or a parameter is a {type(x).__name__}"
        if x.is_nested:
            return "an input is a nested tensor"
        if not tracing and torch._C._functorch.is_functorch_wrapped_tensor(x):
            return "a transform of torch.func is at work"
    return None


def _unlike(*pairs: tuple[Tensor | None, Tensor | None]) -> str | None:
    """Why the ops cannot read these weights, each with its bias, or None."""
    for weight, bias in pairs:
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            return f"a weight is {weight.dtype}, its bias {bias.dtype}"
    return _foreign(*(x for pair in pairs for x in pair))


def _unlike_in(*modules: Any) -> str | None:
    """The same of the parameters of modules that are torch's or ours."""
    return _unlike(*((getattr(m, "weight", None), getattr(m, "bias", None)) for m in modules))


# ---------------------------------------------------------------------------------------- attention


class _Seen(NamedTuple):
    """What the queries see, as `scaled_dot_product_attention` takes it: True takes part."""

    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    packing: Packing | None = None
    padding: Tensor | None = None  # attn_mask as it was given, where it is key_padding_mask alone


NEEDS_WEIGHTS = (
    "need_weights=True, the default, takes plain PyTorch; where the weights are thrown away, "
    "need_weights=False, or accelerate(model, need_weights=False), takes the fused op"
)


def _unknown(names: Iterable[str], masks: Iterable[Tensor | None]) -> None:
    for name, mask in zip(names, masks):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"{name} has dtype {mask.dtype}; expected torch.bool, True where a key is left "
                "out, or a floating dtype, to be added to the scores"
            )


class _MultiheadAttention(_Accelerated):
    _base = nn.MultiheadAttention
    _internal = ("forward", "merge_masks")
    _returns_weights = True  # where they are asked for; accelerate(need_weights=False) ends it

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        need_weights = need_weights and self._returns_weights
        reason = _foreign(query, key, value, key_padding_mask, attn_mask) or self._obstacle()
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if reason is not None:
            return self._as_before(reason, query, key, value, *masks)
        try:
            self._require(query, key, value)
            seen = self._seen(query, key, attn_mask, key_padding_mask, is_causal)
        except (TypeError, ValueError) as refusal:
            return self._if_it_takes(refusal, query, key, value, *masks)
        with _running(self):
            if not need_weights:
                return self._attend(query, key, value, seen), None
            out, weights = self._attend_with_weights(query, key, value, seen)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if query.dim() == 3 else weights.squeeze(0)

    def _obstacle(self: Any) -> str | None:
        """Why the op cannot stand for this module, or None."""
        if self.head_dim > functional.MAX_HEAD_DIM:
            return f"the head dim is {self.head_dim}; the op takes up to {functional.MAX_HEAD_DIM}"
        packed = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        return _unlike(
            (packed, self.in_proj_bias),
            (self.k_proj_weight, self.v_proj_weight),
            (self.bias_k, self.bias_v),
            (self.out_proj.weight, self.out_proj.bias),
        )

    def _require(self: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.dim() not in (2, 3):
            raise ValueError(
                f"query has shape {functional._shape(query)}; "
                f"expected {'[N, L, E]' if self.batch_first else '[L, N, E]'}, or [L, E]"
            )
        features = (self.embed_dim, self.kdim, self.vdim)
        for name, x, n in zip(("query", "key", "value"), (query, key, value), features):
            if x.dim() != query.dim() or x.shape[-1] != n:
                raise ValueError(
                    f"{name} has shape {functional._shape(x)}; "
                    f"expected {query.dim()} dimensions, as query, the last of them {n}"
                )
        batch = 0 if self.batch_first else 1
        same = key.shape[:-1] == value.shape[:-1]
        if not same or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            q, k, v = (functional._shape(x) for x in (query, key, value))
            raise ValueError(
                f"query {q}, key {k}, value {v}; expected one batch, and as many values as keys"
            )

    def _heads(self: Any, x: Tensor) -> Tensor:
        """[N, H, L, D], of what is projected: [N, L, H, D], [L, N, H, D] or [L, H, D]."""
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self: Any, x: Tensor, batched: bool) -> Tensor:
        """And back, [N, L, E], [L, N, E] or [L, E]."""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(1)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(2)

    def _seen(
        self: Any,
        query: Tensor,  # [N, L, E], [L, N, E] or [L, E]
        key: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        names: tuple[str, str] = ("attn_mask", "key_padding_mask"),
    ) -> _Seen:
        """torch's two masks, in which True leaves out and a float is added."""
        batched, heads = query.dim() == 3, self.num_heads
        at = 1 if batched and self.batch_first else 0
        batch, length, keys = query.shape[1 - at] if batched else 1, query.shape[at], key.shape[at]
        if is_causal and attn_mask is None:
            raise ValueError(
                f"is_causal is True and {names[0]} None; it is a hint that {names[0]} is causal: "
                "expected the mask as well (nn.Transformer.generate_square_subsequent_mask)"
            )
        _unknown(names, (attn_mask, key_padding_mask))
        if key_padding_mask is not None:
            expected = [batch, keys] if batched else [keys]
            if list(key_padding_mask.shape) != expected:
                raise ValueError(
                    f"{names[1]} has shape {functional._shape(key_padding_mask)}; "
                    f"expected {'[N, S]' if batched else '[S]'} = {expected}"
                )
            key_padding_mask = key_padding_mask.view(batch, 1, 1, keys)
        if attn_mask is not None:
            if attn_mask.shape == (batch * heads, length, keys):
                attn_mask = attn_mask.unflatten(0, (batch, heads))
            elif attn_mask.shape != (length, keys):
                raise ValueError(
                    f"{names[0]} has shape {functional._shape(attn_mask)}; expected [L, S] = "
                    f"[{length}, {keys}] or [N H, L, S] = [{batch * heads}, {length}, {keys}]"
                )
        # Of keys appended behind the others a causal hint says nothing: there the mask is read.
        is_causal = is_causal and not self._appends()
        visible, bias = None, None
        for mask in (None if is_causal else attn_mask, key_padding_mask):
            if mask is None:
                continue
            if mask.dtype == torch.bool and visible is None:
                visible = ~mask
                continue
            if mask.dtype == torch.bool:  # beside another mask: as a bias of the keys
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, float("-inf"))
            elif mask.dtype != torch.float32:
                mask = mask.to(query.dtype)
            bias = mask if bias is None else bias + mask
        padding = None
        if key_padding_mask is not None and attn_mask is None and bias is None:
            padding = key_padding_mask.view(batch, keys)
        return _Seen(visible, bias, is_causal, padding=padding)

    def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, seen: _Seen) -> Tensor:
        """As the caller has them, or [tokens, E] of a packed batch -> the same."""
        q, k, v = self._projected(query, key, value)  # [.., S, H, D]
        p = self.dropout if self.training else 0.0
        if seen.packing is not None:
            at, longest = seen.packing.cu_seqlens, seen.packing.longest
            out = functional.packed_attention(
                q, k, v, at, at, longest, longest, dropout_p=p, is_causal=seen.is_causal
            ).flatten(-2)
        else:
            k, v, seen = self._appended(self._heads(k), self._heads(v), seen)
            mask, bias, causal = seen[:3]
            q = self._heads(q)
            out = functional.scaled_dot_product_attention(q, k, v, mask, p, causal, bias=bias)
            out = self._joined(out, query.dim() == 3)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias)

    def _attend_with_weights(
        self: Any, query: Tensor, key: Tensor, value: Tensor, seen: _Seen
    ) -> tuple[Tensor, Tensor]:
        """Also the weights [N, H, L, S], after dropout, as torch returns them."""
        _tell(self, "MultiheadAttention", NEEDS_WEIGHTS)
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        k, v, seen = self._appended(k, v, seen)
        weights = functional.attention_weights(q, k, seen.attn_mask, seen.is_causal, bias=seen.bias)
        weights = F.dropout(weights, self.dropout, self.training)
        out = self._joined(weights @ v.to(weights.dtype), query.dim() == 3)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias), weights

    def _projected(self: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """query, key and value through their projections, those of one input in one GEMM."""
        groups = [(query, 1), (key, 1), (value, 1)]
        if key is value and self.in_proj_weight is not None:
            groups = [(query, 3)] if query is key else [(query, 1), (key, 2)]
        sizes, bias = [n * self.embed_dim for _, n in groups], self.in_proj_bias
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        else:
            weights = self.in_proj_weight.split(sizes)
        biases = [None] * len(groups) if bias is None else bias.split(sizes)
        out: list[Tensor] = []
        for (x, n), w, b in zip(groups, weights, biases):
            heads = F.linear(x, w, b).unflatten(-1, (n, self.num_heads, self.head_dim))
            out += heads.unbind(-3)
        return out

    def _appends(self: Any) -> bool:
        return self.bias_k is not None or self.add_zero_attn

    def _appended(self: Any, k: Tensor, v: Tensor, seen: _Seen) -> tuple[Tensor, Tensor, _Seen]:
        """[N, H, S, D] each: the learned key and value, and the zero ones, behind the others."""
        ends = [] if self.bias_k is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            ends.append((k.new_zeros(1, 1, self.embed_dim),) * 2)
        mask, bias = seen.attn_mask, seen.bias
        for end in ends:
            shape = (len(k), self.num_heads, 1, self.head_dim)
            last_k, last_v = (x.view(1, *shape[1:]).expand(shape) for x in end)
            k, v = torch.cat([k, last_k.to(k.dtype)], 2), torch.cat([v, last_v.to(v.dtype)], 2)
            mask = None if mask is None else F.pad(mask, (0, 1), value=True)
            bias = None if bias is None else F.pad(bias, (0, 1))
        return k, v, seen._replace(attn_mask=mask, bias=bias)


# ------------------------------------------------------------------------------------------- layers


def _activation(function: Any) -> Any:
    """Its name, where the op has it; else the function."""
    if isinstance(function, nn.Module) and not is_unmodified(function):
        return function
    if function in (F.relu, torch.relu) or type(function) is nn.ReLU:
        return "relu"
    if function is F.silu or type(function) is nn.SiLU:
        return "silu"
    if type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return "gelu" if function is F.gelu else function


class _Layer(_Accelerated):
    """What an encoder layer and a decoder layer share."""

    _attentions: ClassVar[tuple[str, ...]]

    def _obstacle(self: Any) -> str | None:
        """Why the sublayers cannot run one after the other on one stream, or None."""
        first = getattr(self, self._attentions[0])
        for name in self._attentions:
            attention = getattr(self, name)
            if _MultiheadAttention not in type(attention).__mro__:
                return f"{name} is a {type(attention).__name__} that was not replaced"
            if not is_unmodified(attention):
                return f"{name} has hooks"
            if attention.batch_first != first.batch_first:
                return "one attention has batch_first, another has not"
            if attention._obstacle() is not None:
                return f"{name}: {attention._obstacle()}"
        norms = (
            getattr(self, name) for name in ("norm1", "norm2", "norm3") if name in self._modules
        )
        return _unlike_in(self.linear1, self.linear2, *norms)

    def _feed(self: Any, x: Tensor) -> Tensor:
        return apply_feed_forward(
            x, self.linear1, _activation(self.activation), self.dropout, self.linear2
        )

    def _attending(self: Any, name: str, seen: _Seen, memory: Tensor | None = None) -> Any:
        """The sublayer x -> attention(x, memory, memory), of memory = x where it is None."""
        attention = getattr(self, name)

        def attend(x: Tensor) -> Tensor:
            with _running(attention):
                return attention._attend(x, *((x, x) if memory is None else (memory, memory)), seen)

        return attend


_Context = tuple[Any, ...]  # what a layer's `_through` takes after the stream


def _encoder_context(
    attention: Any,
    src: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    names: tuple[str, str],
) -> _Context:
    attention._require(src, src, src)
    return (attention._seen(src, src, mask, key_padding_mask, is_causal, names),)


def _decoder_context(
    layer: Any,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None,
    memory_mask: Tensor | None,
    tgt_padding: Tensor | None,
    memory_padding: Tensor | None,
    tgt_is_causal: bool,
    memory_is_causal: bool,
) -> _Context:
    own, cross = layer.self_attn, layer.multihead_attn
    own._require(tgt, tgt, tgt)
    cross._require(tgt, memory, memory)
    names = ("tgt_mask", "tgt_key_padding_mask"), ("memory_mask", "memory_key_padding_mask")
    seen = own._seen(tgt, tgt, tgt_mask, tgt_padding, tgt_is_causal, names[0])
    args = (memory_mask, memory_padding, memory_is_causal)
    return seen, memory, cross._seen(tgt, memory, *args, names[1])


class _TransformerEncoderLayer(_Layer):
    _base = nn.TransformerEncoderLayer
    _internal = ("forward", "_sa_block", "_ff_block")
    _attentions = ("self_attn",)

    def forward(
        self: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = (src_mask, src_key_padding_mask)
        reason = _foreign(src, *masks) or self._obstacle()
        if reason is not None:
            return self._as_before(reason, src, *masks, is_causal)
        names = ("src_mask", "src_key_padding_mask")
        try:
            context = _encoder_context(self.self_attn, src, *masks, is_causal, names)
        except (TypeError, ValueError) as refusal:
            return self._if_it_takes(refusal, src, *masks, is_causal)
        stream = ResidualStream(src)
        self._through(stream, *context)
        return stream.value().contiguous()

    def _through(self: Any, stream: ResidualStream, seen: _Seen) -> None:
        if self._native(stream, seen):
            return
        with _running(self):
            first = self.norm_first
            stream.add_sublayer(
                self._attending("self_attn", seen), self.norm1, self.dropout1, first
            )
            stream.add_sublayer(self._feed, self.norm2, self.dropout2, first)

    def _native(self: Any, stream: ResidualStream, seen: _Seen) -> bool:
        """At inference on a CPU the layer is one op of torch's, with less to do around its GEMMs.

        Without a mask, and with padding that leaves each query a key, it computes what the parts
        do. Whether it ran.
        """
        x, attention = stream.x, self.self_attn  # x: [N, L, E], [L, N, E] or [L, E]
        if x.device.type != "cpu" or self.training or torch.is_grad_enabled():
            return False
        if backends.current_backend() == "triton" or not reference.eager(x) or not x.numel():
            return False
        if stream.pending is not None or functional._autocast_dtype(x) is not None:
            return False
        if seen.is_causal or seen.bias is not None or seen.packing is not None:
            return False
        if not torch.backends.mha.get_fastpath_enabled():
            return False
        dropouts = (self.dropout, self.dropout1, self.dropout2)
        if any(type(d) is not nn.Dropout or d.training for d in dropouts) or attention._appends():
            return False
        if seen.attn_mask is not None and (seen.padding is None or seen.padding.all(1).any()):
            return False
        parts = (self.norm1, self.norm2, self.linear1, self.linear2)
        activation = _activation(self.activation)
        known = all(_LayerNorm in type(norm).__mro__ for norm in parts[:2])
        known = known and all(type(linear) is nn.Linear for linear in parts[2:])
        known = known and is_unmodified(*parts, *dropouts) and activation in ("relu", "gelu")
        if not known or self.norm1.eps != self.norm2.eps or attention.num_heads % 2:
            return False
        weights = [attention.in_proj_weight, attention.in_proj_bias]
        for part in (attention.out_proj, *parts):
            weights += [part.weight, part.bias]
        if any(w is None or w.dtype != x.dtype for w in weights):
            return False
        sizes = (attention.embed_dim, attention.num_heads)
        form = (activation == "gelu", self.norm_first, self.norm1.eps)
        mask = () if seen.padding is None else (seen.padding, 1)
        whole: Any = torch._transformer_encoder_layer_fwd
        batched, turned = x.dim() == 3, x.dim() == 3 and not attention.batch_first
        x = x.transpose(0, 1) if turned else x if batched else x.unsqueeze(0)
        x = whole(x, *sizes, *weights[:4], *form, *weights[4:], *mask)
        stream.x = x.transpose(0, 1) if turned else x if batched else x.squeeze(0)
        if backends._state.watch is not None:
            why = "without gradients, on a CPU, torch has the layer as one op"
            backends._state.watch(backends.Choice(type(self).__name__, "torch", why))
        return True


class _TransformerDecoderLayer(_Layer):
    _base = nn.TransformerDecoderLayer
    _internal = ("forward", "_sa_block", "_mha_block", "_ff_block")
    _attentions = ("self_attn", "multihead_attn")

    def forward(
        self: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        hints = (tgt_is_causal, memory_is_causal)
        reason = _foreign(tgt, memory, *masks) or self._obstacle()
        if reason is not None:
            return self._as_before(reason, tgt, memory, *masks, *hints)
        try:
            context = _decoder_context(self, tgt, memory, *masks, *hints)
        except (TypeError, ValueError) as refusal:
            return self._if_it_takes(refusal, tgt, memory, *masks, *hints)
        stream = ResidualStream(tgt)
        self._through(stream, *context)
        return stream.value().contiguous()

    def _through(
        self: Any, stream: ResidualStream, seen: _Seen, memory: Tensor, memory_seen: _Seen
    ) -> None:
        cross = self._attending("multihead_attn", memory_seen, memory)
        with _running(self):
            first = self.norm_first
            stream.add_sublayer(
                self._attending("self_attn", seen), self.norm1, self.dropout1, first
            )
            stream.add_sublayer(cross, self.norm2, self.dropout2, first)
            stream.add_sublayer(self._feed, self.norm3, self.dropout3, first)


def _form(attention: Any) -> tuple[Any, ...]:
    """What one reading of the masks serves."""
    return attention.batch_first, attention.num_heads, attention._appends()


class _Stack(_Accelerated):
    """What an encoder and a decoder share."""

    _layer: ClassVar[type[_Layer]]
    _internal = ("forward",)

    def _obstacle(self: Any) -> str | None:
        """Why the layers cannot run on one stream, or None."""
        if len(self.layers) == 0:
            return "it has no layers"
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, self._layer):
                return f"layers.{i} is a {type(layer).__name__} that was not replaced"
            if not is_unmodified(layer):
                return f"layers.{i} has hooks"
            if layer._obstacle() is not None:
                return f"layers.{i}: {layer._obstacle()}"
            for name in layer._attentions:
                if _form(getattr(layer, name)) != _form(getattr(self.layers[0], name)):
                    return f"layers.{i} has another form of {name} than layers.0"
        return None if self.norm is None else _unlike_in(self.norm)

    def _normalized(self: Any, stream: ResidualStream) -> Tensor:
        with _running(self):
            out = stream.value() if self.norm is None else stream.normalize(self.norm)
        return out.contiguous()


def _is_causal(mask: Tensor | None, hint: bool | None) -> bool:
    """The hint; without one whether the mask is causal, where a look at it is possible."""
    if hint is not None or mask is None:
        return bool(hint)
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad or not _look(mask):
        return False
    left_out = True if mask.dtype == torch.bool else float("-inf")
    return torch.equal(mask, torch.full_like(mask, left_out).triu(1))


def _look(x: Tensor) -> bool:
    """Whether the contents of x may decide what runs."""
    return reference.eager(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _TransformerEncoder(_Stack):
    _base = nn.TransformerEncoder
    _layer = _TransformerEncoderLayer

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        _unseen: bool = False,
    ) -> Tensor:
        """`_unseen`: nobody sees what comes out at the padding."""
        padding = src_key_padding_mask
        reason = _foreign(src, mask, padding) or self._obstacle()
        dropped = None
        if self._drops_padding and padding is not None and src.dim() == 3:
            dropped = padding if padding.dtype == torch.bool else None
        if reason is not None:
            out = self._as_before(reason, src, mask, padding, is_causal)
            return out if dropped is None or out.is_nested else self._blanked(out, dropped)
        attention = self.layers[0].self_attn
        causal, names = _is_causal(mask, is_causal), ("mask", "src_key_padding_mask")
        try:
            (seen,) = _encoder_context(attention, src, mask, padding, causal, names)
        except (TypeError, ValueError) as refusal:
            return self._if_it_takes(refusal, src, mask, padding, is_causal)
        if dropped is None and padding is not None:
            hidden = padding if padding.dtype == torch.bool else padding != 0
            if _unseen or self._converts(src, mask, hidden):
                dropped = hidden
        packing = None
        if dropped is not None and (mask is None or seen.is_causal) and not attention._appends():
            packing = _worth_packing(dropped)
        x, turned = src, not attention.batch_first
        if packing is not None:
            x, _ = unpad(x.transpose(0, 1) if turned else x, packing)
            seen = _Seen(is_causal=seen.is_causal, packing=packing)
        stream = ResidualStream(x)
        for layer in self.layers:
            layer._through(stream, seen)
        if packing is not None:
            x = pad(stream.value(), packing)
            stream = ResidualStream(x.transpose(0, 1) if turned else x)
        elif dropped is not None and not _unseen:
            dropped = (dropped.t() if turned else dropped).unsqueeze(-1)
            stream = ResidualStream(stream.value().masked_fill(dropped, 0.0))
        return self._normalized(stream)

    def _converts(self: Any, src: Tensor, mask: Tensor | None, hidden: Tensor) -> bool:
        """Whether torch's forward takes the padding out, as nested tensors: where it was, zeros
        come out of the layers.
        """
        first = self.layers[0]
        if first.training or src.dim() != 3 or mask is not None:
            return False
        if not getattr(self, "use_nested_tensor", False):  # which an old pickle lacks
            return False
        if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
            return False
        if torch.is_grad_enabled():
            parts = (first.self_attn.out_proj, first.norm1, first.norm2)
            weights = [first.self_attn.in_proj_weight, first.self_attn.in_proj_bias]
            for part in (*parts, first.linear1, first.linear2):
                weights += [part.weight, part.bias]
            if any(x.requires_grad for x in (src, *weights)):
                return False
        if not getattr(self, "mask_check", True):
            return True
        return _look(hidden) and torch._nested_tensor_from_mask_left_aligned(src, ~hidden)

    def _blanked(self: Any, out: Tensor, hidden: Tensor) -> Tensor:
        """The output of torch's own forward with what zeros give where padding is."""
        if not self.layers[0].self_attn.batch_first:
            hidden = hidden.t()
        blank = out.new_zeros(out.shape[-1])
        blank = blank if self.norm is None else self.norm(blank)
        return torch.where(hidden.unsqueeze(-1), blank.to(out.dtype), out)


def _worth_packing(hidden: Tensor) -> Packing | None:
    """The packing of the tokens that are not hidden [N, S], where dropping the others pays."""
    if not _look(hidden):
        return None
    valid = ~hidden
    counts = valid.sum(1)
    longest, kept = (
        (int(n) for n in torch.stack([counts.max(), counts.sum()])) if len(counts) else (0, 0)
    )
    share, least = _WORTH_DROPPING
    dropped = hidden.numel() - kept
    worth = kept > 0 and dropped >= max(least, share * hidden.numel())
    return _packing_of(valid, longest) if worth else None


class _TransformerDecoder(_Stack):
    _base = nn.TransformerDecoder
    _layer = _TransformerDecoderLayer

    def forward(
        self: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        reason = _foreign(tgt, memory, *masks) or self._obstacle()
        if reason is not None:
            return self._as_before(reason, tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        first = self.layers[0]
        hints = (_is_causal(tgt_mask, tgt_is_causal), memory_is_causal)
        try:
            context = _decoder_context(first, tgt, memory, *masks, *hints)
        except (TypeError, ValueError) as refusal:
            return self._if_it_takes(refusal, tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        stream = ResidualStream(tgt)
        for layer in self.layers:
            layer._through(stream, *context)
        return self._normalized(stream)


class _Transformer(_Accelerated):
    _base = nn.Transformer
    _internal = ("forward",)

    def forward(
        self: Any,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """torch's own, but for padding that the decoder does not see: the encoder may drop it."""
        masks = (src_mask, tgt_mask, memory_mask)
        paddings = (src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask)
        hints = (src_is_causal, tgt_is_causal, memory_is_causal)
        if not self._hides(src, paddings[0], paddings[2]):
            return self._original.forward(self, src, tgt, *masks, *paddings, *hints)
        memory = self.encoder(src, src_mask, paddings[0], src_is_causal, _unseen=True)
        return self.decoder(tgt, memory, *masks[1:], *paddings[1:], *hints[1:])

    def _hides(self: Any, src: Tensor, padding: Any, from_decoder: Any) -> bool:
        """Whether nobody sees what the encoder gives where padding is."""
        if padding is None or from_decoder is None or src.dim() != 3:
            return False
        if padding.dtype != torch.bool or from_decoder.dtype != torch.bool or not _look(padding):
            return False
        encoder, decoder = self.encoder, self.decoder
        kinds = [getattr(type(part), "_kind", None) for part in (encoder, decoder)]
        if kinds != [_TransformerEncoder, _TransformerDecoder] or not is_unmodified(
            encoder, decoder
        ):
            return False
        if decoder._obstacle() is not None:
            return False
        if padding is from_decoder:
            return True
        return padding.shape == from_decoder.shape and not (padding & ~from_decoder).any()


# -------------------------------------------------------------------------------------------- norms


def _wide(x: Tensor) -> Tensor:
    """In float32 where torch.autocast runs the norms in it: on a GPU."""
    low = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if low and functional._autocast_dtype(x) is not None else x


def _norm_obstacle(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> str | None:
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return f"the input is {x.dtype}, the weight {weight.dtype}"
    if eps is not None and eps < 0:
        return f"eps is {eps}"
    return _unlike((weight, bias), (x, None))


class _LayerNorm(_Accelerated):
    _base = nn.LayerNorm
    _internal = ("forward",)

    def forward(self: Any, input: Tensor) -> Tensor:
        reason = _norm_obstacle(input, self.weight, self.bias, self.eps)
        if reason is not None:
            return self._as_before(reason, input)
        with _running(self):
            return functional.layer_norm(
                _wide(input), self.normalized_shape, self.weight, self.bias, self.eps
            )

    def after_sum(
        self: Any, x: Tensor, residual: Tensor, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        """(self(sum), sum), sum = residual + dropout(x), in one kernel."""
        if _norm_obstacle(residual, self.weight, self.bias, self.eps) is not None:
            total = residual + F.dropout(x, dropout_p)
            return self.forward(total), total
        normalized, total = functional.dropout_add_layer_norm(
            _wide(x), _wide(residual), self.weight, self.bias, dropout_p, self.eps
        )
        return normalized, total.to(torch.promote_types(x.dtype, residual.dtype))


class _RMSNorm(_Accelerated):
    _base = nn.RMSNorm
    _internal = ("forward",)

    def forward(self: Any, x: Tensor) -> Tensor:
        reason = _norm_obstacle(x, self.weight, None, self.eps)
        if reason is not None:
            return self._as_before(reason, x)
        with _running(self):
            return functional.rms_norm(_wide(x), self.normalized_shape, self.weight, self.eps)


# -------------------------------------------------------------------- the Annotated Transformer


class _Tutorial(_Accelerated):
    """A class known by its parts, and confirmed by a run."""

    _arguments: ClassVar[tuple[str, ...]]  # of its forward

    @staticmethod
    def _matches(module: Any) -> bool:
        """Whether a module has the parts."""
        raise NotImplementedError

    @staticmethod
    def _probes(module: Any, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Arguments to try it with."""
        raise NotImplementedError


def _only(module: nn.Module, *names: str) -> bool:
    """Whether the module's parts are the named ones: no other parameters, buffers or modules."""
    return {*module._parameters, *module._buffers, *module._modules} == set(names)


class _AnnotatedAttention(_Tutorial, MultiHeadedAttention):
    _arguments = ("query", "key", "value", "mask")
    keep_attention = False
    attn = None  # where the class has none of its own

    def forward(  # type: ignore[override]
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        reason = _foreign(query, key, value, mask)
        if reason is None and self.d_k > functional.MAX_HEAD_DIM:
            reason = f"the head dim is {self.d_k}; the op takes up to {functional.MAX_HEAD_DIM}"
        if type(self.dropout) is not nn.Dropout or not is_unmodified(self.dropout):
            reason = "its dropout has hooks or was replaced"
        if reason is None and mask is not None and mask.dim() != 3:
            reason = f"the mask has {mask.dim()} dimensions, not three"
        if reason is not None:
            return self._as_before(reason, query, key, value, mask)
        if mask is not None and mask.is_floating_point():
            mask = mask != 0  # whatever it holds, as the original reads it
        with _running(self):
            return MultiHeadedAttention.forward(self, query, key, value, mask)

    @staticmethod
    def _matches(module: Any) -> bool:
        linears, h, d_k = (getattr(module, name, None) for name in ("linears", "h", "d_k"))
        if not isinstance(linears, nn.ModuleList) or len(linears) != 4:
            return False
        if not (isinstance(h, int) and isinstance(d_k, int)):
            return False
        if not _only(module, "linears", "dropout"):
            return False
        sizes = {(x.in_features, x.out_features) for x in linears if isinstance(x, nn.Linear)}
        dropout = getattr(module, "dropout", None)
        return sizes == {(h * d_k, h * d_k)} and isinstance(dropout, nn.Dropout)

    @staticmethod
    def _probes(module: Any, random: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
        query, memory = random(2, 130, module.h * module.d_k), random(2, 150, module.h * module.d_k)
        lengths = torch.tensor([[[150]], [[70]]], device=query.device)
        padding = torch.arange(150, device=query.device) < lengths
        causal = torch.ones(1, 130, 130, dtype=torch.bool, device=query.device).tril()
        yield query, memory, memory, None
        yield query, memory, memory, padding
        yield query, query, query, causal


class _AnnotatedNorm(_Tutorial):
    _arguments = ("x",)

    def forward(self: Any, x: Tensor) -> Tensor:
        reason = _foreign(x, self.a_2, self.b_2)
        if x.dtype != self.a_2.dtype:  # whose result the original has in the wider one
            reason = f"the input is {x.dtype}, the weight {self.a_2.dtype}"
        if reason is not None:
            return self._as_before(reason, x)
        with _running(self):
            shape = self.a_2.shape
            return functional.layer_norm(x, shape, self.a_2, self.b_2, self.eps, unbiased=True)

    @staticmethod
    def _matches(module: Any) -> bool:
        a, b, eps = (getattr(module, name, None) for name in ("a_2", "b_2", "eps"))
        if not (isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter)):
            return False
        if not _only(module, "a_2", "b_2"):
            return False
        return a.dim() == 1 and a.shape == b.shape and len(a) > 1 and isinstance(eps, float)

    @staticmethod
    def _probes(module: Any, random: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
        x = random(2, 3, len(module.a_2))
        yield (x * 0.01 + 1,)  # a small spread, in which each form of eps is seen
        yield (x,)


class _AnnotatedFeedForward(_Tutorial, PositionwiseFeedForward):
    _arguments = ("x",)

    def forward(self: Any, x: Tensor) -> Tensor:
        reason = _foreign(x)
        if reason is not None:
            return self._as_before(reason, x)
        with _running(self):
            return PositionwiseFeedForward.forward(self, x)

    @staticmethod
    def _matches(module: Any) -> bool:
        w_1, w_2, dropout = (getattr(module, name, None) for name in ("w_1", "w_2", "dropout"))
        if not (isinstance(w_1, nn.Linear) and isinstance(w_2, nn.Linear)):
            return False
        if not _only(module, "w_1", "w_2", "dropout"):
            return False
        return isinstance(dropout, nn.Dropout) and w_1.out_features == w_2.in_features

    @staticmethod
    def _probes(module: Any, random: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
        yield (random(2, 3, module.w_1.in_features),)


KINDS: tuple[Any, ...] = (
    _MultiheadAttention,
    _TransformerEncoderLayer,
    _TransformerDecoderLayer,
    _TransformerEncoder,
    _TransformerDecoder,
    _Transformer,
    _LayerNorm,
    _RMSNorm,
)
TUTORIAL: tuple[Any, ...] = (_AnnotatedAttention, _AnnotatedNorm, _AnnotatedFeedForward)
