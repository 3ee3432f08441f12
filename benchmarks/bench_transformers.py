"""Training steps of Hugging Face's BERT-base and GPT-2 with random weights, by attn_implementation.

`auto` and the other backends are "fastformer"; `torch` is "sdpa", `eager` is "eager", and
`flash-attn`, on a GPU, is "flash_attention_2". They share one model and its weights, and differ in
the attention and in the masks that transformers makes for it. `compile`, on a GPU, is torch.compile
of "sdpa", and `accelerate` is a copy with "fastformer" after `accelerate(model)`, which has our
norms and feed-forward layers as well. Before the timing they are compared in evaluation, at the
tokens that are no padding. The weights are float32; on a GPU the steps run under autocast to
bfloat16.

The batch of BERT has padding: the lengths are spread evenly from S/2 to S. That of GPT-2 has none,
so that sdpa runs torch's causal kernel. Dropout is 0.1, the default of the models. A CPU runs one
of the twelve layers on one sequence of 128 tokens; with --slow all layers and 512 tokens.

FLOPs: forward 2 for each weight of the layers and token, backward twice that; attention as in
bench_attention.
"""

import copy

import pytest
import torch

import fastformer as ff
from benchmarks.peers import BACKENDS, GPU, available, backend_of, backend_taken, check_agreement

NAMES = {"torch": "sdpa", "compile": "sdpa", "eager": "eager", "flash-attn": "flash_attention_2"}
PEERS = available(*NAMES)
LENGTHS = [128, 256, 512, 1024] if GPU else [128, 512]
SHORT = 128  # on a CPU the lengths end here, without --slow
D_MODEL, HEADS, P = 768, 12, 0.1
VOCAB = 30522 if GPU else 1024
VALID = {"BERT-base": 0.75, "GPT-2": 1.0}  # the keys that are no padding


def _model(name, layers, length):
    transformers = pytest.importorskip("transformers")
    if name == "BERT-base":
        sizes = {"num_hidden_layers": layers, "max_position_embeddings": length}
        config = transformers.BertConfig(vocab_size=VOCAB, **sizes)
        return transformers.BertModel(config, add_pooling_layer=False)
    sizes = {"n_layer": layers, "n_positions": length}
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=VOCAB, use_cache=False, **sizes, **ids)
    return transformers.GPT2Model(config)


@pytest.mark.parametrize("provider", [*PEERS, *BACKENDS, "accelerate"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", VALID)
def test_step(measure, device, dtype, batch, name, length, provider, request):
    slow = request.config.getoption("slow")
    if not GPU and not slow and length > SHORT:
        pytest.skip(f"S = {length} on a CPU: needs --slow")
    layers, batch = (12, batch) if GPU or slow else (1, 1)
    model = accelerated = compiled = _model(name, layers, length).to(device)
    ff.register_transformers()
    if provider == "accelerate":
        ff.accelerate(accelerated := copy.deepcopy(model))
        accelerated.set_attn_implementation("fastformer")
    elif provider == "compile":
        compiled = torch.compile(model, dynamic=False)
    tokens = torch.randint(0, VOCAB, (batch, length), device=device)
    lengths = torch.full((batch,), length, device=device)
    given = {"input_ids": tokens}
    if VALID[name] < 1:
        lengths = torch.linspace(length / 2, length, batch + 1, device=device)[:-1].int()
        given["attention_mask"] = (torch.arange(length, device=device) < lengths[:, None]).long()
    kept = torch.arange(length, device=device) < lengths[:, None]
    grad = torch.randn(batch, length, D_MODEL, device=device) * kept.unsqueeze(2)

    called = compiled if provider == "compile" else accelerated

    def run(who, called):
        with backend_of(who), torch.autocast(device.type, dtype, enabled=GPU):
            return called(**given).last_hidden_state

    def step():
        called.zero_grad()
        run(provider, called).backward(grad)

    model.eval(), accelerated.eval()
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = run("torch", model)[kept]
        if accelerated is model:
            model.set_attn_implementation(NAMES.get(provider, "fastformer"))
        actual = run(provider, accelerated)[kept]
    check_agreement(provider, actual, expected, 50 * torch.finfo(dtype).eps)
    model.train(), accelerated.train()

    valid = int(lengths.sum())
    weights = layers * 12 * D_MODEL**2
    pairs = valid * length if name == "BERT-base" else batch * length**2 / 2
    measure(
        step,
        group=f"{name}, {layers} layers, S={length}, a training step",
        backend=backend_taken("auto" if provider == "accelerate" else provider, device),
        flops=3 * 2 * weights * batch * length + 3.5 * 4 * layers * pairs * D_MODEL,
        batch=batch,
        valid_keys=valid,
        d_model=D_MODEL,
        heads=HEADS,
        layers=layers,
        dropout_p=P,
    )
