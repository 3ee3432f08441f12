"""`accelerate` on feed-forward layers and norms of residual sums, which it finds in the source of a
module's methods.
"""

import copy
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
from fastformer.drop_in.replacements import chains, rewriting


@pytest.fixture(autouse=True)
def rewritten_too(monkeypatch):
    """The classes of this file are rewritten as those of transformers are."""
    monkeypatch.setattr(chains, "PACKAGES", (*chains.PACKAGES, __name__.partition(".")[0]))


transformers = pytest.importorskip("transformers", "5.17")
from tiny_models import Tiny  # noqa: E402

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
    """python -c "import test_chains; print(test_chains.table())" in tests/drop_in prints it."""
    assert table() in (ROOT / "docs" / "existing_models.md").read_text()


def table():
    head = f"| type | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}"
    return "\n".join([head, *map(row, TYPES)])


# ------------------------------------------------------------------------------- planted changes


class Layer(nn.Module):
    """A feed-forward layer, a residual sum and its norm, as most models have them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.dropout, self.norm = nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(16)
        self.scale, self.fc3, self.p = nn.Parameter(torch.rand(16)), nn.Linear(16, 16), 0.0

    def forward(self, x):
        hidden = self.fc2(self.dropout(self.act(self.fc1(x))))
        return self.norm(x + self.dropout(hidden))


class Functions(Layer):
    def forward(self, x):
        hidden = F.gelu(self.fc1(x))
        hidden = F.dropout(hidden, p=self.p, training=self.training)
        hidden = self.fc2(hidden)
        hidden = F.dropout(hidden, self.p, self.training)
        hidden = hidden + x
        return self.norm(hidden)


class PreNorm(Layer):
    def forward(self, x):
        hidden = x + self.fc3(x)
        x = hidden
        if self.p > 0.5:
            hidden = hidden * 2
        return x + self.fc2(self.act(self.fc1(self.norm(hidden))))


BOTH = {"feed_forward", "dropout_add_layer_norm"}


@pytest.mark.parametrize("make", [Layer, Functions, PreNorm])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layers_of_the_user(make, backend):
    check(make(), BOTH, backend)


def check(layer, ops, backend="reference"):
    """The outputs and gradients are those before, and of the two ops these ran."""
    plain = copy.deepcopy(layer)
    report = ff.accelerate(layer)
    x = torch.randn(2, 5, 16)
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


def changed(forward=None, **parts):
    """A `Layer` with other submodules, or another forward."""
    layer = (type("Changed", (Layer,), {"forward": forward}) if forward else Layer)()
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


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


class Weighted(nn.PReLU):
    def __init__(self):
        super().__init__(32)

    def forward(self, x):
        return torch.where(x > 0, x, x * self.weight)


class OverTokens(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2)


def of_a_third_layer(self, x):
    return self.norm(x + self.fc3(self.act(self.fc2(self.act(self.fc1(x))))))


def of_a_scaled_output(self, x):
    return self.norm(x + self.scale * self.fc2(self.act(self.fc1(x))))


def of_a_difference(self, x):
    return self.norm(x - self.dropout(self.fc2(self.act(self.fc1(x)))))


def of_a_scale_in_between(self, x):
    return self.norm(x + self.fc2(2 * self.act(self.fc1(x))))


def of_an_output_that_is_read_twice(self, x):
    hidden = self.act(self.fc1(x))
    out = self.fc2(hidden)
    return self.norm(x + out) + hidden.mean()


def of_a_sum_that_changes(self, x):
    total = x + self.fc2(self.act(self.fc1(x)))
    total += 1
    return self.norm(total)


def of_a_sum_that_changes_in_a_branch(self, x):
    total = x + self.fc2(self.act(self.fc1(x)))
    if self.p == 0:
        total.mul_(2)
    return self.norm(total)


def of_a_sum_that_is_replaced(self, x):
    total = x + self.fc2(self.act(self.fc1(x)))
    if self.p == 0:
        total = total * 2
    return self.norm(total)


def of_a_broadcast_sum(self, x):
    return self.norm(self.fc3(x[:1, :1]) + self.dropout(x)) + self.fc2(self.act(self.fc1(x)))


def of_a_switch(self, x):
    f = self.fc2 if self.training else self.fc3
    return self.norm(x + (f(self.act(self.fc1(x))) if self.training else f(x)))


def of_a_try(self, x):
    try:
        return self.norm(x + self.fc2(self.act(self.fc1(x))))
    finally:
        self.p = 0.0


def of_another_norm_in_between(self, x):
    return self.norm(x + self.fc2(self.norm2(self.act(self.fc1(x)))))


# By change: the layer, and which of the ops still run in it.
CHANGED = {
    "another activation": (lambda: changed(act=nn.Mish()), {"dropout_add_layer_norm"}),
    "a clamped activation": (lambda: changed(act=Clamped()), {"dropout_add_layer_norm"}),
    "an activation with a mode": (lambda: changed(act=Noisy()), {"dropout_add_layer_norm"}),
    "an activation with a weight": (lambda: changed(act=nn.PReLU()), {"dropout_add_layer_norm"}),
    "an activation with weights": (lambda: changed(act=Weighted()), {"dropout_add_layer_norm"}),
    "another dropout": (lambda: changed(dropout=nn.AlphaDropout(0.0)), {"dropout_add_layer_norm"}),
    "a linear layer that overrides forward": (
        lambda: changed(fc2=Twice(32, 16)), {"dropout_add_layer_norm"},
    ),
    "a norm that overrides forward": (lambda: changed(norm=Shifted(16)), {"feed_forward"}),
    "a norm over another dimension": (lambda: changed(norm=OverTokens(5)), {"feed_forward"}),
    "a norm of another kind": (lambda: changed(norm=nn.GroupNorm(5, 5)), {"feed_forward"}),
    "a third layer": (lambda: changed(of_a_third_layer), {"dropout_add_layer_norm"}),
    "a scaled output": (lambda: changed(of_a_scaled_output), BOTH),
    "a difference": (lambda: changed(of_a_difference), {"feed_forward"}),
    "a scale in between": (lambda: changed(of_a_scale_in_between), {"dropout_add_layer_norm"}),
    "a hidden value that is read twice": (
        lambda: changed(of_an_output_that_is_read_twice), {"dropout_add_layer_norm"},
    ),
    "a sum that changes": (lambda: changed(of_a_sum_that_changes), {"feed_forward"}),
    "a sum that changes in a branch": (
        lambda: changed(of_a_sum_that_changes_in_a_branch), {"feed_forward"},
    ),
    "a sum that is replaced": (lambda: changed(of_a_sum_that_is_replaced), BOTH),
    "a broadcast sum": (lambda: changed(of_a_broadcast_sum), {"feed_forward"}),
    "a switch": (lambda: changed(of_a_switch), {"dropout_add_layer_norm"}),
    "a try": (lambda: changed(of_a_try), set()),
    "a norm in between": (
        lambda: changed(of_another_norm_in_between, norm2=nn.LayerNorm(32)),
        {"dropout_add_layer_norm"},
    ),
    "a forward on the instance": (lambda: with_a_forward_of_its_own(), set()),
    "an MLP of three layers": (
        lambda: nn.Sequential(
            nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16)
        ),
        set(),
    ),
}  # fmt: skip


def with_a_forward_of_its_own():
    layer = Layer()
    layer.forward = types.MethodType(Layer.forward, layer)
    return layer


@pytest.mark.parametrize("make, ops", CHANGED.values(), ids=list(CHANGED))
def test_planted_changes(make, ops):
    """What the ops do not compute stays as it is, and the outputs are those before."""
    torch.manual_seed(0)
    check(make(), ops)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        (nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 16), nn.Dropout(0.0)),
        (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16, bias=False)),
    ],
    ids=len,
)
def test_sequential(layers):
    report = check(nn.Sequential(*layers), {"feed_forward"})
    assert report.replaced[""] == "Sequential"


def test_an_unknown_activation_is_named():
    report = ff.accelerate(changed(act=nn.Mish(), norm=Shifted(16)))
    why = (
        "its activation Mish is none of relu, gelu, gelu_tanh, silu, sigmoid, relu2, by a trial run"
    )
    assert report.skipped[""] == f"Layer: {why}"


def test_a_source_that_cannot_be_read():
    """Code that was made from a string, and code of a file that has changed since."""
    names = {}
    exec("def forward(self, x):\n    return self.norm(x + self.fc3(x))", names)
    assert rewriting.rewritten(names["forward"]) is None
    check(changed(names["forward"]), set())
    moved = copy.copy(of_a_difference)
    stale = type(moved)(of_a_third_layer.__code__.replace(co_firstlineno=1), globals())
    assert rewriting.rewritten(stale) is None


# ------------------------------------------------------------------------------------- the report


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
    model = nn.Sequential(Layer())
    with pytest.raises(ValueError, match="w_1 has shape"):
        ff.accelerate(model, torch.randn(2, 3))
    assert type(model[0]) is Layer and type(model[0].norm) is nn.LayerNorm


def test_the_attention_of_transformers_is_named():
    model = bert()
    for name, noted in (("eager", 2), ("sdpa", 2), ("fastformer", 0)):
        model.set_attn_implementation(name)
        report = ff.accelerate(model)
        why = [x for x in report.skipped.values() if f"attn_implementation is {name!r}" in x]
        assert len(why) == noted
        ff.restore(model)
