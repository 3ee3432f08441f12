"""Triangle attention by the recipe of docs/attention.md: a bias of pairs, shared by the rows."""

import pytest
import torch

import fastformer as ff

B, R, H, S, D = 2, 5, 2, 21, 16


def triangle_attention(query, key, value, pair_bias, mask):
    attend = ff.scaled_dot_product_attention
    masks = mask[:, :, None, None]
    parts = [attend(*x[:4], bias=x[4]) for x in zip(query, key, value, masks, pair_bias)]
    return torch.stack(parts)


def eager(query, key, value, pair_bias, mask):
    """Jumper et al. 2021, supplement, algorithm 13, without its gate."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + pair_bias
    weights = scores.masked_fill(~mask[:, :, None, None], -torch.inf).softmax(-1)
    return weights @ value


def inputs(device, dtype=torch.float32):
    shapes = *[(B, R, H, S, D)] * 3, (B, 1, H, S, S)
    lengths = torch.tensor([[S] * R, [9, 3, S, 1, 12]], device=device)
    mask = torch.arange(S, device=device) < lengths[..., None]
    return [torch.randn(s, device=device).to(dtype) for s in shapes], mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_the_oracle(backend, device, against_oracle, dtype):
    tensors, mask = inputs(device, dtype)
    names = "query", "key", "value", "pair_bias"
    against_oracle(triangle_attention, dict(zip(names, tensors)), mask=mask)


def test_of_the_paper_and_the_same_bits(backend, device):
    tensors, mask = inputs(device)
    leaves = [x.requires_grad_() for x in tensors]
    grad = torch.randn(B, R, H, S, D, device=device)
    found = []
    for _ in range(2):
        out = triangle_attention(*leaves, mask)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    want = eager(*[x.double() for x in leaves], mask)
    want = [want, *torch.autograd.grad(want, leaves, grad.double())]
    for have, wanted in zip(found[0], want):
        torch.testing.assert_close(have.double(), wanted.double(), atol=2e-5, rtol=1e-4)


def test_what_is_launched_and_allocated(device, monkeypatch):
    """Forward, delta, dK and dV, dQ and one kernel of the bias; nothing has the size of the scores
    of all rows.
    """
    launch = pytest.importorskip("fastformer.kernels.launch")
    launched = []
    former = launch.Launch.__call__

    def call(self, *pointers):
        launched.append(self.kernel.fn.__name__)
        sizes = [x.numel() for x in pointers if isinstance(x, torch.Tensor)]
        assert max(sizes) < R * H * S * S, self.kernel.fn.__name__
        former(self, *pointers)

    monkeypatch.setattr(launch.Launch, "__call__", call)
    tensors, mask = inputs(device)
    leaves = [x[:1].requires_grad_() for x in tensors]
    with ff.use_backend("triton"):
        triangle_attention(*leaves, mask[:1]).sum().backward()
    assert len(launched) == 5 and launched[-1] == "backward_dbias_kernel", launched
