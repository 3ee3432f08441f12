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

bert = Tiny(
    "Bert", "ForMaskedLM", vocab_size=40, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4, intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
gpt2 = Tiny(
    "GPT2", "LMHeadModel", vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=40,
    bos_token_id=1, eos_token_id=None, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
of_each = pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
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


@pytest.mark.parametrize("training", [True, False])
def test_bert(training, backend):
    plain, model, report = pair(bert)
    if backend == "triton":
        plain, model = plain.float(), model.float()
    replaced = {"BertLayer", "BertSelfOutput", "BertIntermediate", "BertOutput", "LayerNorm"}
    assert set(report.replaced.values()) == replaced
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in plain.state_dict().items())
    plain.train(training), model.train(training)
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


@of_each
def test_three_steps(make):
    plain, model, _ = pair(make)
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.train().parameters(), 1e-2)
        for _ in range(3):
            result(one)
            optimizer.step()
    close(model.state_dict(), plain.state_dict())


@of_each
def test_methods_run_as_they_are_on_a_cpu(make, monkeypatch):
    """Under "auto", where they make fewer calls; not where a backend is chosen or observed."""
    monkeypatch.undo()
    calls, inner = [], known_methods._torch_is_faster
    monkeypatch.setattr(
        known_methods, "_torch_is_faster", lambda *given: calls.append(inner(*given)) or calls[-1]
    )
    plain, model, report = pair(make, **(dict(hidden_dropout_prob=0.1) if make is bert else {}))
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


def test_dropout_of_bert(monkeypatch):
    """The share that is dropped and the scale of the rest, drawn anew, alike on both backends."""
    _, model, _ = pair(bert, hidden_dropout_prob=0.25)
    output = model.float().train().bert.encoder.layer[0].attention.output
    nn.init.zeros_(output.dense.weight)
    nn.init.constant_(output.dense.bias, 3.0)
    residual, seen = torch.zeros(64, 64, 32), []
    after_sum = type(output.LayerNorm).after_sum

    def record(norm, *given):
        found = after_sum(norm, *given)
        seen.append(found[1])
        return found

    monkeypatch.setattr(type(output.LayerNorm), "after_sum", record)
    for _ in range(2):
        output(torch.zeros(64, 64, 32), residual)
    for backend in ("reference", "triton"):
        torch.manual_seed(3)
        with ff.use_backend(backend):
            output(torch.zeros(2, 64, 32), residual[:2])
    first, second, *both = seen
    assert set(first.unique().tolist()) == {0.0, 4.0}
    dropped = (first == 0).double().mean().item()
    assert abs(dropped - 0.25) < 5 * (0.25 * 0.75 / first.numel()) ** 0.5
    assert not torch.equal(first, second)
    assert torch.equal(*both)


@pytest.mark.parametrize("reentrant", [False, True])
@of_each
def test_checkpointing(make, reentrant):
    """The recomputed layers draw the same masks, so that the gradients are those without it."""
    dropout = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)
    _, model, _ = pair(make, **(dropout if make is bert else dict(resid_pdrop=0.2)))
    torch.manual_seed(4)
    want = result(model.train(), names=["loss"])
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    torch.manual_seed(4)
    close(result(model, names=["loss"]), want)


def test_hooks():
    """A submodule with a hook is called, and the others are fused where they can be."""
    plain, model, _ = pair(bert)
    calls = []
    layer = model.bert.encoder.layer[0]
    for path in ("intermediate", "output.dense", "output.LayerNorm", "attention.output.dropout"):
        module = layer.get_submodule(path)
        handle = module.register_forward_hook(lambda m, *_: calls.append(m))
        calls.clear()
        close(result(model), result(plain))
        assert calls == [module]
        handle.remove()


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
        plain, model, _ = pair(make)
        for one in (plain, model):
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            found.append(result(peft.get_peft_model(one, config).double()))
        close(*found)
        ops = {op for _, op in ops_in(model, **GIVEN)}
        assert "dropout_add_layer_norm" in ops and "feed_forward" not in ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
@of_each
def test_low_precision(make, dtype):
    """Not further from float64 than twice the plain model."""
    plain, model, report = pair(make)
    want = plain(**GIVEN).logits
    errors = []
    for one in (plain, model):
        one.to(torch.float32 if dtype == "autocast" else dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            have = one(**GIVEN).logits
        errors.append((have.double() - want).norm() / want.norm())
    assert errors[1] < 2 * errors[0]
    assert not report.fallbacks


@of_each
def test_copies_and_signatures(make):
    """Copies and pickles are accelerated, too; the signatures stay."""
    plain, model, _ = pair(make)
    want = result(plain)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(result(one), want)
        assert ops_in(one, **GIVEN) == ops_in(model, **GIVEN)
    for a, b in zip(model.modules(), plain.modules()):
        have, want = (inspect.signature(x.forward, eval_str=True) for x in (a, b))
        assert have == want


@pytest.mark.with_all
@of_each
def test_compiled(make):
    plain, model, _ = pair(make)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(TOKENS).logits, plain(TOKENS).logits)


@of_each
def test_trainer(make, tmp_path):
    """Two steps of two parts, and the evaluation."""
    pytest.importorskip("accelerate")
    ids = [TOKENS[i % 3].roll(i) for i in range(8)]
    examples = [dict(input_ids=x, labels=x) for x in ids]
    found = []
    for model in pair(make)[:2]:
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, optim="sgd",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model.float(), options, train_dataset=examples, eval_dataset=examples
        )
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


# By form that none of them has: the type, the settings that ask for it, and a class of a layer.
FORMS = {
    "wav2vec2, norm first": ("wav2vec2", dict(do_stable_layer_norm=True), "EncoderLayerStable"),
    "opt, norm last": ("opt", dict(do_layer_norm_before=False), "OPTDecoderLayer"),
    "albert, in chunks": ("albert", dict(chunk_size_feed_forward=1), "AlbertLayer"),
    "bert, in chunks": ("bert", dict(chunk_size_feed_forward=1), "BertLayer"),
    "whisper in bfloat16": ("whisper", {}, "WhisperDecoderLayer"),
    "t5 in bfloat16": ("t5", {}, "T5DenseActDense"),
    "mbart": ("mbart", {}, "MBartDecoderLayer"),
    "siglip": ("siglip", {}, "SiglipEncoderLayer"),
}


def built(kind, dtype=torch.float64, **settings):
    """A model of a type, and its arguments, with labels if it takes them."""
    config, cls = build(kind)
    config.update(settings)
    *_, model, wanted = compare_models.runnable(config, cls)
    given = (compare_models.with_labels(model, wanted[0][1]) or wanted)[0][1]
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    return model.to(dtype), given


@pytest.mark.parametrize("form", [*TYPES, *FORMS])
def test_a_type_equals_the_plain_model(form):
    """Outputs, loss and the gradient of every parameter, in evaluation and in training."""
    kind, settings, layer = FORMS.get(form, (form, {}, ""))
    low = "bfloat16" in form
    plain, given = built(kind, torch.bfloat16 if low else torch.float64, **settings)
    plain.config.apply_spec_augment = False  # of wav2vec2: it masks a part of the sound
    model = copy.deepcopy(plain)
    report = ff.accelerate(model)
    assert any(layer in name for name in report.replaced.values())
    for training in (False, True):
        plain.train(training), model.train(training)
        want = compare_models.results(plain, given)
        error = compare_models.error(compare_models.results(model, given), want)
        assert error < (0.05 if low else 1e-5)
    assert not report.fallbacks or form == "siglip"  # it has an nn.MultiheadAttention with weights
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


def table():
    """The ops that run in each type, with labels, after `accelerate`."""
    rows = [f"| type | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for kind in TYPES:
        model, given = built(kind, torch.float32)
        compare_models.set_implementation(model, "fastformer")
        ff.accelerate(model)
        ran = {op for _, op, backend, _ in ff.explain(model, **given).rows if backend != "torch"}
        cells = [", ".join(f"`{op}`" for op in ops if op in ran) for ops in COLUMNS.values()]
        rows.append(f"| {kind} | {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join(rows)


def test_the_table_of_the_types():
    """python -c "import test_known_methods as t; print(t.table())" in tests/drop_in prints it."""
    assert table() in (ROOT / "docs" / "existing_models.md").read_text()


# ------------------------------------------------------------------------- what the rows compute


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


# Classes of other types, whose forwards are feed-forward layers that are known.
CLASSES = (
    "vjepa2.VJEPA2MLP", "qwen2_vl.VisionMlp", "qwen3_vl.Qwen3VLVisionMLP",
    "llava.LlavaMultiModalProjector", "sam.SamMLPBlock", "nemotron.NemotronMLP", "gptj.GPTJMLP",
)  # fmt: skip


def module_of(kind):
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def test_every_method_that_is_known_is_of_a_class():
    """Of the types above, or one of CLASSES."""
    kinds = {x.replace("-", "_").replace("xlm_", "") for x in TYPES} | {"mbart", "phi3"}
    classes = [cls for kind in kinds for cls in vars(module_of(kind)).values()]
    members = [getattr(cls, name, None) for cls in classes for name in known_methods._NAMES]
    found = {known_methods.digest(x) for x in members if isinstance(x, types.FunctionType)}
    for name in CLASSES:
        kind, cls = name.split(".")
        digest = known_methods.digest(getattr(module_of(kind), cls).forward)
        assert digest in known_methods._FEED_FORWARDS, name
        found.add(digest)
    assert {*known_methods._METHODS, *known_methods._FEED_FORWARDS} <= found


# ------------------------------------------------------------------------------- planted changes

BOTH = {"feed_forward", "dropout_add_layer_norm"}
FORWARD, SUM = {"feed_forward"}, {"dropout_add_layer_norm"}


def layer_of(make):
    """A layer of BERT or GPT-2 with random weights."""
    model, *_ = pair(make)
    return (model.bert.encoder.layer if make is bert else model.transformer.h)[0].float()


def check(layer, ops, backend="reference", d=32):
    """Accelerates a layer, and compares it with what it was."""
    plain = copy.deepcopy(layer)
    report = ff.accelerate(layer)
    compare(layer, plain, ops, backend, d)
    return report


def compare(layer, plain, ops, backend="reference", d=32):
    """The outputs and gradients are those of the plain layer, and of the two ops these ran."""
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


@of_each
def test_a_layer_alone(make, backend):
    check(layer_of(make), BOTH, backend)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


class GELUActivation(nn.Module):  # the name of one of transformers
    def forward(self, x):
        return F.gelu(x) + 1


class First(nn.Module):
    """In place of an attention: its output is broadcast."""

    def forward(self, x, **named):
        return x[:1, :1], None


# By change: the layer, the submodule that is replaced, by what (None: its forward is, on the
# instance), and which of the ops still run.
PARTS = {
    "another activation": (gpt2, "mlp.act", nn.Mish(), SUM),
    "an activation of the same name": (gpt2, "mlp.act", GELUActivation(), SUM),
    "another dropout": (bert, "output.dropout", nn.AlphaDropout(0.0), BOTH),
    "a first layer of another kind": (bert, "intermediate.dense", Twice(32, 48), SUM),
    "a last layer of another kind": (bert, "output.dense", Twice(48, 32), SUM),
    "a norm that overrides forward": (gpt2, "ln_2", Shifted(32), FORWARD),
    "a norm of another kind": (gpt2, "ln_2", nn.GroupNorm(5, 5), FORWARD),
    "a broadcast sum": (gpt2, "attn", First(), FORWARD),
    "a forward on the instance": (gpt2, "mlp", None, SUM),
}


@pytest.mark.parametrize("replaced_later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", PARTS)
def test_planted_parts(change, replaced_later):
    """What the ops do not compute stays as it is, also if `accelerate` came first."""
    make, path, part, ops = PARTS[change]
    layer, plain = layer_of(make), layer_of(make)
    if replaced_later:
        ff.accelerate(layer)
    for one in (layer, plain):
        if part is None:
            one.get_submodule(path).forward = lambda x: 2 * x
        else:
            one.set_submodule(path, copy.deepcopy(part))
    if not replaced_later:
        ff.accelerate(layer)
    compare(layer, plain, ops)


# By change: the layer, the submodule whose class changes, the method, what its source has, what it
# gets in its place, and which of the ops still run.
SOURCES = {
    "no change but a comment": (bert, "output", "forward", "return", "# !\n    return", BOTH),
    "a difference": (bert, "output", "forward", "states + input", "states - input", SUM),
    "a scale": (bert, "intermediate", "forward", "= self.dense", "= 2 * self.dense", SUM),
    "another input": (bert, "", "feed_forward_chunk", "(attention", "(2 * attention", SUM),
    "another order": (gpt2, "", "forward", "mlp(hidden_states)", "mlp(residual)", FORWARD),
    "a call": (gpt2, "mlp", "forward", "act(hidden_states", "act(self.act(hidden_states)", SUM),
    "a statement": (gpt2, "mlp", "forward", "return", "if 0:\n        pass\n    return", SUM),
}


@pytest.mark.parametrize("change", SOURCES)
def test_planted_changes_of_the_source(change, tmp_path, monkeypatch):
    """A method whose source changes runs as it is; if it is changed back, it is replaced again."""
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

    def known(method, module="transformers.mine"):
        method.__module__ = module
        cls = type("Mine", (nn.Module,), {"forward": method})
        return [*known_methods.known_methods(cls)]

    same = types.FunctionType(forward.__code__, forward.__globals__)
    assert known(same) == ["forward"]
    assert known(same, "mine") == known(same, None) == []
    names = {}
    exec("def forward(self, x):\n    return x", names)
    assert known(names["forward"]) == []

    @functools.wraps(forward)
    def wrapper(self, x):
        return forward(self, 2 * x)

    assert known(wrapper) == []


FIRST, LAST = nn.Linear(16, 32), nn.Linear(32, 16)
FED = nn.Sequential(FIRST, nn.GELU(), LAST)
SEQUENCES = {
    "gelu": (FED, FORWARD),
    "dropout": ((FIRST, nn.ReLU(), nn.Dropout(0.0), LAST, nn.Dropout(0.0)), FORWARD),
    "after a norm": ((nn.LayerNorm(16), FIRST, nn.GELU("tanh"), nn.Linear(32, 16, False)), FORWARD),
    "another activation": ((FIRST, nn.Mish(), LAST), set()),
    "a norm in between": ((FIRST, nn.GELU(), nn.LayerNorm(32), LAST), set()),
    "another layer": ((Twice(16, 32), nn.GELU(), LAST), set()),
    "three layers": ((FIRST, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), LAST), set()),
    "no activation": ((FIRST, LAST), set()),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequential(name):
    layers, ops = SEQUENCES[name]
    report = check(copy.deepcopy(nn.Sequential(*layers)), ops, d=16)
    assert report.replaced.get("") == ("Sequential" if ops else None)


def test_a_sequence_that_changes():
    x, plain, model = torch.randn(2, 16), copy.deepcopy(FED), copy.deepcopy(FED)
    ff.accelerate(model)
    for one in (plain, model):
        one.insert(2, nn.LayerNorm(32))
        one.append(nn.Tanh())
    close(model(x), plain(x))
    close(model[:1](x), plain[:1](x))


def test_what_stays_is_named():
    gelu = "relu, gelu, gelu_tanh, silu, sigmoid, relu2"
    mish = nn.Sequential(FIRST, nn.Mish(), LAST)
    assert ff.accelerate(mish).skipped[""] == f"Sequential: its activation Mish is none of {gelu}"
    for kind, why in (
        ("clip", f"CLIPMLP: its activation QuickGELUActivation is none of {gelu}"),
        ("gpt_neox", f"GPTNeoXLayer: {known_methods.UNKNOWN}"),
    ):
        config, cls = build(kind)
        assert why in ff.accelerate(cls(config)).skipped.values()


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
    """By the report, and attention by `explain`, too."""
    model = nn.Sequential(make(), nn.LayerNorm(16))
    if make in (SelfAtt, ByFunctions, Direct):
        op = "scaled_dot_product_attention" if make is Direct else make.__name__
        row = ff.explain(model, torch.randn(2, 5, 16)).rows[0]
        assert row == ("0", op, "torch", NAMED[make])
    report = ff.accelerate(model)
    assert report.skipped == {"0": f"{make.__name__}: {NAMED[make]}"}
    assert report.replaced.pop("1") == "LayerNorm"
    assert {*report.replaced} <= {"0.norm"}


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
    model = nn.Sequential(*copy.deepcopy(FED), nn.LayerNorm(16))
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
