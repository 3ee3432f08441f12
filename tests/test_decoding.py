"""greedy_decode against a model whose next symbol is known, and against a loop written out."""

import pytest
import torch
from torch import nn

from fastformer import PositionalEncoding, greedy_decode, make_model, subsequent_mask, use_backend


class Counting(nn.Module):
    """A model that follows y_t = y_{t-1} + src[0] modulo 10, and checks what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def encode(self, src, src_mask):
        assert not torch.is_grad_enabled()
        return src[:, :1] * self.weight

    def decode(self, memory, src_mask, tgt, tgt_mask):
        assert torch.equal(tgt_mask, subsequent_mask(tgt.shape[1]))
        following = (tgt + memory.long()) % 10
        return nn.functional.one_hot(following, 10).float()

    def generator(self, x):
        assert x.dim() == 2  # the last position alone
        return (x + 0.01).log()


def test_each_row_follows_its_own_source():
    src = torch.tensor([[1, 9], [3, 9], [0, 9]])
    decoded = greedy_decode(Counting(), src, None, 6, 2)
    assert decoded.tolist() == [[2, 3, 4, 5, 6, 7], [2, 5, 8, 1, 4, 7], [2] * 6]
    assert decoded.dtype == src.dtype and not decoded.requires_grad
    assert greedy_decode(Counting(), src.int(), None, 1, 2).tolist() == [[2]] * 3
    assert greedy_decode(Counting(), src.int(), None, 2, 2).dtype == torch.int32


def test_it_is_the_loop_written_out(device):
    """Row by row, growing the sequence by concatenation, with padding in the source."""
    torch.manual_seed(5)
    model = make_model(11, 11, 2, 16, 32, 2, 0.1).to(device).eval()
    src = torch.tensor([[1, 4, 9, 2, 7], [1, 8, 0, 0, 0]], device=device)
    mask = (src != 0).unsqueeze(-2)
    decoded = greedy_decode(model, src, mask, 5, 1)
    assert torch.is_grad_enabled() and not model.training
    for row in range(2):
        s, m = src[row : row + 1], mask[row : row + 1]
        ys = torch.full((1, 1), 1, device=device)
        with torch.no_grad():
            for _ in range(4):
                out = model(s, ys, m, subsequent_mask(ys.shape[1]).to(device))
                best = model.generator(out)[:, -1].argmax(-1, keepdim=True)
                ys = torch.cat((ys, best), 1)
        assert decoded[row].tolist() == ys[0].tolist()
    # What padding holds does not matter, what the source holds does.
    other = src.clone()
    other[1, 2:] = 5
    assert torch.equal(greedy_decode(model, other, mask, 5, 1), decoded)


def test_it_is_refused_before_the_first_step(monkeypatch):
    """What the last step would not take."""
    model = make_model(7, 7, 1, 16, 16, 2)
    model.tgt_embed[1] = PositionalEncoding(16, 0.0, max_len=4)
    steps = []
    monkeypatch.setattr(model, "encode", lambda *_: steps.append(1))
    src = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="max_len is 6; expected at most 5"):
        greedy_decode(model, src, None, 6, 1)
    with pytest.raises(ValueError, match="start_symbol is 7; expected a token of the 7"):
        greedy_decode(model, src, None, 5, 7)
    assert not steps
    monkeypatch.undo()
    assert greedy_decode(model, src, None, 5, 6).shape == (1, 5)


@pytest.mark.parametrize("model", [nn.Transformer(8, 2, 1, 1, 8), None])
def test_it_needs_a_model_that_decodes(model):
    with pytest.raises(TypeError, match=f"model is a {type(model).__name__} without encode"):
        greedy_decode(model, torch.ones(1, 3, dtype=torch.int64), None, 3, 1)


def test_both_backends_decode_alike(device):
    model = make_model(7, 7, 1, 16, 16, 2).to(device).eval()
    src = torch.tensor([[1, 4, 2], [1, 3, 0]], device=device)
    decoded = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            decoded.append(greedy_decode(model, src, (src != 0).unsqueeze(-2), 3, 1))
    assert torch.equal(*decoded)


def test_the_mode_is_the_callers():
    model = make_model(11, 11, 1, 16, 16, 2, 0.1)
    model.encoder.eval()
    modes = [m.training for m in model.modules()]
    greedy_decode(model, torch.ones(1, 3, dtype=torch.int64), None, 3, 1)
    assert [m.training for m in model.modules()] == modes


ids = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("src", "max_len", "start", "error", "message"),
    [
        (ids[0], 3, 1, ValueError, r"src has shape \[4\]; expected two dimensions"),
        (ids.float(), 3, 1, TypeError, "src has dtype torch.float32"),
        (ids, 0, 1, ValueError, "max_len is 0; expected 1 or more"),
        (ids, 3.0, 1, TypeError, "max_len is a float; expected an int"),
        (ids, 3, -1, ValueError, "start_symbol is -1; expected 0 or more"),
        (ids, 3, 10, ValueError, "start_symbol is 10; expected a token of the 10"),
        (ids * 10, 3, 1, ValueError, "token id 10; expected ids from 0 to 9"),
    ],
)
def test_bad_input_is_named(src, max_len, start, error, message):
    model = make_model(10, 10, 1, 8, 8, 2)
    with pytest.raises(error, match=message):
        greedy_decode(model, src, None, max_len, start)
