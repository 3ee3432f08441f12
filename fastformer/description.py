"""One description of attention, from the public function to the launcher of the kernels.

`functional` makes an `Attention` of what it has checked; `reference` and the launcher read it. The
registered ops take its fields one by one, because torch.library knows tensors, numbers and strings
alone: `SCHEMA` and `PACKED_SCHEMA` spell them, `pack` takes a description apart and `unpack` makes
one again.

`OPTIONS` declares each option once. The schema, the dimensions that sharding splits, the words of a
measurement, and the test whether torch's op may compute a call are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """Where the shard that a call of attention is given begins in the whole: the index there of its
    first sequence, head, query and key, and how many heads, queries and keys the whole has, 0 for
    as many as the shard.
    """

    batch: int = 0
    head: int = 0
    query: int = 0
    key: int = 0
    heads: int = 0
    queries: int = 0
    keys: int = 0


class RowShard(NamedTuple):
    """Where the shard that an op on rows [M, N] is given begins in the whole: the index there of
    its first row and column, and how many columns the whole has, 0 for as many. Where each sequence
    is cut, `run` of its rows are here of the `sequence` rows that it has; 0 where the rows follow
    each other. Row i here is row `row + i // run * sequence + i % run` of the whole.
    """

    row: int = 0
    column: int = 0
    columns: int = 0
    run: int = 0
    sequence: int = 0


_ENDLESS = 2**40  # rows of a run, where there are no runs


def row_shard(shard: Sequence[int] | None) -> RowShard | None:
    """Return a shard as the kernels take it, with a run that is no 0; it may serve as a key."""
    if shard is None:
        return None
    given = RowShard(*shard)
    return given if given.run else given._replace(run=_ENDLESS)


class Attention(NamedTuple):
    """What attention takes beside query [B, H, Sq, D], key [B, G, Sk, D] and value [B, G, Sk, Dv].

    The fields have the names and the meaning of the arguments of
    `functional.scaled_dot_product_attention`, after its checks: `scale` is a number, a `window` has
    two ints, -1 for a side without a bound, `dropout_seed` is a tensor of one int64 where
    `dropout_p` is not 0, and a `shard` has the sizes of the whole; it is None for the whole. A
    packed batch has the last four as well, the arguments of `functional.packed_attention`.

    A tuple with names, and not a frozen dataclass: it is as immutable, and made in a quarter of the
    time (0.3 us instead of 1.3 us), which every call pays.
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
    shard: Shard | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0


# ----------------------------------------------------------------------------------------- options

Words = dict[str, Any]  # the name of a measurement has those that are not False


class Option(NamedTuple):
    """What the package has to know of an option of attention beside its mathematics.

    name: of the field of `Attention`.
    schema: its type in the schema of a registered op.
    words: returns, given the value, the words that tell a measurement of it from others; None for
        the name, where the option is given.
    dims: of a tensor, what its last dimensions are: b batch, h heads, q queries, k keys; "." is
        never sharded.
    broadcasts: whether a dimension may have size 1 in place of that size.
    by_torch: whether torch's fused ops compute it. If not, no call that has it is given to them.
    packed: whether a packed batch takes it.
    """

    name: str
    schema: str
    words: Callable[[Any], Words] | None = None
    dims: str = ""
    broadcasts: bool = False
    by_torch: bool = False
    packed: bool = False

    def words_of(self, x: Any) -> Words:
        """Return the words of a value."""
        return {self.name: _is_given(x)} if self.words is None else self.words(x)

    def dims_of(self, x: Tensor) -> str:
        """Return a letter of `dims` for each dimension of x, "." for one that broadcasts."""
        dims = self.dims[-x.dim() :] if x.dim() else ""
        if not self.broadcasts:
            return dims
        return "".join("." if size == 1 else dim for dim, size in zip(dims, x.shape))


def _is_given(x: Any) -> bool:
    return isinstance(x, Tensor) or bool(x)


def _no_words(x: Any) -> Words:
    return {}


def power_of_2(n: int) -> int:
    """Round a size up."""
    return 1 << max(0, n - 1).bit_length()


def _varies_over(x: Tensor | None) -> str | bool:
    """Return whether a mask or a bias varies over "keys", over "rows", queries, or "all"."""
    if x is None:
        return False
    if x.dim() < 2 or x.shape[-2] == 1:
        return "keys"
    return "rows" if x.shape[-1] == 1 else "all"


def _sides(window: tuple[int, int] | None) -> Words:
    sides = zip(("left", "right"), window or (-1, -1))
    return {side: power_of_2(n) if n >= 0 else False for side, n in sides}


OPTIONS = (
    Option("attn_mask", "Tensor?", lambda x: dict(mask=_varies_over(x)), "bhqk", broadcasts=True),
    Option("dropout_p", "float", lambda x: dict(dropout=x > 0), packed=True),
    Option("is_causal", "bool", lambda x: dict(causal=x), by_torch=True, packed=True),
    Option("scale", "float", _no_words, by_torch=True, packed=True),
    Option(
        "bias",
        "Tensor?",
        lambda x: dict(bias=_varies_over(x), bias_gradient=x is not None and x.requires_grad),
        "bhqk",
        broadcasts=True,
    ),
    Option("key_lengths", "Tensor?", lambda x: dict(lengths=x is not None), "b"),
    Option("window", "int[]?", _sides, packed=True),
    Option(
        "causal_alignment",
        "str",
        lambda x: dict(bottom_right=x == "bottom_right"),
        by_torch=True,
        packed=True,
    ),
    Option("alibi_slopes", "Tensor?", lambda x: dict(alibi=x is not None), "bh"),
    Option("softcap", "float?"),
    Option("sinks", "Tensor?", dims="h", packed=True),
    Option("dropout_seed", "Tensor?", _no_words, ".", by_torch=True, packed=True),
    Option("shard", "SymInt[]?", _no_words, by_torch=True, packed=True),
)
SCHEMA = ", ".join(f"{option.schema} {option.name}" for option in OPTIONS)
PACKED_SCHEMA = SCHEMA + ", Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k"
PADDED_OPTIONS = tuple(option.name for option in OPTIONS if not option.packed)
_WINDOW, _SHARD = map(Attention._fields.index, ("window", "shard"))
_BEYOND_TORCH = tuple((o.name, Attention._fields.index(o.name)) for o in OPTIONS if not o.by_torch)


def words(attention: Attention) -> Words:
    """Return what a measurement of attention depends on beside the sizes and the dtype."""
    return {
        word: value
        for option in OPTIONS
        for word, value in option.words_of(getattr(attention, option.name)).items()
    }


def dims(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the dimensions of the options that are tensors, given the fields by name."""
    return {
        o.name: o.dims_of(fields[o.name]) for o in OPTIONS if isinstance(fields[o.name], Tensor)
    }


def beyond_torch(attention: Attention) -> list[str]:
    """Return the names of the options of a call that torch's fused ops do not compute.

    Causality is not among them: the caller has to know from which corner it counts.
    """
    found = []  # a comprehension takes longer, and every call on a CPU asks
    for name, i in _BEYOND_TORCH:
        x = attention[i]
        if x is not None and x is not False and (type(x) is not float or x):
            found.append(name)
    return found


def pack(arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of an op as its schema has them: the fields replace a description."""
    flat: list[Any] = []
    for x in arguments:
        if isinstance(x, Attention):
            flat += x[: len(OPTIONS)] if x.cu_seqlens_q is None else x
        else:
            flat.append(x)
    return flat


def unpack(fields: Sequence[Any]) -> Attention:
    """Return the description, given its fields in the order of the schema."""
    if fields[_WINDOW] is not None:  # the dispatcher makes a list of it, which is no key
        fields = [*fields[:_WINDOW], tuple(fields[_WINDOW]), *fields[_WINDOW + 1 :]]
    if fields[_SHARD] is not None:
        fields = [*fields[:_SHARD], Shard(*fields[_SHARD]), *fields[_SHARD + 1 :]]
    return Attention(*fields)
