"""token_batches: what is in a batch, in which order, and where it goes on; strip."""

import pickle
import random
from itertools import chain, pairwise

import pytest
import torch

import fastformer as ff
from fastformer.training.batches import Batch

LENGTHS = [3, 9, 4, 4, 7, 2, 9, 5, 4, 6, 2, 8, 3, 4, 5, 7]


def drawn(seed=0):
    """Pairs whose first symbol tells them apart; targets are shorter or longer."""
    draw = random.Random(seed)
    return [
        (
            [10 + i, *(draw.randint(3, 9) for _ in range(n - 1))],
            [10 + i, *(draw.randint(3, 9) for _ in range(max(n + i % 7 - 4, 1)))],
        )
        for i, n in enumerate(LENGTHS)
    ]


def firsts(batches):
    """The first symbol of each row of each batch."""
    return [batch.src[:, 0].tolist() for batch in batches]


def rows(data):
    return [target for _, target in data]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_is_in_one_batch_of_at_most_so_many_tokens(shuffle):
    data = drawn()
    batches = ff.token_batches(data, 24, shuffle=shuffle)
    found, spans = [], []
    assert len(batches) > 4
    for batch in batches:
        tgt = torch.cat([batch.tgt, batch.tgt_y[:, -1:]], 1)
        assert max(batch.src.numel(), tgt.numel()) <= 24
        given = [*zip(ff.strip(batch.src), ff.strip(tgt))]
        lengths = [max(map(len, pair)) for pair in given]
        spans.append((min(lengths), max(lengths)))
        found += given
        want = Batch(batch.src, tgt)
        assert torch.equal(batch.src_mask, want.src_mask) and batch.ntokens == want.ntokens
        assert torch.equal(batch.tgt_mask, want.tgt_mask)
    assert sorted(found) == sorted(data)
    for (_, last), (first, _) in pairwise(sorted(spans)):  # rows of similar lengths
        assert last <= first


def test_batches_are_as_large_as_they_may_be():
    """Each holds what has no room in the one of shorter rows before it."""
    batches = [
        x.src.shape for x in ff.token_batches([([5] * n,) * 2 for n in LENGTHS], 24, shuffle=False)
    ]
    for (count, _), (_, longer) in pairwise(batches):
        assert (count + 1) * longer > 24
    assert sum(count for count, _ in batches) == len(LENGTHS)


def test_rows_are_for_a_language_model():
    data = rows(drawn())
    (batch,) = ff.token_batches([torch.tensor(x) for x in data[:2]], 30, 99)
    assert batch.src is None and batch.tgt.shape == (2, max(map(len, data[:2])) - 1)
    assert (batch.tgt_y == 99).any() and int(batch.ntokens) == sum(map(len, data[:2])) - 2
    model = ff.make_decoder(100, N=1, d_model=8, d_ff=16, h=2)
    assert model(batch.tgt, batch.tgt_mask).shape == (*batch.tgt.shape, 8)


@pytest.mark.parametrize("pairs", [True, False])
def test_packed_batches_count_tokens_without_padding(pairs):
    data = drawn() if pairs else rows(drawn())
    batches = list(ff.token_batches(data, 24, packed=True))
    assert len(batches) <= len(ff.token_batches(data, 24))
    assert all(x.tgt.dim() == 1 and x.tgt.numel() <= 24 for x in batches)
    assert not pairs or all(x.src.numel() <= 24 for x in batches)
    assert sum(int(x.ntokens) for x in batches) == sum(len(x) - 1 for x in rows(drawn()))


def test_the_order_is_the_seeds_and_the_epochs_alone():
    data = drawn()
    batches, again = ff.token_batches(data, 24), ff.token_batches(data, 24)
    state = torch.get_rng_state(), random.getstate()
    first, second = firsts(batches), firsts(batches)
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
    torch.rand(3)
    assert firsts(again) == first and firsts(again) == second
    assert first != second and firsts(ff.token_batches(data, 24, seed=1)) != first
    assert sorted(first, key=len) != first and sorted(chain(*first)) == sorted(chain(*second))
    plain = ff.token_batches(data, 24, shuffle=False)
    assert firsts(plain) == firsts(plain)
    lengths = [x.tgt.shape[1] for x in ff.token_batches(rows(data), 24, shuffle=False)]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_a_position_is_gone_on_from(packed):
    """Anywhere in three epochs, in another object; len() is that of the epoch."""

    def batches():
        return ff.token_batches(rows(drawn()), 15, packed=packed, seed=3)

    one, want, states = batches(), [], []
    for _ in range(3):
        before, count = len(want), len(one)
        for batch in one:
            want.append(batch.tgt.tolist())
            states.append(pickle.loads(pickle.dumps(one.state_dict())))
        assert len(want) - before == count
    for i, state in enumerate(states):
        other = batches()
        other.load_state_dict(state)
        rest = [batch.tgt.tolist() for _ in range(3) for batch in other]
        assert rest[: len(want) - i - 1] == want[i + 1 :]


def test_an_iteration_after_that_of_a_state_begins_with_the_epoch():
    """Also if that one was left: the state is the position of the next iteration alone. So does an
    iteration after any that was left.
    """
    batches, want = ff.token_batches(drawn(), 24), firsts(ff.token_batches(drawn(), 24))
    for _ in range(2):
        assert next(iter(batches)).src[:, 0].tolist() == want[0]
    batches.load_state_dict({"epoch": 0, "batch": 2})
    assert next(iter(batches)).src[:, 0].tolist() == want[2]
    assert batches.state_dict() == {"epoch": 0, "batch": 3}
    assert firsts(batches) == want


def test_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    assert list(ff.token_batches(drawn(), 24)) and pinned == []
    assert list(ff.token_batches(drawn(), 24, pin_memory=True)) == pinned


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ([], {}, ValueError, "data is empty; expected pairs or rows"),
        (3, {}, TypeError, "data is a int; expected a list of pairs or rows"),
        (torch.ones(2, 3), {}, TypeError, "data is a Tensor; expected a list"),
        ([[1, 2], ([1], [1, 2])], {}, ValueError, r"data\[0\] is a row, and data\[1\] is a pair"),
        ([([1], [1, 2]), [1, 2]], {}, ValueError, r"data\[0\] is a pair, and data\[1\] is a row"),
        ([[1, 2], [1]], {}, ValueError, r"data\[1\] has 1 tokens; expected 2 or more"),
        ([([1], [1])], {}, ValueError, r"data\[0\] has 1 and 1 tokens; expected 1 or more"),
        ([([], [1, 2])], {}, ValueError, r"data\[0\] has 0 and 2 tokens"),
        ([[1] * 5], {"tokens": 4}, ValueError, r"data\[0\] has 5 tokens; expected at most tokens"),
        ([[1, 2]], {"tokens": 1}, ValueError, "tokens is 1; expected 2 or more"),
        ([[1, 2]], {"seed": 0.5}, TypeError, "seed is a float"),
        ([[1, 2]], {"padding_idx": None}, TypeError, "padding_idx is a NoneType"),
        ([[1, 2]], {"packed": 1}, TypeError, "packed is 1"),
    ],
)  # fmt: skip
def test_bad_arguments(data, options, error, words):
    with pytest.raises(error, match=words):
        ff.token_batches(data, **options)


def test_ids_that_are_not_integers():
    with pytest.raises(TypeError, match=r"tgt has dtype torch.float32; expected integers"):
        next(iter(ff.token_batches([[1.0, 2.5]])))


# ------------------------------------------------------------------------------------------- strip


def test_strip():
    tokens = torch.tensor([[1, 7, 0, 8, 2, 9, 0], [1, 7, 3, 5, 2, 2, 2], [0, 0, 1, 5, 5, 5, 5]])
    assert ff.strip(tokens) == [[1, 7, 8, 2, 9], [1, 7, 3, 5, 2, 2, 2], [1, 5, 5, 5, 5]]
    assert ff.strip(tokens, 2) == [[1, 7, 8], [1, 7, 3, 5], [1, 5, 5, 5, 5]]
    assert ff.strip(tokens, [2, 3], None)[:2] == [[1, 7, 0, 8], [1, 7]]
    assert ff.strip(tokens[0], 2, 8) == [1, 7, 0]
    assert ff.strip(tokens[None], 2) == [ff.strip(tokens, 2)] and ff.strip(tokens[:0]) == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (([[1]],), TypeError, "tokens is a list; expected an integer tensor"),
        ((torch.ones(2),), TypeError, "tokens has dtype torch.float32; expected integers"),
        ((torch.tensor(3),), ValueError, r"tokens has shape \[\]; expected \[..., T\]"),
        ((torch.tensor([3]), []), ValueError, "end_symbol is empty"),
        ((torch.tensor([3]), -1), ValueError, "end_symbol is -1"),
        ((torch.tensor([3]), 1, 0.0), TypeError, "padding_idx is a float"),
    ],
)
def test_strip_names_a_bad_argument(given, error, words):
    with pytest.raises(error, match=words):
        ff.strip(*given)
