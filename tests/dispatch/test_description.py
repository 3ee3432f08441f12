"""The one declaration of the options of attention, and what is made from it."""

import inspect

import pytest
import torch

import fastformer as ff
from fastformer import description
from fastformer.description import OPTIONS, PADDED_OPTIONS, Attention

NAMES = [option.name for option in OPTIONS]
PLAIN = Attention(None, 0.0, False, 0.5)
VALUES = dict(
    attn_mask=torch.ones(2, 1, 3, 5, dtype=torch.bool),
    dropout_p=0.1,
    bias=torch.zeros(4, 1, 5),
    key_lengths=torch.ones(2, dtype=torch.int64),
    window=(3, -1),
    alibi_slopes=torch.ones(4),
    softcap=5.0,
    sinks=torch.zeros(4),
    mask_spans=torch.zeros(2, 1, 2, 5, dtype=torch.int32),
    mask_lists=torch.zeros(3, 0, dtype=torch.int16),
    mask_bits=torch.zeros(2, 256, dtype=torch.int32),
)
# A `BlockMask`, which is given as attn_mask, is several fields; `packed_attention` takes no tensor.
PUBLIC = dict.fromkeys(("mask_spans", "mask_lists", "mask_bits"), "attn_mask")


def test_every_option_is_declared():
    """A schema has the order of the fields, whose last four are for a packed batch."""
    assert {*Attention._fields[:-4]} == {*NAMES}
    declared = [word.split()[1] for word in description.SCHEMA.split(", ")]
    assert declared == [*Attention._fields[:-4]]
    assert description.PACKED_SCHEMA.count(",") + 1 == len(Attention._fields)
    public = inspect.signature(ff.scaled_dot_product_attention).parameters
    assert {PUBLIC.get(name, name) for name in NAMES} <= set(public)
    packed = {*inspect.signature(ff.packed_attention).parameters} - {"attn_mask"} | {*PUBLIC}
    assert tuple(name for name in NAMES if name not in packed) == PADDED_OPTIONS


def test_torch_is_given_no_option_that_it_does_not_compute():
    assert description.beyond_torch(PLAIN) == []
    computed = PLAIN._replace(is_causal=True, causal_alignment="bottom_right", scale=2.0)
    assert description.beyond_torch(computed) == []
    assert set(VALUES) == {option.name for option in OPTIONS if not option.by_torch}
    for name, x in VALUES.items():
        assert description.beyond_torch(PLAIN._replace(**{name: x})) == [name]


@pytest.mark.parametrize(
    "name", [*sorted({*VALUES} - {"mask_bits"}), "is_causal", "causal_alignment", "scale"]
)
def test_calls_that_differ_in_an_option_share_no_plan(monkeypatch, name):
    """Bits come with spans and lists, and no plan depends on how many there are."""
    launchers = pytest.importorskip("fastformer.kernels.attention.launchers")
    monkeypatch.setattr(launchers, "_forward_plan", lambda *_: None)
    given = VALUES | dict(is_causal=True, causal_alignment="bottom_right", scale=0.3)
    inputs = [torch.zeros(2, 4, 3, 8)] * 3
    other = PLAIN._replace(**{name: given[name]})
    of_plain, *of_other = (
        launchers.forward.plan(*description.pack([*inputs, attention]), False)
        for attention in (PLAIN, other, other)
    )
    assert of_plain is not of_other[0] is of_other[1]
