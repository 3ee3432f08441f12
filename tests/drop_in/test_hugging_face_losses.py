"""The logits and the loss of accelerated models of Hugging Face, with and without skip_logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fastformer as ff

transformers = pytest.importorskip("transformers", "5.17")
from tiny_models import Tiny  # noqa: E402

transformers.logging.set_verbosity_error()

V = 37
SIZES = dict(
    vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
IDS = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(3))
LABELS = torch.cat([torch.full((2, 2), -100), IDS[:, 2:]], 1)
GIVEN = dict(input_ids=IDS, labels=LABELS)
SKIPS = pytest.mark.parametrize("skip", [False, True], ids=["logits", "skip_logits"])


def causal(name="Llama", dtype=torch.float32, **changes):
    """A language model in training mode, with weights that are far from those at the start."""
    torch.manual_seed(0)
    model = Tiny(name, **SIZES, pad_token_id=0)(**changes)
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model.to(dtype).train()


def pair(skip=False, name="Llama", **options):
    """The same model plain and accelerated."""
    plain = causal(name, **options)
    model = copy.deepcopy(plain)
    report = ff.accelerate(model, skip_logits=skip)
    assert type(plain).__name__ in report.replaced.values() and "" not in report.notes
    return plain, model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def own_loss(logits):
    """A loss of the user's own, which is not the model's."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), IDS[:, 1:].reshape(-1)) + (
        0.1 * logits.logsumexp(-1).square().mean()
    )


def total(out, skip):
    """The model's loss, and where there are logits the user's."""
    assert (out.logits is None) == skip
    return out.loss if skip else out.loss + own_loss(out.logits)


def check(plain, model, skip, forward):
    """Compare loss, logits and gradients. forward: what runs the accelerated model."""
    want, have = plain(**GIVEN), forward(**GIVEN)
    if not skip:
        torch.testing.assert_close(have.logits, want.logits)
    expected = want.loss if skip else total(want, skip)
    loss = total(have, skip)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, expected))


# ------------------------------------------------------------------------ the loss and its options

# By name: what the forward is given beside the tokens.
OPTIONS = {
    "mean": {},
    "number of items": dict(num_items_in_batch=5),
    "tensor of items": dict(num_items_in_batch=torch.tensor(5)),
    "ignore_index": dict(labels=IDS, ignore_index=int(IDS[0, 3])),
    "shift_labels": dict(shift_labels=IDS.roll(-1, 1)),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@SKIPS
def test_options_of_the_loss(skip, options, backend):
    plain, model = pair(skip)
    given = {**GIVEN, **options}
    want = plain(**given)
    with ff.use_backend(backend):
        have = model(**given)
        torch.testing.assert_close(have.loss, want.loss)
        grads = gradients(model, have.loss)
    torch.testing.assert_close(grads, gradients(plain, want.loss))


@pytest.mark.parametrize("name", ["Gemma3Text", "Phi", "EuroBert", "Qwen2Moe"])
@SKIPS
def test_other_models(skip, name):
    """A softcap that is None, a bias of the output layer, the other loss, a loss of routers."""
    options = dict(output_router_logits=True) if name == "Qwen2Moe" else {}
    if name == "EuroBert":
        plain = Tiny("EuroBert", "ForMaskedLM", **SIZES, pad_token_id=0)().train()
        model = copy.deepcopy(plain)
        ff.accelerate(model, skip_logits=skip)
    else:
        plain, model = pair(skip, name)
    want, have = plain(**GIVEN, **options), model(**GIVEN, **options)
    assert (have.logits is None) == skip
    torch.testing.assert_close(have.loss, want.loss)
    torch.testing.assert_close(gradients(model, have.loss), gradients(plain, want.loss))


@pytest.mark.parametrize("mode", ["bfloat16", "float16", "float64", "autocast"])
@SKIPS
def test_dtypes_of_the_loss_and_the_logits(skip, mode):
    """Those of the plain model; no error is twice as large as its."""
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    plain, model = pair(skip, dtype=dtype)
    exact = copy.deepcopy(plain).double()(**GIVEN)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        want, have = plain(**GIVEN), model(**GIVEN)
    assert have.loss.dtype == want.loss.dtype == torch.float32
    if not skip:
        assert have.logits.dtype == want.logits.dtype
        errors = [(x.logits.double() - exact.logits).abs().max() for x in (have, want)]
        if mode != "float64":  # in which the norms of the plain model compute in float32
            assert errors[0] <= 2 * errors[1], errors
        loss = F.cross_entropy(have.logits[:, :-1].float().flatten(0, 1), LABELS[:, 1:].flatten())
        torch.testing.assert_close(have.loss, loss)
    errors = [abs(x.loss.item() - exact.loss.item()) for x in (have, want)]
    assert errors[0] <= 2 * errors[1] + 1e-6 * exact.loss.item(), errors


def test_which_op_computes_the_loss():
    for skip, op in ((False, "cross_entropy"), (True, "linear_cross_entropy")):
        _, model = pair(skip)
        rows = [row[:2] for row in ff.explain(model, **GIVEN).rows if "entropy" in row[1]]
        assert rows == [("", op)]
        ff.explain(model.eval(), **GIVEN)
        rows = [row[:2] for row in ff.explain(model, **GIVEN).rows if "entropy" in row[1]]
        assert rows == [("", "cross_entropy")]


# ----------------------------------------------------------------- what a user does with the logits


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


def mean_square(x: torch.Tensor):
    return x.square().mean()


def after_a_metric(out):
    with torch.no_grad():
        out.logits.argmax(-1)
    return out.loss + own_loss(out.logits)


def with_a_hook(out):
    out.logits.register_hook(lambda grad: grad * 0)
    return out.loss


def in_a_view(out):
    out.logits[:, -1, :].zero_()
    return mean_square(out.logits)


def in_a_column(out):
    out.logits.view(-1, V)[:, 5] = -1e4
    return own_loss(out.logits)


def penalty(out):
    (grad,) = torch.autograd.grad(out.loss, out.logits, create_graph=True)
    return 100 * grad.square().sum()


# By name: a loss of the output of the model.
USES = {
    "own loss": lambda out: own_loss(out.logits),
    "both losses": lambda out: out.loss + own_loss(out.logits),
    "softcap": lambda out: mean_square(30 * torch.tanh(out.logits / 30)),
    "after a metric": after_a_metric,
    "autograd.Function": lambda out: out.loss + Square.apply(out.logits),
    "script": lambda out: out.loss + torch.jit.script(mean_square)(out.logits),
    "vmap": lambda out: out.loss + torch.vmap(mean_square)(out.logits).mean(),
    "checkpoint": lambda out: checkpoint(mean_square, out.logits, use_reentrant=False),
    "reentrant checkpoint": lambda out: checkpoint(mean_square, out.logits, use_reentrant=True),
    "hook": with_a_hook,
    "in place in a view": in_a_view,
    "in place in a column": in_a_column,
    "keyword": lambda out: torch.softmax(input=out.logits, dim=-1).square().sum(),
    "gradient of the logits": penalty,
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_losses_of_the_logits(use):
    plain, model = pair()
    want, have = use(plain(**GIVEN)), use(model(**GIVEN))
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(gradients(model, have), gradients(plain, want))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation(context):
    """The logits need no gradient outside of the context either, whatever is done with them."""
    plain, model = pair()
    found = []
    for one in (plain, model):
        with context():
            out = one.eval()(**GIVEN)
        assert type(out.logits) is torch.Tensor and not out.logits.requires_grad
        found.append((out.loss, out.logits.argmax(-1), out.logits.softmax(-1).cpu().numpy()))
        with context():
            assert not out.logits.div_(2).requires_grad
        student = nn.Parameter(torch.ones(1))
        (student * out.logits.detach().clone()).sum().backward()
        assert all(x.grad is None for x in one.parameters())
    torch.testing.assert_close(*found)


def test_the_grad_mode_is_that_of_the_forward():
    found = []
    for one in pair():
        out = one(**GIVEN)
        with torch.no_grad():
            copied, view = out.logits[:, :-1].contiguous(), out.logits[:, -1]
        one.lm_head.requires_grad_(False)
        found.append([x.requires_grad for x in (out.logits, copied, view)])
    assert found[0] == found[1] == [True, False, True]


def optimizer_step(model, out):
    out.loss.backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


# By name: what changes the model after its forward.
CHANGES = {
    "data.zero_": lambda model, out: model.lm_head.weight.data.zero_(),
    "data": lambda model, out: setattr(model.lm_head.weight, "data", torch.zeros(V, 16)),
    "dtype": lambda model, out: model.to(torch.bfloat16),
    "hidden states": lambda model, out: out.hidden_states[-1].data.div_(2),
    "optimizer": optimizer_step,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_the_logits_are_those_of_the_forward(change):
    plain, model = pair()
    want = plain(**GIVEN).logits
    out = model(**GIVEN, output_hidden_states=True)
    change(model, out)
    torch.testing.assert_close(out.logits, want)


@SKIPS
def test_a_model_that_is_built_in_inference_mode(skip):
    with torch.inference_mode():
        plain, model = pair(skip)
        want, have = plain(**GIVEN), model(**GIVEN)
        torch.testing.assert_close(have.loss, want.loss)
        assert (have.logits is None) == skip
        torch.testing.assert_close(model.eval()(**GIVEN).logits, plain.eval()(**GIVEN).logits)


def test_torch_func():
    for skip in (False, True):
        plain, model = pair(skip)
        found = []
        for one in (plain, model):
            values = {name: x.detach() * 2 for name, x in one.named_parameters()}

            def loss(values, one=one):
                return torch.func.functional_call(one, values, (), GIVEN).loss

            found.append((loss(values), torch.func.grad(loss)(values)))
        torch.testing.assert_close(*found)
        assert not hasattr(model, "_fallbacks")


@SKIPS
def test_compiled(skip):
    """A compiled model returns its logits."""
    plain, model = pair(skip)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    check(plain, model, False, compiled)


# -------------------------------------------------------------------------------- ways of training


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", None])
@SKIPS
def test_ddp(skip, option, process_group):
    """Its options search the outputs for gradients: the loss, and the logits where they are."""
    plain, model = pair(skip)
    parallel = DistributedDataParallel(model, **{option: True} if option else {})
    check(plain, model, skip, parallel)
    if not skip:
        want, have = (own_loss(one(**GIVEN).logits) for one in (plain, parallel))
        torch.testing.assert_close(gradients(model, have), gradients(plain, want))


@SKIPS
def test_fsdp(skip, process_group):
    """Its weights are freed after each forward, and gathered again for the backward."""
    plain, model = pair(skip)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    want, have = plain(**GIVEN), model(**GIVEN)
    expected, loss = total(want, False) if not skip else want.loss, total(have, skip)
    torch.testing.assert_close(loss, expected)
    grads = {name: x.full_tensor() for name, x in gradients(model, loss).items()}
    torch.testing.assert_close(grads, gradients(plain, expected))


def test_an_output_layer_of_fsdp(process_group):
    """Its weight is whole in its own forward only: the logits are computed."""
    plain, model = pair(True)
    mesh = init_device_mesh("cpu", (1,))
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    out = model(**GIVEN)
    want = plain(**GIVEN)
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(out.logits, want.logits)
    sharded = causal()
    fully_shard(sharded.lm_head, mesh=mesh)
    report = ff.accelerate(sharded, skip_logits=True)
    assert "its output layer is FSDPLinear" in report.notes[""]
    sharded = causal()
    fully_shard(sharded, mesh=mesh)
    report = ff.accelerate(sharded, skip_logits=True)
    assert "a parameter is a DTensor" in report.notes[""]
    shards = [distribute_tensor(x, mesh) for x in (want.logits.detach(), IDS)]
    shifted = model.loss_function(shards[0], None, V, shift_labels=shards[1])
    torch.testing.assert_close(
        shifted.full_tensor(), F.cross_entropy(want.logits.flatten(0, 1), IDS.flatten())
    )
    assert model._fallbacks["an input or a parameter is a DTensor"] == 1


@pytest.mark.parametrize("reentrant", [False, True])
@SKIPS
def test_gradient_checkpointing(skip, reentrant):
    plain, model = pair(skip)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    check(plain, model, skip, model)
    loss = checkpoint(lambda ids: model(ids, labels=LABELS).loss, IDS, use_reentrant=False)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, plain(**GIVEN).loss))


@SKIPS
def test_gradient_accumulation(skip):
    """Trainer divides the sum of each part by the number of labels of all parts."""
    plain, model = pair(skip)
    n = (LABELS[:, 1:] >= 0).sum()
    want = gradients(plain, plain(**GIVEN).loss)
    model.zero_grad()
    for i in range(2):
        part = dict(input_ids=IDS[i : i + 1], labels=LABELS[i : i + 1])
        model(**part, num_items_in_batch=n).loss.backward()
    have = {name: x.grad for name, x in model.named_parameters()}
    torch.testing.assert_close(have, want)


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = IDS[i % 2].roll(i)
        return dict(input_ids=ids, labels=ids.masked_fill(torch.arange(7) < i, -100))


@SKIPS
def test_trainer(skip, tmp_path):
    """Two steps of two parts, with different numbers of labels, then the evaluation."""
    pytest.importorskip("accelerate")
    found = []
    for model in pair(skip):
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True,
            per_device_eval_batch_size=4, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, options, train_dataset=Examples(), eval_dataset=Examples()
        )
        trained = trainer.train().training_loss
        predicted = trainer.predict(Examples())
        assert predicted.predictions.shape == (8, 7, V)
        found.append((trained, predicted.metrics["test_loss"], dict(model.named_parameters())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@SKIPS
def test_peft(skip):
    """Adapters of a projection change nothing; one of the output layer keeps the logits."""
    peft = pytest.importorskip("peft")
    for targets in (["up_proj"], ["up_proj", "lm_head"]):
        plain, model = pair(skip)
        found = []
        for one in (plain, model):
            torch.manual_seed(1)
            config = peft.LoraConfig(
                r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
            )
            wrapped = peft.get_peft_model(one, config)
            out = wrapped(**GIVEN)
            out.loss.backward()
            grads = [x.grad for x in wrapped.parameters() if x.requires_grad]
            found.append((out.loss, grads, out.logits))
        skipped = skip and len(targets) == 1
        assert (out.logits is None) == skipped
        torch.testing.assert_close(*[x[: 2 if skipped else 3] for x in found])
    ff.restore(model)
    if skip:
        assert "its output layer is Linear" in ff.accelerate(model, skip_logits=True).notes[""]


# ------------------------------------------------------------------------------- which logits stay


def test_skipped_logits():
    """They are None with labels in training mode, and nowhere in the output."""
    plain, model = pair(True)
    want = plain(**GIVEN)
    out = model(**GIVEN)
    assert out.logits is None and "logits" not in out
    assert len(out.to_tuple()) == len(want.to_tuple()) - 1
    found = model(**GIVEN, return_dict=False)
    assert len(found) == len(out.to_tuple()) and torch.equal(found[0], out.loss)
    positional = model(IDS, None, None, None, None, LABELS)
    assert positional.logits is None
    for given in (dict(input_ids=IDS), dict(input_ids=IDS, labels=None)):
        torch.testing.assert_close(model(**given).logits, want.logits)
    torch.testing.assert_close(model.eval()(**GIVEN).logits, want.logits)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.train()(**GIVEN).logits is None
    ff.accelerate(model.train())
    assert model(**GIVEN).logits is None
    ff.accelerate(model, skip_logits=False)
    torch.testing.assert_close(model(**GIVEN).logits, want.logits)
    ff.restore(model)
    assert vars(model).keys() == vars(plain).keys()
    torch.testing.assert_close(model.train()(**GIVEN).logits, want.logits)
    with pytest.raises(TypeError, match="skip_logits is 1"):
        ff.accelerate(model, skip_logits=1)


def test_a_loss_of_routers_in_the_configuration():
    """It is computed in every forward, beside the loss of logits that are skipped."""
    plain, model = pair(True, "Qwen2Moe", output_router_logits=True, router_aux_loss_coef=10.0)
    want, have = plain(**GIVEN), model(**GIVEN)
    assert have.logits is None and have.aux_loss > 0
    torch.testing.assert_close(have.loss, want.loss)
    torch.testing.assert_close(gradients(model, have.loss), gradients(plain, want.loss))


def in_place(logits):
    """Hides a token, as Chameleon hides those of images."""
    logits[..., [1]] = -100.0
    return logits


def own_forward(change=lambda logits: logits, end=lambda loss, logits: (loss, logits)):
    """A Llama that changes its logits before its loss, or what it returns."""

    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            logits = change(self.lm_head(hidden))
            loss = self.loss_function(logits, labels, V)
            return transformers.modeling_outputs.CausalLMOutput(*end(loss, logits))

    return of(Own)


class Whole(transformers.LlamaForCausalLM):
    """Has no base model beside itself."""

    base_model_prefix = ""


def hooked():
    model = causal()
    model.lm_head.register_forward_hook(lambda module, args, out: out / 2)
    return model


def pruned():
    model = causal()
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    return model


def of(cls):
    return cls._from_config(transformers.LlamaConfig(**SIZES))


CHANGED = "its logits are not skipped: it changes them before it computes its loss"
# By name: the model, and what the report says of its loss and of its logits.
REPORTS = {
    "softcap": (lambda: causal("Gemma2"), None, CHANGED),
    "scale": (lambda: causal("Cohere"), None, CHANGED),
    "division": (lambda: causal("Granite", logits_scaling=2.0), None, CHANGED),
    "in place": (lambda: own_forward(in_place), None, CHANGED),
    "cast": (lambda: own_forward(torch.Tensor.float), None, CHANGED),  # float32 does not show it
    "read": (
        lambda: own_forward(end=lambda loss, logits: (loss + logits.square().mean(), logits)),
        None,
        "by a trial run, it uses them for more than its loss",
    ),
    "returned": (
        lambda: own_forward(end=lambda loss, logits: (loss, logits * 2)),
        None,
        "it uses them for more than its loss",
    ),
    "no base model": (lambda: of(Whole), None, "it has no base model"),
    "hook": (hooked, None, "its output layer has hooks"),
    "pruned": (pruned, None, "its output layer has hooks"),
    "T5": (
        Tiny("T5", "ForConditionalGeneration", vocab_size=V, d_model=16, d_kv=8, d_ff=24,
             num_layers=1, num_heads=2, decoder_start_token_id=0),
        "its forward does not compute its loss by loss_function", "no loss of logits",
    ),
    "classes": (
        Tiny("Llama", "ForSequenceClassification", **SIZES, pad_token_id=0),
        "its loss is ForSequenceClassificationLoss", "no loss of logits",
    ),
    "no transformers": (lambda: nn.TransformerEncoderLayer(16, 2), None, "no loss of logits"),
}  # fmt: skip


@pytest.mark.parametrize("make, of_the_loss, of_the_logits", REPORTS.values(), ids=list(REPORTS))
def test_the_report_says_why(make, of_the_loss, of_the_logits):
    """And the model computes what it computed."""
    torch.manual_seed(0)
    plain = make().train()
    torch.manual_seed(0)
    model = make().train()
    before = vars(model).keys(), [vars(module).keys() for module in model.children()]
    report = ff.accelerate(model)
    assert "" not in report.notes and (of_the_loss or "") in report.skipped.get("", "")
    assert (of_the_loss is None) == ("" not in report.skipped)
    ff.restore(model)
    assert of_the_logits in ff.accelerate(model.eval(), skip_logits=True).notes[""]
    model.train()
    if of_the_loss is None and hasattr(model, "lm_head"):
        want, have = plain(input_ids=IDS, labels=LABELS), model(input_ids=IDS, labels=LABELS)
        torch.testing.assert_close(have.loss, want.loss)
        torch.testing.assert_close(have.logits, want.logits)
        torch.testing.assert_close(gradients(model, have.loss), gradients(plain, want.loss))
    ff.restore(model)
    assert (vars(model).keys(), [vars(module).keys() for module in model.children()]) == before


def test_a_model_that_changes_its_logits_later():
    """It did not at the time of the trial run."""
    _, model = pair(True, "Gemma3Text")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(RuntimeError, match=r"Gemma3ForCausalLM changes its logits before"):
        model(**GIVEN)
    model.config.final_logit_softcapping = None
    assert model(**GIVEN).logits is None


def test_a_hook_that_is_added_later():
    """The output layer runs, and the report counts it."""
    plain, model = causal(), causal()
    report = ff.accelerate(model, skip_logits=True)
    for one in (plain, model):
        one.lm_head.register_forward_hook(lambda module, args, out: out / 2)
    want, have = plain(**GIVEN), model(**GIVEN)
    torch.testing.assert_close(have.logits, want.logits)
    torch.testing.assert_close(have.loss, want.loss)
    assert report.fallbacks[""] == {"its logits are computed: its output layer has hooks": 1}


def test_a_loss_of_the_user():
    """It is called, before and after."""
    _, model = pair()
    model.loss_function = lambda logits, labels, vocab_size, **options: logits.sum() * 0 + 7
    assert model(**GIVEN).loss.item() == 7
    del model._loss_function
    assert model(**GIVEN).loss.item() != 7
    plain = causal()
    plain.loss_function = own = lambda logits, labels, vocab_size, **options: logits.sum() * 0 + 7
    report = ff.accelerate(plain)
    assert "its loss is <lambda>" in report.skipped[""] and plain.loss_function is own


def test_logits_that_are_not_of_the_vocabulary():
    """transformers' own function says what is wrong."""
    _, model = pair()
    model.config.vocab_size = V + 1
    with pytest.raises(RuntimeError, match="shape"):
        model(**GIVEN)
    assert "vocab_size is 38, and there are 37 logits" in str(model._fallbacks)
