# mypy: allow-untyped-defs
"""Feed-forward layers and norms of residual sums, in the layers of transformers, on the ops.

A method is replaced only if its source is one that this file has an entry for: `digest` of it is a
key of `_FEED_FORWARDS` or `_METHODS`. The entry computes what that source computes, by
sublayers.py. The comments name classes that have the source, from transformers 5.17 to 5.23.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.dispatch.state import is_transformed, unwatched_backend
from fastformer.drop_in.replacements.base import AnySignature
from fastformer.drop_in.replacements.sublayers import feed_forward, normalized_sum, unfit
from fastformer.nn.stream import is_unmodified

Method = Callable[..., Any]

# By digest, the attributes of a method that applies a linear layer, an activation, a dropout, a
# linear layer and a dropout to its argument; "-" where it has no dropout.
_FEED_FORWARDS = {
    "847553dad7ce": "fc1 activation_fn - fc2 -",  # CLIPMLP, ViTMLP, PhiMLP
    "dba7288f95e4": "fc1 activation - fc2 -",  # VJEPA2MLP
    "4aa8e4ca9493": "fc1 act - fc2 -",  # Qwen2-VL's VisionMlp
    "ed7ad64b092c": "linear_fc1 act_fn - linear_fc2 -",  # Qwen3VLVisionMLP
    "acf5a69e5b16": "linear_1 act - linear_2 -",  # LlavaMultiModalProjector
    "1f3c12a0ccf3": "lin1 act - lin2 -",  # SamMLPBlock
    "1a21df7bfe7c": "up_proj act_fn - down_proj -",  # NemotronMLP
    "795830c28a6c": "dense_h_to_4h act - dense_4h_to_h -",  # GPTNeoXMLP
    "cc6f26a432c8": "c_fc act - c_proj dropout",  # GPT2MLP
    "a4ffa1ddbcd8": "fc_in act - fc_out dropout",  # GPTJMLP
    "6a3d4e4de24f": "wi act dropout wo -",  # T5DenseActDense
    "9a587577059b": "lin1 activation - lin2 dropout",  # DistilBERT's FFN.ff_chunk
    "99371c928296": "ffn activation - ffn_output -",  # AlbertLayer.ff_chunk
    "e37aa066df31": (  # Wav2Vec2FeedForward
        "intermediate_dense intermediate_act_fn intermediate_dropout output_dense output_dropout"
    ),
}
_METHODS: dict[str, Method] = {}  # by digest
_NAMES = "forward", "feed_forward_chunk", "ff_chunk"  # of the methods that may be replaced


def _replaces(digest: str) -> Callable[[Method], Method]:
    """A decorator: the function computes what a method with this digest computes, or returns
    NotImplemented.
    """
    return lambda function: _METHODS.setdefault(digest, function)


@_replaces("eaa7af5a522a")  # BertOutput, BertSelfOutput
def _output(self, hidden_states, input_tensor):
    x = self.dense(hidden_states)
    return normalized_sum(self, self.LayerNorm, input_tensor, x, self.dropout)[0]


@_replaces("e186a983cb26")  # BertIntermediate: `_chunk` looks for it
def _intermediate(self, hidden_states):
    return self.intermediate_act_fn(self.dense(hidden_states))


@_replaces("827de682eebf")  # BertLayer.feed_forward_chunk
def _chunk(self, attention_output):
    x, inner, outer = attention_output, self.intermediate, self.output
    known = _is(inner, _intermediate) and _is(outer, _output)
    if not known or not is_unmodified(inner, outer):
        return outer(inner(x), x)
    y = _feed_forward(outer, x, inner.dense, inner.intermediate_act_fn, 0.0, outer.dense)
    return normalized_sum(outer, outer.LayerNorm, x, y, outer.dropout)[0]


@_replaces("b3f331305c39")  # AlbertLayer
def _albert(self, hidden_states, attention_mask=None, **kwargs):
    if self.chunk_size_feed_forward:
        return NotImplemented
    x, _ = self.attention(hidden_states, attention_mask, **kwargs)
    return normalized_sum(self, self.full_layer_layer_norm, x, self.ff_chunk(x))[0]


@_replaces("0f14f337b024")  # DistilBERT's TransformerBlock
def _distilbert(self, hidden_states, attention_mask=None, **kwargs):
    x, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
    x, _ = normalized_sum(self, self.sa_layer_norm, hidden_states, x)
    return normalized_sum(self, self.output_layer_norm, x, self.ffn(x))[0]


@_replaces("9379ad7f8348")  # Wav2Vec2EncoderLayer
def _wav2vec2(self, hidden_states, attention_mask=None, **kwargs):
    x, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
    x, _ = normalized_sum(self, self.layer_norm, hidden_states, x, self.dropout)
    return normalized_sum(self, self.final_layer_norm, x, self.feed_forward(x))[0]


@_replaces("bc0e5f980288")  # Wav2Vec2EncoderLayerStableLayerNorm
def _stable_wav2vec2(self, hidden_states, attention_mask=None, **kwargs):
    x = self.layer_norm(hidden_states)
    x, _ = self.attention(x, attention_mask=attention_mask, **kwargs)
    x, total = normalized_sum(self, self.final_layer_norm, hidden_states, x, self.dropout)
    total = total + self.feed_forward(x)
    return total if self.adapter_layer is None else total + self.adapter_layer(total)


@_replaces("dcde281c6255")  # ViTLayer
def _vit(self, hidden_states, attention_mask=None, **kwargs):
    x, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
    x, total = normalized_sum(self, self.layernorm_after, hidden_states, x, self.dropout)
    return self.dropout(self.mlp(x)) + total


@_replaces("e0551bfbdf71")  # CLIPEncoderLayer, SiglipEncoderLayer
def _clip(self, hidden_states, attention_mask, **kwargs):
    x = self.layer_norm1(hidden_states)
    x, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, **kwargs)
    x, total = normalized_sum(self, self.layer_norm2, hidden_states, x)
    return total + self.mlp(x)


@_replaces("c825df34dfdb")  # GPT2Block
def _gpt2(self, hidden_states, past_key_values=None, attention_mask=None,
          encoder_hidden_states=None, encoder_attention_mask=None, use_cache=False,
          **kwargs):  # fmt: skip
    if encoder_hidden_states is not None:
        return NotImplemented
    named = dict(past_key_values=past_key_values, use_cache=use_cache, **kwargs)
    x, _ = self.attn(self.ln_1(hidden_states), attention_mask=attention_mask, **named)
    x, total = normalized_sum(self, self.ln_2, hidden_states, x)
    return total + self.mlp(x)


@_replaces("40d05b85fcb7")  # LlamaDecoderLayer; also of Mistral, Qwen and Gemma
@_replaces("3e69688fff9f")  # Phi3DecoderLayer, which has dropouts
def _llama(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None,
           use_cache=False, position_embeddings=None, **kwargs):  # fmt: skip
    x, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
        position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
        position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    dropout = self._modules.get("resid_attn_dropout", 0.0)
    x, total = normalized_sum(self, self.post_attention_layernorm, hidden_states, x, dropout)
    return total + (self.resid_mlp_dropout(self.mlp(x)) if dropout else self.mlp(x))


@_replaces("fb54aa429555")  # Gemma2DecoderLayer, Gemma3DecoderLayer
def _gemma2(self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None,
            past_key_values=None, **kwargs):  # fmt: skip
    x, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), position_embeddings=position_embeddings,
        attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
        **kwargs,
    )  # fmt: skip
    x = self.post_attention_layernorm(x)
    x, total = normalized_sum(self, self.pre_feedforward_layernorm, hidden_states, x)
    return total + self.post_feedforward_layernorm(self.mlp(x))


@_replaces("b493e6de3b6b")  # BartEncoderLayer
def _bart_encoder(self, hidden_states, attention_mask, **kwargs):
    x, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
    x, _ = normalized_sum(self, self.self_attn_layer_norm, hidden_states, x, _p(self))
    x, _ = normalized_sum(self, self.final_layer_norm, x, _fc1_fc2(self, x), _p(self))
    return _clamped(x) if x.dtype == torch.float16 and not torch.isfinite(x).all() else x


@_replaces("62b975426720")  # WhisperEncoderLayer, MBartEncoderLayer
def _whisper_encoder(self, hidden_states, attention_mask, **kwargs):
    x = self.self_attn_layer_norm(hidden_states)
    x, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, **kwargs)
    x, total = normalized_sum(self, self.final_layer_norm, hidden_states, x, _p(self))
    total = total + F.dropout(_fc1_fc2(self, x), self.dropout, self.training)
    return _clamped(total) if total.dtype == torch.float16 else total


@_replaces("4525662c21cb")  # BartDecoderLayer
def _bart_decoder(self, hidden_states, attention_mask=None, encoder_hidden_states=None,
                  encoder_attention_mask=None, past_key_values=None, use_cache=True,
                  **kwargs):  # fmt: skip
    named = dict(past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
    x, _ = self.self_attn(hidden_states, **named)
    x, _ = normalized_sum(self, self.self_attn_layer_norm, hidden_states, x, _p(self))
    if encoder_hidden_states is not None:
        named |= dict(key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        y, _ = self.encoder_attn(x, **named)
        x, _ = normalized_sum(self, self.encoder_attn_layer_norm, x, y, _p(self))
    return normalized_sum(self, self.final_layer_norm, x, _fc1_fc2(self, x), _p(self))[0]


@_replaces("d89aedea45e7")  # WhisperDecoderLayer
def _whisper_decoder(self, hidden_states, attention_mask=None, encoder_hidden_states=None,
                     encoder_attention_mask=None, past_key_values=None, use_cache=True,
                     **kwargs):  # fmt: skip
    named = dict(past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
    x, _ = _attend(self, self.self_attn, self.self_attn_layer_norm(hidden_states), named)
    total = hidden_states
    if encoder_hidden_states is not None:
        x, total = normalized_sum(self, self.encoder_attn_layer_norm, total, x, _p(self))
        named |= dict(key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        x, _ = _attend(self, self.encoder_attn, x, named)
    x, total = normalized_sum(self, self.final_layer_norm, total, x, _p(self))
    return total + F.dropout(_fc1_fc2(self, x), self.dropout, self.training)


@_replaces("26eac2539db3")  # MBartDecoderLayer, M2M100DecoderLayer (NLLB)
def _mbart_decoder(self, *args, **kwargs):
    return _whisper_decoder(self, *args, **kwargs)


def _attend(layer, attention, x, named):
    """Call the attention of a decoder; MBart's layers name its first argument."""
    if _is(layer, _mbart_decoder):
        return attention(hidden_states=x, **named)
    return attention(x, **named)


@_replaces("5e9498b6ae78")  # OPTDecoderLayer
def _opt(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False,
         position_ids=None, **kwargs):  # fmt: skip
    first, shape = self.do_layer_norm_before, hidden_states.shape  # True in all sizes but one
    named = dict(past_key_values=past_key_values, position_ids=position_ids, **kwargs)
    x = self.self_attn_layer_norm(hidden_states) if first else hidden_states
    x, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, **named)
    if first:
        rows = hidden_states.reshape(-1, shape[-1]), x.reshape(-1, shape[-1])
        x, total = normalized_sum(self, self.final_layer_norm, *rows, _p(self))
    else:
        x, _ = normalized_sum(self, self.self_attn_layer_norm, hidden_states, x, _p(self))
        x = total = x.reshape(-1, shape[-1])
    x = _feed_forward(self, x, self.fc1, self.activation_fn, 0.0, self.fc2)
    x = (total + F.dropout(x, self.dropout, self.training)).view(shape)
    return x if first else self.final_layer_norm(x)


def _is(module, function):
    return function in vars(type(module)).get("_replaced", ())


def _p(layer):
    return layer.dropout if layer.training else 0.0


def _fc1_fc2(layer, x):
    p = layer.activation_dropout if layer.training else 0.0
    return _feed_forward(layer, x, layer.fc1, layer.activation_fn, p, layer.fc2)


def _feed_forward(layer, x, first, activation, p, last):
    out = feed_forward(layer, x, first, activation, p, last)
    return last(F.dropout(activation(first(x)), p)) if out is None else out


def _clamped(x):
    limit = torch.finfo(x.dtype).max - 1000
    return torch.clamp(x, min=-limit, max=limit)


# ----------------------------------------------------------------------- what accelerate asks


def digest(method: FunctionType) -> str | None:
    """Return a digest of the source of a method without its comments, annotations and decorators,
    or None if it cannot be read. If another function wraps the method, its source counts.
    """
    while method.__code__.co_name == "forward_with_checkpointing":  # transformers wraps layers so
        method = method.__wrapped__  # type: ignore[attr-defined]
    return _digest(method.__code__)


@functools.cache
def _digest(code: CodeType) -> str | None:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    for node in ast.walk(definition.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    body = definition.body[ast.get_docstring(definition) is not None :]
    text = " ".join(map(ast.dump, (definition.args, *body)))
    text = re.sub(r"(, )?\w+=(\[\]|Load\(\))", "", text)  # what newer versions of Python omit
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class FusedMethods(AnySignature):
    """A layer of transformers, some of whose methods run on the ops."""

    _read = _NAMES
    _replaced: ClassVar[tuple[Method, ...]] = ()  # the functions that replace them

    @classmethod
    def _members_for(cls, original: type[nn.Module]) -> dict[str, Any]:
        found = known_methods(original)
        members: dict[str, Any] = {name: _like(*both) for name, both in found.items()}
        return {**members, "_replaced": tuple(function for _, function in found.values())}


def _like(method: FunctionType, function: Method) -> Method:
    """Return the function with the signature of the method, which runs where that cannot."""

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not _torch_is_faster(*args, *named.values()):
            result = function(self, *args, **named)
            if result is not NotImplemented:
                return result
        return method(self, *args, **named)

    return run


def _torch_is_faster(x: Any = None, *others: Any) -> bool:
    """Return whether the method itself is to run: under "auto" on a CPU it computes the same, and
    makes fewer calls than the ops.
    """
    return (
        type(x) is Tensor
        and x.is_cpu
        and not (torch.compiler.is_compiling() or is_transformed())
        and unwatched_backend() == "auto"
    )


def _from_parts(names: list[str], self: nn.Module, *given: Any, **named: Any) -> Any:
    """Compute a method of `_FEED_FORWARDS`."""
    (x,) = (*given, *named.values())
    *parts, outer = _parts(self, names)
    out = feed_forward(self, x, *parts)
    if out is None:
        return NotImplemented
    return out if names[-1] == "-" else outer(out)


for _key, _attributes in _FEED_FORWARDS.items():
    _METHODS[_key] = functools.partial(_from_parts, _attributes.split())


def _parts(module: nn.Module, names: list[str]) -> list[Any]:
    return [0.0 if name == "-" else getattr(module, name) for name in names]


def known_methods(original: type[nn.Module]) -> dict[str, tuple[FunctionType, Method]]:
    """Return, by name, the methods of a class that are known, and what replaces them."""
    found: dict[str, tuple[FunctionType, Method]] = {}
    for name in _NAMES:
        method = inspect.getattr_static(original, name, None)
        module = getattr(method, "__module__", None) or ""
        if not isinstance(method, FunctionType) or not module.startswith("transformers."):
            continue
        key = digest(method)
        if key in _METHODS:
            found[name] = method, _METHODS[key]
    return found


def unfit_parts(module: nn.Module) -> str | None:
    """Return why the ops cannot compute a known feed-forward layer of the module, or None."""
    for _, function in known_methods(type(module)).values():
        if isinstance(function, functools.partial):
            return unfit(*_parts(module, function.args[0])[:-1])
    return None


def unknown_layer(module: nn.Module) -> str | None:
    """Return that a layer of transformers keeps its forward, if it has a norm after a sum: one of
    two norms or more.
    """
    layer = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
    norms = sum("Norm" in type(x).__name__ for x in module.children())
    return UNKNOWN if layer and norms > 1 else None


UNKNOWN = "its forward is none that accelerate knows: its residual sums and norms stay apart"
