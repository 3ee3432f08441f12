"""Greedy decoding, sampling, and beam search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastformer import checks
from fastformer.cache.decoder import DecoderCache
from fastformer.decoding.steps import Steps, Symbols, end_symbols, make_steps, put_tokens

_likeliest = partial(torch.argmax, dim=-1)
MAX_LEN = "max_len, which counts the prompt or the start symbol too"
WAIT_EVERY = 16  # on a GPU, steps between two checks for the end, each of which waits


@torch.no_grad()
@checks.refuse(max_new_tokens=MAX_LEN)
def greedy_decode(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: Symbols = None,
    pad_symbol: int | None = None,
    repetition_penalty: float = 1.0,
    cache: bool | DecoderCache = True,
) -> Tensor:
    """Choose the most likely next token at each step.

        y_0 = start_symbol, y_t = argmax_v p(v | y_0 .. y_{t-1}, src)

    Gradients are disabled. The mode of the model does not change: call model.eval() first, or
    dropout applies, with a warning.

    Args:
        model: a model with encode, decode and generator, as `make_model` builds it; or a language
            model, as `make_decoder` builds it.
        src: [B, S] token ids; for a language model the prompts.
        src_mask: the encoder's mask, [B, 1, S] as `Batch` makes it; None masks nothing out. For a
            language model, True at the tokens of a prompt and False at the padding, which stands on
            its left, on its right or on both sides. Positions count from the prompt's first token.
        max_len: length of the result, including the start symbol or the prompt, at least 1.
        start_symbol: the first id of every row; None for a language model.
        end_symbol: the id that ends a row, or a list of several; None for none. The loop stops when
            all rows have ended. On a GPU it checks this only at every 16th step, because a check
            waits for the device.
        pad_symbol: the id that fills a row after its end; the first end_symbol by default.
        repetition_penalty: positive; multiplies log p(v) of each token v that the row already has,
            in its prompt (without the padding) or after it. 1 changes nothing, more makes such
            tokens less likely.
        cache: True keeps the keys and values of each token for later steps; apart from attention, a
            step then costs the same at any length. False recomputes all tokens at each step, which
            is also what happens if a module of the model takes no cache. A `DecoderCache` is used
            as the cache, and keeps its buffers for the next call.

    Returns:
        [B, max_len], in the dtype and on the device of src; an empty batch gives [0, max_len]. If
        the prompts differ in length, each row gets max_len - S new tokens, which follow its prompt;
        what stands to the left of a prompt stays.

    Raises:
        ValueError: src is not [B, S]; max_len is less than 1 or than the prompt, or exceeds the
            model's positions or the capacity of the cache; a symbol is not in the vocabulary;
            repetition_penalty is not positive and finite; a prompt is empty or has padding between
            its tokens; the model refuses the ids or the mask.
        TypeError: the ids are not integers; the model has no encode, decode or generator.

    Source: harvardnlp/annotated-transformer, "Greedy Decoding"; the cache: Shazeer 2019, "Fast
    Transformer Decoding: One Write-Head is All You Need", section 2.4; repetition_penalty: Keskar
    et al. 2019, "CTRL", section 4.1.
    """
    penalty = _Penalty(repetition_penalty)
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _searched(_RowSearch(make_steps(*given), _likeliest, penalty)).tokens


@torch.no_grad()
@checks.refuse(max_new_tokens=MAX_LEN)
def sample(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: Symbols = None,
    pad_symbol: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    cache: bool | DecoderCache = True,
) -> Tensor:
    """Draw each next token from the distribution that the model gives.

        y_t ~ p(v)^(1 / temperature) / sum, over the tokens that top_k, top_p and min_p keep

    Args:
        model, src, src_mask, max_len, start_symbol: as in `greedy_decode`.
        end_symbol, pad_symbol, cache: as in `greedy_decode`.
        repetition_penalty: as in `greedy_decode`, before the temperature.
        temperature: above 0; below 1 it sharpens the distribution.
        top_k: keeps the k most likely tokens; None keeps all.
        top_p: in (0, 1]; keeps the fewest most likely tokens whose probabilities, after temperature
            and top_k, sum to top_p or more; None keeps all.
        min_p: in [0, 1]; keeps the tokens of at least min_p times the probability of the most
            likely one, after temperature; None keeps all.
        seed: the seed of the draws; None draws from torch's default generator.

    Returns:
        [B, max_len], as `greedy_decode`.

    Raises:
        ValueError: temperature is not positive and finite, top_k is below 1, top_p is outside
            (0, 1], min_p is outside [0, 1]; as in `greedy_decode`.
        TypeError: one of these has another type; as in `greedy_decode`.

    Source: top_k: Fan et al. 2018, "Hierarchical Neural Story Generation", section 5.4; top_p:
    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1; min_p: Nguyen
    et al. 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs".
    """
    choose, penalty = _draws(temperature, top_k, top_p, min_p, seed), _Penalty(repetition_penalty)
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _searched(_RowSearch(make_steps(*given), choose, penalty)).tokens


@torch.no_grad()
@checks.refuse(max_new_tokens=MAX_LEN)
def stream_tokens(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: Symbols = None,
    pad_symbol: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    cache: bool | DecoderCache = True,
) -> Iterator[Tensor]:
    """Yield the next token of each row, step by step, as `greedy_decode` or `sample` chooses them.

    The arguments are checked, and a source is encoded, at the call; each step runs when its tokens
    are asked for. Until then, do not use the cache elsewhere.

    Args:
        model, src, src_mask, max_len, start_symbol: as in `greedy_decode`.
        end_symbol, pad_symbol, repetition_penalty, cache: as in `greedy_decode`.
        temperature: None takes the most likely tokens, as `greedy_decode` does; a number draws
            them, as `sample` does, whose default is 1.
        top_k, top_p, min_p, seed: as in `sample`; they need a temperature.

    Yields:
        [B], in the dtype and on the device of src: the new tokens of a step, the pad symbol in a
        row that has ended. There are at most max_len - S steps (max_len - 1 after a start symbol),
        and they stop as those of `greedy_decode` do.

    Raises:
        ValueError: top_k, top_p, min_p or seed is given without a temperature; as in `sample`.
        TypeError: as in `sample`.
    """
    if temperature is None:
        for name, x in dict(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed).items():
            if x is not None:
                raise ValueError(
                    f"{name} is {x} and temperature None, which draws nothing; expected a "
                    "temperature, such as 1.0"
                )
    draw = None if temperature is None else _draws(temperature, top_k, top_p, min_p, seed)
    penalty = _Penalty(repetition_penalty)
    given = model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache
    return _stepwise(_RowSearch(make_steps(*given), draw or _likeliest, penalty))


def strip(tokens: Tensor, end_symbol: Symbols = None, padding_idx: int | None = 0) -> list[Any]:
    """Return token ids as lists: each row up to its first end symbol, and without padding.

        ff.strip(torch.tensor([[1, 7, 8, 2, 0], [1, 7, 2, 2, 2]]), end_symbol=2)
            -> [[1, 7, 8], [1, 7]]

    Args:
        tokens: [..., T] ids, such as the result of `greedy_decode`, or the tokens of `Hypotheses`.
        end_symbol: the id that ends a row, or a list of several; None for none.
        padding_idx: the id that is left out; None leaves none out.

    Returns:
        A list of ids for [T], a list of these for [B, T], and so on.

    Raises:
        TypeError: tokens is not a tensor of integers, or a symbol is no int.
        ValueError: tokens has no dimension or is on the meta device, end_symbol is empty or
            negative.
    """
    checks.require_integers("tokens", tokens)
    if tokens.is_meta:
        raise ValueError("tokens is on the meta device; expected a tensor that holds ids")
    if tokens.dim() == 0:
        raise checks.wrong_shape("tokens", tokens, "[..., T]")
    ends = end_symbols(None, end_symbol)
    if padding_idx is not None:
        checks.require_int("padding_idx", padding_idx)

    def stripped(rows: list[Any], dims: int) -> list[Any]:
        if dims > 1:
            return [stripped(row, dims - 1) for row in rows]
        return [x for x in itertools.takewhile(lambda x: x not in ends, rows) if x != padding_idx]

    return stripped(tokens.tolist(), tokens.dim())


class Hypotheses(NamedTuple):
    """The best sequences that `beam_search` has found for each source, the best first.

    Attributes:
        tokens: [B, n_best, max_len], in the dtype of src.
        scores: [B, n_best]: log p(y | src) / ((5 + n) / 6)^length_penalty, n new tokens; -inf in
            the last places if fewer than n_best sequences were found.
        lengths: [B, n_best] int64: tokens of a sequence, including the prompt and the end symbol.
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


@checks.refuse(beams="num_beams", alpha="length_penalty", max_new_tokens=MAX_LEN)
@torch.no_grad()
def beam_search(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None = None,
    *,
    end_symbol: Symbols = None,
    pad_symbol: int | None = None,
    num_beams: int = 4,
    length_penalty: float = 0.6,
    n_best: int = 1,
    repetition_penalty: float = 1.0,
    cache: bool | DecoderCache = True,
) -> Hypotheses:
    """Search for the sequences with the largest scores, with K beams for each source.

        score(y) = log p(y | src) / ((5 + n) / 6)^length_penalty, n new tokens

    Each step extends the K beams, the most likely unfinished sequences, by every token and keeps
    the K most likely results that have not ended. A sequence that ends is a hypothesis; the K best
    hypotheses are kept. The search for a source is over when no beam can reach the score of its
    n_best-th hypothesis, or at max_len, where the unfinished beams become hypotheses as well.


    Args:
        model, src, src_mask, max_len, start_symbol: as in `greedy_decode`.
        end_symbol, pad_symbol, cache: as in `greedy_decode`.
        num_beams: K.
        length_penalty: from 0 to 32: 0 is none, a larger value favours longer sequences.
        n_best: the number of sequences to return for each source, at most K.
        repetition_penalty: as in `greedy_decode`, for the tokens that the beam already has; log p
            of a score then includes it.

    Returns:
        `Hypotheses`: tokens [B, n_best, max_len], scores and lengths [B, n_best].

    Raises:
        ValueError: num_beams is below 1, n_best is outside [1, num_beams], length_penalty is
            outside [0, 32]; as in `greedy_decode`.
        TypeError: one of these has another type, or is given by both its names; as in
            `greedy_decode`.

    Source: Wu et al. 2016, "Google's Neural Machine Translation System", section 7, equation 14,
    without its coverage penalty.
    """
    num_beams, n_best = checks.require_size(num_beams=num_beams, n_best=n_best)
    if n_best > num_beams:
        raise ValueError(f"n_best is {n_best}; expected at most num_beams, {num_beams}")
    length_penalty = checks.require_number("length_penalty", length_penalty)
    if not 0 <= length_penalty <= 32:  # above, the penalty of a long sequence overflows
        raise ValueError(f"length_penalty is {length_penalty}; expected a number from 0 to 32")
    penalty = _Penalty(repetition_penalty)
    steps = make_steps(model, src, src_mask, max_len, start_symbol, end_symbol, pad_symbol, cache)
    return _searched(_BeamSearch(steps, num_beams, n_best, length_penalty, penalty)).result()


Searching = TypeVar("Searching", bound="_RowSearch | _BeamSearch")


def _searched(search: Searching) -> Searching:
    """Run the search until the sequences are full or it has ended, and return it."""
    for _ in _stepwise(search):
        pass
    return search


@torch.no_grad()
def _stepwise(search: _RowSearch | _BeamSearch) -> Iterator[Tensor]:
    """Run the search, and yield the tokens [R] of each step."""
    steps = search.steps
    if not steps.new or not len(steps.prompt):
        return
    scores = search.begin()
    for i in range(steps.new):
        tokens, rows = search.take(scores, i)
        yield tokens
        if i + 1 == steps.new or (_looks(tokens, i) and search.ended()):
            return
        if rows is not None:
            steps.reorder(rows, same_source=True)
        scores = steps.step(tokens)


def _looks(tokens: Tensor, i: int) -> bool:
    """Return whether the host checks for the end after step i; on a GPU the check waits."""
    return tokens.is_cpu or i % WAIT_EVERY == WAIT_EVERY - 1


class _RowSearch:
    """Search for one sequence in each row.

    choose: log-probabilities [B, V] -> tokens [B].
    tokens: [B, max_len], with the pad symbol after the end of a row.
    """

    def __init__(self, steps: Steps, choose: Callable[[Tensor], Tensor], penalty: _Penalty) -> None:
        self.steps, self._choose, self._penalty = steps, choose, penalty
        self.tokens = steps.begun()
        self._done = torch.zeros(len(self.tokens), dtype=torch.bool, device=self.tokens.device)

    def begin(self) -> Tensor:
        """Return the log-probabilities [R, V] after the prompts."""
        return self.steps.first()

    def take(self, scores: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Choose the i-th new tokens, [R], and return them with the rows that they continue, [R];
        with None if each continues its own row.
        """
        chosen = self._choose(self._penalty.lowered(scores, self.steps)).to(self.tokens.dtype)
        self._penalty.add(chosen)
        ended = self.steps.ended(chosen)
        if ended is not None:
            chosen = chosen.masked_fill(self._done, self.steps.pad)
            self._done |= ended
        put_tokens(self.tokens, self.steps.first_new, i, chosen)
        return chosen, None

    def ended(self) -> Tensor | None:
        """Return a device boolean, True at the end of the search; None if it cannot end early."""
        return None if self.steps.end is None else self._done.all()


def _draws(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
) -> Callable[[Tensor], Tensor]:
    """Return a function that draws tokens [B] from log-probabilities [B, V]."""
    wanted = "a positive number, or greedy_decode instead"
    temperature = checks.require_positive("temperature", temperature, wanted)
    if top_k is not None:
        [top_k] = checks.require_size(top_k=top_k)
    if top_p is not None:
        top_p = checks.require_number("top_p", top_p, "a number in (0, 1], or None")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; expected a number in (0, 1]")
    if min_p is not None:
        min_p = checks.require_probability("min_p", min_p)
    if seed is not None:
        seed = checks.require_int("seed", seed)
    generator = None

    def draw(scores: Tensor) -> Tensor:
        nonlocal generator
        if seed is not None and generator is None:
            generator = torch.Generator(scores.device).manual_seed(seed)
        scores = _precise(scores) / temperature
        order = None
        if top_k is not None or top_p is not None:
            scores, order = scores.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            scores[..., top_k:] = float("-inf")
        weights = scores.softmax(-1)
        largest = weights.amax(-1, keepdim=True)
        if top_p is not None:
            before = weights.cumsum(-1) - weights
            before[..., 0] = 0.0
            weights = weights.masked_fill(before >= top_p, 0.0)
        if min_p is not None:
            weights = weights.masked_fill(weights < min_p * largest, 0.0)
        drawn = torch.multinomial(weights, 1, generator=generator)
        return (drawn if order is None else order.gather(-1, drawn)).squeeze(-1)

    return draw


class _Penalty:
    """The repetition penalty: it lowers the scores of the tokens that a row already has."""

    def __init__(self, factor: float) -> None:
        self._factor = checks.require_positive("repetition_penalty", factor)
        self._seen: Tensor | None = None  # [R, V], the tokens of each row

    def lowered(self, scores: Tensor, steps: Steps) -> Tensor:
        """Return the scores [R, V] with the penalty; R is B, or B rows with their beams."""
        if self._factor == 1:
            return scores
        scores = _precise(scores)
        if self._seen is None:  # mark the tokens of the prompts, whose padding is no token
            prompt, columns = steps.prompt.long(), torch.arange(steps.prompt.shape[1])
            lengths = torch.as_tensor(steps.lengths, device=prompt.device).view(-1, 1)
            tokens = prompt[:, :1].where(columns.to(prompt.device) >= lengths, prompt)
            seen = scores.new_zeros(len(prompt), scores.shape[1], dtype=torch.bool)
            seen.scatter_(1, tokens, True)
            self._seen = seen.repeat_interleave(len(scores) // len(prompt), 0)
        # A model of one's own may give logits, which can be positive.
        lower = torch.where(scores < 0, scores * self._factor, scores / self._factor)
        return torch.where(self._seen, lower, scores)

    def add(self, tokens: Tensor, rows: Tensor | None = None) -> None:
        """Note the new tokens [R], each of which continues its own row, or row rows[i]."""
        if self._seen is not None:
            self._seen = self._seen if rows is None else self._seen[rows]
            self._seen.scatter_(1, tokens.long().unsqueeze(1), True)


def _precise(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


class _BeamSearch:
    """The K most likely unfinished sequences of each source, its beams, and its best hypotheses.

    tokens: [B, K, max_len], the beams. scores: [B, K], their log-probabilities. best: the K best
    `Hypotheses`.
    """

    def __init__(
        self, steps: Steps, num_beams: int, n_best: int, length_penalty: float, penalty: _Penalty
    ) -> None:
        self.steps, self.n_best, self._penalty = steps, n_best, penalty
        self.num_beams, self.length_penalty = num_beams, length_penalty
        begun, self._first_new = steps.begun(), steps.first_new
        batch, device = len(begun), begun.device
        self.tokens = begun.unsqueeze(1).repeat(1, self.num_beams, 1)
        self._rows = torch.arange(batch, device=device).repeat_interleave(self.num_beams)
        self._lengths = torch.as_tensor(steps.lengths, device=device).view(-1, 1)
        none = torch.full((batch, self.num_beams), float("-inf"), device=device)
        self.scores = none.clone()
        self.scores[:, 0] = 0.0  # the beams are all the same at first: only one counts
        self.best = Hypotheses(self.tokens, none, self._lengths.expand(batch, self.num_beams))
        if not steps.new:
            self.best = self.best._replace(scores=self.scores)

    def begin(self) -> Tensor:
        scores = self.steps.first()[self._rows]
        self.steps.reorder(self._rows, same_source=False)
        return scores

    def take(self, scores: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        batch, beams, vocabulary = *self.scores.shape, scores.shape[-1]
        scores = self._penalty.lowered(_precise(scores), self.steps)
        scores = scores.view(batch, beams, vocabulary)
        totals = (self.scores.unsqueeze(-1) + scores).flatten(1)
        # A beam has at most `ends` continuations that end. So (1 + ends) K candidates hold at least
        # K that go on.
        ends = 1 if self.steps.end is None else len(self.steps.end)
        totals, at = totals.topk(min((1 + ends) * beams, totals.shape[1]), -1)
        origin, chosen = at // vocabulary, (at % vocabulary).to(self.tokens.dtype)
        ended = self.steps.ended(chosen)
        if ended is not None:
            tokens = _extended(self.tokens, origin, self._first_new, i, chosen)
            self._offer(tokens, totals.masked_fill(~ended, float("-inf")), i + 1)
            totals = totals.masked_fill(ended, float("-inf"))
        self.scores, kept = totals.topk(beams, -1)
        origin, chosen = origin.gather(1, kept), chosen.gather(1, kept)
        self.tokens = _extended(self.tokens, origin, self._first_new, i, chosen)
        if i + 1 == self.steps.new:
            self._offer(self.tokens, self.scores, i + 1)
        tokens, rows = chosen.flatten(), origin + self._rows.view(batch, beams)[:, :1] * beams
        self._penalty.add(tokens, rows.flatten())
        return tokens, rows.flatten()

    def ended(self) -> Tensor | None:
        if self.steps.end is None:
            return None
        reachable = self.scores[:, 0] / _penalty(self.steps.new, self.length_penalty)
        return (self.best.scores[:, self.n_best - 1] >= reachable).all()

    def _offer(self, tokens: Tensor, totals: Tensor, new: int) -> None:
        """Keep the K best hypotheses of `best` and of the sequences tokens [B, n, L].

        totals: [B, n], their log-probabilities, -inf for a sequence that is no hypothesis. new: the
            number of tokens after the prompts.
        """
        scores = torch.cat([self.best.scores, totals / _penalty(new, self.length_penalty)], 1)
        scores, at = scores.topk(self.num_beams, -1)
        lengths = (self._lengths + new).expand_as(totals)
        lengths = torch.cat([self.best.lengths, lengths], 1).gather(1, at)
        tokens = torch.cat([self.best.tokens, tokens], 1).take_along_dim(at.unsqueeze(-1), 1)
        self.best = Hypotheses(tokens, scores, lengths)

    def result(self) -> Hypotheses:
        return Hypotheses(*(x[:, : self.n_best] for x in self.best))


def _penalty(new: int, length_penalty: float) -> float:
    return ((5 + new) / 6) ** length_penalty


def _extended(tokens: Tensor, origin: Tensor, lengths: int | Tensor, i: int, new: Tensor) -> Tensor:
    """Return the rows `origin` [B, J] of tokens [B, K, L], each with its i-th new token."""
    extended = tokens.take_along_dim(origin.unsqueeze(-1), 1)
    put_tokens(extended, lengths, i, new)
    return extended
