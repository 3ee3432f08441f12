"""From a trained model to sequences: greedy decoding, sampling, and beam search.

All three run one loop over the steps of a model, which give the log-probabilities of the token
after those so far. An `EncoderDecoder` continues a start symbol, given a source; a language model,
as `make_decoder` gives, continues its prompt. The steps read a `DecoderCache`, or compute all
tokens again where a model takes no cache.

Shapes: B sequences, K beams, R rows that the model computes, B or B K; S source length, V tokens.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.backends import current_backend
from fastformer.cache.decoder import DecoderCache
from fastformer.checks import (
    autocast_dtype,
    may_read,
    require_flag,
    require_int,
    require_number,
    require_size,
    require_tensor,
    require_token_ids,
    shape_of,
)
from fastformer.nn.embeddings import Embeddings, PositionalEncoding
from fastformer.nn.stream import is_unmodified
from fastformer.nn.transformer import has_positions, subsequent_mask

__all__ = ["Hypotheses", "beam_search", "greedy_decode", "sample"]

WAIT_EVERY = 16  # steps on a GPU between two looks at whether all rows have ended


@torch.no_grad()
def greedy_decode(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: int | None = None,
    pad_symbol: int | None = None,
    cache: bool | DecoderCache = True,
) -> Tensor:
    """Decode the likeliest next token at each step.

        y_0 = start_symbol, y_t = argmax_v p(v | y_0 .. y_{t-1}, src)

    Gradients are off. The mode of the model does not change: call model.eval() first, or dropout
    applies.

    Args:
        model: what `make_model` gives: encode, decode and generator; or a language model, what
            `make_decoder` gives.
        src: [B, S] token ids; of a language model the prompts.
        src_mask: what the encoder takes, [B, 1, S] as `Batch` makes it; None masks nothing out. Of
            a language model it is True at the tokens of a prompt and False at padding on its right.
        max_len: length of the result, the start symbol or the prompt included, at least 1.
        start_symbol: the first id of every row; None for a language model.
        end_symbol: the id that ends a row; None for none. The loop stops when all rows have ended.
            On a GPU it looks at every 16th step alone, because a look waits for the device.
        pad_symbol: what follows the end of a row; end_symbol by default.
        cache: True keeps the keys and values of each token for the next steps; the step of a token
            then costs the same at any length, but for attention. False computes all tokens again at
            each step, as is done for a model whose modules take no cache. A `DecoderCache` is used
            and keeps its buffers for the next call.

    Returns:
        [B, max_len], in the dtype and on the device of src; an empty batch gives [0, max_len].
        Where prompts differ in length each row gets max_len - S new tokens.

    Raises:
        ValueError: src not [B, S], a max_len less than 1, than the prompt, or beyond the model's
            positions or the capacity of the cache, a symbol that is not in its vocabulary; as the
            model does for ids and masks.
        TypeError: ids that are not integers, a model without encode, decode and generator.

    Source: harvardnlp/annotated-transformer, "Greedy Decoding"; the cache: Shazeer 2019, "Fast
    Transformer Decoding: One Write-Head is All You Need", section 2.4.
    """
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _searched(_Rows(_begin(*given), lambda scores: scores.argmax(-1))).tokens


@torch.no_grad()
def sample(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: int | None = None,
    pad_symbol: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    cache: bool | DecoderCache = True,
) -> Tensor:
    """Draw each next token from what the model gives.

        y_t ~ p(v)^(1 / temperature) / sum, over the tokens that top_k and top_p keep

    Args:
        model, src, src_mask, max_len, start_symbol: as in `greedy_decode`.
        end_symbol, pad_symbol, cache: as there.
        temperature: above 0; below 1 it sharpens the distribution.
        top_k: keeps the k likeliest tokens; None keeps all.
        top_p: keeps the fewest likeliest tokens whose probabilities sum to top_p or more, in
            (0, 1], after temperature and top_k; None keeps all.
        seed: of the draws; None takes them from torch's generator.

    Returns:
        [B, max_len], as `greedy_decode`.

    Raises:
        ValueError: a temperature that is not positive and finite, a top_k below 1, a top_p outside
            (0, 1]; as `greedy_decode`.
        TypeError: one of them of another type; as `greedy_decode`.

    Source: top_k: Fan et al. 2018, "Hierarchical Neural Story Generation", section 5.4; top_p:
    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    draw = _draws(temperature, top_k, top_p, seed)
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _searched(_Rows(_begin(*given), draw)).tokens


class Hypotheses(NamedTuple):
    """The best sequences that `beam_search` has found for each source, the best first.

    Attributes:
        tokens: [B, n_best, max_len], in the dtype of src.
        scores: [B, n_best]: log p(y | src) / ((5 + n) / 6)^alpha, n the number of new tokens; -inf
            where there are fewer sequences than n_best.
        lengths: [B, n_best] int64: tokens of a sequence, prompt and end symbol included.
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


@torch.no_grad()
def beam_search(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: int | None = None,
    pad_symbol: int | None = None,
    beams: int = 4,
    alpha: float = 0.6,
    n_best: int = 1,
    cache: bool | DecoderCache = True,
) -> Hypotheses:
    """Search for the sequences of the largest score, with K beams for each source.

        score(y) = log p(y | src) / ((5 + n) / 6)^alpha, n new tokens

    Each step extends the K likeliest beginnings by all tokens and keeps the K likeliest results
    that have not ended; those that end are hypotheses, of which the K best are kept. The search of
    a source is over when no beginning can reach the score of its n_best-th hypothesis, or at
    max_len, where beginnings that have not ended are hypotheses, too.

    Args:
        model, src, src_mask, max_len, start_symbol: as in `greedy_decode`.
        end_symbol, pad_symbol, cache: as there.
        beams: K.
        alpha: the length penalty, from 0 to 32: 0 is none, a larger one favours longer sequences.
        n_best: sequences that are returned for each source, at most K.

    Returns:
        `Hypotheses`: tokens [B, n_best, max_len], scores and lengths [B, n_best].

    Raises:
        ValueError: beams below 1, n_best outside [1, beams], alpha outside [0, 32]; as
            `greedy_decode`.
        TypeError: one of them of another type; as `greedy_decode`.

    Source: Wu et al. 2016, "Google's Neural Machine Translation System", section 7, equation 14,
    without its coverage penalty.
    """
    require_size(beams=beams, n_best=n_best)
    if n_best > beams:
        raise ValueError(f"n_best is {n_best}; expected at most the beams, {beams}")
    alpha = require_number("alpha", alpha)
    if not 0 <= alpha <= 32:  # beyond, the penalty of a long sequence overflows
        raise ValueError(f"alpha is {alpha}; expected a number from 0 to 32")
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _searched(_Beams(_begin(*given), beams, n_best, alpha)).result()


# ----------------------------------------------------------------------------------------- the loop


class _Search(Protocol):
    """What chooses tokens, given the log-probabilities of each step."""

    steps: _Steps

    def begin(self) -> Tensor:
        """Return the log-probabilities [R, V] after the prompts."""

    def take(self, scores: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Choose the new tokens number i, [R], and the rows that they continue; None: their own."""

    def ended(self) -> Tensor | None:
        """Return whether nothing is left to search, a boolean on the device; None: never."""


Searching = TypeVar("Searching", bound=_Search)


def _searched(search: Searching) -> Searching:
    """Let the search take each token that there is room for, or until it has ended."""
    steps = search.steps
    if not steps.new or not len(steps.prompt):
        return search
    scores = search.begin()
    for i in range(steps.new):
        tokens, rows = search.take(scores, i)
        if i + 1 == steps.new or (_looks(tokens, i) and search.ended()):
            break
        if rows is not None:
            steps.reorder(rows, same_source=True)
        scores = steps.step(tokens)
    return search


def _looks(tokens: Tensor, i: int) -> bool:
    """Say whether the host looks at what step i has computed, which waits for a GPU."""
    return tokens.is_cpu or i % WAIT_EVERY == WAIT_EVERY - 1


class _Rows:
    """One token a row at each step, as `choose` takes it from log-probabilities [B, V].

    tokens: [B, max_len], with the pad symbol past the end of a row.
    """

    def __init__(self, steps: _Steps, choose: Callable[[Tensor], Tensor]) -> None:
        self.steps, self._choose = steps, choose
        self.tokens = steps.begun()
        self._done = torch.zeros(len(self.tokens), dtype=torch.bool, device=self.tokens.device)

    def begin(self) -> Tensor:
        return self.steps.first()

    def take(self, scores: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        chosen = self._choose(scores).to(self.tokens.dtype)
        if self.steps.end is not None:
            chosen = chosen.masked_fill(self._done, self.steps.pad)
            self._done |= chosen == self.steps.end
        _put(self.tokens, self.steps.lengths, i, chosen)
        return chosen, None

    def ended(self) -> Tensor | None:
        return None if self.steps.end is None else self._done.all()


def _put(tokens: Tensor, lengths: int | Tensor, i: int, new: Tensor) -> None:
    """Write the new tokens number i, [B, ..], behind the prompts of `lengths` in [B, .., L]."""
    if isinstance(lengths, int):
        tokens[..., lengths + i] = new
    else:
        at = (lengths + i).view(-1, *[1] * (tokens.dim() - 1)).expand(*tokens.shape[:-1], 1)
        tokens.scatter_(-1, at, new.unsqueeze(-1))


def _draws(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> Callable[[Tensor], Tensor]:
    """Return what draws tokens [B] from log-probabilities [B, V]."""
    temperature = require_number("temperature", temperature)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    if top_k is not None:
        require_size(top_k=top_k)
    if top_p is not None:
        top_p = require_number("top_p", top_p, "a number in (0, 1], or None")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; expected a number in (0, 1]")
    if seed is not None:
        require_int("seed", seed)
    generator = None

    def draw(scores: Tensor) -> Tensor:
        nonlocal generator
        if seed is not None and generator is None:
            generator = torch.Generator(scores.device).manual_seed(seed)
        scores = _precise(scores) / temperature
        if top_k is None and top_p is None:
            return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            scores[..., top_k:] = float("-inf")
        weights = scores.softmax(-1)
        if top_p is not None:
            before = weights.cumsum(-1) - weights
            before[..., 0] = 0.0
            weights = weights.masked_fill(before >= top_p, 0.0)
        drawn = torch.multinomial(weights, 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)

    return draw


def _precise(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


class _Beams:
    """K beginnings of each source, of the largest log-probability, and its best hypotheses.

    tokens: [B, K, max_len] of the beginnings, and scores [B, K] their log-probabilities. best:
    the K best `Hypotheses`.
    """

    def __init__(self, steps: _Steps, beams: int, n_best: int, alpha: float) -> None:
        self.steps, self.beams, self.n_best, self.alpha = steps, beams, n_best, alpha
        self._lengths, begun = steps.lengths, steps.begun()
        batch, device = len(begun), begun.device
        self.tokens = begun.unsqueeze(1).repeat(1, self.beams, 1)
        self._rows = torch.arange(batch, device=device).repeat_interleave(self.beams)
        lengths = torch.as_tensor(self._lengths, device=device).view(-1, 1)
        none = torch.full((batch, self.beams), float("-inf"), device=device)
        self.scores = none.clone()
        self.scores[:, 0] = 0.0  # the beginnings are all the same: one of them counts
        self.best = Hypotheses(self.tokens, none, lengths.expand(batch, self.beams))
        if not steps.new:
            self.best = self.best._replace(scores=self.scores)

    def begin(self) -> Tensor:
        scores = self.steps.first()[self._rows]
        self.steps.reorder(self._rows, same_source=False)
        return scores

    def take(self, scores: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        batch, beams, vocabulary = *self.scores.shape, scores.shape[-1]
        scores = _precise(scores).view(batch, beams, vocabulary)
        totals = (self.scores.unsqueeze(-1) + scores).flatten(1)
        # A beginning ends in one way: K of the 2 K best have not ended.
        totals, at = totals.topk(min(2 * beams, totals.shape[1]), -1)
        origin, chosen = at // vocabulary, (at % vocabulary).to(self.tokens.dtype)
        if self.steps.end is not None:
            ended = chosen == self.steps.end
            tokens = _extended(self.tokens, origin, self._lengths, i, chosen)
            self._offer(tokens, totals.masked_fill(~ended, float("-inf")), i + 1)
            totals = totals.masked_fill(ended, float("-inf"))
        self.scores, kept = totals.topk(beams, -1)
        origin, chosen = origin.gather(1, kept), chosen.gather(1, kept)
        self.tokens = _extended(self.tokens, origin, self._lengths, i, chosen)
        if i + 1 == self.steps.new:
            self._offer(self.tokens, self.scores, i + 1)
        rows = origin + self._rows.view(batch, beams)[:, :1] * beams
        return chosen.flatten(), rows.flatten()

    def ended(self) -> Tensor | None:
        if self.steps.end is None:
            return None
        reachable = self.scores[:, 0] / _length_penalty(self.steps.new, self.alpha)
        return (self.best.scores[:, self.n_best - 1] >= reachable).all()

    def _offer(self, tokens: Tensor, totals: Tensor, new: int) -> None:
        """Keep the K best of the best and of sequences [B, n, L] with `new` tokens after prompts.

        totals: [B, n], their log-probabilities.
        """
        scores = torch.cat([self.best.scores, totals / _length_penalty(new, self.alpha)], 1)
        scores, at = scores.topk(self.beams, -1)
        lengths = torch.as_tensor(self._lengths, device=at.device).view(-1, 1) + new
        lengths = torch.cat([self.best.lengths, lengths.expand_as(totals)], 1).gather(1, at)
        tokens = torch.cat([self.best.tokens, tokens], 1)
        self.best = Hypotheses(_chosen_rows(tokens, at), scores, lengths)

    def result(self) -> Hypotheses:
        return Hypotheses(*(x[:, : self.n_best] for x in self.best))


def _length_penalty(new: int, alpha: float) -> float:
    return ((5 + new) / 6) ** alpha


def _chosen_rows(tokens: Tensor, at: Tensor) -> Tensor:
    """Return row at[b, j] of each tokens[b], [B, J, L]."""
    return tokens.gather(1, at.unsqueeze(-1).expand(*at.shape, tokens.shape[-1]))


def _extended(tokens: Tensor, origin: Tensor, lengths: int | Tensor, i: int, new: Tensor) -> Tensor:
    """Return the rows `origin` [B, J] of tokens [B, K, L], each with its new token number i."""
    extended = _chosen_rows(tokens, origin)
    _put(extended, lengths, i, new)
    return extended


# ------------------------------------------------------------------------------------------ steps


class _Steps:
    """What a model gives after the tokens so far: log-probabilities [R, V] of the next one.

    prompt: [B, P] token ids. lengths: of the prompts, P, or [B] where they differ. new: tokens that
    follow each prompt. end, pad: the symbol that ends a row, and what follows it.
    """

    end: int | None = None
    pad = 0

    def __init__(
        self,
        model: Any,
        src: Tensor,
        src_mask: Tensor | None,
        max_len: int,
        start_symbol: int | None,
    ) -> None:
        self.model, self.src_mask = model, src_mask
        self.memory: Tensor | None = None
        self.lengths: int | Tensor = 1
        if start_symbol is None:
            self.prompt = src
            self.lengths = src.shape[1] if src_mask is None else _prompt_lengths(src, src_mask)
        else:
            self.prompt = src.new_full((src.shape[0], 1), start_symbol)
            self.memory = model.encode(src, src_mask)
        self.translates = start_symbol is not None
        self.new = max_len - self.prompt.shape[1]

    def begun(self) -> Tensor:
        """Return the prompts as the beginnings of [B, max_len], and the pad symbol after them."""
        tokens = F.pad(self.prompt, (0, self.new), value=self.pad)
        if isinstance(self.lengths, Tensor):
            past = torch.arange(tokens.shape[1], device=tokens.device) >= self.lengths.unsqueeze(1)
            tokens.masked_fill_(past, self.pad)
        return tokens

    def first(self) -> Tensor:
        """Return the log-probabilities [B, V] after the prompts."""
        raise NotImplementedError

    def step(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [R, V] after one more token of each row, [R]."""
        raise NotImplementedError

    def reorder(self, rows: Tensor, same_source: bool) -> None:
        """Let row i continue rows[i], [R'], which has the same source or another."""
        if not same_source and self.src_mask is not None and len(self.src_mask) > 1:
            self.src_mask = self.src_mask[rows]

    def _last(self, output: Tensor, lengths: int | Tensor) -> Tensor:
        """Return the log-probabilities after the last of each row's tokens; output: [R, n, d]."""
        if isinstance(lengths, Tensor):
            last = output[torch.arange(len(output), device=output.device), lengths - 1]
        else:
            last = output[:, -1]
        return self.model.generator(last)


class _CachedSteps(_Steps):
    """Steps that compute the new tokens alone.

    On a GPU the second step is captured in a CUDA graph, and replayed for each token: the host then
    launches one graph for it, and counts. A later call with the same cache, model and sizes replays
    the graph of the first one.
    """

    def __init__(self, cache: DecoderCache, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache = cache
        self._steps = 0
        self._graph: _StepGraph | None = None

    def first(self) -> Tensor:
        output = self._output(self.prompt)
        if isinstance(self.lengths, Tensor):
            self.cache.crop(self.lengths)
        return self._last(output, self.lengths)

    def step(self, tokens: Tensor) -> Tensor:
        self._steps += 1
        if self._steps == 2 and captures(self.model, tokens):  # the first compiles the kernels
            self._graph = self._captured(tokens)
        return self._one(tokens) if self._graph is None else self._graph.step(tokens)

    def _captured(self, tokens: Tensor) -> _StepGraph | None:
        """Return the graph of a step, that of an earlier call where it computes the same."""
        key, graph = self._graph_key(tokens), self.cache.graph
        if not isinstance(graph, _StepGraph) or graph.key != key:
            try:
                graph = _StepGraph(key, self, tokens)
            except RuntimeError as error:
                warnings.warn(f"the steps run without a CUDA graph: {error}", stacklevel=2)
                return None
            self.cache.graph = graph
        graph.take_mask(self.src_mask)
        return graph

    def _one(self, tokens: Tensor) -> Tensor:
        return self._last(self._output(tokens.unsqueeze(1)), 1)

    def _graph_key(self, tokens: Tensor) -> tuple[object, ...]:
        """Return what a graph depends on beside the contents of its tensors.

        The printed model has the numbers of its modules, such as the probability of a dropout.
        """
        modules = tuple((m, m.training) for m in self.model.modules())
        parameters = (*self.model.parameters(), *self.model.buffers())
        pointers = tuple(x.data_ptr() for x in parameters)
        mask = None if self.src_mask is None else (self.src_mask.shape, self.src_mask.dtype)
        buffers = tuple(x.data_ptr() for x in self.cache.buffers())
        precision = torch.get_float32_matmul_precision(), autocast_dtype(tokens)
        given = tokens.shape, tokens.dtype, mask, current_backend(), precision
        return modules, repr(self.model), pointers, buffers, given

    def reorder(self, rows: Tensor, same_source: bool) -> None:
        super().reorder(rows, same_source)
        self.cache.reorder(rows, same_source)
        if not same_source:
            self.memory = None  # the cache has its keys and values

    def _output(self, tokens: Tensor) -> Tensor:
        if self.translates:
            return self.model.decode(self.memory, self.src_mask, tokens, None, cache=self.cache)
        return self.model(tokens, cache=self.cache)


class _StepGraph:
    """A step of one token a row, captured: the same kernels on the same tensors for each token.

    The host's part of a step, which finds room in the cache, runs before each replay. The
    log-probabilities of a step are overwritten by the next.
    """

    def __init__(self, key: tuple[object, ...], steps: _CachedSteps, tokens: Tensor) -> None:
        self.key, self.cache = key, steps.cache
        self._tokens = tokens.clone()
        self._mask = None if steps.src_mask is None else steps.src_mask.clone()
        given, steps.src_mask = steps.src_mask, self._mask
        try:
            with self.cache.advanced(1):
                self._replay, self._scores = captured(lambda: steps._one(self._tokens))
        finally:
            steps.src_mask = given
        self._counted = True  # the host has counted a step that no replay has computed yet

    def take_mask(self, src_mask: Tensor | None) -> None:
        """Read this mask from now on, of the shape of the captured one."""
        if self._mask is not None and src_mask is not None:
            self._mask.copy_(src_mask)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [R, V] after one more token of each row, [R]."""
        self._tokens.copy_(tokens)
        if self._counted:
            self._counted = False
            self._replay()
        else:
            with self.cache.advanced(1):
                self._replay()
        return self._scores


def captures(model: nn.Module, tokens: Tensor) -> bool:
    """Say whether a step is captured: on a GPU, with modules that run nothing of their own."""
    if not tokens.is_cuda or may_read(tokens) or torch.cuda.is_current_stream_capturing():
        return False
    for module in model.modules():
        known = type(module).__module__.split(".")[0] in ("fastformer", "torch")
        if not known or not is_unmodified(module) or getattr(module, "keep_attention", False):
            return False
    return True


def captured(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture what the function launches in a CUDA graph; return its replay, and the result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph.replay, out


class _RecomputedSteps(_Steps):
    """Steps that compute all tokens again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tokens, self._now = self.prompt, self.lengths

    def first(self) -> Tensor:
        return self._last(self._output(self._tokens), self._now)

    def step(self, tokens: Tensor) -> Tensor:
        self._tokens = torch.cat([self._tokens, tokens.unsqueeze(1)], 1)
        _put(self._tokens, self._now, 0, tokens)
        self._now = self._now + 1
        return self.first()

    def reorder(self, rows: Tensor, same_source: bool) -> None:
        super().reorder(rows, same_source)
        self._tokens = self._tokens[rows]
        if isinstance(self._now, Tensor):
            self._now = self._now[rows]
        if not same_source and self.memory is not None:
            self.memory = self.memory[rows]

    def _output(self, tokens: Tensor) -> Tensor:
        if not self.translates:
            return self.model(tokens)
        mask = subsequent_mask(tokens.shape[1]).to(tokens.device)
        return self.model.decode(self.memory, self.src_mask, tokens, mask)


def _begin(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None,
    end_symbol: int | None,
    pad_symbol: int | None,
    cache: bool | DecoderCache,
) -> _Steps:
    """Return the steps of a model that decodes, after the checks that all kinds of search share."""
    require_token_ids("src", src)
    require_size(max_len=max_len)
    if start_symbol is not None:
        require_size(0, start_symbol=start_symbol)
    _require_model(model, start_symbol)
    prompt = 1 if start_symbol is not None else src.shape[1]
    if not 1 <= prompt <= max_len:
        raise ValueError(
            f"max_len is {max_len} and src has {prompt} tokens; expected a prompt of 1 to max_len"
        )
    _require_positions(model, max_len)
    symbols = dict(start_symbol=start_symbol, end_symbol=end_symbol, pad_symbol=pad_symbol)
    _require_symbols(_vocabulary(model), **symbols)
    steps = _steps(cache, model, src, src_mask, max_len, start_symbol)
    pad = end_symbol if pad_symbol is None else pad_symbol
    if pad is None and isinstance(steps.lengths, Tensor):
        raise ValueError(
            "pad_symbol is None and so is end_symbol; expected a token to follow short prompts"
        )
    steps.end, steps.pad = end_symbol, 0 if pad is None else pad
    return steps


def _steps(
    cache: bool | DecoderCache,
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None,
) -> _Steps:
    """Return steps with a cache, if the model takes one and the caller wants it."""
    arguments = model, src, src_mask, max_len, start_symbol
    takes = _takes_cache(model)
    if not isinstance(cache, DecoderCache):
        if not (require_flag("cache", cache) and takes):
            return _RecomputedSteps(*arguments)
        return _CachedSteps(DecoderCache(max(1, max_len - 1)), *arguments)
    if not takes:
        raise ValueError("cache is a DecoderCache, and a module of the model takes none")
    if cache.capacity < max_len - 1:
        raise ValueError(
            f"cache has a capacity of {cache.capacity}; expected max_len - 1 = {max_len - 1}"
        )
    cache.reset(src.shape[0] or None)  # an empty batch takes no step, and the buffers stay
    return _CachedSteps(cache, *arguments)


# ------------------------------------------------------------------------------------------ checks


def _require_model(model: Any, start_symbol: int | None) -> None:
    """Require what `make_model` gives, and a start symbol, or a language model without one."""
    if callable(getattr(model, "generator", None)) and not hasattr(model, "encode"):
        if start_symbol is not None:
            raise ValueError(
                f"start_symbol is {start_symbol}; expected None: a language model continues src"
            )
        return
    for part in ("encode", "decode", "generator"):
        if not callable(getattr(model, part, None)):
            kind = type(model).__name__
            raise TypeError(f"model is a {kind} without {part}; expected what make_model gives")
    if start_symbol is None:
        raise ValueError("start_symbol is None; expected the first token of every row")


def _embedding(model: Any) -> nn.Module | None:
    """Return a module that embeds the tokens that are decoded, and no others."""
    embed = getattr(model, "tgt_embed", None) if hasattr(model, "encode") else model
    return embed if isinstance(embed, nn.Module) else None


def _vocabulary(model: Any) -> int | None:
    embed = _embedding(model)
    for module in () if embed is None else embed.modules():
        if isinstance(module, Embeddings):
            return module.lut.num_embeddings
    return None


def _require_positions(model: Any, max_len: int) -> None:
    """Require positions for all tokens but the last, which no step reads."""
    embed = _embedding(model)
    for module in () if embed is None else embed.modules():
        if isinstance(module, PositionalEncoding) and max_len - 1 > module.pe.shape[1]:
            raise ValueError(
                f"max_len is {max_len}; expected at most {module.pe.shape[1] + 1}, "
                "the positions of the model and the symbol after them"
            )


def _require_symbols(vocabulary: int | None, **symbols: int | None) -> None:
    for name, symbol in symbols.items():
        if symbol is not None:
            require_size(0, **{name: symbol})
            if vocabulary is not None and symbol >= vocabulary:
                raise ValueError(f"{name} is {symbol}; expected a token of the {vocabulary}")


def _prompt_lengths(src: Tensor, src_mask: Tensor) -> int | Tensor:
    """Return the lengths of prompts [B, S] with padding on the right, which the mask hides."""
    require_tensor("src_mask", src_mask)
    mask = src_mask.squeeze(1) if src_mask.dim() == 3 else src_mask
    if mask.shape != src.shape or mask.is_floating_point():
        raise ValueError(
            f"src_mask has shape {shape_of(src_mask)} and dtype {src_mask.dtype}; expected "
            f"booleans, [B, S] = {shape_of(src)} or [B, 1, S]"
        )
    kept = mask != 0
    if may_read(kept) and not (kept[:, 0].all() and (kept[:, 1:] <= kept[:, :-1]).all()):
        raise ValueError(
            "src_mask masks out a token before another one; expected prompts on the left, of one "
            "token or more, and padding on their right"
        )
    return kept.sum(1)


def _takes_cache(model: Any) -> bool:
    """Say whether all modules that decode take a cache, and the positions continue in it."""
    if not isinstance(model, nn.Module):
        return False
    translates = hasattr(model, "encode")
    embed = getattr(model, "tgt_embed" if translates else "embed", None)
    decoder = getattr(model, "decoder", None)
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not isinstance(embed, nn.Module) or not has_positions(embed):
        return False
    forwards: list[Any] = [model.decode if translates else model.forward]
    forwards.append(getattr(decoder, "forward", None))
    for layer in layers:
        attentions = (getattr(layer, name, layer) for name in ("self_attn", "src_attn"))
        forwards += [layer.forward, *(attention.forward for attention in attentions)]
    return all(_has_cache(forward) for forward in forwards)


def _has_cache(function: Callable[..., Any]) -> bool:
    return "cache" in inspect.signature(function).parameters
