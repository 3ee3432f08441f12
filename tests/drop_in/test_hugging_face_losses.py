"""The logits and the loss of accelerated models of Hugging Face, with and without skip_logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
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


def causal(name="Llama", head="ForCausalLM", dtype=torch.float32, **changes):
    """A language model in training mode, with weights that are far from those at the start."""
    torch.manual_seed(0)
    model = Tiny(name, head, **SIZES, pad_token_id=0)(**changes)
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model.to(dtype).train()


def pair(skip=False, **options):
    """The same model plain and accelerated."""
    plain = causal(**options)
    model = copy.deepcopy(plain)
    report = ff.accelerate(model, skip_logits=skip)
    assert type(plain).__name__ in report.replaced.values() and "" not in report.notes
    return plain, model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {n: x.full_tensor() if isinstance(x, DTensor) else x.clone() for n, x in grads.items()}


def own_loss(logits):
    """A loss of the user's own, which is not the model's."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), IDS[:, 1:].reshape(-1)) + (
        0.1 * logits.logsumexp(-1).square().mean()
    )


def check(plain, model, skip, forward=None, **options):
    """Compare the loss, its gradients and, where they are not skipped, the logits: a plain tensor,
    of which the user computes a loss besides. forward: what runs the accelerated model.
    """
    given, forward = GIVEN | options, model if forward is None else forward
    want, have = plain(**given), forward(**given)
    torch.testing.assert_close(have.loss, want.loss)
    found = [(model, have.loss), (plain, want.loss)]
    if skip:
        assert have.logits is None
    else:
        assert type(have.logits) is torch.Tensor
        torch.testing.assert_close(have.logits, want.logits)
        found = [(one, x.loss + own_loss(x.logits)) for one, x in ((model, have), (plain, want))]
    torch.testing.assert_close(*(gradients(one, loss) for one, loss in found))


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
    with ff.use_backend(backend):
        check(*pair(skip), skip, **options)


# By name: the model, and what its forward is given beside the tokens.
OTHERS = {
    "a softcap that is None": (dict(name="Gemma3Text"), {}),
    "Phi": (dict(name="Phi"), {}),  # its output layer has a bias
    "the other loss": (dict(name="EuroBert", head="ForMaskedLM"), {}),
    "a loss of routers": (dict(name="Qwen2Moe"), dict(output_router_logits=True)),
    "a loss of routers by the configuration": (
        dict(name="Qwen2Moe", output_router_logits=True, router_aux_loss_coef=10.0),
        {},
    ),
}


@pytest.mark.parametrize("of, options", OTHERS.values(), ids=list(OTHERS))
@SKIPS
def test_other_models(skip, of, options):
    check(*pair(skip, **of), skip, **options)


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
        for training, wanted in ((True, op), (False, "cross_entropy")):
            rows = ff.explain(model.train(training), **GIVEN).rows
            assert [row[:2] for row in rows if "entropy" in row[1]] == [("", wanted)]


# ----------------------------------------------------------------- what a user does with the logits


def with_a_hook(out):
    out.logits.register_hook(lambda grad: grad * 0)
    return out.loss


def penalty(out):
    (grad,) = torch.autograd.grad(out.loss, out.logits, create_graph=True)
    return 100 * grad.square().sum()


@pytest.mark.parametrize("use", [with_a_hook, penalty])
def test_losses_of_the_logits(use):
    plain, model = pair()
    want, have = use(plain(**GIVEN)), use(model(**GIVEN))
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(gradients(model, have), gradients(plain, want))


@SKIPS
def test_a_model_that_is_built_in_inference_mode(skip):
    with torch.inference_mode():
        plain, model = pair(skip)
        torch.testing.assert_close(model(**GIVEN).loss, plain(**GIVEN).loss)
        want, have = plain.eval()(**GIVEN), model.eval()(**GIVEN)
    torch.testing.assert_close((have.loss, have.logits), (want.loss, want.logits))


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
    check(plain, model, False, torch.compile(model, fullgraph=True, backend="eager"))


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
    check(plain, model, skip)


def test_an_output_layer_of_fsdp(process_group):
    """Its weight is whole in its own forward only: the logits are computed."""
    plain, model = pair(True)
    mesh = init_device_mesh("cpu", (1,))
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    check(plain, model, False)
    for part, why in (
        ("lm_head", "FSDPLinear, not nn.Linear"),
        ("", "a parameter is a DTensor"),
    ):
        sharded = causal()
        fully_shard(sharded.get_submodule(part), mesh=mesh)
        assert why in ff.accelerate(sharded, skip_logits=True).notes[""]
    logits = plain(**GIVEN).logits.detach()
    shards = [distribute_tensor(x, mesh) for x in (logits, IDS)]
    shifted = model.loss_function(shards[0], None, V, shift_labels=shards[1])
    torch.testing.assert_close(
        shifted.full_tensor(), F.cross_entropy(logits.flatten(0, 1), IDS.flatten())
    )
    assert model._fallbacks["an input or a parameter is a DTensor"] == 1


@pytest.mark.parametrize("reentrant", [False, True])
@SKIPS
def test_gradient_checkpointing(skip, reentrant):
    plain, model = pair(skip)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    check(plain, model, skip)
    loss = checkpoint(lambda ids: model(ids, labels=LABELS).loss, IDS, use_reentrant=False)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, plain(**GIVEN).loss))


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
        note = ff.accelerate(model, skip_logits=True).notes[""]
        assert "its output layer is peft.tuners.lora.layer.Linear, not nn.Linear" in note


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


def without_a_token(logits):
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
    "in place": (lambda: own_forward(without_a_token), None, CHANGED),
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
        check(plain, model, False)
    ff.restore(model)
    assert (vars(model).keys(), [vars(module).keys() for module in model.children()]) == before


def test_a_model_that_changes_its_logits_later():
    """It did not at the time of the trial run."""
    _, model = pair(True, name="Gemma3Text")
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
    check(plain, model, False)
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
