"""Greedy decoding, sampling, and beam search."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fastformer.cache.decoder import DecoderCache
from fastformer.checks import require_int, require_number, require_size
from fastformer.decoding.steps import Steps, make_steps, put_tokens

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
    return _searched(_RowSearch(make_steps(*given), lambda scores: scores.argmax(-1))).tokens


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
    return _searched(_RowSearch(make_steps(*given), draw)).tokens


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
    return _searched(_BeamSearch(make_steps(*given), beams, n_best, alpha)).result()


class _Search(Protocol):
    """What chooses tokens, given the log-probabilities of each step."""

    steps: Steps

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


class _RowSearch:
    """One token a row at each step, as `choose` takes it from log-probabilities [B, V].

    tokens: [B, max_len], with the pad symbol past the end of a row.
    """

    def __init__(self, steps: Steps, choose: Callable[[Tensor], Tensor]) -> None:
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
        put_tokens(self.tokens, self.steps.lengths, i, chosen)
        return chosen, None

    def ended(self) -> Tensor | None:
        return None if self.steps.end is None else self._done.all()


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


class _BeamSearch:
    """K beginnings of each source, of the largest log-probability, and its best hypotheses.

    tokens: [B, K, max_len] of the beginnings, and scores [B, K] their log-probabilities. best:
    the K best `Hypotheses`.
    """

    def __init__(self, steps: Steps, beams: int, n_best: int, alpha: float) -> None:
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
    put_tokens(extended, lengths, i, new)
    return extended
