"""One description of attention, from the public function to the launcher of the kernels.

The contract makes an `Attention` of the checked arguments; the reference and the launcher read it.
The registered ops take its fields one by one, because torch.library accepts only tensors, numbers
and strings: `SCHEMA` and `PACKED_SCHEMA` are the schemas of these fields, `pack` flattens a
description into its fields, and `unpack` rebuilds it.

`OPTIONS` declares each option once. The schema, and the test whether torch's op may compute a call,
are derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.mask_tiles import dense_mask

MAX_HEAD_DIM = 256  # of the kernels of attention on every GPU; some take up to 512


class Attention(NamedTuple):
    """The arguments of attention other than query [B, H, Sq, D], key [B, G, Sk, D] and value
    [B, G, Sk, Dv].

    The fields have the names and the meaning of the arguments of
    `functional.scaled_dot_product_attention`, after its checks: `scale` is a number, `window` has
    two ints, -1 for a side without a bound, and `dropout_seed` is a tensor of one int64 if
    `dropout_p` is not 0. If `attn_mask` is a `BlockMask`, the field is None, and the next fields
    are its tensors. The last four fields are for a packed batch: they are arguments of
    `functional.packed_attention`.

    This is a NamedTuple, not a frozen dataclass, because every call makes one: it is as immutable,
    and takes 0.3 us to make instead of 1.3 us.
    """

    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    window: tuple[int, int] | None = None
    causal_alignment: str = "top_left"
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None
    mask_spans: Tensor | None = None
    mask_lists: Tensor | None = None
    mask_bits: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0

    def with_dense_mask(self, q_length: int, k_length: int) -> Attention:
        """Return the description with a boolean tensor in place of a `BlockMask`."""
        if self.mask_spans is None or self.mask_lists is None or self.mask_bits is None:
            return self
        tensors = self.mask_spans, self.mask_lists, self.mask_bits
        mask = dense_mask(*tensors, q_length, k_length)
        return self._replace(attn_mask=mask, mask_spans=None, mask_lists=None, mask_bits=None)


class Option(NamedTuple):
    """What the package has to know about an option of attention, apart from its mathematics.

    name: the name of its field of `Attention`.
    schema: its type in the schema of a registered op.
    by_torch: whether torch's fused ops compute it. If not, no call with this option goes to them.
    packed: whether `packed_attention` takes it.
    """

    name: str
    schema: str
    by_torch: bool = False
    packed: bool = False


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


OPTIONS = (
    Option("attn_mask", "Tensor?"),
    Option("dropout_p", "float", packed=True),
    Option("is_causal", "bool", by_torch=True, packed=True),
    Option("scale", "float", by_torch=True, packed=True),
    Option("bias", "Tensor?", packed=True),
    Option("key_lengths", "Tensor?"),
    Option("window", "int[]?", packed=True),
    Option("causal_alignment", "str", by_torch=True, packed=True),
    Option("alibi_slopes", "Tensor?", packed=True),
    Option("softcap", "float?", packed=True),
    Option("sinks", "Tensor?", packed=True),
    Option("dropout_seed", "Tensor?", by_torch=True, packed=True),
    Option("mask_spans", "Tensor?", packed=True),
    Option("mask_lists", "Tensor?", packed=True),
    Option("mask_bits", "Tensor?", packed=True),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_PADDED = [name for name in Attention._fields if name in _BY_NAME]
SCHEMA = ", ".join(f"{_BY_NAME[name].schema} {name}" for name in _PADDED)
PACKED_SCHEMA = SCHEMA + ", Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k"
PADDED_OPTIONS = tuple(option.name for option in OPTIONS if not option.packed)


_WINDOW = Attention._fields.index("window")
_BEYOND_TORCH = tuple((o.name, Attention._fields.index(o.name)) for o in OPTIONS if not o.by_torch)


def beyond_torch(attention: Attention) -> list[str]:
    """Return the names of the options of a call that torch's fused ops do not compute. `is_causal`
    is never among them: the caller has to check how it is aligned.
    """
    found = []  # faster than a comprehension, and every call on a CPU comes here
    for name, i in _BEYOND_TORCH:
        x = attention[i]
        if x is not None and x is not False and (type(x) is not float or x):
            found.append(name)
    return found


def parts(
    projected: Tensor, memory: Tensor | None, heads: int, order: Sequence[int]
) -> list[Tensor]:
    """Return the views of query, key and value in one projection [.., H + 2 G, D], or of the query
    in one [.., H, D] and of key and value in that of a memory [.., 2 G, D].

    heads: H. order: the dimensions of a projection in the order of the op.
    """
    if memory is None:
        groups = (projected.shape[-2] - heads) // 2
        found = projected.split([heads, groups, groups], -2)
    else:
        found = projected, *memory.chunk(2, -2)
    return [x.permute(order) for x in found]


def pack(arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of an op in the order of its schema, with a description flattened."""
    flat: list[Any] = []
    for x in arguments:
        if isinstance(x, Attention):
            flat += x[: len(_PADDED)] if x.cu_seqlens_q is None else x
        else:
            flat.append(x)
    return flat


def unpack(fields: Sequence[Any]) -> Attention:
    """Return the description, given its fields in the order of the schema."""
    if fields[_WINDOW] is not None:  # the dispatcher makes it a list, which is not hashable
        fields = [*fields[:_WINDOW], tuple(fields[_WINDOW]), *fields[_WINDOW + 1 :]]
    return Attention(*fields)
