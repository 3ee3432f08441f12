"""Batches of sources and targets with their masks, padded or packed.

Shapes: B batch, S source length, T target length.

Source: harvardnlp/annotated-transformer, "Model Training"; packing: Krell et al. 2021, "Efficient
Sequence Packing without Cross-contamination".
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastformer import checks
from fastformer.mask_tiles import as_device
from fastformer.nn.padding import Packing, packing_of, unpad
from fastformer.nn.transformer import subsequent_mask


class Batch:
    """A batch of sources and targets, with their masks.

    Args:
        src: [B, S] token ids; None for a language model.
        tgt: [B, T] token ids, T at least 2; None if only the source is needed.
        pad: the token id of padding.
        packed: if True, the batch holds no padding: the tokens of all sequences, one after the
            other.

    Attributes:
        src: [B, S], and src_mask: [B, 1, S], True where src is not padding.
        tgt: [B, T-1], the input of the decoder: the targets without their last column.
        tgt_y: [B, T-1], the tokens to predict: the targets without their first column.
        tgt_mask: [B, T-1, T-1], True where position i of tgt may see position j: j <= i, and j is
            not padding.
        ntokens: the number of tokens in tgt_y that are not padding, as a tensor (reading its value
            synchronizes with a GPU).
        pad: the token id of padding.

    Without a source, src and src_mask are None and tgt_mask is [B, 1, T-1], True where tgt is not
    padding, because a language model applies the causal mask itself. Without a target, tgt, tgt_y,
    tgt_mask and ntokens are None.

    If packed, src [tokens] holds what is not padding, and src_mask is its `Packing`; tgt and tgt_y
    [ntokens] hold the positions whose token to predict is not padding, and tgt_mask is the
    `Packing` of tgt. The models take these in place of the padded ones, and the losses are the
    same. On a GPU, packing waits for the device.

    `to(device)` returns the batch on another device, `pin_memory()` in pinned memory. A DataLoader
    with pin_memory=True calls the latter; then to(device, non_blocking=True) does not block.

    Raises:
        ValueError: src or tgt does not have two dimensions, their batch sizes or devices differ, or
            T is less than 2; packed is True, and a row of tgt has padding before a token, or the
            token ids are on meta.
        TypeError: the token ids are not integers, pad is not an int, packed is not a bool, or src
            and tgt are both None.
    """

    src: Tensor | None = None
    src_mask: Tensor | Packing | None = None
    tgt: Tensor | None = None
    tgt_y: Tensor | None = None
    tgt_mask: Tensor | Packing | None = None
    ntokens: Tensor | None = None

    def __init__(
        self, src: Tensor | None, tgt: Tensor | None = None, pad: int = 0, *, packed: bool = False
    ) -> None:
        self.pad = pad = checks.require_int("pad", pad)
        checks.require_flag("packed", packed)
        if src is not None:
            checks.require_token_ids("src", src)
            self.src = src
            if packed:
                self.src_mask = _packing("src", src != pad)
                self.src, _ = unpad(src, self.src_mask)
            else:
                self.src_mask = _kept(src, pad)
        if tgt is None:
            if src is None:
                raise TypeError("src and tgt are None; expected token ids in one of them")
            return
        checks.require_token_ids("tgt", tgt)
        if tgt.shape[1] < 2:
            raise checks.wrong_shape("tgt", tgt, "two columns or more")
        self.tgt = tgt[:, :-1]
        self.tgt_y = tgt[:, 1:]
        if src is not None:
            if tgt.shape[0] != src.shape[0]:
                given, expected = list(tgt.shape), list(src.shape)
                raise ValueError(f"tgt {given}; expected the batch of src {expected}")
            checks.require_device("tgt", tgt, "src", src)
        self.ntokens = (self.tgt_y != pad).sum()
        if packed:
            _require_padding_last(tgt, pad)
            self.tgt_mask = _packing("tgt", self.tgt_y != pad)
            self.tgt, self.tgt_y = (unpad(x, self.tgt_mask)[0] for x in (self.tgt, self.tgt_y))
        elif src is None:
            self.tgt_mask = _kept(self.tgt, pad)
        else:
            self.tgt_mask = self.make_std_mask(self.tgt, pad)

    @staticmethod
    def make_std_mask(tgt: Tensor, pad: int) -> Tensor:
        """Return the mask [B, T, T] of targets [B, T]: True where position i may see position j.

        Position i may see position j if j <= i and j is not padding.
        """
        checks.require_token_ids("tgt", tgt)
        pad = checks.require_int("pad", pad)
        return _kept(tgt, pad) & subsequent_mask(tgt.shape[-1]).to(tgt.device)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its tensors on the device.

        Raises ValueError for an invalid device.
        """
        device = as_device(device)
        return self._with(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy of the batch with its tensors in pinned memory, as Tensor.pin_memory."""
        return self._with(lambda x: x.pin_memory())

    def _with(self, f: Callable[[Any], Any]) -> Batch:
        """Return a copy of the batch in which f has replaced each tensor and each packing."""
        batch = copy.copy(self)
        for name, x in vars(self).items():
            if isinstance(x, (Tensor, Packing)):
                setattr(batch, name, f(x))
        return batch

    def __repr__(self) -> str:
        src, tgt = (None if x is None else list(x.shape) for x in (self.src, self.tgt))
        device = next(x.device for x in (self.src, self.tgt) if x is not None)
        return f"Batch(src={src}, tgt={tgt}, device={device})"


class token_batches:
    """An epoch of `Batch`es of similar lengths, each with at most `tokens` tokens.

        batches = ff.token_batches([([5, 6, 2], [1, 7, 8, 2]), ([5, 2], [1, 7, 2])], tokens=4096)

    The rows are sorted by length, those of equal length at random, and cut into batches, which come
    in random order. Packed batches hold no padding, so their rows are not sorted. The order depends
    on the seed and the epoch alone: each iteration that reaches the end begins the next epoch.

    Args:
        data: pairs (source, target) of token ids for an `EncoderDecoder`, or rows of token ids for
            a `LanguageModel`. The ids of a sequence are a list or a tensor [length]; a target or a
            row has at least two, because each predicts the next one.
        tokens: the most tokens of a batch, with its padding; of the sources or of the targets,
            whichever are longer.
        padding_idx: the token id of padding.
        packed: whether the batches are packed, see `Batch`.
        shuffle: False gives the same batches in each epoch, the short rows first (packed: in the
            order of data).
        seed: of the order.
        pin_memory: whether the tensors are in pinned memory, from which a GPU copies beside its
            computation.

    len() is the number of batches of this epoch. `state_dict()` is the position, the epoch and the
    number of batches that were read of it, and after `load_state_dict(state)` the next iteration
    begins there.

    Raises:
        ValueError: data is empty, mixes pairs and rows, or has a sequence that is too short, or
            longer than `tokens`; a number is out of range.
        TypeError: data is not iterable, or an argument has a wrong type.
    """

    def __init__(
        self,
        data: Iterable[Any],
        tokens: int = 4096,
        padding_idx: int = 0,
        *,
        packed: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        [self._tokens] = checks.require_size(2, tokens=tokens)
        self.padding_idx = checks.require_int("padding_idx", padding_idx)
        self._seed = checks.require_int("seed", seed)
        self._packed = checks.require_flag("packed", packed)
        self._shuffle = checks.require_flag("shuffle", shuffle)
        self._pin = checks.require_flag("pin_memory", pin_memory)
        if isinstance(data, (str, Tensor)) or not isinstance(data, Iterable):
            raise TypeError(f"data is a {type(data).__name__}; expected a list of pairs or rows")
        self._data = list(data)
        if not self._data:
            raise ValueError("data is empty; expected pairs or rows of token ids")
        self._lengths = torch.tensor([self._length(i) for i in range(len(self._data))])
        self._begin(0)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments, with the number of rows and a checksum in place of the data."""
        found = 0
        for row in self._data:
            for x in row if _is_pair(row) else [row]:
                x, found = torch.as_tensor(x).cpu(), zlib.crc32(b"%d" % len(x), found)
                found = zlib.crc32(torch.as_tensor(x).long().numpy().tobytes(), found)
        flags = dict(packed=self._packed, shuffle=self._shuffle, padding_idx=self.padding_idx)
        numbers = dict(tokens=self._tokens, seed=self._seed)
        return dict(rows=len(self._data), checksum=found, **numbers, **flags)

    def _length(self, i: int) -> int:
        """Return the tokens for which a row or pair counts."""
        row, pairs = self._data[i], _is_pair(self._data[0])
        if _is_pair(row) != pairs:
            forms = ("a pair", "a row") if pairs else ("a row", "a pair")
            raise ValueError(
                f"data[0] is {forms[0]}, and data[{i}] is {forms[1]}; expected one of them"
            )
        counts = [len(x) for x in (row if pairs else [row])]
        if counts[0] < 1 or counts[-1] < 2:
            expected = "1 or more, and 2 or more" if pairs else "2 or more"
            raise ValueError(
                f"data[{i}] has {' and '.join(map(str, counts))} tokens; expected {expected}"
            )
        if max(counts) > self._tokens:
            raise ValueError(
                f"data[{i}] has {max(counts)} tokens; expected at most tokens = {self._tokens}"
            )
        return max(counts)

    def _begin(self, epoch: int, batch: int = 0) -> None:
        """Choose the rows of each batch of an epoch."""
        self._epoch, self._start, self._read = epoch, batch, batch
        seed = random.Random(f"{self._seed}, {epoch}").getrandbits(63)
        generator, n = torch.Generator().manual_seed(seed), len(self._data)
        order = torch.randperm(n, generator=generator) if self._shuffle else torch.arange(n)
        if not self._packed:
            order = order[self._lengths[order].argsort(stable=True)]
        batches: list[list[int]] = [[]]
        used = 0  # tokens of the last batch
        for i, length in zip(order.tolist(), self._lengths[order].tolist()):
            used = used + length if self._packed else (len(batches[-1]) + 1) * length
            if used > self._tokens:
                batches.append([])
                used = length
            batches[-1].append(i)
        if self._shuffle:
            shuffled = torch.randperm(len(batches), generator=generator).tolist()
            batches = [batches[i] for i in shuffled]
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        self._read, self._start = self._start, 0
        while self._read < len(self._batches):
            rows = [self._data[i] for i in self._batches[self._read]]
            self._read += 1
            sequences = zip(*rows) if _is_pair(rows[0]) else [rows]
            padded = [
                pad_sequence([torch.as_tensor(x) for x in column], True, self.padding_idx)
                for column in sequences
            ]
            source, target = padded if len(padded) == 2 else (None, *padded)
            batch = Batch(source, target, self.padding_idx, packed=self._packed)
            yield batch.pin_memory() if self._pin else batch
        self._begin(self._epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self._epoch, "batch": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin at a position."""
        self._begin(state["epoch"], state["batch"])


def _is_pair(row: Any) -> bool:
    """Return whether a row of data holds two sequences, and not ids."""
    return isinstance(row, (tuple, list)) and len(row) == 2 and hasattr(row[0], "__len__")


def _kept(tokens: Tensor, pad: int) -> Tensor:
    """Return the padding mask [B, 1, T] of tokens [B, T]: True keeps a token."""
    return torch.ne(tokens, pad).unsqueeze(-2)


def _packing(name: str, kept: Tensor) -> Packing:
    """Return the `Packing` of the tokens that are True in `kept` [B, T]."""
    if kept.is_meta:
        raise ValueError(f"{name} is on meta; expected token ids that are known, as packed is True")
    return packing_of(kept, int(kept.sum(1).max()) if kept.numel() else 0)


def _require_padding_last(tgt: Tensor, pad: int) -> None:
    """Require that no token of tgt [B, T] follows padding: it would be predicted from padding,
    which a packed batch leaves out.
    """
    kept = tgt != pad
    wrong = (kept[:, 1:] & ~kept[:, :-1]).any(1)
    if not wrong.is_meta and wrong.any():
        raise ValueError(
            f"tgt has padding before a token in row {int(wrong.nonzero()[0])}; expected padding at "
            "the end of each row, as packed is True"
        )
