"""The steps of a model: each gives the log-probabilities of the next token."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import checks
from fastformer.batch_invariance import on
from fastformer.cache.decoder import DecoderCache
from fastformer.cuda_graphs import captured
from fastformer.dispatch.backends import current_backend
from fastformer.eager import may_read, refuse_vmap
from fastformer.nn.embeddings import Embeddings, PositionalEncoding, RotaryEmbedding
from fastformer.nn.stream import is_unmodified
from fastformer.nn.transformer import has_positions, subsequent_mask

Symbols = int | Sequence[int] | None  # end symbols


def put_tokens(tokens: Tensor, lengths: int | Tensor, i: int, new: Tensor) -> None:
    """Write the i-th new tokens, [B, ..], to positions lengths + i of tokens [B, .., L]."""
    if isinstance(lengths, int):
        tokens[..., lengths + i] = new
    else:
        at = (lengths + i).view(-1, *[1] * (tokens.dim() - 1)).expand(*tokens.shape[:-1], 1)
        tokens.scatter_(-1, at, new.unsqueeze(-1))


class Steps:
    """The steps of a model: each gives the log-probabilities [R, V] of the next token.

    prompt: [B, P] token ids, each row from its first column on. lengths: the lengths of the
    prompts, P, or [B] where they can differ. first_new: the column of the result in which the first
    new token of a row stands, an int or [B]: `lengths`, and the padding on the left. new: the
    number of tokens that follow each prompt. end, pad: the symbols that end a row, [E] or None, and
    the symbol that fills it afterwards.
    """

    first: Callable[[], Tensor]  # returns the log-probabilities [B, V] after the prompts
    step: Callable[[Tensor], Tensor]  # those [R, V] after one more token of each row, [R]
    end: Tensor | None = None
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
        self.first_new: int | Tensor = 1
        if start_symbol is None:
            self._given = self.prompt = src
            self.lengths = self.first_new = src.shape[1]
            if src_mask is not None:
                first, self.lengths = _prompt_places(src, src_mask)
                self.first_new = first + self.lengths
                columns = torch.arange(src.shape[1], device=src.device) + first.unsqueeze(1)
                self.prompt = src.gather(1, columns % src.shape[1])
        else:
            self._given = self.prompt = src.new_full((src.shape[0], 1), start_symbol)
            self.memory = model.encode(src, src_mask)
        self.translates = start_symbol is not None
        self.new = max_len - self.prompt.shape[1]

    def begun(self) -> Tensor:
        """Return tokens [B, max_len]: the prompts where they were given, then the pad symbol."""
        tokens = F.pad(self._given, (0, self.new), value=self.pad)
        if isinstance(self.first_new, Tensor):
            columns = torch.arange(tokens.shape[1], device=tokens.device)
            tokens.masked_fill_(columns >= self.first_new.unsqueeze(1), self.pad)
        return tokens

    def ended(self, tokens: Tensor) -> Tensor | None:
        """Return whether tokens [..] are end symbols, [..]; None if there is no end symbol."""
        return None if self.end is None else (tokens.unsqueeze(-1) == self.end).any(-1)

    def reorder(self, rows: Tensor, same_source: bool) -> None:
        """Let row i continue the tokens of row rows[i]; rows: [R'].

        same_source: whether rows i and rows[i] have the same source.
        """
        if not same_source and self.src_mask is not None and len(self.src_mask) > 1:
            self.src_mask = self.src_mask[rows]

    def _last(self, output: Tensor, lengths: int | Tensor) -> Tensor:
        """Return the log-probabilities after the last token of each row; output: [R, n, d]."""
        if isinstance(lengths, Tensor):
            last = output[torch.arange(len(output), device=output.device), lengths - 1]
        else:
            last = output[:, -1]
        return self.model.generator(last)


class _CachedSteps(Steps):
    """Steps that compute only the new tokens, with a `DecoderCache`.

    On a GPU the second step is captured in a CUDA graph, which is replayed for this and each later
    step: the host then only launches the graph and counts positions. A later call with the same
    cache, model and sizes replays the graph of the earlier call.
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
        if self._steps == 2 and captures(self.model, tokens):  # step 1 compiles the kernels
            self._graph = self._captured(tokens)
        return self._one(tokens) if self._graph is None else self._graph.step(tokens)

    def _captured(self, tokens: Tensor) -> _StepGraph | None:
        """Return the CUDA graph of a step, of an earlier call if it fits; None if capture fails."""
        key, graph = self._graph_key(tokens), self.cache.graph
        if not isinstance(graph, _StepGraph) or graph.key != key:
            try:
                graph = _StepGraph(key, self, tokens)
            except RuntimeError as error:
                warnings.warn(f"the steps run without a CUDA graph: {error}", stacklevel=2)
                return None
            self.cache.graph = graph
        if graph.mask is not None and self.src_mask is not None:
            graph.mask.copy_(self.src_mask)  # of the shape of the captured one
        return graph

    def _one(self, tokens: Tensor) -> Tensor:
        return self._last(self._output(tokens.unsqueeze(1)), 1)

    def _graph_key(self, tokens: Tensor) -> tuple[object, ...]:
        """Return all that a graph depends on, except the contents of its tensors.

        repr(model) has the numbers of its modules, such as the probability of a dropout.
        """
        modules = tuple((m, m.training) for m in self.model.modules())
        parameters = (*self.model.parameters(), *self.model.buffers())
        pointers = tuple(x.data_ptr() for x in parameters)
        mask = None if self.src_mask is None else (self.src_mask.shape, self.src_mask.dtype)
        buffers = tuple(x.data_ptr() for x in self.cache.buffers())
        precision = torch.get_float32_matmul_precision(), checks.autocast_dtype(tokens)
        given = tokens.shape, tokens.dtype, mask, current_backend(), precision, on()
        return modules, repr(self.model), pointers, buffers, given

    def reorder(self, rows: Tensor, same_source: bool) -> None:
        super().reorder(rows, same_source)
        self.cache.reorder(rows, same_source)
        if not same_source:
            self.memory = None  # the cache holds its keys and values

    def _output(self, tokens: Tensor) -> Tensor:
        if self.translates:
            return self.model.decode(self.memory, self.src_mask, tokens, None, cache=self.cache)
        return self.model(tokens, cache=self.cache)


class _StepGraph:
    """The CUDA graph of a step of one token a row: a replay runs the kernels on the same tensors.

    Before each replay the host reserves room in the cache. Each step overwrites the
    log-probabilities of the previous one.
    """

    def __init__(self, key: tuple[object, ...], steps: _CachedSteps, tokens: Tensor) -> None:
        self.key, self.cache = key, steps.cache
        self._tokens = tokens.clone()
        self.mask = None if steps.src_mask is None else steps.src_mask.clone()
        given, steps.src_mask = steps.src_mask, self.mask
        try:
            with self.cache.advanced(1):
                self._try(steps)
                self._replay, self._scores = captured(lambda: steps._one(self._tokens))
        finally:
            steps.src_mask = given
        self._counted = True  # the host has counted a step that no replay has computed yet

    def _try(self, steps: _CachedSteps) -> None:
        """Compute the step without a capture, so that an error of its own spoils none. The first
        replay writes the same keys and values again.
        """
        lengths = [layer.own.lengths for layer in self.cache.layers if layer.own is not None]
        before = [x.clone() for x in lengths]
        try:
            without_waiting(lambda: steps._one(self._tokens))
        finally:
            for x, old in zip(lengths, before):
                x.copy_(old)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [R, V] after one more token of each row, [R]."""
        self._tokens.copy_(tokens)
        with nullcontext() if self._counted else self.cache.advanced(1):
            self._replay()
        self._counted = False
        return self._scores


def captures(model: nn.Module, tokens: Tensor) -> bool:
    """Return whether a step is captured: on a GPU, with unmodified modules of fastformer and torch.

    It is not captured with `keep_attention`, with FASTFORMER_CHECK=1, or within another capture.
    """
    if not tokens.is_cuda or may_read(tokens) or torch.cuda.is_current_stream_capturing():
        return False
    for module in model.modules():
        known = type(module).__module__.split(".")[0] in ("fastformer", "torch")
        if not known or not is_unmodified(module) or getattr(module, "keep_attention", False):
            return False
    return True


def without_waiting(function: Callable[[], Tensor]) -> None:
    """Call the function; RuntimeError where torch would wait for the device.

    The mode belongs to the process: another thread that waits for its GPU meanwhile gets the error.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _RecomputedSteps(Steps):
    """Steps that recompute all tokens, without a cache."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tokens, self._now = self.prompt, self.lengths

    def first(self) -> Tensor:
        return self._last(self._output(self._tokens), self._now)

    def step(self, tokens: Tensor) -> Tensor:
        self._tokens = torch.cat([self._tokens, tokens.unsqueeze(1)], 1)
        put_tokens(self._tokens, self._now, 0, tokens)
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


def make_steps(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int | None,
    end_symbol: Symbols,
    pad_symbol: int | None,
    cache: bool | DecoderCache,
) -> Steps:
    """Check the arguments that all searches share, and return the steps of the model."""
    checks.require_token_ids("src", src)
    refuse_vmap("decoding, which writes the tokens in place", src)
    [max_len] = checks.require_size(max_len=max_len)
    if start_symbol is not None:
        [start_symbol] = checks.require_size(0, start_symbol=start_symbol)
    _require_model(model, start_symbol)
    if getattr(model, "training", False) and any(
        isinstance(m, nn.Dropout) and m.training and m.p for m in model.modules()
    ):
        message = "model is in train() mode: dropout changes the tokens; call model.eval() first"
        warnings.warn(message, stacklevel=5)  # the caller of a decorated function
    prompt = 1 if start_symbol is not None else src.shape[1]
    if not 1 <= prompt <= max_len:
        raise ValueError(
            f"max_len is {max_len} and src has {prompt} tokens; expected a prompt of 1 to max_len, "
            "which counts the prompt too, unlike max_new_tokens"
        )
    _require_positions(model, max_len)
    tables = (x.lut for x in _embedding(model) if isinstance(x, Embeddings))
    vocabulary = next((table.num_embeddings for table in tables), None)
    _require_symbols(vocabulary, start_symbol=start_symbol, pad_symbol=pad_symbol)
    ends = end_symbols(vocabulary, end_symbol)
    given, takes = (model, src, src_mask, max_len, start_symbol), _takes_cache(model)
    steps: Steps
    if isinstance(cache, DecoderCache):
        if not takes:
            raise ValueError("cache is a DecoderCache, and a module of the model takes none")
        if cache.capacity < max_len - 1:
            raise ValueError(
                f"cache has a capacity of {cache.capacity}; expected max_len - 1 = {max_len - 1}"
            )
        cache.reset(src.shape[0] or None)  # an empty batch takes no step: keep the buffers
        steps = _CachedSteps(cache, *given)
    elif checks.require_flag("cache", cache) and takes:
        steps = _CachedSteps(DecoderCache(max(1, max_len - 1)), *given)
    else:
        steps = _RecomputedSteps(*given)
    pad = ends[0] if ends and pad_symbol is None else pad_symbol
    if pad is None and isinstance(steps.lengths, Tensor):
        raise ValueError(
            "pad_symbol is None and so is end_symbol; expected a pad_symbol, which fills the rows "
            "of shorter prompts"
        )
    steps.end = torch.tensor(ends, device=src.device) if ends else None
    steps.pad = 0 if pad is None else pad
    return steps


def _require_model(model: Any, start_symbol: int | None) -> None:
    """Require an encoder-decoder with a start symbol, or a language model without one."""
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


def _embedding(model: Any) -> list[nn.Module]:
    """Return modules of which the only embedding is that of the decoded tokens."""
    embed = getattr(model, "tgt_embed", None) if hasattr(model, "encode") else model
    return list(embed.modules()) if isinstance(embed, nn.Module) else []


def _require_positions(model: Any, max_len: int) -> None:
    """Require that the model has positions for all tokens but the last, which no step reads."""
    for module in _embedding(model):
        if not isinstance(module, (PositionalEncoding, RotaryEmbedding)):
            continue
        most = module.pe.shape[1] if isinstance(module, PositionalEncoding) else module.max_len
        if max_len - 1 > most:
            raise ValueError(
                f"max_len is {max_len}; expected at most {most + 1}, "
                "the positions of the model and the symbol after them"
            )


def _require_symbols(vocabulary: int | None, **symbols: int | None) -> None:
    for name, symbol in symbols.items():
        if symbol is not None:
            checks.require_size(0, **{name: symbol})
            if vocabulary is not None and symbol >= vocabulary:
                raise ValueError(f"{name} is {symbol}; expected a token from 0 to {vocabulary - 1}")


def end_symbols(vocabulary: int | None, end_symbol: Symbols) -> list[int]:
    """Return the end symbols, none for None."""
    if end_symbol is None:
        return []
    ends = list(end_symbol) if isinstance(end_symbol, (list, tuple)) else [cast(int, end_symbol)]
    if not ends:
        raise ValueError("end_symbol is empty; expected a token, several, or None")
    for end in ends:
        checks.require_int("end_symbol", end)
        _require_symbols(vocabulary, end_symbol=end)
    return ends


def _prompt_places(src: Tensor, src_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first columns [B] of prompts [B, S] and their lengths [B].

    The mask hides the padding on their left and on their right.
    """
    checks.require_tensor("src_mask", src_mask)
    mask = src_mask.squeeze(1) if src_mask.dim() == 3 else src_mask
    if mask.shape != src.shape or mask.is_floating_point():
        raise ValueError(
            f"src_mask has shape {checks.shape_of(src_mask)} and dtype {src_mask.dtype}; expected "
            f"booleans, [B, S] = {checks.shape_of(src)} or [B, 1, S]"
        )
    kept = mask != 0
    first, lengths = kept.to(torch.uint8).argmax(1), kept.sum(1)
    if may_read(kept):
        starts = kept[:, 0] + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
        if not (starts == 1).all():
            raise ValueError(
                "src_mask masks out a token between others, or all of a row; expected prompts of "
                "one token or more in one piece, and padding on their left or right"
            )
    return first, lengths


def _takes_cache(model: Any) -> bool:
    """Return whether all modules that decode take a cache, and positions can start later than 0."""
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
    return all("cache" in inspect.signature(forward).parameters for forward in forwards)
