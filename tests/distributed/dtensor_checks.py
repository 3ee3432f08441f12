"""What the processes of parallel_worker.py check of the ops on DTensors: each op, split over each
of its dimensions and over two of them, against the whole in float64 by the numerics policy; and
the masks of dropout, bit for bit.

Letters name the dimensions of each tensor of a case, as in an einsum, and `ways` those that the
dimensions of the mesh split: "bh" splits the batch over the first and the heads over the second.
"""

import functools
import itertools

import torch
from policy import check_output
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastformer as ff
from fastformer.dispatch.sharding import call
from fastformer.eager import use_formula

SEED, P = 11, 0.4
WHOLE = "."  # of a dimension of the mesh: nothing is split


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(classes, *shape):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def mesh_of(ways):
    """The mesh that has as many dimensions as there are ways."""
    world = torch.distributed.get_world_size()
    if len(ways) == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))


def placements(which, ways, otherwise=None):
    """The placements of a tensor with these letters."""
    rest = otherwise or Replicate()
    of = {WHOLE: Replicate()} | {x: Shard(i) for i, x in enumerate(which) if x != WHOLE}
    return tuple(of.get(way, rest) for way in ways)


def results(function, tensors, gradients):
    """The outputs of a function in full, the placements of the first one, and the gradients."""
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if n in gradients}
    out = function(**tensors | leaves)
    out = out if isinstance(out, tuple) else (out,)
    for x in out:
        if isinstance(x, DTensor):  # its dimensions lie as those of its shards do
            here = torch.empty_strided(x.shape, x.stride(), device="meta")
            assert here.is_contiguous() == x.to_local().is_contiguous(), x.stride()
    full = [x.full_tensor() if isinstance(x, DTensor) else x for x in out]
    grads = {}
    if leaves:
        cotangents = (
            drawn(*x.shape, seed=5 + i).bfloat16().to(x.dtype) for i, x in enumerate(full)
        )
        loss = sum((x.masked_fill(x.isinf(), 0.0) * g).sum() for x, g in zip(full, cotangents))
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    return [x.detach() for x in full], getattr(out[0], "placements", None), grads


class Case:
    """A function of tensors, by name; `letters` names the dimensions of those that are distributed,
    and `output` those of its first output. Of a letter that the output lacks, it is a partial sum,
    or `merged`.
    """

    def __init__(self, name, function, tensors, letters, output, merged=False, constant=()):
        self.name, self.function, self.letters, self.output = name, function, letters, output
        self.tensors, self.rest = tensors, Replicate() if merged else Partial()
        floating = (n for n in letters if tensors[n].is_floating_point())
        self.gradients = [n for n in floating if n not in constant]
        self.known = {}

    def given(self, dtype, tensors=None):
        return {
            n: x.detach().to(dtype if x.is_floating_point() else x.dtype, copy=True)
            for n, x in (tensors or self.tensors).items()
        }

    def whole(self, dtype, of):
        """The results of the whole in a dtype, of inputs that were rounded to another."""
        if (dtype, of) not in self.known:
            tensors = self.given(dtype, self.given(of))
            with ff.use_backend("reference"), use_formula():
                self.known[dtype, of] = results(self.function, tensors, self.gradients)
        return self.known[dtype, of]

    def check(self, backend, ways, letters=None, dtype=None):
        """Compare the split call with the whole one: outputs, placements and gradients.

        letters: of the tensors as they are given, None for a plain one; by default those of the
            case.
        """
        dtype = dtype or (torch.float64 if backend == "reference" else torch.float32)
        mesh, letters = mesh_of(ways), self.letters | (letters or {})
        places = {n: placements(which, ways) for n, which in letters.items() if which is not None}
        tensors = {
            n: distribute_tensor(x, mesh, places[n]) if n in places else x
            for n, x in self.given(dtype).items()
        }
        label = f"{self.name}, {backend}, {dtype}, over {ways} of {tuple(mesh.shape)}: "
        try:
            with ff.use_backend(backend):
                outputs, placed, grads = results(self.function, tensors, self.gradients)
            want = placements(self.output, ways, self.rest)
            assert placed == want, f"the output has {placed} instead of {want}"
            for name in grads.keys() & places.keys():
                g, grads[name] = grads[name], grads[name].full_tensor()
                assert g.placements == places[name], f"d{name} has {g.placements}"
            self._compare(dict(enumerate(outputs)) | grads, dtype)
        except Exception as error:
            raise AssertionError(label + str(error)) from error

    def _compare(self, found, dtype):
        (wide, _, wide_grads), (same, _, same_grads) = (
            self.whole(x, dtype) for x in (torch.float64, dtype)
        )
        assert not wide_grads or any(g.any() for g in wide_grads.values()), "gradients of zeros"
        oracle, eager = dict(enumerate(wide)) | wide_grads, dict(enumerate(same)) | same_grads
        for name, have in found.items():
            want, peer = oracle[name], eager[name]
            hidden = want.isinf()
            assert have.shape == want.shape and torch.equal(have.isinf(), hidden), name
            have, want, peer = (x.masked_fill(hidden, 0.0) for x in (have, want, peer))
            try:
                check_output(have, want, peer, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error or have - want}") from None
            if dtype == torch.float64:
                error = (have - want).norm() / want.norm().clamp_min(1e-30)
                assert error < 1e-11, f"{name}: {error:.1e}"


# ---------------------------------------------------------------------------------------- attention

ATTENTION = {"query": "bhqd", "key": "bhkd", "value": "bhke"}


def of_attention():
    """The cases of attention, by name."""
    q, k, v = drawn(4, 8, 64, 8), drawn(4, 4, 20, 8, seed=1), drawn(4, 4, 20, 6, seed=2)
    lengths = torch.tensor([20, 3, 0, 17])
    options = {  # of each: tensors, their letters, and the rest
        "plain": ({}, {}, {}),
        "causal, window, alibi": (
            dict(alibi_slopes=drawn(4, 8, seed=3).abs()),
            dict(alibi_slopes="bh"),
            dict(is_causal=True, window=(9, None)),
        ),
        "mask, lengths, bottom right": (
            dict(attn_mask=drawn(4, 1, 64, 20, seed=4) > -1, key_lengths=lengths),
            dict(attn_mask="b.qk", key_lengths="b"),
            dict(is_causal=True, causal_alignment="bottom_right"),
        ),
        "bias, softcap": (
            dict(bias=drawn(8, 64, 20, seed=6)), dict(bias="hqk"), dict(softcap=2.0),
        ),
        "sinks, dropout, causal": (
            dict(sinks=drawn(8, seed=7)),
            dict(sinks="h"),
            dict(dropout_p=P, dropout_seed=SEED, is_causal=True),
        ),
    }  # fmt: skip
    for name, (tensors, letters, rest) in options.items():
        function = functools.partial(
            ff.scaled_dot_product_attention, **rest, enable_gqa=True, return_lse=True
        )
        yield (
            name,
            Case(
                name,
                function,
                dict(query=q, key=k, value=v, **tensors),
                ATTENTION | letters,
                "bhqe",
                constant=("alibi_slopes",),
            ),
        )


def attention(folder):
    """Over batch, heads and queries, and over two of them; whole tensors beside shards."""
    for name, case in of_attention():
        others = ("hb", "bq", "bb", ".h") if name.startswith(("plain", "sinks")) else ()
        for ways in ("b", "h", "q", "bh", "qh", *others):
            case.check("reference", ways)
        extras = {n: "." * len(x) for n, x in case.letters.items() if n not in ATTENTION}
        if extras:  # replicated: each process takes its part of them
            for ways in ("bh", "hq"):
                case.check("reference", ways, extras)
            for ways in ("b", "bh"):
                case.check("reference", ways, dict.fromkeys(extras))
        case.check("reference", "h", {"query": "hbqd"})  # heads in place of the batch
        case.check("reference", "bh", dtype=torch.bfloat16)
        if name.startswith(("sinks", "mask")):
            for ways in ("bh", "hq"):
                case.check("triton", ways)


def other_attention(folder):
    """Attention over packed tokens and over pages: by heads, and pages by batch and queries."""
    cu = torch.tensor([0, 20, 29, 48], dtype=torch.int32)
    for p, sinks in ((0.0, True), (P, False)):
        tensors = dict(
            query=drawn(48, 8, 8), key=drawn(48, 4, 8, seed=1), value=drawn(48, 4, 8, seed=2)
        )
        letters = dict(query=".hd", key=".hd", value=".he")
        given = {}
        if sinks:
            tensors["sinks"], letters["sinks"] = drawn(8, seed=3), "h"
        else:
            tensors["bias"], letters["bias"] = drawn(48, seed=3), "."
            given = dict(alibi_slopes=drawn(3, 8, seed=4).abs(), softcap=5.0, return_lse=True)
        packed = Case(
            f"packed {p}",
            functools.partial(
                ff.packed_attention, cu_seqlens_q=cu, cu_seqlens_k=cu, max_q=20, max_k=20,
                dropout_p=p, dropout_seed=SEED, is_causal=True, **given,
            ),
            tensors, letters, ".he",
        )  # fmt: skip
        for backend, ways in (("reference", "h"), ("reference", "hh"), ("triton", ".h")):
            packed.check(backend, ways)
        packed.check("reference", "h", dict(query="h.d", key="h.d", value="h.e"))  # tokens
    paged = Case(
        "paged",
        functools.partial(ff.paged_attention, is_causal=True, causal_alignment="bottom_right"),
        dict(
            query=drawn(4, 8, 4, 8),
            key_pages=drawn(9, 16, 4, 8, seed=1),
            value_pages=drawn(9, 16, 4, 8, seed=2),
            block_table=torch.tensor([[3, 1], [0, 2], [8, 4], [5, 7]], dtype=torch.int32),
            key_lengths=torch.tensor([20, 16, 31, 4], dtype=torch.int32),
            sinks=drawn(8, seed=3),
        ),
        dict(
            query="bhqd", key_pages="..hd", value_pages="..he", block_table="b.", key_lengths="b",
            sinks="h",
        ),
        "bhqe",
        constant=("query", "key_pages", "value_pages", "sinks"),
    )  # fmt: skip
    for ways in ("b", "h", "q", "bh", "hq"):
        paged.check("reference", ways)
    paged.check("triton", "bh")


# ----------------------------------------------------------------------------------------- the rows


def norms(folder):
    """Over the rows, of each norm; features that are sharded are exchanged for rows."""
    x, r = drawn(4, 6, 8), drawn(4, 6, 8, seed=1)
    w, b = drawn(8, seed=2), drawn(8, seed=3)
    every = {"input": "01d", "residual": "01d", "weight": "w", "bias": "w", "input_bias": "w"}
    of_one = functools.partial(ff.layer_norm, normalized_shape=[8])
    cases = [
        ("layer_norm", of_one, dict(input=x, weight=w, bias=b)),
        ("rms_norm", functools.partial(ff.rms_norm, normalized_shape=[8]), dict(input=x, weight=w)),
    ]
    for p in (0.0, P):
        add = dict(dropout_p=p, dropout_seed=SEED)
        sums = dict(input=x, residual=r, weight=w)
        layer = functools.partial(ff.dropout_add_layer_norm, **add)
        rms = functools.partial(ff.dropout_add_rms_norm, **add)
        cases += [(f"add layer {p}", layer, sums | dict(bias=b)), (f"add rms {p}", rms, sums)]
        cases.append((f"add biases {p}", layer, sums | dict(bias=b, input_bias=2 * b)))
    for name, function, tensors in cases:
        letters = {n: every[n] for n in tensors}
        case = Case(name, function, tensors, letters, "01d")
        for ways in ("0", "1", "01", "10", "00"):
            case.check("reference", ways)
        for ways in ("0", "01"):  # the features in place of the first rows
            over = {n: "d10" for n in ("input", "residual") if n in tensors}
            case.check("reference", ways, over)
        few = {n: x[:3, :4] if x.dim() == 3 else x for n, x in tensors.items()}
        over = {n: "0d1" for n, x in few.items() if x.dim() == 3}
        Case(f"{name}, 3 rows", function, few, letters, "01d").check("reference", "1", over)
        case.check("reference", "01", dtype=torch.bfloat16)
        case.check("triton", "01")
        if name.startswith("add"):
            case.check("triton", "1.")


def feed_forward(folder):
    """Over d_ff, by columns then by rows, and over the tokens."""
    x, w_2, b_2 = drawn(4, 6, 8), drawn(8, 64, seed=3), drawn(8, seed=4)
    for op, p in (("feed_forward", 0.0), ("feed_forward", P), ("geglu", P), ("swiglu", P)):
        gated = op != "feed_forward"
        first = ("w", "b") if gated else ("w_1", "b_1")
        rows = 128 if gated else 64
        tensors = dict(zip(first, (drawn(rows, 8, seed=1), drawn(rows, seed=2))))
        tensors |= {"input": x, "w_2": w_2, "b_2": b_2}
        letters = {"input": "01d", first[0]: "fd", first[1]: "f", "w_2": "of", "b_2": "o"}
        function = functools.partial(getattr(ff, op), dropout_p=p, dropout_seed=SEED)
        case = Case(f"{op} {p}", function, tensors, letters, "01o")
        for ways in ("f", "0", "1", "0f", "1f", "f0", "01", "10", "00", ".f"):
            case.check("reference", ways)
        if not gated:
            case.check("reference", "ff")
        for ways in ("f", "0f"):  # tokens that are gathered
            case.check("reference", ways, {"input": "0fd"})
        case.check("reference", "0f", dtype=torch.bfloat16)
        for ways in ("1f", "01"):
            case.check("triton", ways)


def gated_activation(folder):
    tensors = {"gate": drawn(4, 6, 64), "value": drawn(4, 6, 64, seed=1)}
    case = Case("gated", ff.gated_activation, tensors, dict(gate="01f", value="01f"), "01f")
    for ways in ("f", "0", "1f", "01"):
        case.check("reference", ways)
        case.check("reference", ways, {"value": ".."})
    case.check("triton", "1f")


def embedding(folder):
    """Over the vocabulary, the features, and the tokens."""
    tensors = dict(tokens=tokens(11, 4, 6), weight=drawn(11, 16, seed=1))
    tensors["positional"] = drawn(7, 16, seed=2)
    letters = dict(tokens="01", weight="vn", positional="pn")
    for p in (0.0, P):
        function = functools.partial(ff.embed, dropout_p=p, dropout_seed=SEED, padding_idx=3)
        case = Case(f"embed {p}", function, tensors, letters, "01n")
        for ways in ("v", "n", "0", "1", "0v", "1v", "0n", "n1", "01", "10", ".v", "vn"):
            case.check("reference", ways)
        case.check("reference", "v", {"tokens": "0v"})
        for ways in ("1v", "1n"):
            case.check("triton", ways)


def rotary(folder):
    """Over the batch, the heads and the tokens, which split cos and sin, too."""
    both = functools.partial(ff.rotary_embedding, interleaved=True, eps=0.1)
    tensors = dict(query=drawn(4, 4, 6, 8), key=drawn(4, 2, 6, 8, seed=1))
    tensors |= dict(query_norm=drawn(8, seed=2), key_norm=drawn(8, seed=3))
    letters = dict(query="bhqd", key="bhqd", query_norm="d", key_norm="d", cos="qr", sin="qr")
    for table in ((6, 4), (4, 6, 4)):
        given = tensors | dict(cos=drawn(*table, seed=4), sin=drawn(*table, seed=5))
        own = letters | ({n: "bqr" for n in ("cos", "sin")} if len(table) == 3 else {})
        case = Case(f"rotary {table}", both, given, own, "bhqd", constant=("cos", "sin"))
        for ways in ("b", "q", "bh", "qh", "bq", "qq"):
            case.check("reference", ways)
        case.check("triton", "bh")
        plain = {n: x for n, x in own.items() if n not in ("cos", "sin")}
        case.check("reference", "bq", plain)
    packed = {n: x.flatten(0, 1) for n, x in tensors.items() if "norm" not in n}
    packed = {n: x.view(4, 24 // 4 * (x.shape[0] // 4), 8) for n, x in packed.items()}
    packed |= dict(cos=drawn(4, 4, seed=4), sin=drawn(4, 4, seed=5))
    letters = dict(query="qhd", key="qhd", cos="qr", sin="qr")
    Case("rotary, packed", both, packed, letters, "qhd", constant=("cos", "sin")).check(
        "reference", "qh"
    )


def losses(folder):
    """Over the vocabulary, whose lse is merged, and over the tokens."""
    target = tokens(11, 4, 6)
    target[1] = 5
    linear = dict(input=drawn(4, 6, 8), linear_weight=drawn(11, 8, seed=1))
    linear |= dict(linear_bias=drawn(11, seed=2), target=target)
    of_linear = dict(input="01d", linear_weight="vd", linear_bias="v", target="01")
    logits, of_logits = (
        dict(logits=drawn(4, 6, 11, seed=3), target=target),
        dict(logits="01v", target="01"),
    )
    kinds = [*itertools.product(("mean", "sum", "none"), ("uniform", "kl"), (5,))]
    kinds += [("mean", "kl", None), ("none", "kl", None)]
    for reduction, smoothing, ignored in kinds:
        options = dict(
            reduction=reduction, ignore_index=ignored, label_smoothing=0.2, smoothing=smoothing
        )
        output = "01" if reduction == "none" else ""
        for op, tensors, letters in (
            (ff.linear_cross_entropy, linear, of_linear),
            (ff.cross_entropy, logits, of_logits),
        ):
            function = functools.partial(op, **options)
            name = f"{op.__name__}, {reduction}, {smoothing}, {ignored}"
            case = Case(name, function, tensors, letters, output, merged=True)
            for ways in ("v", "0", "1", "0v", "v1", "01", "00", ".v", "vv"):
                case.check("reference", ways)
            if op is ff.linear_cross_entropy:
                case.check("reference", "v", {"input": "0vd", "target": "0v"})
                case.check("reference", "0v", dtype=torch.bfloat16)
            if reduction == "mean":
                case.check("triton", "0v")
                case.check("triton", "01")


# -------------------------------------------------------------------------------------------- masks


def kept(op, tensors, letters, *several, output=lambda out: out, **options):
    """Require that a call that is split in several ways keeps the elements that one process keeps.
    Where nothing is dropped, no element of the output is zero.
    """

    def function(**given):
        return output(op(**given, **options, dropout_p=P, dropout_seed=SEED))

    with ff.use_backend("reference"):
        whole = function(**tensors) != 0
    share = float(whole.float().mean())
    assert abs(share - (1 - P)) < 0.1, f"{op.__name__} keeps {share}"
    for backend, ways in (*(("reference", x) for x in several), ("triton", several[-1])):
        mesh = mesh_of(ways)
        given = {
            n: distribute_tensor(x, mesh, placements(letters[n], ways)) for n, x in tensors.items()
        }
        with ff.use_backend(backend):
            ours = function(**given).full_tensor() != 0
        differ = int((ours != whole).sum())
        assert not differ, f"{op.__name__}, {backend}, {ways}: {differ} of {whole.numel()} differ"
    part = {n: x[2:] if letters[n][0] in "b0" else x for n, x in tensors.items()}
    for backend in ("reference", "triton"):
        with ff.use_backend(backend), ff.sequences_from(2):
            ours = function(**part) != 0
        assert torch.equal(ours, whole[2:]), f"{op.__name__}, {backend}: the last two sequences"


def masks(folder):
    """The dropout masks of each op are those of one process, bit for bit."""
    ones, zeros = torch.ones, torch.zeros
    x, eye = ones(4, 6, 8), torch.eye(20).expand(4, 4, 20, 20)
    kept(
        ff.scaled_dot_product_attention,
        dict(query=zeros(4, 8, 64, 8), key=zeros(4, 4, 20, 8), value=eye),
        ATTENTION, "b", "h", "q", "bh", "qb", "bb", "qq", "hq", enable_gqa=True,
    )  # fmt: skip
    kept(
        ff.feed_forward,
        dict(input=x, w_1=zeros(64, 8), b_1=ones(64), w_2=torch.eye(64)),
        dict(input="01d", w_1="fd", b_1="f", w_2="of"),
        "f", "0", "1", "0f", "f1", "ff", "01", b_2=None,
    )  # fmt: skip
    for op in (ff.geglu, ff.swiglu):
        kept(
            op,
            dict(input=x, w=zeros(128, 8), b=ones(128), w_2=torch.eye(64)),
            dict(input="01d", w="fd", b="f", w_2="of"),
            "f", "0", "1f", b_2=None,
        )  # fmt: skip
    kept(
        ff.embed,
        dict(tokens=tokens(11, 4, 6), weight=ones(11, 16)),
        dict(tokens="01", weight="vn"),
        "v", "n", "0", "1", "0v", "nv", "1n", positional=None,
    )  # fmt: skip
    sums = dict(input=x, residual=zeros(4, 6, 8), weight=ones(8))
    letters = dict(input="01d", residual="01d", weight="w")
    ways = "0", "1", "01", "00", "10"
    kept(ff.dropout_add_layer_norm, sums, letters, *ways, output=lambda out: out[1], bias=None)
    kept(ff.dropout_add_rms_norm, sums, letters, *ways, output=lambda out: out[1])


def no_targets(folder):
    """A mean over no token is NaN, as torch has it."""
    logits, target = drawn(4, 11), torch.full((4,), -100)
    mesh = mesh_of("0")
    for placement in (Shard(0), Replicate()):
        given = (distribute_tensor(x, mesh, [placement]) for x in (logits, target))
        assert ff.cross_entropy(*given).full_tensor().isnan()


def any_strides(folder):
    """What devices exchange may be transposed in memory."""
    group = mesh_of("0").get_group()
    x = drawn(6, 8, seed=torch.distributed.get_rank()).t()
    want = call.exchanged(x.contiguous(), group, 2)
    assert torch.equal(call.exchanged(x, group, 2), want)


def one_device(folder):
    """Hidden units that are split over a dimension of one device: it adds the bias."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    given = drawn(3, 8), drawn(16, 8, seed=1), drawn(16, seed=2), drawn(8, 16, seed=3), drawn(8)
    split = Replicate(), Shard(0), Shard(0), Shard(1), Replicate()
    placed = [distribute_tensor(x, mesh, [Replicate(), how]) for x, how in zip(given, split)]
    have = ff.feed_forward(*placed).full_tensor()
    torch.testing.assert_close(have, ff.feed_forward(*given))


def gated_halves(folder):
    """A gated layer over its tokens, whose hidden units two devices could not share."""
    given = drawn(4, 8), drawn(6, 8, seed=1), drawn(8, 3, seed=2)
    ways = Shard(0), Replicate(), Replicate()
    x, w, w_2 = (distribute_tensor(x, mesh_of("0"), [way]) for x, way in zip(given, ways))
    have = ff.geglu(x, w, None, w_2, None).full_tensor()
    torch.testing.assert_close(have, ff.geglu(*given[:2], None, given[2], None))
