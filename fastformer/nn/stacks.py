"""The layers of the encoder and the decoder, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor, nn

from fastformer.cache.decoder import DecoderCache, LayerCache
from fastformer.checks import require_callable, require_flag, require_instance, require_size
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.base import clones
from fastformer.nn.embeddings import RotaryEmbedding
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.norms import SublayerConnection, make_norm, require_norm_input
from fastformer.nn.padding import AnyMask, Packing
from fastformer.nn.seeds import Seeds, runs_forward_of
from fastformer.nn.stream import Pair, ResidualStream, fuses_sum, is_unmodified


class _Stack(nn.Module):
    """What an encoder and a decoder share."""

    def __init__(self, layer: nn.Module, N: int, norm: str | None = "layer") -> None:
        super().__init__()
        size = getattr(layer, "size", None)
        if not isinstance(layer, nn.Module) or not isinstance(size, int):
            kind = type(layer).__name__
            raise TypeError(f"layer is a {kind}; expected a module whose `size` is its features")
        self.layers = clones(layer, N)
        self.norm = nn.Identity() if norm is None else make_norm(norm, size)

    @property
    def _sites(self) -> int:
        """How many seeds the layers take."""
        return sum(getattr(layer, "_sites", 0) for layer in self.layers)

    def _run(
        self,
        kind: type[EncoderLayer] | type[DecoderLayer],
        x: Tensor,
        *context: Any,
        seeds: Seeds | None,
        cache: DecoderCache | None,
        **options: Any,
    ) -> Tensor:
        """Return norm(layer_N(..layer_1(x)..)) for x [B, S, d] or [tokens, d].

        The layers share one residual stream, so that the last sum of a layer and the norm that
        follows are one kernel. context: the other arguments of a layer's forward; with a cache, the
        `LayerCache` of the layer follows them. options: its keyword arguments. seeds: those of the
        model, from this stack on; None for a stack that runs alone.
        """
        stream = ResidualStream(x, Seeds(self._sites) if seeds is None else seeds)
        for i, layer in enumerate(self.layers):
            own = () if cache is None else (cache.layer(i),)
            followed = i + 1 < len(self.layers) or fuses_sum(self.norm)
            stream.ends_at = None if followed else getattr(layer, "_sites", 0) - 1
            if type(layer) is kind and is_unmodified(layer):
                layer._through(stream, *context, *own, **options)
            else:  # the layer is of another class or has hooks
                given = {"_seeds": stream.seeds} if runs_forward_of(layer, kind) else {}
                y = layer(stream.value(), *context, *own, **options, **given)
                stream = ResidualStream(y, stream.seeds)
            stream.seeds = stream.seeds.after(getattr(layer, "_sites", 0))
        return stream.normalize(self.norm)


class Encoder(_Stack):
    """N deep copies of a layer, one after the other, then a norm on `layer.size` features.

    Args:
        layer: a module with a `size`, such as an EncoderLayer.
        N: the number of copies.
        norm: "layer", a LayerNorm, "rms", an RMSNorm, or None for no norm after the last layer, as
            in post-norm.
        rotary: a `RotaryEmbedding`, whose cos and sin of the positions all layers get, or None.

    forward(x, mask, cache=None): as in EncoderLayer, but cache is a `DecoderCache`. Raises
    ValueError if N is negative or the norm unknown, TypeError if `layer` is not a module with a
    `size`, or rotary is no `RotaryEmbedding`.
    """

    def __init__(
        self,
        layer: nn.Module,
        N: int,
        norm: str | None = "layer",
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        super().__init__(layer, N, norm)
        kinds = RotaryEmbedding, NoneType
        require_instance("rotary", rotary, kinds, "a RotaryEmbedding or None")
        self.rotary = rotary
        self.register_load_state_dict_post_hook(_place_table)

    def forward(
        self,
        x: Tensor,
        mask: AnyMask,
        cache: DecoderCache | None = None,
        *,
        _seeds: Seeds | None = None,
    ) -> Tensor:
        require_norm_input("x", x, self.norm)
        require_cache(cache)
        options: dict[str, Any] = {}
        if self.rotary is not None:
            start = 0 if cache is None else cache.start()
            options["rotary"] = self.rotary(x, mask if isinstance(mask, Packing) else start)
        return self._run(EncoderLayer, x, mask, seeds=_seeds, cache=cache, **options)


def _place_table(stack: Encoder, _: object) -> None:
    """Compute the table of positions where the weights are, which load_state_dict(assign=True) may
    have replaced by those of another device: a model that is built on meta has no other table.
    """
    weight = next(stack.parameters(), None)
    if stack.rotary is None or weight is None or stack.rotary.table.device == weight.device:
        return
    stack.rotary.to_empty(device=weight.device).to(weight.dtype)


class Decoder(_Stack):
    """N deep copies of a layer, one after the other, then a norm on `layer.size` features.

    Args:
        layer: a module with a `size`, such as a DecoderLayer.
        N, norm: as in `Encoder`.

    forward(x, memory, src_mask, tgt_mask, cache=None): as in DecoderLayer, but cache is a
    `DecoderCache`. Raises ValueError if N is negative or the norm unknown, TypeError if `layer` is
    not a module with a `size`.
    """

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        src_mask: AnyMask,
        tgt_mask: AnyMask,
        cache: DecoderCache | None = None,
        *,
        _seeds: Seeds | None = None,
    ) -> Tensor:
        require_norm_input("x", x, self.norm)
        require_packings(src_mask, tgt_mask)
        if memory is not None or cache is None:
            require_norm_input("memory", memory, self.norm)
        require_cache(cache)
        return self._run(DecoderLayer, x, memory, src_mask, tgt_mask, seeds=_seeds, cache=cache)


def require_cache(cache: object, kind: type = DecoderCache) -> None:
    require_instance("cache", cache, (kind, NoneType), f"a {kind.__name__} or None")


def require_packings(src_mask: AnyMask, tgt_mask: AnyMask) -> None:
    given = dict(src_mask=src_mask, tgt_mask=tgt_mask)
    packed = [name for name, x in given.items() if isinstance(x, Packing)]
    if len(packed) == 1:
        (other,) = given.keys() - packed
        kind = type(given[other]).__name__
        raise TypeError(f"{other} is a {kind}; expected a Packing, as {packed[0]} is one")


class EncoderLayer(nn.Module):
    """Self-attention and the feed-forward, each in a SublayerConnection.

    Args:
        size: features, d_model.
        self_attn: a module that is called with (query, key, value, mask).
        feed_forward: a module that is called with x.
        dropout: probability that an element of a sublayer's output is dropped, in training.
        norm_first, norm: as in `SublayerConnection`.
        is_causal: if True, a token attends to itself and earlier tokens, and the mask can hide
            more; self_attn is then called with is_causal=True as well.

    forward(x, mask): x [B, S, size]; mask [B, 1, S], [B, S, S], [1, S, S], a `BlockMask` or None
    -> [B, S, size]. For a packed batch x is [tokens, size] and mask its `Packing`.

    forward(.., rotary=(cos, sin)): self_attn is called with `rotary`, too.

    forward(x, mask, cache), if is_causal: x holds the tokens that follow those in the `LayerCache`,
    and the last dimension of the mask counts both.

    Raises ValueError and TypeError as `MultiHeadedAttention` and `layer_norm` do.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.1.
    """

    _sites = 4  # of dropout: the weights, the hidden elements, and two sublayers' outputs

    def __init__(
        self,
        size: int,
        self_attn: nn.Module,
        feed_forward: nn.Module,
        dropout: float,
        norm_first: bool = True,
        norm: str = "layer",
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        require_callable(self_attn=self_attn, feed_forward=feed_forward)
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first, norm), 2)
        [self.size] = require_size(size=size)
        self.is_causal = require_flag("is_causal", is_causal)

    def forward(
        self,
        x: Tensor,
        mask: AnyMask,
        cache: LayerCache | None = None,
        rotary: Pair | None = None,
        *,
        _seeds: Seeds | None = None,
    ) -> Tensor:
        require_cache(cache, LayerCache)
        require_norm_input("x", x, getattr(self.sublayer[0], "norm", None))
        stream = ResidualStream(x, _seeds or Seeds(self._sites), self._sites - 1)
        self._through(stream, mask, cache, rotary)
        return stream.value()

    def _through(
        self,
        stream: ResidualStream,
        mask: AnyMask,
        cache: LayerCache | None = None,
        rotary: Pair | None = None,
    ) -> None:
        connections = list(self.sublayer)
        options: dict[str, Any] = {"is_causal": True} if self.is_causal else {}
        if cache is not None:
            if not self.is_causal:
                raise ValueError("cache is given to a layer with is_causal=False; expected None")
            options["cache"] = cache
        options |= _seed(stream, self.self_attn, 0, cache)
        if rotary is not None:
            options["rotary"] = rotary
        seed = _seed(stream, self.feed_forward, 2)
        _add(stream, connections[0], lambda x: self.self_attn(x, x, x, mask, **options), 1)
        _add(stream, connections[1], lambda x: self.feed_forward(x, **seed), 3)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory and the feed-forward, each in a SublayerConnection.

    Args:
        self_attn, src_attn: modules that are called with (query, key, value, mask).
        size, feed_forward, dropout, norm_first, norm: as in `EncoderLayer`.

    forward(x, memory, src_mask, tgt_mask): x [B, T, size]; memory [B, S, size]; src_mask [B, 1, S],
    [B, T, S], [1, T, S] or None; tgt_mask [B, T, T], [1, T, T], [B, 1, T] or None -> [B, T, size].

    forward(.., cache): with a `LayerCache`, x holds the tokens that follow those in the cache.
    Self-attention is then causal, over the cached tokens and x, and the last dimension of tgt_mask
    counts both; None masks nothing else out. Later steps pass the memory of the first step again,
    or None.

    For a packed batch x is [target tokens, size], memory [source tokens, size], and the masks are
    their `Packing`s. Self-attention is then causal: self_attn is called with is_causal=True, and
    src_attn with query_packing=tgt_mask.

    Raises ValueError and TypeError as `MultiHeadedAttention` and `layer_norm` do.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.1.
    """

    _sites = 6

    def __init__(
        self,
        size: int,
        self_attn: nn.Module,
        src_attn: nn.Module,
        feed_forward: nn.Module,
        dropout: float,
        norm_first: bool = True,
        norm: str = "layer",
    ) -> None:
        super().__init__()
        require_callable(self_attn=self_attn, src_attn=src_attn, feed_forward=feed_forward)
        [self.size] = require_size(size=size)
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first, norm), 3)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        src_mask: AnyMask,
        tgt_mask: AnyMask,
        cache: LayerCache | None = None,
        *,
        _seeds: Seeds | None = None,
    ) -> Tensor:
        require_cache(cache, LayerCache)
        require_packings(src_mask, tgt_mask)
        require_norm_input("x", x, getattr(self.sublayer[0], "norm", None))
        if memory is not None or cache is None:
            require_norm_input("memory", memory, getattr(self.sublayer[0], "norm", None))
        stream = ResidualStream(x, _seeds or Seeds(self._sites), self._sites - 1)
        self._through(stream, memory, src_mask, tgt_mask, cache)
        return stream.value()

    def _through(
        self,
        stream: ResidualStream,
        memory: Tensor | None,
        src_mask: AnyMask,
        tgt_mask: AnyMask,
        cache: LayerCache | None = None,
    ) -> None:
        own: dict[str, Any] = {} if cache is None else {"cache": cache}
        kept: dict[str, Any] = {} if cache is None else {"cache": cache.memory}
        if isinstance(tgt_mask, Packing):
            own, kept = {**own, "is_causal": True}, {**kept, "query_packing": tgt_mask}
        first, second, last, *_ = self.sublayer
        own |= _seed(stream, self.self_attn, 0, cache)
        kept |= _seed(stream, self.src_attn, 2, cache)
        seed = _seed(stream, self.feed_forward, 4)
        _add(stream, first, lambda x: self.self_attn(x, x, x, tgt_mask, **own), 1)
        _add(stream, second, lambda x: self.src_attn(x, memory, memory, src_mask, **kept), 3)
        _add(stream, last, lambda x: self.feed_forward(x, **seed), 5)


def _seed(
    stream: ResidualStream, module: Any, site: int, cache: LayerCache | None = None
) -> dict[str, Any]:
    """Return the seed of a site and the stream as keyword arguments, if the module takes them: no
    seed beside a cache. The stream is left out if the module has hooks, so that these see the
    output with its bias.
    """
    if not runs_forward_of(module, MultiHeadedAttention, PositionwiseFeedForward):
        return {}
    seed = {"dropout_seed": stream.seed(site, module.dropout)} if cache is None else {}
    return seed | {"_stream": stream} if is_unmodified(module) else seed


def _add(
    stream: ResidualStream, connection: nn.Module, sublayer: Callable[[Tensor], Tensor], site: int
) -> None:
    """Apply a SublayerConnection, whose dropout has that site: x = connection(x, sublayer)."""
    if type(connection) is SublayerConnection and is_unmodified(connection):
        order = connection.norm_first
        stream.add_sublayer(sublayer, connection.norm, connection.dropout, order, site)
    else:
        stream.x = connection(stream.value(), sublayer)
