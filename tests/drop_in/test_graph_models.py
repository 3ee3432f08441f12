"""The rewriter of graphs in models that nobody here wrote: of transformers (with eager attention),
of x-transformers and of vit_pytorch. Results stay, and most of what is in them is found, by
`accelerate` and under torch.compile.
"""

import copy
import importlib
import sys
import types
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from graph_counts import count
from graph_styles import STYLES
from hugging_face_models import SMALL, build, candidates, randomize
from test_graph import KINDS, compare, found, fresh_dynamo  # noqa: F401
from torch import nn

import fastformer as ff
from benchmarks import ROOT
from fastformer.drop_in.graph import rewriter
from fastformer.drop_in.replacements import rewritten
from fastformer.drop_in.replacements.norms import FusedLayerNorm, FusedRMSNorm
from fastformer.drop_in.replacements.rewritten import Rewritten

GOALS = {"attention": 0.93, "norm": 0.98, "feed_forward": 0.9}
LENGTH = 9


class Row(NamedTuple):
    """How many of each kind are found, all that are wanted, or (found, wanted); and why not all."""

    attention: int | tuple[int, int]
    norm: int | tuple[int, int]
    feed_forward: int | tuple[int, int]
    stays: str = ""

    def pairs(self):
        return [(x, x) if isinstance(x, int) else x for x in self[:3]]


def row(model, inputs, others=0):
    """Compare a model to its rewritten copy; return what is found, what is wanted in the graphs of
    the first inputs, and what stays. others: how many softmaxes are no attention.
    """
    wanted = Counter()

    def backend(gm, given):
        count(gm, wanted)
        return ff.dynamo_backend_eager(gm, given)

    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    with ff.use_backend("reference"), rewriter.recording() as rewriting:
        compare(model, compiled, inputs[0])
    have, want = found(rewriting), Counter(wanted)
    want["attention"] -= others
    with ff.use_backend("reference"):
        compare(model, compiled, inputs[1])
    have["norm"] += have["sum_norm"]
    return Row(*((have[kind], want[kind]) for kind in GOALS)), rewriting.stays()


def found_by_accelerate(model, inputs):
    """How many of each kind `accelerate` puts into a model, by what runs in its rewritten modules,
    and the norms of torch that it replaces; and the report.
    """
    fast = copy.deepcopy(model)
    report = ff.accelerate(fast)
    with ff.use_backend("reference"):
        compare(model, fast, inputs)
    counts = Counter()
    for module in fast.modules():
        counts["layer_norm"] += isinstance(module, (FusedLayerNorm, FusedRMSNorm))
        if isinstance(module, Rewritten):
            counts.update(x.op for capture in module._captures.values() for x in capture.parts)
    assert not report.fallbacks
    have = {kind: sum(counts[op] for op in ops) for kind, ops in KINDS.items()}
    have["norm"] += have["sum_norm"]
    return [have[kind] for kind in GOALS], report


# ------------------------------------------------------------------------------------------ models

LAYERS = [name for name, size in SMALL.items() if size == 2 and "layer" in name]


class Named(nn.Module):
    """Calls a model with arguments by name, and returns the tensors of its output."""

    def __init__(self, model, names, **more):
        super().__init__()
        self.model, self.names, self.more = model, names, more

    def forward(self, *given):
        return flat(self.model(**dict(zip(self.names, given)), **self.more))


def flat(output):
    if isinstance(output, dict):
        output = [*output.values()]
    if isinstance(output, (list, tuple)):
        return [x for part in output for x in flat(part)]
    return [output] if isinstance(output, torch.Tensor) else []


def hugging_face(kind):
    """A small model of a type, and two inputs: the first is padded if the model takes a mask."""
    pytest.importorskip("transformers", "5.17").logging.set_verbosity_error()
    config, cls = build(kind, {**SMALL, **dict.fromkeys(LAYERS, 1 + (kind == "gpt_neo"))})
    config._attn_implementation = "eager"
    model = cls(config)
    randomize(model)
    padded, plain = (next(candidates(model, padding)) for padding in ("right", "none"))
    if "attention_mask" not in padded:
        plain = {n: -x for n, x in plain.items()}
    more = {"use_cache": False} if {"input_ids", "decoder_input_ids"} & {*padded} else {}
    return Named(model, [*padded], **more), [[x.get(n) for n in padded] for x in (padded, plain)]


def x_transformers(kind="Decoder", **options):
    xt = pytest.importorskip("x_transformers")
    sizes = dict(dim=32, depth=1, heads=4, attn_dim_head=8)
    layers = getattr(xt, kind)(**{**sizes, **options})
    model = xt.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, -3:] = False
    tokens = torch.randint(50, (2, LENGTH))
    return Named(model, ["x", "mask"]), [[tokens, mask], [tokens, None]]


def vit_pytorch(module, cls="ViT", shape=(3, 32, 32), **options):
    import_vit_pytorch()
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**options)
    images = torch.randn(2, *shape)
    return model, [[images], [-images]]


def sizes(parts, **options):
    return {f"{part}_{n}": x for part in parts.split() for n, x in options.items()}


def import_vit_pytorch():
    """Import it without torchvision, which only its modules for training call."""
    names = ("torchvision", "torchvision.transforms")
    missing = [n for n in names if importlib.util.find_spec("torchvision") is None]
    sys.modules.update({n: types.ModuleType(n) for n in missing})
    for n in missing[1:]:
        sys.modules["torchvision"].transforms = sys.modules[n]
    try:
        pytest.importorskip("vit_pytorch")
    finally:
        for n in missing:
            del sys.modules[n]


# What is found of each kind, and of how many.
FILLED = "attention: a finite fill follows scores that another has filled"
MIXED = "attention: its heads are mixed"
HUGGING_FACE = {
    "bert": Row(1, 4, 1),
    "roberta": Row(1, 4, 1),
    "distilbert": Row(1, 4, 1),
    "albert": Row(1, 4, 1),
    "electra": Row(1, 4, 1),
    "deberta": Row(1, 4, 1),
    "deberta-v2": Row(1, 4, 1),
    "mpnet": Row(1, 4, 1),
    "modernbert": Row(2, 6, 2),
    "nomic_bert": Row(1, 4, 1),
    "bart": Row(3, 7, 2),
    "t5": Row(3, 7, 2),
    "gpt2": Row(1, 3, 1),
    "gpt_neo": Row((0, 2), 5, 2, "attention: a mask is added to scores that another has filled"),
    "gpt_neox": Row(1, 3, 1),
    "gptj": Row(1, 2, 1),
    "opt": Row(1, 3, 1),
    "bloom": Row(1, 4, (0, 1), "feed-forward: its gelu is an autograd.Function"),
    "mpt": Row(1, 3, 1),
    "falcon": Row(1, 2, 1),
    "llama": Row(1, 3, 1),
    "mistral": Row(1, 3, 1),
    "qwen2": Row(2, 5, 2),
    "qwen3": Row(2, 9, 2),
    "gemma2": Row(2, 9, 2),
    "gemma3_text": Row(2, 13, 2),
    "phi3": Row(1, 3, 1),
    "cohere": Row(1, 2, 1),
    "gpt_oss": Row(2, 5, 0),
    "whisper": Row(3, 7, 2),
    "vit": Row(1, 3, 1),
    "deit": Row(1, 3, 1),
    "swin": Row(4, 13, 4),
    "clip_text_model": Row(1, 3, 1),
    "clip_vision_model": Row(1, 4, 1),
    "wav2vec2": Row(1, 4, 1),
}
X_TRANSFORMERS = {
    "decoder": (dict(), Row(1, 3, 1)),
    "encoder": (dict(kind="Encoder"), Row(1, 3, 1)),
    "relative positions": (dict(rel_pos_bias=True), Row(1, 3, 1)),
    "alibi": (dict(alibi_pos_bias=True, alibi_num_heads=2), Row(1, 3, 1)),
    "rotary": (dict(rotary_pos_emb=True), Row(1, 3, 1)),
    "dynamic positions": (dict(dynamic_pos_bias=True), Row(1, 3, 2)),
    "one head of keys": (dict(attn_one_kv_head=True), Row(1, 3, 1)),
    "groups": (dict(attn_kv_heads=2), Row(1, 3, 1)),
    "qk norm": (dict(attn_qk_norm=True), Row(1, 3, 1)),
    "gated values": (dict(attn_gate_values=True), Row(1, 3, 1)),
    "swiglu": (
        dict(ff_swish=True, ff_glu=True),
        Row(1, 3, (0, 1), "feed-forward: the product is multiplied by 1.0"),
    ),
    "rms norm": (dict(use_rmsnorm=True), Row(1, 3, 1)),
    "scale norm": (dict(use_scalenorm=True), Row(1, 3, 1)),
    "sandwich": (dict(sandwich_norm=True), Row(1, 5, 1)),
    "capped": (dict(attn_softclamp_logits=True), Row(1, 3, 1)),
    "memory": (dict(attn_num_mem_kv=3), Row(1, 3, 1)),
    "residual attention": (dict(residual_attn=True, depth=2), Row((1, 2), 5, 2, FILLED)),
    "squared relu": (dict(ff_relu_squared=True), Row(1, 3, 1)),
    "post-norm": (dict(pre_norm=False), Row(1, 2, 1)),
    "scaled heads": (dict(attn_head_scale=True), Row(1, 3, 1)),
    "flash": (dict(attn_flash=True), Row(1, 3, 1)),
    "talking heads": (
        dict(attn_pre_talking_heads=True, attn_post_talking_heads=True),
        Row((0, 1), 3, 1, MIXED),
    ),
    "top k": (dict(attn_sparse_topk=4), Row(1, 3, 1)),
}
TINY = dict(image_size=32, num_classes=5, dim=32)
VIT = dict(TINY, patch_size=8, depth=1, heads=4, mlp_dim=64, dim_head=8)
SIMPLE = dict(VIT, cls="SimpleViT")
LARGE = dict(shape=(3, 64, 64), num_classes=5)
CROSS = dict(
    cls="CrossViT", image_size=32, num_classes=5, depth=1, sm_dim=16, lg_dim=32, sm_patch_size=8,
    cross_attn_depth=1, cross_attn_heads=2, cross_attn_dim_head=8,
    **sizes("sm lg", enc_depth=1, enc_heads=2, enc_mlp_dim=32, enc_dim_head=8),
)  # fmt: skip
VIDEO = dict(
    cls="ViViT", shape=(3, 4, 32, 32), frames=4, image_patch_size=8, frame_patch_size=2,
    spatial_depth=1, temporal_depth=1, heads=4, mlp_dim=64, dim_head=8, **TINY,
)  # fmt: skip
SCALABLE = dict(
    LARGE, cls="ScalableViT", dim=16, heads=(2, 2), depth=(1, 1), ssa_dim_key=(8, 8),
    reduction_factor=(4, 2), window_size=(4, None),
)  # fmt: skip
CCT = dict(
    cls="CCT", img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=1, num_heads=4,
    mlp_ratio=2.0, num_classes=5, positional_embedding="learnable",
)  # fmt: skip
VIT_PYTORCH = {
    "vit": (VIT, Row(1, 5, 1)),
    "simple_vit": (SIMPLE, Row(1, 5, 1)),
    "deepvit": (dict(VIT, cls="DeepViT"), Row((0, 1), 6, 1, MIXED)),
    "cait": (
        dict(VIT, cls="CaiT", cls_depth=1),
        Row((0, 2), 7, 2, "attention: its heads are mixed"),
    ),
    "parallel_vit": (VIT, Row(2, 5, 2)),
    "vit_for_small_dataset": (VIT, Row(1, 4, 1)),
    "simple_vit_with_qk_norm": (SIMPLE, Row(1, 8, 1)),
    "learnable_memory_vit": (VIT, Row(1, 5, 1)),
    "vit_with_patch_merger": (dict(VIT, depth=2), Row(3, 8, 2)),
    "simple_vit_with_value_residual": (dict(SIMPLE, depth=2), Row(2, 7, 2)),
    "normalized_vit": (dict(VIT, cls="nViT"), Row(1, 0, 1)),
    "rvt": (dict(VIT, cls="RvT"), Row(1, 3, 1)),
    "cvt": (
        dict(LARGE, cls="CvT", **sizes("s1 s2 s3", emb_dim=16, heads=2, depth=1)),
        Row(3, 9, 0),
    ),
    "nest": (
        dict(TINY, cls="NesT", patch_size=4, heads=2, num_hierarchies=2, block_repeats=(1, 1)),
        Row(2, 8, 0),
    ),
    "t2t": (
        dict(TINY, cls="T2TViT", depth=1, heads=4, mlp_dim=64, t2t_layers=((7, 4), (3, 2))),
        Row(2, 6, 2),
    ),
    "levit": (dict(TINY, cls="LeViT", stages=1, depth=1, heads=4, mlp_mult=2), Row(1, 0, 0)),
    "cross_vit": (CROSS, Row(4, 14, 2)),
    "pit": (
        dict(TINY, cls="PiT", patch_size=8, depth=(1, 1), heads=2, mlp_dim=32, dim_head=8),
        Row(2, 5, 2),
    ),
    "vivit": (VIDEO, Row(2, 8, 2)),
    "scalable_vit": (SCALABLE, Row(4, 10, 0)),
    "cct": (CCT, Row(1, 3, 1)),
    "xcit": (dict(VIT, cls="XCiT", cls_depth=1), Row(2, 9, 2)),
}
CASES = {
    **{n: (hugging_face, dict(kind=n), x) for n, x in HUGGING_FACE.items()},
    **{f"x {n}": (x_transformers, o, x) for n, (o, x) in X_TRANSFORMERS.items()},
    **{f"v {n}": (vit_pytorch, dict(o, module=n), x) for n, (o, x) in VIT_PYTORCH.items()},
}
NO_ATTENTION = {  # softmaxes that are wanted by count, but are none
    "gpt_oss": (2, "the router of each layer"),
    "v cct": (1, "it weighs the sequence by one linear layer, to pool it"),
}
OUTSIDE = {"mpt": Row(0, 3, 1)}  # what `accelerate` finds: its ALiBi is made outside of its layers
CHEAP = {"distilbert", "x encoder"}  # vit_pytorch is installed for the other cases alone


def made(name):
    torch.manual_seed(0)
    maker, options, _ = CASES[name]
    model, inputs = maker(**options)
    with torch.no_grad():
        for x in model.parameters():  # also the norms' weights, which begin at 1
            x += 0.03 * torch.randn_like(x)
    return model.eval(), inputs


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.with_all) for n in CASES]
)
def test_models(name, monkeypatch):
    monkeypatch.setattr(rewritten, "_MOST", -1)  # each module has graphs of its own, to be counted
    expected = CASES[name][2]
    model, inputs = made(name)
    have, report = found_by_accelerate(copy.deepcopy(model), inputs[0])  # a call may keep tensors
    assert have == [n for n, _ in OUTSIDE.get(name, expected).pairs()], report
    have, stays = row(model, inputs, NO_ATTENTION.get(name, (0,))[0])
    assert have.pairs() == expected.pairs(), stays


def totals(rows):
    """Of each kind, how many are found and wanted."""
    return [tuple(map(sum, zip(*(x.pairs()[i] for x in rows)))) for i in range(len(GOALS))]


def test_goals():
    """Of what is wanted in all of these models, and in the styles of graph_styles, most is found;
    a row that finds less than it wants says why. The page has the figures.
    """
    tables = {
        "transformers, eager": [*HUGGING_FACE.values()],
        "x-transformers": [x for _, x in X_TRANSFORMERS.values()],
        "vit-pytorch": [x for _, x in VIT_PYTORCH.values()],
    }
    styles = [Row(x.attention, x.norm + x.sum_norm, x.feed_forward) for x in STYLES.values()]
    rows = [x for table in tables.values() for x in table]
    for (have, want), (kind, goal) in zip(totals([*rows, *styles]), GOALS.items()):
        assert have >= goal * want, kind
    for x in rows:
        assert any(have < want for have, want in x.pairs()) == bool(x.stays)
    page = (ROOT / "docs" / "existing_models.md").read_text()
    for family, table in tables.items():
        cells = [f"{have} of {want}" for have, want in totals(table)]
        assert f"| {family} | {len(table)} | {' | '.join(cells)} |" in page, cells


def attends(x):
    weights = F.dropout((x @ x.mT).softmax(-1), 0.5).masked_fill(x.mean() > 9.0, 0.0)
    return weights.flatten(0, 1).unflatten(0, (2, -1)) @ x


def routes_to_the_best(x):
    weights, chosen = x.softmax(-1).topk(2)
    return x.gather(-1, chosen) * weights


def routes_by_a_sum(x):
    return (x.softmax(-1) * x).sum(-1)


@pytest.mark.parametrize("function, attentions", [
    (attends, 1), (routes_to_the_best, 0), (routes_by_a_sum, 0),
])  # fmt: skip
def test_a_router_of_experts_is_no_attention(function, attentions):
    counts = Counter(), Counter()

    def backend(gm, given):
        for wanted, routers in zip(counts, (False, True)):
            count(gm, wanted, routers)
        return gm.forward

    torch.compile(function, backend=backend)(torch.randn(2, 4, 4))
    assert [x["attention"] for x in counts] == [attentions, 1]
