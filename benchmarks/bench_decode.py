"""Decoding: attention of one query to a cache, and whole generations with a cache and without.

Attention reads keys and values of bfloat16 [B, 8, S, 128] (float32 on a CPU), with 1, 4 or 16 query
heads to a head of the cache, S by the size of the cache. `triton` is the kernel that splits the
keys, and `read` no attention but two sums over the cache: its GB/s are what this GPU can read.
flash-attn's is its kernel for caches, FlexAttention has one of its own for few queries. All rows
are full, and the kernels of fastformer are given their lengths, as a cache does.

FLOPs: 4 B H S D. Least bytes: the keys and values once, and the query and output.

Generations are greedy, of a Transformer of the base model's width. `auto` decodes with a cache,
`recomputed` computes all tokens again at each step; the time is that of the host, from the source
to the last token, and tokens_per_s counts the new tokens of all sequences.
"""

import statistics
import time

import pytest
import torch

import fastformer as ff
from benchmarks.peers import FORCED, GPU, available, flash_attn, sdpa
from benchmarks.report import STAND_IN

CACHE_HEADS, DIM = 8, 128
SIZES = [16, 64, 256, 1024, 4096] if GPU else [1]  # MB
BATCHES, GROUPS = ([1, 8, 64], [1, 4, 16]) if GPU else ([1, 4], [1, 4])
PROVIDERS = available("torch", *FORCED, "flash-attn", "flash-attn 3", "flex")
PROVIDERS += available("triton", "read", *([] if GPU else ["reference"]))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("group", GROUPS, ids=lambda n: f"{n}heads")
@pytest.mark.parametrize("batch", BATCHES, ids=lambda n: f"B{n}")
@pytest.mark.parametrize("megabytes", SIZES, ids=lambda n: f"{n}MB")
def test_attention_of_one_query(measure, request, device, dtype, megabytes, batch, group, provider):
    if provider == "flex" and not request.config.getoption("slow"):
        pytest.skip("flex_attention compiles for each shape: needs --slow")
    heads, of_token = CACHE_HEADS * group, 2 * CACHE_HEADS * DIM * dtype.itemsize
    length = (megabytes << 20) // (batch * of_token)
    query = torch.randn(batch, heads, 1, DIM, device=device, dtype=dtype)
    shape = batch, CACHE_HEADS, length, DIM
    key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    attend = _attention(provider, lengths)
    measure(
        torch.no_grad()(lambda: attend(query, key, value)),
        group=f"attention of one query, {megabytes} MB, B={batch}, H/G={group}",
        flops=4 * batch * heads * length * DIM,
        nbytes=batch * length * of_token + 2 * query.nbytes,
        heads=heads,
        length=length,
        head_dim=DIM,
    )


def _attention(provider, lengths):
    """Return the provider's attention: (query, key, value) -> output."""
    if provider in ("reference", "triton"):
        options = {"key_lengths": lengths, "causal_alignment": "bottom_right", "enable_gqa": True}

        def attend(query, key, value):
            with ff.use_backend(provider):
                return ff.scaled_dot_product_attention(query, key, value, **options)

        return attend
    if provider == "read":
        return lambda query, key, value: (key.sum(), value.sum())
    if provider == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda *inputs: compiled(*inputs, enable_gqa=True)
    if provider.startswith("flash-attn"):
        attend = flash_attn(provider).flash_attn_with_kvcache
        return lambda *inputs: attend(*(x.transpose(1, 2) for x in inputs))
    return lambda *inputs: sdpa(provider, *inputs, enable_gqa=True)


# ------------------------------------------------------------------------------------- generations

VOCAB, D_MODEL, D_FF, HEADS, LAYERS, SOURCE = 1000, 512, 2048, 8, 2, 64
RECOMPUTED = 1024 if GPU else 64  # the longest without --slow
# Tokens of a first generation, whose last step has 16 and so a launch of every kind: with a cache
# its capacity decides. Up to SHORT tokens, a generation is repeated.
WARM, SHORT = 17, 256


@pytest.mark.parametrize("provider", ["recomputed", "auto"])
@pytest.mark.parametrize("length", [64, 256, 1024, 4096] if GPU else [64, 256])
@pytest.mark.parametrize("batch", [1, 64] if GPU else [1], ids=lambda n: f"B{n}")
def test_generation(measure, benchmark, request, device, dtype, batch, length, provider):
    slow = request.config.getoption("slow")
    if provider == "recomputed" and length > RECOMPUTED and not slow:
        pytest.skip(f"{length} tokens, recomputed: needs --slow")
    model = ff.make_model(VOCAB, VOCAB, LAYERS, D_MODEL, D_FF, HEADS, max_len=max(length, SOURCE))
    model = model.to(device, dtype).eval()
    source = torch.randint(1, VOCAB, (batch, SOURCE), device=device)
    cache = ff.DecoderCache(length) if provider == "auto" else False

    def seconds(tokens):
        started = time.perf_counter()
        ff.greedy_decode(model, source, None, tokens, 1, cache=cache)[0, -1].item()  # waits
        return time.perf_counter() - started

    seconds(WARM)
    stand_in = GPU and torch.cuda.get_device_name() == STAND_IN  # has compiled all by now
    lengths = [length] * (3 if length <= SHORT else 1)
    samples = [seconds(n) for n in ([WARM] if stand_in or benchmark.disabled else lengths)]
    measure(
        samples=samples,
        group=f"greedy decoding, {LAYERS} layers, B={batch} S={length}",
        d_model=D_MODEL,
        layers=LAYERS,
        tokens_per_s=batch * (length - 1) / statistics.median(samples),
    )
