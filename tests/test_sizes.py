"""Every kernel, forward and backward, against the oracle at the sizes that training has: bfloat16,
head dimensions 64 and 128 and small ones, thousands of tokens. Without a GPU the same calls are
small.
"""

import pytest
import torch

import fastformer as ff

GPU = torch.cuda.is_available()
S, ROWS, WIDTH, CLASSES = (2048, 4096, 512, 32768) if GPU else (48, 6, 16, 33)
D = (16, 32, 64, 128) if GPU else (16, 32)
SEED = 20170612

ATTENTION = {
    "plain": {},
    "causal": dict(is_causal=True),
    "lengths and dropout": dict(lengths=True, dropout_p=0.1),
    "lengths, bias and dropout": dict(lengths=True, bias=True, dropout_p=0.1),
    "window": dict(window=(S // 4, 0)),
}


@pytest.fixture
def random(device):
    def random(*shape, scale=1.0):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale

    return random


@pytest.fixture(autouse=True)
def kernels():
    with ff.use_backend("triton"):
        yield


@pytest.mark.parametrize("d", D)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(against_oracle, random, device, case, d):
    options = dict(ATTENTION[case])
    tensors = {name: random(2, 4, S, d, scale=1.5) for name in ("query", "key", "value")}
    if options.pop("bias", False):
        tensors["bias"] = random(4, S, S)
    if options.pop("lengths", False):
        options["key_lengths"] = torch.tensor([S // 2 + 1, S], device=device)
    if "dropout_p" in options:
        options["dropout_seed"] = SEED
    against_oracle(ff.scaled_dot_product_attention, tensors, **options)


def test_packed(against_oracle, random, device):
    offsets = torch.tensor([0, S // 4 + 1, 2 * S], device=device, dtype=torch.int32)
    tensors = {
        name: random(2 * S, 4, 64 if GPU else 16, scale=1.5) for name in ("query", "key", "value")
    }
    longest = 2 * S - S // 4 - 1

    def packed(**given):
        return ff.packed_attention(
            **given, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=longest, max_k=longest
        )

    against_oracle(packed, tensors, dropout_p=0.1, dropout_seed=SEED, is_causal=True)


@pytest.mark.parametrize("width", [WIDTH, 8 * WIDTH, 32 * WIDTH] if GPU else [WIDTH])
def test_norms(against_oracle, random, width):
    tensors = {"input": random(ROWS, width), "weight": random(width)}
    against_oracle(ff.rms_norm, tensors, normalized_shape=width)
    tensors["bias"] = random(width)
    against_oracle(ff.layer_norm, tensors, normalized_shape=width)
    tensors["residual"] = random(ROWS, width)
    against_oracle(_both, tensors, dropout_p=0.1, dropout_seed=SEED)


def _both(**given):
    return torch.cat(ff.dropout_add_layer_norm(**given))


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH] if GPU else [WIDTH])
def test_feed_forward(against_oracle, random, width):
    tensors = {"input": random(ROWS, width), "b_1": random(4 * width), "b_2": random(width)}
    tensors["w_1"] = random(4 * width, width, scale=width**-0.5)
    tensors["w_2"] = random(width, 4 * width, scale=width**-0.5)
    against_oracle(ff.feed_forward, tensors, dropout_p=0.1, dropout_seed=SEED)


@pytest.mark.parametrize("op", [ff.geglu, ff.swiglu])
def test_gated(against_oracle, random, op):
    tensors = {"x": random(ROWS, WIDTH), "w": random(6 * WIDTH, WIDTH, scale=WIDTH**-0.5)}
    tensors["w_2"] = random(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5)

    def gated(x, w, w_2, **options):
        return op(x, w, None, w_2, None, **options)

    against_oracle(gated, tensors, dropout_p=0.1, dropout_seed=SEED)


def test_embed(against_oracle, random, device):
    tensors = {"tokens": torch.randint(0, CLASSES, (2, ROWS), device=device)}
    tensors |= {"weight": random(CLASSES, WIDTH), "positional": random(ROWS, WIDTH)}
    against_oracle(ff.embed, tensors, dropout_p=0.1, dropout_seed=SEED)


@pytest.mark.parametrize("smoothing", ["uniform", "kl"])
def test_losses(against_oracle, random, device, smoothing):
    options = dict(reduction="none", label_smoothing=0.1, smoothing=smoothing, ignore_index=0)
    target = torch.randint(1, CLASSES, (ROWS,), device=device)
    logits = {"logits": random(ROWS, CLASSES), "target": target}
    against_oracle(ff.cross_entropy, logits, **options)
    projected = {"input": random(ROWS, WIDTH), "target": target}
    projected["linear_weight"] = random(CLASSES, WIDTH, scale=WIDTH**-0.5)
    against_oracle(ff.linear_cross_entropy, projected, **options)
