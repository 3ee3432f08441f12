"""Attentions, hidden states and cache entries that a Hugging Face model returns if it is asked."""

import copy

import compare_models
import hugging_face_models
import pytest
import torch

import fastformer as ff
from fastformer.drop_in import transformers_attention

transformers = pytest.importorskip("transformers", "5.17")


@pytest.fixture
def models():
    """Return a function: a small model of a type with eager attention, and one with ours."""
    ff.register_transformers()

    def make(kind):
        torch.manual_seed(0)
        config, cls = next(hugging_face_models.builds(kind))()
        made = []
        for implementation in ("eager", "fastformer"):
            config._attn_implementation = implementation
            made.append(cls(copy.deepcopy(config)).eval())
        made[1].load_state_dict(made[0].state_dict())
        return made

    return make


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode", "opt", "llama"])
def test_attentions_equal_those_of_eager(kind, models):
    """The layers of the first three do not hand `output_attentions` to the attention function."""
    eager, ours = models(kind)
    tokens = torch.randint(0, 50, (2, 6))
    want, have = (m(tokens, output_attentions=True).attentions for m in (eager, ours))
    assert len(have) == len(want) == eager.config.num_hidden_layers
    for x, y in zip(have, want):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)
    assert ours(tokens).get("attentions") is None


def test_attentions_of_a_table_of_classes(models):
    """The sdpa class of the table computes no weights; its base class does."""
    eager, ours = models("data2vec-vision")
    given = next(hugging_face_models.candidates(eager, "none"))
    want, have = (m(**given, output_attentions=True).attentions for m in (eager, ours))
    assert len(have) == len(want) > 0
    torch.testing.assert_close(have, want)
    with compare_models.counted() as calls:
        ours(**given)
    assert calls


@pytest.mark.with_all
def test_layers_that_are_compiled(models):
    """Without attentions their graph does not break; with them, they are there."""
    ours, tokens = models("opt")[1], torch.randint(0, 50, (2, 6))
    want = ours(tokens, use_cache=False).logits
    for layer in ours.model.decoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(ours(tokens, use_cache=False).logits, want)
    for layer in ours.model.decoder.layers:
        layer.compile(backend="eager")
    attentions = ours(tokens, use_cache=False, output_attentions=True).attentions
    assert [x.shape[2:] for x in attentions] == [(6, 6)] * ours.config.num_hidden_layers


def test_the_sweep_counts_them(models, monkeypatch):
    eager, ours = models("gpt2")
    given = {"input_ids": torch.randint(0, 50, (2, 6))}
    want = {"attentions": 2, "cross_attentions": 0, "hidden_states": 3, "past_key_values": 2}
    assert compare_models.entries(eager, given) == want
    assert compare_models.entries_differ(ours, eager, given) == ""
    collects = "fastformer.drop_in.transformers_attention._collects_attentions"
    monkeypatch.setattr(collects, lambda module: False)
    assert compare_models.entries_differ(ours, eager, given) == "attentions: 0 for 2"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_a_wrong_shape_is_named(dtype):
    q, mask = torch.randn(2, 4, 6, 8), torch.ones(2, 1, 6, 7).to(dtype)
    ff.register_transformers()
    with pytest.raises(ValueError, match=r"^attention_mask has shape \(2, 1, 6, 7\); expected"):
        transformers_attention.attention(torch.nn.Module(), q, q, q, mask)
