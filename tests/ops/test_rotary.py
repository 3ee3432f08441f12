"""rotary_embedding on both backends, against the formula in float64 and against transformers."""

from functools import partial

import pytest
import torch

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import functional

B, H, G, S = 2, 3, 2, 5


def angles(*shape, device="cpu", interleaved=False):
    """cos and sin of random angles, each for both features of a pair."""
    x = torch.rand((*shape[:-1], shape[-1] // 2), device=device) * 6
    x = x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1)
    return {"cos": x.cos(), "sin": x.sin()}


def heads(dim, norm, dtype=torch.float32, device="cpu"):
    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    x = {n: normal(B, S, h, dim).transpose(1, 2) for n, h in (("query", H), ("key", G))}
    return x | ({"query_norm": normal(dim), "key_norm": normal(dim)} if norm else {})


def rotated(**given):
    """One tensor of both outputs, for `against_oracle`."""
    return torch.cat(functional.rotary_embedding(**given), 1)


@pytest.mark.sample
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim, rotary", [(2, 2), (16, 16), (24, 24), (80, 80), (20, 12), (64, 16)])
def test_shapes(backend, device, against_oracle, dim, rotary, dtype, interleaved, norm):
    table = angles(S, rotary, device=device, interleaved=interleaved)
    x = heads(dim, norm, dtype, device)
    against_oracle(rotated, x, **table, interleaved=interleaved, eps=1e-3)


@pytest.mark.parametrize("norm", [False, True])
def test_packed_and_a_table_for_each_sequence(backend, device, against_oracle, norm):
    table = angles(B, S, 12, device=device)
    padded = heads(16, norm, device=device)
    against_oracle(rotated, padded, **table)
    packed = {n: x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x for n, x in padded.items()}
    flat = {n: x.flatten(0, 1) for n, x in table.items()}
    against_oracle(rotated, packed, **flat)
    results = (ff.rotary_embedding(**x) for x in (packed | flat, padded | table))
    for one, other in zip(*results):
        assert torch.equal(one, other.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("part", [{}, {"dim": 24}], ids=["all features", "some features"])
def test_a_norm_without_eps(backend, device, against_oracle, part):
    """Blocks of tokens reach past the last token, where 1 / sqrt(0) may not enter a sum."""
    x = heads(part.get("dim", 16), True, device=device)
    against_oracle(rotated, x, **angles(S, 16, device=device), eps=0.0)


def test_under_autocast_query_and_key_have_the_wider_dtype(backend, device):
    x, table = heads(16, False, torch.bfloat16, device), angles(S, 16, device=device)
    for name in x:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            q, k = ff.rotary_embedding(**x | {name: x[name].float()}, **table)
        assert q.dtype == k.dtype == torch.float32, name


@pytest.mark.parametrize("form", ["heads outside", "steps", "one table row", "one side's norm"])
def test_strides(backend, device, against_oracle, form):
    x, table = heads(16, True, device=device), angles(S, 8, device=device)
    if form == "heads outside":
        x = {n: t.contiguous() for n, t in x.items()}
    elif form == "steps":
        x = {n: t.repeat_interleave(2, -1)[..., ::2] for n, t in x.items()}
        table = {n: t.repeat_interleave(3, -1)[..., ::3] for n, t in table.items()}
    elif form == "one table row":
        table = {n: t[:1].expand(S, -1) for n, t in table.items()}
    else:
        key_norm = x.pop("key_norm")
        against_oracle(rotated, x, **table)
        del x["query_norm"]
        x["key_norm"] = key_norm
    against_oracle(rotated, x, **table)


def test_outputs_keep_the_order_of_memory(backend, device):
    x, table = heads(16, False, device=device), angles(S, 16, device=device)
    q, _ = ff.rotary_embedding(**x, **table)
    assert q.transpose(1, 2).is_contiguous()
    q, _ = ff.rotary_embedding(**{n: t.contiguous() for n, t in x.items()}, **table)
    assert q.is_contiguous()


def test_rotations_depend_on_distances_alone(backend, device):
    """q at position m and k at position n have the score of m + 7 and n + 7."""
    table = ff.rotary_frequencies(32, 40)
    q, k = (torch.randn(1, 1, 1, 32, device=device, dtype=torch.float64) for _ in range(2))

    def score(m, n):
        [one, _], [other, _] = (
            ff.rotary_embedding(x, x, *(t[i : i + 1].to(device) for t in table))
            for x, i in ((q, m), (k, n))
        )
        return (one * other).sum()

    torch.testing.assert_close(score(3, 1), score(10, 8), rtol=1e-5, atol=1e-5)
    assert abs(score(3, 1) - score(3, 4)) > 1e-3


@pytest.mark.parametrize("norm", [False, True])
def test_rounded_once(device, rounded_once, norm):
    table = angles(S, 32, device=device)
    rounded_once(partial(rotated, **table), heads(32, norm, torch.bfloat16, device))


def test_what_is_saved(device):
    """Without a norm the query and the key are not kept for the backward, which is linear."""
    pytest.importorskip("triton")
    for norm in (False, True):
        x, table = heads(16, norm, device=device), angles(S, 16, device=device)
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        with use_backend("triton"):
            q, _ = functional.rotary_embedding(**leaves, **table)
        saved = {t.data_ptr() for t in q.grad_fn.saved_tensors}
        assert (leaves["query"].data_ptr() in saved) == norm
        assert table["cos"].data_ptr() in saved


@pytest.mark.parametrize("norm", [False, True])
def test_one_output_alone(backend, device, norm):
    """Where nothing depends on the rotated query, its gradient is zero."""
    x, table = heads(16, norm, device=device), angles(S, 8, device=device)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    functional.rotary_embedding(**leaves, **table)[1].sum().backward()
    assert leaves["key"].grad.abs().sum() > 0
    assert leaves["query"].grad is None or (leaves["query"].grad == 0).all()


@pytest.mark.parametrize("empty", ["batch", "tokens"])
def test_empty(backend, device, empty):
    x, table = heads(16, True, device=device), angles(S, 8, device=device)
    x |= {n: x[n][:0] if empty == "batch" else x[n][:, :, :0] for n in ("query", "key")}
    table = table if empty == "batch" else {n: t[:0] for n, t in table.items()}
    x = {n: t.detach().requires_grad_() for n, t in x.items()}
    q, k = ff.rotary_embedding(**x, **table)
    assert q.shape == x["query"].shape and k.shape == x["key"].shape
    grads = torch.autograd.grad(q.sum() + k.sum(), list(x.values()), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in grads)


@pytest.mark.parametrize("far", ["query", "cos", "gradient"])
def test_offsets_past_int32(backend, device, same_when_far, far):
    """Tokens so far apart that the last one stands past 2^31 elements."""
    q = torch.randn(1, 1, 9, 4, device=device).bfloat16()
    x = {n: t.bfloat16() for n, t in angles(9, 4, device=device).items()}
    x |= {"query": q.clone(), "gradient": torch.randn_like(q)}

    def rotated_query(**given):
        return functional.rotary_embedding(key=q, **given)[0]

    # A far query's own gradient would fill what lies between.
    fixed = ("query", "cos", "sin") if far == "query" else ("cos", "sin")
    same_when_far(rotated_query, x, far, dim=0 if far == "cos" else 2, fixed=fixed)


# ------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("model", ["llama", "cohere", "qwen3", "glm"])
def test_transformers(backend, device, model):
    """Halves, neighbours, the norms of Qwen3, and a part of the features."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    x = heads(32, model == "qwen3", device=device)
    interleaved, rotary = model in ("cohere", "glm"), 16 if model == "glm" else 32
    theirs = table = angles(B, S, rotary, device=device)
    if interleaved:  # each angle beside its copy
        table = {n: t[..., : rotary // 2].repeat_interleave(2, -1) for n, t in theirs.items()}
    given = {"query": x["query"], "key": x["key"]}
    if model == "qwen3":
        for name in given:
            norm = module.Qwen3RMSNorm(32, eps=1e-5).to(device)
            norm.weight.data = x[name + "_norm"]
            given[name] = norm(given[name])
    angles_given = table if model == "cohere" else theirs
    want = module.apply_rotary_pos_emb(*given.values(), *angles_given.values())
    have = ff.rotary_embedding(**x, **table, interleaved=interleaved, eps=1e-5)
    for a, b in zip(have, want):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


# ------------------------------------------------------------------------------------------- rest


@pytest.mark.parametrize("dim, rotary", [(2, 2), (64, 16), (128, 32), (96, 96), (4096, 4096)])
def test_a_measurement_has_a_choice(dim, rotary):
    kernels = pytest.importorskip("fastformer.kernels.rotary")
    shipped = kernels.configuration(dim, rotary, "sm_90")
    found = kernels.others(shipped)
    assert len(set(found)) == len(found) >= 3
    for tiles in (*found, shipped, kernels.configuration(dim, rotary, "interpreter")):
        assert 2 * tiles.half >= rotary and tiles.rest >= dim - rotary
        assert all(n.bit_count() == 1 for n in (tiles.rows, tiles.half, tiles.warps))


def test_tables_of_their_own_in_small_tiles(device, against_oracle, small_tiles):
    """cos is of each sequence, and of both features of a pair; sin is of all sequences."""
    with use_backend("triton"), small_tiles():
        for interleaved in (False, True):
            x, table = heads(20, True, device=device), angles(B, S, 12, device=device)
            x["query"] = x["query"].contiguous()
            table["cos"], table["sin"] = torch.rand_like(table["cos"]), table["sin"][0]
            table["sin"] = torch.cat([table["sin"]] * 2, 1)[:, :12].expand(B, -1, -1)
            against_oracle(rotated, x, **table, interleaved=interleaved, eps=0.1)
        del x["key_norm"]
        against_oracle(rotated, x, **angles(S, 20, device=device))


# ------------------------------------------------------------------------------------- frequencies

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "yarn, its options": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
        "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False,
    },
    "yarn, a factor of cos": {
        "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "yarn, of a short length": {"factor": 8.0, "original_max_position_embeddings": 6},
    "yarn, a small theta": {"factor": 8.0, "original_max_position_embeddings": 768},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("length", [40, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, length):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    kind, given, theta = name.split(",")[0], SCALINGS[name], 10.0 if "small" in name else 5000.0
    trained = given.get("original_max_position_embeddings", 64)
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=2, max_position_embeddings=trained,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **given},
    )  # fmt: skip
    if kind == "default":
        even = torch.arange(0, 24, 2, dtype=torch.float64)
        frequencies, factor = 1 / theta ** (even / 24), 1.0
    else:
        compute = utils.ROPE_INIT_FUNCTIONS[kind]
        frequencies, factor = compute(config, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(length).double(), frequencies.double()).repeat(1, 2)
    cos, sin = ff.rotary_frequencies(24, length, theta, scaling={"rope_type": kind, **given})
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (length, 24)
    for have, want in ((cos, angles.cos()), (sin, angles.sin())):  # theirs has float32 frequencies
        torch.testing.assert_close(have.double(), want * factor, atol=3e-5, rtol=0)


def test_frequencies_of_neighbours():
    halves, pairs = (ff.rotary_frequencies(8, 5, interleaved=on)[0] for on in (False, True))
    assert torch.equal(halves[:, :4], pairs[:, ::2]) and torch.equal(halves[:, 4:], pairs[:, 1::2])
    cos, _ = ff.rotary_frequencies(8, 5, dtype=torch.float64)
    assert cos.dtype == torch.float64 and (cos[0] == 1).all()
