"""The standard Transformer: encoder, decoder, generator, and `make_model`, which builds it all.

    src [B, S] -> src_embed -> encoder -> memory [B, S, d]
    tgt [B, T] -> tgt_embed -> decoder(memory) -> [B, T, d] -> generator -> [B, T, tgt_vocab]

`make_decoder` builds a language model, whose decoder is an encoder with causal layers:

    tokens [B, T] -> embed -> decoder -> [B, T, d] -> generator -> [B, T, vocab]

Shapes: B batch, S source length, T target length, d d_model.

Source: Vaswani et al. 2017, "Attention Is All You Need", section 3; the modules have the names
of harvardnlp/annotated-transformer, so that its state dicts load.
"""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fastformer import checks
from fastformer.cache.decoder import DecoderCache
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.base import AliasedModule, make_dropout, require_linear_input
from fastformer.nn.embeddings import (
    Embeddings,
    PositionalEncoding,
    RotaryEmbedding,
    require_longest,
)
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.padding import AnyMask, Packing, require_tokens
from fastformer.nn.seeds import Seeds, runs_forward_of
from fastformer.nn.stacks import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    require_cache,
    require_packings,
)
from fastformer.nn.stream import dropout_probability, is_unmodified
from fastformer.ops import functional

POSITIONS = ("sinusoidal", "rotary")
LEFT_OUT: Any = ...  # not None, which is given for no mask
Model = TypeVar("Model", bound=nn.Module)


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    *,
    norm_first: bool = True,
    activation: str = "relu",
    norm: str = "layer",
    kv_heads: int | None = None,
    learned_positions: bool = False,
    max_len: int = 5000,
    padding_idx: int | None = None,
    tie_generator: bool = False,
    tie_source: bool = False,
) -> EncoderDecoder:
    """Build the Transformer, and initialise its two-dimensional weights with xavier_uniform_.

    Args:
        src_vocab, tgt_vocab: numbers of tokens.
        N: layers of the encoder; the decoder has as many.
        d_model: features; a multiple of h.
        d_ff: hidden features of the feed-forward.
        h: attention heads.
        dropout: probability of every dropout, including that of the attention weights.
        norm_first: True for pre-norm, x + sublayer(norm(x)), with a norm after the last layer;
            False for post-norm, as in the paper: norm(x + sublayer(x)), without a further norm,
            because the last layer ends with one.
        activation: of the feed-forward: "relu", "gelu", "gelu_tanh", "silu", "sigmoid",
            "relu2", "geglu" or "swiglu".
        norm: "layer" or "rms".
        kv_heads: heads of keys and values, a divisor of h; h by default.
        learned_positions: if True, the positions are parameters that start as the sinusoid.
        max_len: the number of positions.
        padding_idx: the padding token of both vocabularies: its embedding starts as zero, and the
            lookup gives it no gradient (a generator that shares the weight does).
        tie_generator: if True, the target's embedding and the generator share one weight.
        tie_source: if True, the embeddings of source and target share one weight.

    Raises:
        ValueError: a size is below 1 (N below 0), h does not divide d_model, kv_heads does not
            divide h, dropout is outside [0, 1], an activation or a norm is unknown, padding_idx is
            outside a vocabulary, tie_source is True and the vocabularies differ in size.
        TypeError: a size is not an int, a flag not a bool.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3 and table 3 (base);
    initialisation: Glorot and Bengio 2010, "Understanding the Difficulty of Training Deep
    Feedforward Neural Networks", equation 16; norm_first: Xiong et al. 2020, "On Layer
    Normalization in the Transformer Architecture"; shared weights: Press and Wolf 2017, "Using the
    Output Embedding to Improve Language Models".
    """
    made = "make_model", dict(locals())
    checks.require_size(src_vocab=src_vocab, tgt_vocab=tgt_vocab)
    checks.require_size(0, N=N)
    if checks.require_flag("tie_source", tie_source) and src_vocab != tgt_vocab:
        raise ValueError(
            f"tie_source is True with src_vocab {src_vocab} and tgt_vocab {tgt_vocab}; "
            "expected one size of vocabulary"
        )
    attn = MultiHeadedAttention(h, d_model, dropout, kv_heads)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout, activation)
    position = PositionalEncoding(d_model, dropout, max_len, learned_positions)
    c = copy.deepcopy
    last = norm if norm_first else None
    encoder_layer = EncoderLayer(d_model, c(attn), c(ff), dropout, norm_first, norm)
    decoder_layer = DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout, norm_first, norm)
    encoder, decoder = Encoder(encoder_layer, N, last), Decoder(decoder_layer, N, last)
    source = Embeddings(d_model, src_vocab, padding_idx)
    target = Embeddings(d_model, tgt_vocab, padding_idx)
    generator = Generator(d_model, tgt_vocab)
    if tie_source:
        source.lut.weight = target.lut.weight
    if checks.require_flag("tie_generator", tie_generator):
        generator.proj.weight = target.lut.weight
    src_embed, tgt_embed = (nn.Sequential(x, c(position)) for x in (source, target))
    return _initialised(EncoderDecoder(encoder, decoder, src_embed, tgt_embed, generator), made)


def make_decoder(
    vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    *,
    norm_first: bool = True,
    activation: str = "relu",
    norm: str = "layer",
    kv_heads: int | None = None,
    learned_positions: bool = False,
    max_len: int = 5000,
    padding_idx: int | None = None,
    tie_generator: bool = False,
    positions: str = "sinusoidal",
    rope_theta: float | None = None,
    qk_norm: bool = False,
) -> LanguageModel:
    """Build a decoder-only language model, initialised as in `make_model`.

    Its layers are encoder layers, of causal self-attention and feed-forward: a token attends to
    itself and earlier tokens.

    Args:
        vocab: number of tokens.
        N: layers.
        d_model, d_ff, h, dropout, norm_first, activation, norm: as in `make_model`.
        kv_heads, learned_positions, max_len, padding_idx, tie_generator: as in `make_model`.
        positions: "sinusoidal", which are added to the embeddings, or "rotary", which rotate the
            queries and keys of each layer.
        rope_theta: the base of rotary positions; None for the default of `RotaryEmbedding`.
        qk_norm: if True, queries and keys have an RMSNorm of each head before the rotation.

    Raises ValueError and TypeError as `make_model` does; ValueError for positions="rotary" with an
    odd head dim or learned_positions=True, and for a rope_theta without rotary positions.

    Source: Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", section 4.2.3;
    rotary: Su et al. 2021, "RoFormer"; qk_norm: Qwen Team 2025, "Qwen3 Technical Report",
    section 2.
    """
    made = "make_decoder", dict(locals())
    checks.require_size(vocab=vocab)
    checks.require_size(0, N=N)
    attn = MultiHeadedAttention(h, d_model, dropout, kv_heads, qk_norm=qk_norm)
    rotary = _rotary(positions, attn.d_k, max_len, rope_theta, learned_positions)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout, activation)
    layer = EncoderLayer(d_model, attn, ff, dropout, norm_first, norm, is_causal=True)
    decoder = Encoder(layer, N, norm if norm_first else None, rotary)
    tokens, generator = Embeddings(d_model, vocab, padding_idx), Generator(d_model, vocab)
    if checks.require_flag("tie_generator", tie_generator):
        generator.proj.weight = tokens.lut.weight
    last: nn.Module = make_dropout(dropout)
    if rotary is None:
        last = PositionalEncoding(d_model, dropout, max_len, learned_positions)
    return _initialised(LanguageModel(nn.Sequential(tokens, last), decoder, generator), made)


def _rotary(
    positions: str, dim: int, max_len: int, theta: float | None, learned: bool
) -> RotaryEmbedding | None:
    """Return the rotary positions of heads of `dim` features, or None for sinusoidal ones."""
    if checks.require_choice("positions", positions, POSITIONS) == "sinusoidal":
        if theta is not None:
            raise ValueError(
                f"rope_theta is {theta} with positions 'sinusoidal', which have no base; expected "
                "None, or positions 'rotary'"
            )
        return None
    if checks.require_flag("learned_positions", learned):
        raise ValueError("learned_positions is True with positions 'rotary'; expected False")
    if dim % 2:
        raise ValueError(f"d_model / h is {dim} with positions 'rotary'; expected an even number")
    if theta is None:
        return RotaryEmbedding(dim, max_len)
    return RotaryEmbedding(dim, max_len, checks.require_positive("rope_theta", theta))


def _initialised(model: Model, made: tuple[str, dict[str, Any]]) -> Model:
    """Initialise two-dimensional weights with xavier_uniform_ and the rows of padding with zeros.
    Learned positions have three dimensions, [1, max_len, d], and keep the sinusoid. made: the name
    of the function that has made the model, and its arguments, for save_model.
    """
    model._made = made  # type: ignore[assignment]
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.xavier_uniform_(p)
    for module in model.modules():
        if isinstance(module, Embeddings) and module.lut.padding_idx is not None:
            with torch.no_grad():
                module.lut.weight[module.lut.padding_idx] = 0
    return model


class EncoderDecoder(nn.Module):
    """An encoder and a decoder with their embeddings, and a generator that the user calls.

    forward(src, tgt, src_mask, tgt_mask): token ids src [B, S] and tgt [B, T], masks as in
    DecoderLayer -> [B, T, d_model], the input of `generator`. For a packed batch src and tgt are
    [tokens] and the masks their `Packing`s -> [tokens, d_model].

    Raises ValueError and TypeError as its modules do, TypeError if one of the four is left out.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Module,
        tgt_embed: nn.Module,
        generator: Generator,
    ) -> None:
        super().__init__()
        embeds: dict[str, Any] = dict(src_embed=src_embed, tgt_embed=tgt_embed)
        checks.require_callable(encoder=encoder, decoder=decoder, **embeds, generator=generator)
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def forward(
        self,
        src: Tensor,
        tgt: Tensor = LEFT_OUT,
        src_mask: AnyMask = LEFT_OUT,
        tgt_mask: AnyMask = LEFT_OUT,
    ) -> Tensor:
        if tgt is LEFT_OUT or src_mask is LEFT_OUT or tgt_mask is LEFT_OUT:
            expected = "src, tgt, src_mask and tgt_mask; to generate without tgt, greedy_decode"
            raise TypeError(f"tgt or a mask is left out; expected {expected}")
        require_packings(src_mask, tgt_mask)
        first: dict[str, Any] = {}  # a subclass may have methods of its own, which take no seeds
        second: dict[str, Any] = {}
        if (type(self).encode, type(self).decode) == (EncoderDecoder.encode, EncoderDecoder.decode):
            sites = _sites(self.encoder)
            seeds = Seeds(sites + _sites(self.decoder))
            first, second = {"_seeds": seeds}, {"_seeds": seeds.after(sites)}
        memory = self.encode(src, src_mask, **first)
        return self.decode(memory, src_mask, tgt, tgt_mask, **second)

    def encode(self, src: Tensor, src_mask: AnyMask, *, _seeds: Seeds | None = None) -> Tensor:
        """Return the memory [B, S, d_model] of src [B, S], [tokens, d_model] of a packed batch."""
        checks.require_tensor("src", src)
        seeds = _seeds or Seeds(_sites(self.encoder))
        x = _embedded(self.src_embed, "src", src, src_mask, seeds=seeds)
        return self.encoder(x, src_mask, **_after_embedding(self.encoder, seeds))

    def decode(
        self,
        memory: Tensor | None,
        src_mask: AnyMask,
        tgt: Tensor,
        tgt_mask: AnyMask,
        cache: DecoderCache | None = None,
        *,
        _seeds: Seeds | None = None,
    ) -> Tensor:
        """Return the decoder's output [B, T, d_model] for memory [B, S, d_model] and tgt [B, T], or
        [tokens, d_model] of a packed batch.

        With a cache, tgt holds the tokens that follow those in the cache, and self-attention is
        causal: tgt_mask, whose last dimension counts both, may be None. The keys and values of the
        memory are computed once: later steps pass the same memory again, or None.
        """
        checks.require_tensor("tgt", tgt)
        require_cache(cache)
        seeds = _seeds or Seeds(_sites(self.decoder))
        x = _embedded(self.tgt_embed, "tgt", tgt, tgt_mask, cache, seeds=seeds)
        own = _after_embedding(self.decoder, seeds)
        return self.decoder(x, memory, src_mask, tgt_mask, cache, **own)


class LanguageModel(nn.Module):
    """An embedding and a stack of causal layers, and a generator that the user calls.

    Args:
        embed: token ids [B, T] -> [B, T, d_model].
        decoder: a stack of causal layers, such as an `Encoder` of them.
        generator: [.., d_model] -> log-probabilities [.., vocab].

    forward(tokens, mask=None, cache=None): tokens [B, T], mask [B, 1, T], [B, T, T], [1, T, T] or
    None -> [B, T, d_model], the input of `generator`. With a `DecoderCache` the tokens follow those
    in the cache, and the last dimension of the mask counts both. For a packed batch tokens is
    [tokens] and mask its `Packing` -> [tokens, d_model].

    Raises ValueError and TypeError as its modules do.
    """

    def __init__(self, embed: nn.Module, decoder: Encoder, generator: Generator) -> None:
        super().__init__()
        checks.require_callable(embed=embed, decoder=decoder, generator=generator)
        self.embed = embed
        self.decoder = decoder
        self.generator = generator

    def forward(
        self, tokens: Tensor, mask: AnyMask = None, cache: DecoderCache | None = None
    ) -> Tensor:
        checks.require_tensor("tokens", tokens)
        require_cache(cache)
        seeds = Seeds(_sites(self.decoder))
        x = _embedded(self.embed, "tokens", tokens, mask, cache, seeds=seeds)
        return self.decoder(x, mask, cache, **_after_embedding(self.decoder, seeds))


def _sites(stack: nn.Module) -> int:
    """Return how many dropout seeds a stack takes, and the embedding before it."""
    return 1 + getattr(stack, "_sites", 0)


def _after_embedding(stack: nn.Module, seeds: Seeds) -> dict[str, Any]:
    """Return the seeds of a stack as keyword argument, if it takes them."""
    return {"_seeds": seeds.after(1)} if runs_forward_of(stack, Encoder, Decoder) else {}


def _embedded(
    embed: nn.Module,
    name: str,
    tokens: Tensor,
    mask: AnyMask,
    cache: DecoderCache | None = None,
    *,
    seeds: Seeds,
) -> Tensor:
    """Return embed(tokens) for tokens [B, S] after those in the cache, or for the [tokens] of a
    packed batch at their positions, whose `Packing` is the mask.
    """
    if not isinstance(mask, Packing):
        if tokens.dim() < 2:
            raise checks.wrong_shape(name, tokens, "[B, S], or a Packing as its mask")
        held, start = (0, None) if cache is None else (cache.longest, cache.start())
        return _embedded_from(embed, tokens, start, held, seeds)
    if cache is not None:
        raise ValueError("cache is given together with a Packing; expected None")
    require_tokens(name, tokens, mask)
    if tokens.dim() != 1:
        raise checks.wrong_shape(name, tokens, "[tokens], as it is packed")
    for part in embed.children():
        if isinstance(part, PositionalEncoding):
            require_longest(name, mask, part.pe.shape[1])
    rows = tokens.unsqueeze(1)  # of one token, which begin at their positions
    longest = max(0, mask.length - 1)
    return _embedded_from(embed, rows, mask.positions, longest, seeds).squeeze(1)


def _embedded_from(
    embed: nn.Module, tokens: Tensor, start: int | Tensor | None, held: int, seeds: Seeds
) -> Tensor:
    """Return embed(tokens) for tokens [B, S] that begin at the positions `start`, at most `held`,
    by one kernel if it can. seeds: those of the model, from the embedding's on.
    """
    parts: list[Any] = list(embed) if type(embed) is nn.Sequential else []
    rotary = _is_without_positions(embed)
    if not rotary and [type(part) for part in parts] != [Embeddings, PositionalEncoding]:
        return _embedded_by_parts(embed, tokens, start)
    embeddings, position = parts
    lut, dropout = embeddings.lut, position if rotary else position.dropout
    plain = type(lut) is nn.Embedding and lut.max_norm is None and not lut.scale_grad_by_freq
    plain = plain and not lut.sparse and type(dropout) is nn.Dropout
    # Else it raises.
    fits = rotary or (tokens.dim() == 2 and held + tokens.shape[1] <= position.pe.shape[1])
    if not (fits and plain and is_unmodified(embed, embeddings, position, lut, dropout)):
        return _embedded_by_parts(embed, tokens, start)
    pe, shape = None if rotary else position.pe[0], tokens.shape
    if start is not None and not rotary:
        rows = position.rows("tokens", tokens, start)
        pe = rows.flatten(0, 1)
        if len(rows) != 1:  # each row has its own positions: make it one long row
            tokens = tokens.reshape(1, -1)
    p = dropout_probability(dropout)
    out = functional.embed(
        tokens,
        lut.weight,
        None if pe is None else pe.to(lut.weight.dtype),
        p,
        dropout_seed=seeds.of(0, lut.weight.device) if p else None,
        scale=math.sqrt(embeddings.d_model),
        padding_idx=lut.padding_idx,
    )
    return out if tokens.shape == shape else out.view(*shape, embeddings.d_model)


def has_positions(embed: nn.Module) -> bool:
    """Return whether `embed` can start at a later position than 0, as with a cache."""
    return _is_without_positions(embed) or (
        type(embed) is nn.Sequential
        and len(embed) > 0
        and type(embed[-1]) is PositionalEncoding
        and is_unmodified(embed, embed[-1])
    )


def _is_without_positions(embed: nn.Module) -> bool:
    """Return whether `embed` has embeddings and dropout alone, as a model with rotary positions."""
    kinds = [type(part) for part in embed] if type(embed) is nn.Sequential else []
    return kinds == [Embeddings, nn.Dropout]


def _embedded_by_parts(embed: nn.Module, tokens: Tensor, start: int | Tensor | None) -> Tensor:
    """Return embed(tokens), module by module, for tokens [B, S] that begin at positions `start`."""
    if start is None or _is_without_positions(embed):
        return embed(tokens)
    if not isinstance(embed, nn.Sequential) or not has_positions(embed):
        raise TypeError(
            f"the embedding is a {type(embed).__name__}; expected an nn.Sequential that ends in a "
            "PositionalEncoding, which takes the positions after a cache, or of a packed batch"
        )
    x = tokens
    for part in list(embed)[:-1]:
        x = part(x)
    return embed[-1](x, start)


class Generator(AliasedModule):
    """log_softmax(proj(x)).

    forward(x): x [..., d_model] -> log-probabilities [..., vocab].

    Raises ValueError if x has another width or device than the parameters, TypeError if it has
    another dtype.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.4.
    """

    spellings: ClassVar[dict[str, str]] = {"project": "proj", "projection": "proj"}

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        d_model, vocab = checks.require_size(d_model=d_model, vocab=vocab)
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        require_linear_input("x", x, self.proj)
        return self.proj(x).log_softmax(-1)


def subsequent_mask(size: int) -> Tensor:
    """Return the causal mask, boolean [1, size, size]: True where query i sees key j, j <= i.

    Raises ValueError if size is negative, TypeError if it is not an int.
    """
    [size] = checks.require_size(0, size=size)
    return torch.ones(1, size, size, dtype=torch.bool).tril()
