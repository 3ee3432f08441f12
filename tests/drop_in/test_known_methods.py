"""`accelerate` on the feed-forward layers and the norms of residual sums in transformers' layers,
whose methods it knows by their source.
"""

import copy
import functools
import importlib
import inspect
import pickle
import types

import compare_models
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import build
from torch import nn

import fastformer as ff
from benchmarks import ROOT
from fastformer.drop_in.replacements import known_methods, sublayers
from fastformer.ops.feed_forward.reference import ACTIVATIONS

transformers = pytest.importorskip("transformers", "5.17")
from tiny_models import Tiny, edited  # noqa: E402

transformers.logging.set_verbosity_error()
ff.register_transformers()

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
bert = Tiny("Bert", "ForMaskedLM", **SIZES)
gpt2 = Tiny(
    "GPT2", "LMHeadModel", vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=40,
    bos_token_id=1, eos_token_id=None, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
TOKENS = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(0))
GIVEN = dict(input_ids=TOKENS, labels=TOKENS)


def pair(make, **changes):
    """An eager model and its accelerated copy, with random weights, and the report."""
    torch.manual_seed(0)
    plain = make(**changes).double()
    with torch.no_grad():
        for x in plain.parameters():
            x += 0.1 * torch.randn_like(x)
    model = copy.deepcopy(plain)
    plain.set_attn_implementation("eager")
    model.set_attn_implementation("fastformer")
    return plain, model, ff.accelerate(model)


def ops_in(model, **given):
    """How often each op ran, by the last name of the module and the op."""
    rows = ff.explain(model, **given).rows
    found = [(name.rpartition(".")[2], op) for name, op, *_ in rows]
    return {key: found.count(key) for key in found}


def result(model, given=GIVEN, names=("loss", "logits")):
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return [out[name] for name in names], {n: p.grad for n, p in model.named_parameters()}


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)  # some losses are in float32


# ------------------------------------------------------------------------------------------- BERT


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("training", [True, False])
def test_bert(training, backend):
    plain, model, report = pair(bert, **NO_DROPOUT)
    if backend == "triton":
        plain, model = plain.float(), model.float()
    assert set(report.replaced.values()) == {
        *("BertLayer", "BertSelfOutput", "BertIntermediate", "BertOutput", "LayerNorm"),
    }
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in plain.state_dict().items())
    plain.train(training), model.train(training)
    with ff.use_backend(backend):
        close(result(model), result(plain))
    assert not report.fallbacks
    assert ops_in(model, **GIVEN) == {
        ("LayerNorm", "layer_norm"): 2,
        ("self", "scaled_dot_product_attention"): 2,
        ("output", "dropout_add_layer_norm"): 4,
        ("output", "feed_forward"): 2,
    }
    ff.restore(model)
    assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]
    assert all(vars(x).keys() == vars(y).keys() for x, y in zip(model.modules(), plain.modules()))


@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_three_steps(make):
    plain, model, _ = pair(make, **(NO_DROPOUT if make is bert else {}))
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.train().parameters(), 1e-2)
        for _ in range(3):
            result(one)
            optimizer.step()
    close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_methods_run_as_they_are_on_a_cpu(make, monkeypatch):
    """Under "auto", where they make fewer calls; not where a backend is chosen or observed."""
    monkeypatch.undo()
    calls, inner = [], known_methods._torch_is_faster
    monkeypatch.setattr(
        known_methods, "_torch_is_faster", lambda *given: calls.append(inner(*given)) or calls[-1]
    )
    options = dict(attention_probs_dropout_prob=0.0) if make is bert else {}
    plain, model, report = pair(make, **options)
    torch.manual_seed(1)
    want = result(plain.train())
    torch.manual_seed(1)
    close(result(model.train()), want)  # with dropout: it is torch's
    assert len(calls) >= 4 and all(calls) and not report.fallbacks
    with pytest.raises(TypeError, match="hidden_states"):
        (model.bert.encoder.layer[0].output if make is bert else model.transformer.h[0])()
    calls.clear()
    for backend in ("reference", "triton"):
        with ff.use_backend(backend), torch.no_grad():
            model.float()(**GIVEN)
    assert ops_in(model, **GIVEN)["output" if make is bert else "mlp", "feed_forward"] == 2
    assert len(calls) >= 4 and not any(calls)


def test_dropout_of_bert():
    """How many elements are dropped before a sum, and the scale of the others; another mask in the
    next call, and the same on both backends.
    """
    _, model, _ = pair(bert, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.0)
    output = model.float().train().bert.encoder.layer[0].attention.output
    with torch.no_grad():
        output.dense.weight.zero_()
        output.dense.bias.fill_(3.0)
    residual = torch.zeros(64, 64, 32)

    seen = []
    after_sum = type(output.LayerNorm).after_sum

    def record(norm, *given):
        found = after_sum(norm, *given)
        seen.append(found[1])
        return found

    type(output.LayerNorm).after_sum = record
    try:
        for _ in range(2):
            output(torch.zeros(64, 64, 32), residual)
        for backend in ("reference", "triton"):
            torch.manual_seed(3)
            with ff.use_backend(backend):
                output(torch.zeros(2, 64, 32), residual[:2])
    finally:
        type(output.LayerNorm).after_sum = after_sum
    first, second, *both = seen
    assert set(first.unique().tolist()) == {0.0, 4.0}
    dropped = (first == 0).double().mean().item()
    assert abs(dropped - 0.25) < 5 * (0.25 * 0.75 / first.numel()) ** 0.5
    assert not torch.equal(first, second)
    assert torch.equal(*both)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_checkpointing(make, reentrant):
    """The recomputed layers draw the same masks, so that the gradients are those without it."""
    dropout = dict(hidden_dropout_prob=0.2) if make is bert else dict(resid_pdrop=0.2)
    _, model, _ = pair(make, **dropout)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        torch.manual_seed(4)
        found.append(result(model.train(), names=["loss"]))
    close(*found)


def test_hooks():
    """A submodule with a hook is called, and the others are fused where they can be."""
    plain, model, _ = pair(bert, **NO_DROPOUT)
    calls = []
    layer = model.bert.encoder.layer[0]
    for path in ("intermediate", "output.dense", "output.LayerNorm", "attention.output.dropout"):
        module = layer.get_submodule(path)
        handle = module.register_forward_hook(lambda m, *_: calls.append(m))
        calls.clear()
        close(result(model), result(plain))
        assert calls == [module]
        handle.remove()
    calls.clear()
    close(result(model), result(plain))
    assert not calls


def test_peft():
    """Adapters of any projection are called; the sums are fused nevertheless."""
    peft = pytest.importorskip("peft")
    for make, targets in (
        (bert, ["intermediate.dense"]),
        (bert, ["output.dense", "query"]),
        (gpt2, ["c_fc"]),
        (gpt2, ["c_proj", "c_attn"]),
    ):
        found = []
        plain, model, _ = pair(make, **(NO_DROPOUT if make is bert else {}))
        for one in (plain, model):
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            found.append(result(peft.get_peft_model(one, config).double()))
        close(*found)
        ops = {op for _, op in ops_in(model, **GIVEN)}
        assert "dropout_add_layer_norm" in ops and "feed_forward" not in ops


class Quantized(nn.Module):
    """A linear layer whose weight is int8."""

    def __init__(self, linear):
        super().__init__()
        self.scale, self.bias = linear.weight.detach().abs().max() / 127, linear.bias
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, self.bias)


@pytest.mark.parametrize("name", ["intermediate.dense", "output.dense"])
def test_quantized_layers(name):
    plain, model, _ = pair(bert, **NO_DROPOUT)
    for one in (plain, model):
        layer = one.bert.encoder.layer[0]
        layer.set_submodule(name, Quantized(layer.get_submodule(name)))
    close(result(model), result(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_low_precision(make, dtype):
    """Not further from float64 than twice the plain model."""
    plain, model, report = pair(make, **(NO_DROPOUT if make is bert else {}))
    want = plain(**GIVEN).logits
    errors = []
    for one in (plain, model):
        if dtype == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                have = one.float()(**GIVEN).logits
        else:
            have = one.to(dtype)(**GIVEN).logits
        errors.append((have.double() - want).norm() / want.norm())
    assert errors[1] < 2 * errors[0]
    assert not report.fallbacks


@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_copies_and_signatures(make):
    """Copies and pickles are accelerated, too; the signatures stay."""
    plain, model, _ = pair(make, **(NO_DROPOUT if make is bert else {}))
    want = result(plain)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(result(one), want)
        assert ops_in(one, **GIVEN) == ops_in(model, **GIVEN)
    for a, b in zip(model.modules(), plain.modules()):
        have, want = (inspect.signature(x.forward).parameters.values() for x in (a, b))
        assert [(x.name, x.kind, x.default) for x in have] == [
            (x.name, x.kind, x.default) for x in want
        ]


@pytest.mark.with_all
@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_compiled(make):
    plain, model, _ = pair(make, **(NO_DROPOUT if make is bert else {}))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(TOKENS).logits, plain(TOKENS).logits)


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = TOKENS[i % 3].roll(i)
        return dict(input_ids=ids, labels=ids)


@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_trainer(make, tmp_path):
    """Two steps of two parts, and the evaluation."""
    pytest.importorskip("accelerate")
    found = []
    for model in pair(make, **(NO_DROPOUT if make is bert else {}))[:2]:
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, optim="sgd",
        )  # fmt: skip
        data = dict(train_dataset=Examples(), eval_dataset=Examples())
        trainer = transformers.Trainer(model.float(), options, **data)
        loss = trainer.train().training_loss
        found.append((loss, trainer.evaluate()["eval_loss"], model.state_dict()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------- the other types

# The types that people fine-tune most.
TYPES = (
    *("bert", "roberta", "distilbert", "xlm-roberta", "electra", "albert", "gpt2", "gpt_neox"),
    *("opt", "phi", "t5", "bart", "whisper", "wav2vec2", "vit", "clip", "llama", "mistral"),
    *("qwen2", "gemma2"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_equals_the_plain_model(kind):
    """Outputs, loss and the gradient of every parameter, in evaluation and in training."""
    *_, plain, wanted = compare_models.runnable(*build(kind))
    plain.config.apply_spec_augment = False  # of wav2vec2: it masks a part of the sound
    model = copy.deepcopy(plain)
    report = ff.accelerate(model)
    given = (compare_models.with_labels(plain, wanted[0][1]) or wanted)[0][1]
    for training in (False, True):
        plain.train(training), model.train(training)
        want = compare_models.results(plain, given)
        assert compare_models.error(compare_models.results(model, given), want) < 1e-5
    assert not report.fallbacks
    ff.restore(model)
    assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]


# By column of the table in docs/existing_models.md, the ops that compute it.
COLUMNS = {
    "attention": ("scaled_dot_product_attention",),
    "rotary": ("rotary_embedding",),
    "norm": ("layer_norm", "rms_norm"),
    "sum and norm": ("dropout_add_layer_norm", "dropout_add_rms_norm"),
    "feed-forward": ("feed_forward", "gated_activation"),
    "loss": ("cross_entropy",),
}


def row(kind):
    """The ops that run in a type, with labels, after `accelerate`, and where torch runs instead."""
    plain, wanted = compare_models.runnable(*build(kind))[2:]
    given = (compare_models.with_labels(plain, wanted[0][1]) or wanted)[0][1]
    model = plain.float()
    given = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
    compare_models.set_implementation(model, "fastformer")
    ff.accelerate(model)
    ran = {op for _, op, backend, _ in ff.explain(model, **given).rows if backend != "torch"}
    cells = [", ".join(f"`{op}`" for op in ops if op in ran) or "-" for ops in COLUMNS.values()]
    return f"| {kind} | {' | '.join(cells)} |"


def test_the_table_of_the_types():
    """python -c "import test_known_methods as t; print(t.table())" in tests/drop_in prints it."""
    assert table() in (ROOT / "docs" / "existing_models.md").read_text()


def table():
    head = f"| type | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}"
    return "\n".join([head, *map(row, TYPES)])


# ------------------------------------------------------------------------- what the rows compute

# By form that no type above has: the type, and the settings that ask for it.
FORMS = {
    "wav2vec2, norm first": ("wav2vec2", dict(do_stable_layer_norm=True), "EncoderLayerStable"),
    "opt, norm last": ("opt", dict(do_layer_norm_before=False), "OPTDecoderLayer"),
    "albert, in chunks": ("albert", dict(chunk_size_feed_forward=1), "AlbertLayer"),
    "bert, in chunks": ("bert", dict(chunk_size_feed_forward=1), "BertLayer"),
    "whisper in bfloat16": ("whisper", {}, "WhisperDecoderLayer"),
    "t5 in bfloat16": ("t5", {}, "T5DenseActDense"),
    "mbart": ("mbart", {}, "MBartDecoderLayer"),
    "siglip": ("siglip", {}, "SiglipEncoderLayer"),
    "qwen3": ("qwen3", {}, "Qwen3DecoderLayer"),
    "gemma3_text": ("gemma3_text", {}, "Gemma3DecoderLayer"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_a_layer(form):
    """As `test_a_type_equals_the_plain_model`; and the layer is replaced."""
    kind, settings, layer = FORMS[form]
    config, cls = build(kind)
    config.update(settings)
    *_, plain, wanted = compare_models.runnable(config, cls)
    plain.config.apply_spec_augment = False
    given = (compare_models.with_labels(plain, wanted[0][1]) or wanted)[0][1]
    if "bfloat16" in form:
        plain = plain.bfloat16()
        given = {n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}
    model = copy.deepcopy(plain)
    report = ff.accelerate(model)
    assert any(layer in name for name in report.replaced.values())
    bound = 0.05 if "bfloat16" in form else 1e-5
    for training in (False, True):
        plain.train(training), model.train(training)
        want = compare_models.results(plain, given)
        assert compare_models.error(compare_models.results(model, given), want) < bound


def test_cross_attention_of_gpt2():
    plain, model, _ = pair(gpt2, add_cross_attention=True)
    memory = torch.randn(3, 4, 32, dtype=torch.float64)
    given = dict(GIVEN, encoder_hidden_states=memory)
    close(result(model, given), result(plain, given))


@pytest.mark.parametrize("name", sublayers._NAMES)
def test_activations(name):
    """The classes of transformers compute what the op calls so, values and gradients."""
    activation = getattr(transformers.activations, name)()
    assert sublayers.activation_name(activation) == sublayers._NAMES[name]
    x = torch.linspace(-60, 60, 1201, dtype=torch.float64, requires_grad=True)
    found = []
    for f in activation, ACTIVATIONS[sublayers._NAMES[name]]:
        y = f(x)
        found.append((y, *torch.autograd.grad(y.sin().sum(), x)))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


# Classes of types that are not in TYPES, whose forwards are feed-forward layers that are known.
CLASSES = (
    "vjepa2.VJEPA2MLP", "qwen2_vl.VisionMlp", "qwen3_vl.Qwen3VLVisionMLP",
    "llava.LlavaMultiModalProjector", "sam.SamMLPBlock", "nemotron.NemotronMLP", "gptj.GPTJMLP",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [CLASSES[0], *(pytest.param(x, marks=pytest.mark.with_all) for x in CLASSES[1:])]
)
def test_feed_forward_layers_of_other_types(name):
    kind, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert known_methods.digest(getattr(module, cls).forward) in known_methods._FEED_FORWARDS


def test_every_method_that_is_known_is_of_a_class():
    """Of the types above, or one of CLASSES."""
    found = {known_methods.digest(m) for m in methods_of_transformers()}
    unused = {*known_methods._METHODS, *known_methods._FEED_FORWARDS} - found
    assert len(unused) <= len(CLASSES)


def methods_of_transformers():
    for kind in {x.replace("-", "_").replace("xlm_", "") for x in TYPES} | {"mbart", "phi3"}:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        for cls in vars(module).values():
            if inspect.isclass(cls):
                for name in known_methods._NAMES:
                    method = inspect.getattr_static(cls, name, None)
                    if isinstance(method, types.FunctionType):
                        yield method


# ------------------------------------------------------------------------------- planted changes

BOTH = {"feed_forward", "dropout_add_layer_norm"}
FORWARD, SUM = {"feed_forward"}, {"dropout_add_layer_norm"}


def layer_of(make):
    """A layer of BERT or GPT-2 with random weights."""
    torch.manual_seed(0)
    model = make(**(NO_DROPOUT if make is bert else {}))
    layer = model.bert.encoder.layer[0] if make is bert else model.transformer.h[0]
    with torch.no_grad():
        for x in layer.parameters():
            x += 0.1 * torch.randn_like(x)
    return layer


def check(layer, ops, backend="reference", d=32):
    """The outputs and gradients are those before, and of the two ops these ran."""
    plain = copy.deepcopy(layer)
    report = ff.accelerate(layer)
    x = torch.randn(2, 5, d)
    for training in (False, True):
        found = []
        for one in (plain.train(training), layer.train(training)):
            given = x.clone().requires_grad_()
            with ff.use_backend(backend):
                y = one(given)
            y.sin().sum().backward()
            grads = {n: p.grad for n, p in one.named_parameters()}
            found.append((y, given.grad, grads))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert {op for _, op, *_ in ff.explain(layer, x).rows} & BOTH == ops
    return report


@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_layer_alone(make, backend):
    check(layer_of(make), BOTH, backend)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


class Clamped(nn.Module):
    def forward(self, x):
        return F.gelu(x).clamp(max=50)


class Noisy(nn.Module):
    def forward(self, x):
        return F.gelu(x) + (0.1 if self.training else 0.0)


class GELUActivation(nn.Module):  # the name of one of transformers
    def forward(self, x):
        return F.gelu(x) + 1


class OverTokens(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2).contiguous()


class First(nn.Module):
    """In place of an attention: its output is broadcast."""

    def forward(self, x, **named):
        return x[:1, :1], None


# By change: the layer, the submodule that is replaced, by what, and which of the ops still run.
PARTS = {
    "another activation": (gpt2, "mlp.act", nn.Mish(), SUM),
    "a clamped activation": (gpt2, "mlp.act", Clamped(), SUM),
    "an activation with a mode": (bert, "intermediate.intermediate_act_fn", Noisy(), SUM),
    "an activation with a weight": (gpt2, "mlp.act", nn.PReLU(), SUM),
    "an activation of the same name": (gpt2, "mlp.act", GELUActivation(), SUM),
    "another dropout": (bert, "output.dropout", nn.AlphaDropout(0.0), BOTH),
    "a first layer of another kind": (bert, "intermediate.dense", Twice(32, 48), SUM),
    "a last layer of another kind": (bert, "output.dense", Twice(48, 32), SUM),
    "a norm that overrides forward": (gpt2, "ln_2", Shifted(32), FORWARD),
    "a norm over another dimension": (gpt2, "ln_2", OverTokens(5), FORWARD),
    "a norm of another kind": (gpt2, "ln_2", nn.GroupNorm(5, 5), FORWARD),
    "a broadcast sum": (gpt2, "attn", First(), FORWARD),
}  # fmt: skip


@pytest.mark.parametrize("replaced_later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", PARTS)
def test_planted_parts(change, replaced_later):
    """What the ops do not compute stays as it is, also if `accelerate` came first."""
    make, path, part, ops = PARTS[change]
    layer = layer_of(make)
    if replaced_later:
        ff.accelerate(layer)
    layer.set_submodule(path, copy.deepcopy(part))
    if replaced_later:
        plain = copy.deepcopy(layer)
        ff.restore(plain)
        x = torch.randn(2, 5, 32)
        close(layer(x), plain(x))
        assert {op for _, op, *_ in ff.explain(layer, x).rows} & BOTH == ops
    else:
        check(layer, ops)


# By change: the layer, the submodule whose class changes, the method, what its source has, what it
# gets in its place, and which of the ops still run.
OUTPUT, INNER = (bert, "output", "forward"), (bert, "intermediate", "forward")
CHUNK, BLOCK, MLP = (
    (bert, "", "feed_forward_chunk"),
    (gpt2, "", "forward"),
    (gpt2, "mlp", "forward"),
)
SOURCES = {
    "no change but a comment": (*OUTPUT, "return hidden_states", "return hidden_states  # !", BOTH),
    "a scaled output": (*OUTPUT, "states + input", "states * 0.5 + input", SUM),
    "a difference": (*OUTPUT, "states + input", "states - input", SUM),
    "a sum that changes": (*OUTPUT, "return", "hidden_states += 1\n    return", SUM),
    "a switch": (*OUTPUT, "self.dropout(", "(abs if self.training else self.dropout)(", SUM),
    "no norm": (*OUTPUT, "self.LayerNorm(", "(", SUM),
    "a scale in between": (*INNER, "= self.dense", "= 2 * self.dense", SUM),
    "a detached value": (*INNER, "return hidden_states", "return hidden_states.detach()", SUM),
    "another residual": (*CHUNK, "output, attention", "output, 2 * attention", SUM),
    "a value read twice": (*CHUNK, "return layer", "return intermediate_output.sum() + layer", SUM),
    "another input": (*CHUNK, "intermediate(attention", "intermediate(2 * attention", SUM),
    "a difference in a block": (*BLOCK, "output + residual", "output - residual", FORWARD),
    "a scaled sum": (*BLOCK, "residual + feed", "2 * residual + feed", FORWARD),
    "another order": (*BLOCK, "self.mlp(hidden_states)", "self.mlp(residual)", FORWARD),
    "a clamp": (*MLP, "self.act(hidden_states)", "self.act(hidden_states).clamp(max=1)", SUM),
    "an activation twice": (*MLP, "act(hidden_states", "act(self.act(hidden_states)", SUM),
    "a try": (*MLP, "return", "try:\n        pass\n    finally:\n        pass\n    return", SUM),
    "a dropout elsewhere": (*MLP, "act(hidden_states", "act(self.dropout(hidden_states)", SUM),
}  # fmt: skip


@pytest.mark.parametrize("change", SOURCES)
def test_planted_changes_of_the_source(change, tmp_path, monkeypatch):
    """A method whose source is another one runs as it is: also if the class was replaced before it
    was changed. After it is changed back it is replaced again.
    """
    make, path, name, old, new, ops = SOURCES[change]
    check(layer_of(make), BOTH)
    cls = type(layer_of(make).get_submodule(path))
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, edited(getattr(cls, name), old, new, tmp_path))
        layer = layer_of(make)
        check(layer, ops)
        ff.restore(layer)
    check(layer_of(make), BOTH)


def test_a_class_of_two_calls(tmp_path, monkeypatch):
    """A class that was changed after the first call is not replaced by what the first call made:
    one of two methods that are known, and a forward that calls a rotary function.
    """
    for kind, name, method, old, new in (
        ("albert", "AlbertLayer", "ff_chunk", "self.ffn(", "2 * self.ffn("),
        ("llama", "LlamaAttention", "forward", "=self.scaling", "=2 * self.scaling"),
    ):
        *_, plain, wanted = compare_models.runnable(*build(kind))
        ff.accelerate(copy.deepcopy(plain))
        cls = next(type(x) for x in plain.modules() if type(x).__name__ == name)
        monkeypatch.setattr(cls, method, edited(getattr(cls, method), old, new, tmp_path))
        model = copy.deepcopy(plain)
        assert name in ff.accelerate(model).replaced.values()
        want = compare_models.results(plain, wanted[0][1])
        assert compare_models.error(compare_models.results(model, wanted[0][1]), want) < 1e-5


def test_a_model_whose_class_changes_is_restored(monkeypatch):
    layer = layer_of(gpt2)
    ff.accelerate(layer)
    monkeypatch.setattr(type(layer.mlp)._original, "forward", lambda self, x: x)
    ff.restore(layer)
    x = torch.randn(2, 5, 32)
    assert layer.mlp(x) is x and not isinstance(layer.mlp, known_methods.FusedMethods)


def test_methods_that_cannot_be_read():
    """Of a string, of a wrapper, of a class that is not of transformers."""
    forward = type(layer_of(gpt2).mlp).forward
    assert known_methods.digest(forward) in known_methods._FEED_FORWARDS
    names = {}
    exec("def forward(self, x):\n    return x", names)
    assert known_methods.digest(names["forward"]) is None

    @functools.wraps(forward)
    def wrapper(self, x):
        return forward(self, 2 * x)

    known = {*known_methods._METHODS, *known_methods._FEED_FORWARDS, None}
    assert known_methods.digest(wrapper) not in known
    mine = types.FunctionType(forward.__code__, forward.__globals__)
    for module, known in ("transformers.mine", ["forward"]), ("mine", []), (None, []):
        mine.__module__ = module
        cls = type("Mine", (nn.Module,), {"forward": mine})
        assert [*known_methods.known_methods(cls)] == known


def test_a_forward_on_the_instance():
    layer = layer_of(gpt2)
    layer.mlp.forward = types.MethodType(lambda self, x: 2 * x, layer.mlp)
    check(layer, SUM)
    late = layer_of(gpt2)
    ff.accelerate(late)
    late.mlp.forward = types.MethodType(lambda self, x: 2 * x, late.mlp)
    assert "feed_forward" not in {op for _, op, *_ in ff.explain(late, torch.ones(2, 5, 32)).rows}


LINEAR = nn.Linear(16, 32), nn.Linear(32, 16)
SEQUENCES = {
    "gelu": ((LINEAR[0], nn.GELU(), LINEAR[1]), FORWARD),
    "relu and dropout": (
        (LINEAR[0], nn.ReLU(), nn.Dropout(0.0), LINEAR[1], nn.Dropout(0.0)), FORWARD
    ),
    "after a norm": (
        (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16, False)), FORWARD
    ),
    "another activation": ((LINEAR[0], nn.Mish(), LINEAR[1]), set()),
    "another dropout": ((LINEAR[0], nn.ReLU(), nn.AlphaDropout(0.0), LINEAR[1]), set()),
    "a norm in between": ((LINEAR[0], nn.GELU(), nn.LayerNorm(32), LINEAR[1]), set()),
    "a norm first": ((LINEAR[0], nn.LayerNorm(32), nn.GELU(), LINEAR[1]), set()),
    "another layer": ((Twice(16, 32), nn.GELU(), LINEAR[1]), set()),
    "three layers": (
        (nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16)), set()
    ),
    "no activation": (LINEAR, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequential(name):
    layers, ops = SEQUENCES[name]
    report = check(copy.deepcopy(nn.Sequential(*layers)), ops, d=16)
    assert report.replaced.get("") == ("Sequential" if ops else None)


def test_a_sequence_that_changes():
    model = copy.deepcopy(nn.Sequential(*LINEAR))
    model.insert(1, nn.GELU())
    x, plain = torch.randn(2, 16), copy.deepcopy(model)
    ff.accelerate(model)
    for one in (plain, model):
        one.insert(2, nn.LayerNorm(32))
        one.append(nn.Tanh())
    close(model(x), plain(x))
    close(model[:1](x), plain[:1](x))


def test_what_stays_is_named():
    gelu = "relu, gelu, gelu_tanh, silu, sigmoid, relu2"
    mish = nn.Sequential(LINEAR[0], nn.Mish(), LINEAR[1])
    assert ff.accelerate(mish).skipped[""] == f"Sequential: its activation Mish is none of {gelu}"
    named = {x for kind in ("clip", "gpt_neox") for x in reasons(kind)}
    assert f"CLIPMLP: its activation QuickGELUActivation is none of {gelu}" in named
    assert f"GPTNeoXLayer: {known_methods.UNKNOWN}" in named


def reasons(kind):
    config, cls = build(kind)
    return ff.accelerate(cls(config)).skipped.values()


# ------------------------------------------------------------------------------------- the report


class Layer(nn.Module):
    """A feed-forward layer, a residual sum and its norm, as people write it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.norm = nn.GELU(), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.fc2(self.act(self.fc1(x))))


class SelfAtt(nn.Module):
    """Attention as people write it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return F.dropout(weights, 0.0) @ v


class ByFunctions(SelfAtt):
    def forward(self, x):
        return attended(*self.qkv(x).chunk(3, -1))


def attended(q, k, v):
    return torch.bmm(scores(q, k).masked_fill(torch.zeros(()).bool(), 0), v)


def scores(q, k):
    return F.softmax(torch.einsum("bid,bjd->bij", q, k), dim=-1)


class Direct(SelfAtt):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class Ours(SelfAtt):
    def forward(self, x):
        return ff.scaled_dot_product_attention(*self.qkv(x).unsqueeze(1).chunk(3, -1)).squeeze(1)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class CalledNorm(Root):
    def forward(self, x):
        return F.layer_norm(x, (16,), self.gain)


class Doubled(Layer):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)) * 2)


OWN_ATTENTION = "attention of its own; replace its three lines by ff.scaled_dot_product_attention"
DIRECT = "it calls F.scaled_dot_product_attention; sdpa_override reaches it"
NAMED = {
    SelfAtt: OWN_ATTENTION,
    ByFunctions: OWN_ATTENTION,
    Direct: DIRECT,
    Root: "a norm of its own; replace its lines by ff.layer_norm or ff.rms_norm",
    CalledNorm: "it calls F.layer_norm; ff.layer_norm computes the same",
    Layer: "a feed-forward layer of its own; replace its lines by ff.feed_forward",
    Doubled: "a feed-forward layer of its own; replace its lines by ff.feed_forward",
}


@pytest.mark.parametrize("make", NAMED, ids=lambda make: make.__name__)
def test_what_a_module_computes_by_itself_is_named(make):
    model = nn.Sequential(make(), nn.LayerNorm(16))
    report = ff.accelerate(model)
    assert report.skipped == {"0": f"{make.__name__}: {NAMED[make]}"}
    assert report.replaced.pop("1") == "LayerNorm"
    assert {*report.replaced} <= {"0.norm"}


@pytest.mark.parametrize("make", [SelfAtt, ByFunctions, Direct])
def test_explain_uses_the_words_of_the_report(make):
    model = nn.Sequential(make())
    op = "scaled_dot_product_attention" if make is Direct else make.__name__
    rows = ff.explain(model, torch.randn(2, 5, 16)).rows
    assert rows == (("0", op, "torch", NAMED[make]),)


def test_what_calls_the_ops_is_not_named():
    x = torch.randn(2, 5, 16)
    model = nn.Sequential(Ours(), nn.Linear(16, 16), nn.Softmax(-1))
    report = ff.accelerate(model, x)
    assert not report.skipped and not report.notes
    assert ff.accelerate(nn.Sequential(nn.BatchNorm1d(5))).skipped == {
        "0": "BatchNorm1d: no op of fastformer computes this norm"
    }


class Dynamic(Layer):
    """What its code does not show: a run does."""

    def forward(self, x, *, twice=False):
        call = {"first": "matmul", "then": "softmax"}
        weights = getattr(torch, call["then"])(getattr(torch, call["first"])(x, x.mT), -1)
        return getattr(torch, call["first"])(weights, x) * (2 if twice else 1)


def test_a_run_names_what_the_code_does_not_show():
    x = torch.randn(2, 5, 16)
    for given, named in ((), {}), ((x,), {}), ((x,), {"twice": True}):
        model, state = Dynamic(), torch.get_rng_state()
        report = ff.accelerate(model, *given, **named)
        noted = {"": f"Dynamic: {OWN_ATTENTION}"} if given else {}
        assert report.notes == noted
        assert torch.equal(state, torch.get_rng_state())


def test_an_error_of_the_run_replaces_nothing():
    model = nn.Sequential(*copy.deepcopy(LINEAR), nn.LayerNorm(16))
    model.insert(1, nn.GELU())
    with pytest.raises(ValueError, match="w_1 has shape"):
        ff.accelerate(model, torch.randn(2, 3))
    assert type(model) is nn.Sequential and type(model[-1]) is nn.LayerNorm


def test_the_attention_of_transformers_is_named():
    model = bert()
    for name, noted in (("eager", 2), ("sdpa", 2), ("fastformer", 0)):
        model.set_attn_implementation(name)
        report = ff.accelerate(model)
        why = [x for x in report.skipped.values() if f"attn_implementation is {name!r}" in x]
        assert len(why) == noted
        ff.restore(model)
