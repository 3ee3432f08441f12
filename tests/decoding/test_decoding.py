"""Decoding against models whose next symbol is known, and loops written out.

With a cache each search gives what it gives when all tokens are computed again at each step.
"""

import contextlib
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from recorder import Recorder, run_as_on_a_gpu
from torch import nn

import fastformer as ff
from fastformer import DecoderCache, beam_search, cuda_graphs, greedy_decode, sample, stream_tokens
from fastformer.cache.contiguous import KVCache
from fastformer.decoding import search as decoding_search
from fastformer.decoding import steps as decoding_steps


class Counting(nn.Module):
    """A model that follows y_t = y_{t-1} + src[0] modulo 10, and checks what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def encode(self, src, src_mask):
        assert not torch.is_grad_enabled()
        return src[:, :1] * self.weight

    def decode(self, memory, src_mask, tgt, tgt_mask):
        assert torch.equal(tgt_mask, ff.subsequent_mask(tgt.shape[1]))
        following = (tgt + memory.long()) % 10
        return nn.functional.one_hot(following, 10).float()

    def generator(self, x):
        assert x.dim() == 2  # the last position alone
        return (x + 0.01).log()


def test_greedy_decode_of_several_sources():
    src = torch.tensor([[1, 9], [3, 9], [0, 9]])
    decoded = greedy_decode(Counting(), src, None, 6, 2)
    assert decoded.tolist() == [[2, 3, 4, 5, 6, 7], [2, 5, 8, 1, 4, 7], [2] * 6]
    assert decoded.dtype == src.dtype and not decoded.requires_grad
    assert greedy_decode(Counting(), src.int(), None, 1, 2).tolist() == [[2]] * 3
    assert greedy_decode(Counting(), src.int(), None, 2, 2).dtype == torch.int32


def test_max_len_past_the_positions_is_refused_before_the_first_step():
    model = ff.make_model(7, 7, 1, 16, 16, 2).eval()
    model.tgt_embed[1] = ff.PositionalEncoding(16, 0.0, max_len=4)
    src, steps = torch.ones(1, 3, dtype=torch.int64), []
    model.encoder.register_forward_hook(lambda *_: steps.append(1))
    with pytest.raises(ValueError, match="max_len is 6; expected at most 5"):
        greedy_decode(model, src, None, 6, 1)
    assert not steps
    assert greedy_decode(model, src, None, 5, 6).shape == (1, 5)


def test_both_backends_decode_alike(device):
    model = ff.make_model(7, 7, 1, 16, 16, 2).to(device).eval()
    src = torch.tensor([[1, 4, 2], [1, 3, 0]], device=device)
    decoded = []
    for backend in ("reference", "triton"):
        with ff.use_backend(backend):
            decoded.append(greedy_decode(model, src, (src != 0).unsqueeze(-2), 3, 1))
    assert torch.equal(*decoded)


@pytest.mark.parametrize("search", [greedy_decode, sample, beam_search, stream_tokens])
def test_decoding_with_dropout_warns(search):
    """And only then: not in eval mode, nor where no module drops. The modes stay as they are."""
    src = torch.ones(1, 3, dtype=torch.int64)
    model, certain = (ff.make_model(11, 11, 1, 16, 16, 2, p) for p in (0.1, 0.0))
    message = r"model is in train\(\) mode: dropout changes the tokens; call model.eval\(\) first"
    model.encoder.eval()
    modes = [m.training for m in model.modules()]
    with pytest.warns(UserWarning, match=message) as seen:
        search(model, src, None, 3, 1)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert [m.training for m in model.modules()] == modes
    writer = ff.make_decoder(11, 1, 16, 16, 2)
    with pytest.warns(UserWarning, match=message):
        search(writer, src, None, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(certain.train(), src, None, 3, 1)
        search(model.eval(), src, None, 3, 1)
        model.training = True  # and no module that drops
        search(model, src, None, 3, 1)
        search(writer.eval(), src, None, 4)


ids = torch.ones(2, 4, dtype=torch.int64)


# ---------------------------------------------------------------------------- with a cache or not


def varied(model):
    """In eval mode, with weights of which the tokens vary."""
    with torch.no_grad():
        for p in model.decoder.parameters():
            p.mul_(2 if p.dim() == 2 else 1)
    return model.eval()


def translator(vocabulary=11, layers=2, seed=5, **options):
    torch.manual_seed(seed)
    return varied(ff.make_model(vocabulary, vocabulary, layers, 16, 32, 2, 0.1, **options))


def sources(device="cpu"):
    src = torch.tensor([[1, 4, 9, 2, 7], [1, 8, 3, 0, 0], [5, 6, 0, 0, 0]], device=device)
    return src, (src != 0).unsqueeze(-2)


def language_model(**options):
    torch.manual_seed(7)
    return varied(ff.make_decoder(11, 2, 16, 32, 2, 0.1, kv_heads=1, **options))


PROMPTS = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0], [2, 0, 0, 0]])
SEARCHES = {
    "greedy": lambda *a, **o: greedy_decode(*a, **o),
    "sample": lambda *a, **o: sample(*a, seed=3, top_k=5, **o),
    "beams": lambda *a, **o: beam_search(*a, num_beams=3, n_best=2, **o).tokens,
}


# By name: a model, what it decodes from, and how many tokens it makes.
FORMS = {
    "translator": lambda: (translator(), *sources(), 20, 1),
    "other options": lambda: (
        translator(norm="rms", kv_heads=1, learned_positions=True), *sources(), 20, 1
    ),
    "language model": lambda: (language_model(), PROMPTS[:, :2], None, 14),
    "rotary": lambda: (
        language_model(positions="rotary", qk_norm=True), PROMPTS[:, :2], None, 14
    ),
}  # fmt: skip


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("end", [None, 7])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_with_a_cache_the_tokens_are_the_same(search, end, form, device):
    model, src, *rest = given = [x.to(device) if hasattr(x, "to") else x for x in form()]
    want = search(*given, end_symbol=end, cache=False)
    for cache in (True, DecoderCache(rest[1] - 1), DecoderCache(20)):
        assert torch.equal(search(*given, end_symbol=end, cache=cache), want)
    assert len(want.unique()) > 2  # which says something
    if isinstance(model, ff.LanguageModel):  # it continues its prompt
        assert (want[..., :2] == (src if want.dim() == 2 else src[:, None])).all()


def test_a_decoder_without_layers_has_nothing_to_keep():
    given = translator(layers=0), *sources(), 6, 1
    assert torch.equal(greedy_decode(*given), greedy_decode(*given, cache=False))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_batch_gives_empty_results(masked, cache, backend):
    src = torch.ones(0, 4, dtype=torch.int32)
    mask = src.unsqueeze(1) > 0 if masked else None
    for model, start in ((translator(layers=1), 1), (language_model(), None)):
        given, options = (model, src, mask, 6, start), dict(end_symbol=7, cache=cache)
        for tokens in (greedy_decode(*given, **options), sample(*given, **options)):
            assert tokens.shape == (0, 6) and tokens.dtype == src.dtype
        found = beam_search(*given, num_beams=3, n_best=2, **options)
        assert [tuple(x.shape) for x in found] == [(0, 2, 6), (0, 2), (0, 2)]
        assert [x.dtype for x in found] == [src.dtype, torch.float32, torch.int64]


def test_a_cache_can_be_used_again():
    model, (src, mask) = translator(), sources()
    cache = DecoderCache(9)
    want = greedy_decode(model, src, mask, 10, 1)
    assert torch.equal(greedy_decode(model, src, mask, 10, 1, cache=cache), want)
    kept = cache.layers[0].own.key
    assert torch.equal(greedy_decode(model, src, mask, 10, 1, cache=cache), want)
    assert cache.layers[0].own.key is kept
    assert torch.equal(greedy_decode(model, src[:2], mask[:2], 8, 1, cache=cache), want[:2, :8])


def test_each_token_is_computed_once(monkeypatch):
    """And with a model that takes no cache, all of them at each step."""
    model, (src, mask) = translator(), sources()
    lengths = []
    model.decoder.layers[0].self_attn.linears[1].register_forward_hook(
        lambda module, inputs, output: lengths.append(inputs[0].shape[1])
    )
    want = greedy_decode(model, src, mask, 6, 1)
    assert lengths == [1] * 5
    lengths.clear()

    class Layer(ff.DecoderLayer):
        def forward(self, x, memory, src_mask, tgt_mask):
            return super().forward(x, memory, src_mask, tgt_mask)

    for layer in model.decoder.layers:
        layer.__class__ = Layer
    assert torch.equal(greedy_decode(model, src, mask, 6, 1), want)
    assert lengths == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="cache is a DecoderCache, and a module"):
        greedy_decode(model, src, mask, 6, 1, cache=DecoderCache(9))


@pytest.mark.parametrize("part", ["decode", "decoder", "self_attn", "src_attn", "tgt_embed"])
def test_each_part_that_decodes_takes_the_cache(part):
    model, (src, mask) = translator(), sources()
    if part == "decode":
        model.decode = lambda memory, src_mask, tgt, tgt_mask: memory
    elif part == "tgt_embed":
        model.tgt_embed = nn.Embedding(11, 16)  # without positions
    else:
        module = model.decoder if part == "decoder" else getattr(model.decoder.layers[1], part)
        module.forward = lambda x, *arguments: x
    with pytest.raises(ValueError, match="cache is a DecoderCache, and a module"):
        greedy_decode(model, src, mask, 6, 1, cache=DecoderCache(9))


def test_a_row_ends_at_its_end_symbol():
    """Rows that count up to 7 in steps of their own, and the loop stops when all have."""
    model, src = Counting(), torch.tensor([[1], [2], [5]])
    steps = []
    generator = model.generator
    model.generator = lambda x: steps.append(1) or generator(x)
    tokens = greedy_decode(model, src, None, 12, 1, end_symbol=7, pad_symbol=0)
    assert tokens[:2].tolist() == [[1, 2, 3, 4, 5, 6, 7] + [0] * 5, [1, 3, 5, 7] + [0] * 8]
    assert tokens[2].tolist() == [1, 6] * 6 and len(steps) == 11  # it never ends
    steps.clear()
    tokens = greedy_decode(model, src[:2], None, 12, 1, end_symbol=7)
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6] + [7] * 6, [1, 3, 5] + [7] * 9]
    assert len(steps) == 6


def test_on_a_gpu_the_loop_looks_at_times(monkeypatch):
    """As on a GPU, where a look waits for the device: more steps, and the same tokens."""
    model, (src, mask) = translator(seed=6), sources()
    want = greedy_decode(model, src, mask, 40, 1, end_symbol=7)
    looks, on_gpu = decoding_search._looks, SimpleNamespace(is_cpu=False)
    monkeypatch.setattr(decoding_search, "_looks", lambda tokens, i: looks(on_gpu, i))
    assert [i for i in range(40) if looks(on_gpu, i)] == [15, 31]
    assert torch.equal(greedy_decode(model, src, mask, 40, 1, end_symbol=7), want)
    beams = beam_search(model, src, mask, 40, 1, end_symbol=7, n_best=3)
    monkeypatch.undo()
    for x, y in zip(beams, beam_search(model, src, mask, 40, 1, end_symbol=7, n_best=3)):
        assert torch.equal(x, y)


# -------------------------------------------------------------------------------------- CUDA graphs


WITHOUT_WAITING = decoding_steps.without_waiting


@pytest.fixture
def recorded(monkeypatch):
    """Decoding captures its steps, and the cache and the reference do as they do on a GPU."""
    captures = []

    def captured(function):
        saved = [(x, x.clone()) for x in recorded.cache.buffers()]
        with Recorder() as recorder:
            out = function()
        for x, before in saved:  # a capture computes nothing
            x.copy_(before)
        captures.append(recorder)
        return recorder.replay, out

    def recorded(function, *arguments, **options):
        recorded.cache = options["cache"]
        return function(*arguments, **options)

    made = KVCache.__init__

    def as_on_a_gpu(self, *arguments, **options):
        made(self, *arguments, **options)
        self._fixed_shapes = True

    monkeypatch.setattr(KVCache, "__init__", as_on_a_gpu)
    monkeypatch.setattr(decoding_steps, "captures", lambda *_: True)
    monkeypatch.setattr(decoding_steps, "captured", captured)
    monkeypatch.setattr(decoding_steps, "without_waiting", lambda function: function())
    run_as_on_a_gpu(monkeypatch)
    recorded.captures = captures
    return recorded


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_replays_of_one_captured_step_decode_the_same(recorded, search):
    """With an end symbol and with rows that change places."""
    model, (src, mask) = translator(), sources()
    want = search(model, src, mask, 24, 1, end_symbol=7, pad_symbol=0, cache=False)
    for _ in range(2):
        cache = DecoderCache(24)
        got = recorded(search, model, src, mask, 24, 1, end_symbol=7, pad_symbol=0, cache=cache)
        assert torch.equal(got, want)
    assert len(recorded.captures) == 2


def test_replays_continue_prompts_of_several_lengths(recorded):
    """With padding on the right and on the left; as on a GPU, where no mask is read."""
    model = language_model()
    for i, (prompts, mask, options) in enumerate((
        (PROMPTS, PROMPTS != 0, {}),
        (LEFT, WHERE, dict(end_symbol=[7, 10], repetition_penalty=1.3)),
    )):  # fmt: skip
        given = dict(model=model, src=prompts, src_mask=mask, max_len=20, pad_symbol=0, **options)
        want = greedy_decode(**given, cache=False)
        got = recorded(greedy_decode, **given, cache=DecoderCache(20))
        assert torch.equal(got, want) and len(recorded.captures) == i + 1


def test_a_graph_is_captured_once_for_a_cache_and_a_batch_size(recorded):
    """And again for other sizes, weights that have moved, or another mode."""
    model, (src, mask) = translator(), sources()
    cache = DecoderCache(12)

    def check(captures, src=src, mask=mask):
        want = greedy_decode(model, src, mask, 12, 1, cache=False)
        assert torch.equal(recorded(greedy_decode, model, src, mask, 12, 1, cache=cache), want)
        assert len(recorded.captures) == captures

    check(1)
    check(1, src.flip(0), mask.flip(0))  # the mask is copied to that of the graph
    with torch.no_grad():
        model.generator.proj.bias.normal_(std=0.1)
    check(1)  # in place
    check(2, src[:2], mask[:2])
    check(3, src[:2, :4], mask[:2, :, :4])
    model.generator.proj.bias = nn.Parameter(torch.randn(11))
    check(4, src[:2, :4], mask[:2, :, :4])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    check(5, src[:2, :4], mask[:2, :, :4])
    model.train()
    check(6, src[:2, :4], mask[:2, :, :4])
    model.eval().decoder.layers[0].sublayer[0].norm.eps = 0.1
    check(7, src[:2, :4], mask[:2, :, :4])
    check(8, src[:2, :4].int(), mask[:2, :, :4])
    check(9, src[:2, :4].int(), mask[:2, :, :4].int())


class Cuda:
    """What `captured` and `without_waiting` use of torch.cuda, with what torch does where the end
    of a capture fails: its capture stream stays, and its generator expects a capture.
    """

    stream, mode = "that of the caller", 1

    def __init__(self, monkeypatch):
        self.calls, self.expects_a_capture = [], False
        for name in ("CUDAGraph", "graph", "current_stream", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda x: setattr(self, "mode", x))

    def CUDAGraph(self):
        return SimpleNamespace(replay=None, reset=lambda: self.calls.append("reset"))

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    @contextlib.contextmanager
    def graph(self, graph, capture_error_mode):
        self.calls.append(capture_error_mode)
        before, self.stream, self.expects_a_capture = self.stream, "of the capture", True
        yield
        self.stream, self.expects_a_capture = before, False


def test_a_capture_that_fails_leaves_torch_as_it_was(monkeypatch):
    cuda = Cuda(monkeypatch)

    def fails():
        assert cuda.expects_a_capture and cuda.stream == "of the capture"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_graphs.captured(fails)
    assert cuda.stream == "that of the caller" and not cuda.expects_a_capture
    assert cuda.calls == ["thread_local", "reset", "thread_local"]
    cuda_graphs.captured(lambda: cuda.calls.clear())
    assert cuda.calls == []


@pytest.mark.parametrize("waits", [False, True])
def test_without_a_capture_the_steps_run_as_they_are(recorded, monkeypatch, waits):
    """The failed capture counts no token. A step that waits for the device fails before it, as it
    is tried in the sync debug mode "error".
    """
    cuda = Cuda(monkeypatch)
    model, (src, mask) = translator(), sources()
    want = greedy_decode(model, src, mask, 12, 1, cache=False)
    monkeypatch.setattr(decoding_steps, "without_waiting", WITHOUT_WAITING)

    def fails(*_):
        if not waits or cuda.mode == "error":
            raise RuntimeError("operation not permitted")

    if waits:  # after the layers, which have written to the cache
        model.generator.register_forward_hook(fails)
    else:
        monkeypatch.setattr(decoding_steps, "captured", fails)
    cache = DecoderCache(11)
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted"):
        assert torch.equal(greedy_decode(model, src, mask, 12, 1, cache=cache), want)
    assert recorded.captures == [] and cuda.mode == 1 and cuda.calls == []
    assert cache.longest == 11 and cache.lengths.tolist() == [11] * 3


def test_models_that_are_captured(monkeypatch):
    """Modules of this package and of torch on a GPU, as they are."""
    model = translator()
    tokens = SimpleNamespace(is_cuda=True, is_cpu=False, device=torch.device("cuda"))
    assert not decoding_steps.captures(model, torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert decoding_steps.captures(model, tokens)
    handle = model.decoder.norm.register_forward_hook(lambda *_: None)
    assert not decoding_steps.captures(model, tokens)
    handle.remove()
    model.decoder.layers[0].self_attn.keep_attention = True
    assert not decoding_steps.captures(model, tokens)
    model.decoder.layers[0].self_attn.keep_attention = False
    assert decoding_steps.captures(model, tokens)
    model.generator = Counting()
    assert not decoding_steps.captures(model, tokens)
    model = translator()
    with monkeypatch.context() as patch:
        patch.setattr(decoding_steps, "may_read", lambda x: True)  # checks wait for the device
        assert not decoding_steps.captures(model, tokens)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not decoding_steps.captures(model, tokens)


# ----------------------------------------------------------------- language models, and plain loops


@pytest.mark.parametrize("name", ["greedy", "beams"])
@pytest.mark.parametrize("cache", [True, False])
def test_prompts_of_several_lengths(name, cache):
    """And of another integer type."""
    model, search, mask = language_model(), SEARCHES[name], PROMPTS != 0
    options = dict(end_symbol=7, pad_symbol=0)
    for src, src_mask in ((PROMPTS, mask), (PROMPTS.int(), PROMPTS.unsqueeze(1))):
        found = search(model, src, src_mask, 12, cache=cache, **options)
        assert found.dtype == src.dtype
        for b, n in enumerate(mask.sum(1).tolist()):
            alone = search(model, PROMPTS[b : b + 1, :n], None, n + 8, cache=False, **options)
            assert torch.equal(found[b, ..., : n + 8].long(), alone[0])
            assert not found[b, ..., n + 8 :].any()


def test_a_prompt_of_max_len_is_all():
    model, mask = language_model(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    prompts = PROMPTS.masked_fill(mask == 0, 3)
    assert torch.equal(greedy_decode(model, prompts, None, 4), prompts)
    assert torch.equal(sample(model, prompts, mask, 4, pad_symbol=0), PROMPTS)
    found = beam_search(model, prompts, mask, 4, pad_symbol=0, n_best=2)
    assert torch.equal(found.tokens, PROMPTS.unsqueeze(1).expand(3, 2, 4))
    assert found.scores.tolist() == [[0.0, -math.inf]] * 3
    assert found.lengths.tolist() == [[4] * 2, [2] * 2, [1] * 2]


@pytest.mark.parametrize("search", [greedy_decode, stream_tokens])  # which refuses at the call
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(start_symbol=1), "start_symbol is 1; expected None: a language model continues src"),
        (dict(max_len=3), r"max_len is 3 and src has 4 tokens; .* unlike max_new_tokens"),
        (dict(src=PROMPTS[:, :0]), "src has 0 tokens"),
        (dict(src_mask=PROMPTS != 1), "src_mask masks out a token between others"),
        (dict(src_mask=(PROMPTS != 0) & (PROMPTS[:, :1] != 5)), "prompts .*of one token or more"),
        (dict(src_mask=PROMPTS[:2] != 0), r"src_mask has shape \[2, 4\] and dtype torch.bool"),
        (dict(src_mask=PROMPTS.float()), r"src_mask has shape \[3, 4\] and dtype torch.float32"),
        (dict(src_mask=PROMPTS != 0, end_symbol=None), "pad_symbol is None and so is end_symbol"),
        (dict(end_symbol=[2, 12]), "end_symbol is 12; expected a token from 0 to 10"),
        (dict(end_symbol=[]), "end_symbol is empty; expected a token, several, or None"),
        (dict(repetition_penalty=0), "repetition_penalty is 0.0; expected a positive number"),
        (dict(repetition_penalty=math.inf), "repetition_penalty is inf; expected a positive"),
        (dict(max_len=5002), "max_len is 5002; expected at most 5001, the positions"),
    ],
)
def test_wrong_prompts_are_named(options, message, search):
    given = dict(src=PROMPTS, src_mask=None, max_len=8, end_symbol=7)
    with pytest.raises(ValueError, match=message):
        search(language_model(), **given | options)


def chooser(temperature=None, min_p=None, seed=0):
    """A function of log-probabilities, row by row: it takes the likeliest tokens, or draws them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scores):
        p = (scores / temperature).softmax(-1)
        p = torch.stack([row * (row >= min_p * row.max()) for row in p])
        return p.multinomial(1, generator=generator).squeeze(-1)

    return draw if temperature else lambda scores: scores.argmax(-1)


@torch.no_grad()
def next_scores(model, tokens, source=None):
    """log p of each token after the tokens of one sequence, which translate a source or none."""
    x = torch.tensor([tokens])
    if source is None:
        out = model(x)
    else:
        src, mask = source
        out = model(src[None], x, mask[None], ff.subsequent_mask(len(tokens)))
    return model.generator(out)[0, -1]


def plain_loop(model, sources, prompts, new, choose, ends, pad, penalty):
    """The tokens after each prompt, row by row and without a cache: a list for each step."""
    rows, over, steps = [list(prompt) for prompt in prompts], [False] * len(prompts), []
    while len(steps) < new and not all(over):
        scores = []
        for row, source in zip(rows, sources):
            scores.append(next_scores(model, row, source))
            for v in set(row):
                scores[-1][v] *= penalty
        chosen = choose(torch.stack(scores)).tolist()
        steps.append([pad if o else v for v, o in zip(chosen, over)])
        for b, v in enumerate(steps[-1]):
            rows[b].append(v)
            over[b] = over[b] or v in ends
    return steps


LEFT = torch.tensor([[3, 1, 4, 1], [0, 0, 5, 9], [0, 0, 0, 2], [0, 6, 8, 0]])
WHERE = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]]).bool()
LEFT_PROMPTS = [row[kept].tolist() for row, kept in zip(LEFT, WHERE)]
DRAWN = dict(temperature=0.9, min_p=0.2, seed=4)


@pytest.mark.parametrize("end, penalty", [([7, 10], 1.0), (7, 1.7), ((10, 6, 7), 1.3)])
@pytest.mark.parametrize("draws", [{}, DRAWN], ids=["greedy", "sample"])
@pytest.mark.parametrize("cache", [True, False])
def test_padding_on_either_side_ends_and_penalties(cache, draws, end, penalty):
    model, new, ends = language_model(), 14, (end,) if isinstance(end, int) else end
    steps = plain_loop(model, [None] * 4, LEFT_PROMPTS, new, chooser(**draws), ends, 0, penalty)
    assert len({v for step in steps for v in step}) > 3
    options = dict(end_symbol=end, pad_symbol=0, repetition_penalty=penalty, cache=cache, **draws)
    given = dict(model=model, src=LEFT, src_mask=WHERE, max_len=4 + new, **options)
    found = (sample if draws else greedy_decode)(**given)
    for b, first in enumerate(WHERE.int().argmax(1).tolist()):
        want = LEFT[b, :first].tolist() + LEFT_PROMPTS[b] + [step[b] for step in steps]
        assert found[b].tolist() == want + [0] * (4 + new - len(want))
    assert [tokens.tolist() for tokens in stream_tokens(**given)] == steps


@pytest.mark.parametrize("draws", [{}, DRAWN], ids=["greedy", "sample"])
def test_a_translation_with_ends_and_penalties(draws):
    model, (src, mask) = translator(), sources()
    pairs = list(zip(src, mask))
    steps = plain_loop(model, pairs, [[1]] * 3, 12, chooser(**draws), (7, 5), 7, 1.4)
    given = (model, src, mask, 13, 1)
    options = dict(end_symbol=[7, 5], repetition_penalty=1.4, **draws)
    found = (sample if draws else greedy_decode)(*given, **options)
    want = torch.tensor(steps).T
    assert torch.equal(found[:, 1 : 1 + len(steps)], want)
    assert (found[:, 1 + len(steps) :] == 7).all()
    assert torch.equal(torch.stack(list(stream_tokens(*given, **options)), 1), want)
    without = torch.stack(list(stream_tokens(*given, end_symbol=[7, 5], **draws)), 1)
    assert not torch.equal(without, want)


@pytest.mark.parametrize("cache", [True, False])
def test_beams_of_padding_on_the_left_and_of_several_ends(cache):
    """Those of the same prompts with their padding on the right, and of each end symbol."""
    model, ends = language_model(), [7, 10, 4]
    right = torch.zeros_like(LEFT)
    for row, prompt in zip(right, LEFT_PROMPTS):
        row[: len(prompt)] = torch.tensor(prompt)
    options = dict(end_symbol=ends, pad_symbol=0, num_beams=3, n_best=3, cache=cache)
    want = beam_search(model, right, right != 0, 12, **options)
    have = beam_search(model, LEFT, WHERE, 12, **options)
    torch.testing.assert_close(have.scores, want.scores)
    assert torch.equal(have.lengths, want.lengths)
    for b, first in enumerate(WHERE.int().argmax(1).tolist()):
        columns = want.tokens[b, :, : len(LEFT_PROMPTS[b]) + 8]
        assert torch.equal(have.tokens[b, :, first : first + columns.shape[1]], columns)
        assert (have.tokens[b, :, :first] == LEFT[b, :first]).all()
    last = want.tokens.gather(-1, want.lengths[..., None] - 1)
    assert len(set(last.flatten().tolist()) & set(ends)) > 1


def test_beams_go_on_where_the_likeliest_tokens_all_end():
    """Three of each beam, as many as there are end symbols. The penalty favours what goes on."""
    model, ends = language_model(), [7, 10, 4]
    with torch.no_grad():
        model.generator.proj.bias[ends] += 20.0
    options = dict(end_symbol=ends, num_beams=3, n_best=3, length_penalty=32)
    found = beam_search(model, PROMPTS[:, :2], None, 5, **options)  # the second step has 3 beams
    assert found.scores.isfinite().all() and (found.lengths == 5).all()


def test_stream_tokens_runs_a_step_when_asked():
    model, cache = language_model(), DecoderCache(9)
    stream = stream_tokens(model, PROMPTS[:, :2].int(), None, 9, cache=cache)
    assert cache.longest == 0 and torch.is_grad_enabled()
    first = next(stream)
    assert first.dtype == torch.int32 and first.shape == (3,) and cache.longest == 2
    assert torch.is_grad_enabled() and not first.requires_grad
    next(stream)
    assert cache.longest == 3 and len(list(stream)) == 5
    assert list(stream_tokens(model, PROMPTS[:0], None, 9)) == []
    assert list(stream_tokens(model, PROMPTS, None, 4)) == []


# -------------------------------------------------------------------------------------- beam search


def beams_in_lists(model, source, new, end, alpha, beams, penalty):
    """Beam search of one source, written out."""
    alive, finished = [(0.0, (1,))], []
    for n in range(1, new + 1):
        grown = []
        for total, y in alive:
            scores = next_scores(model, y, source).tolist()
            scores = [s * penalty if v in y else s for v, s in enumerate(scores)]
            grown += [(total + s, (*y, v)) for v, s in enumerate(scores)]
        grown = sorted(grown, reverse=True)[: 2 * beams]
        ends = [(s / ((5 + n) / 6) ** alpha, y) for s, y in grown if y[-1] == end]
        finished = sorted(finished + ends, reverse=True)[:beams]
        alive = [(s, y) for s, y in grown if y[-1] != end][:beams]
    ends = [(s / ((5 + new) / 6) ** alpha, y) for s, y in alive]
    return sorted(finished + ends, reverse=True)[:beams]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("vocabulary", "new", "beams", "alpha", "penalty"),
    [
        (11, 6, 1, 0.6, 1.0),
        (11, 6, 2, 1.0, 1.0),
        (11, 6, 3, 0.0, 1.0),
        (11, 6, 5, 0.6, 1.0),
        (11, 6, 3, 0.6, 1.8),
        (11, 6, 4, 1.0, 0.4),
        # No sequence of three tokens is lost, so that these are the best of all of four.
        (4, 4, 64, 0.0, 1.0),
        (4, 4, 64, 0.6, 1.0),
        (4, 4, 64, 2.0, 0.4),
    ],
)
def test_beam_search_against_one_written_out(vocabulary, new, beams, alpha, penalty, cache):
    model, (src, mask), end = translator(vocabulary, seed=4), sources(), min(7, vocabulary - 1)
    src = src % vocabulary
    with torch.no_grad():
        model.generator.proj.weight *= 2
    options = dict(length_penalty=alpha, repetition_penalty=penalty, pad_symbol=0, cache=cache)
    options |= dict(end_symbol=end, num_beams=beams, n_best=beams)
    found = beam_search(model, src, mask, new + 1, 1, **options)
    for b in range(3):
        want = beams_in_lists(model, (src[b], mask[b]), new, end, alpha, beams, penalty)
        for j, (score, y) in enumerate(want):
            n = found.lengths[b, j]
            assert found.tokens[b, j, :n].tolist() == list(y)
            assert not found.tokens[b, j, n:].any()
            assert math.isclose(found.scores[b, j], score, rel_tol=1e-5)


def test_one_beam_with_a_penalty_is_greedy_over_prompts_with_padding():
    model, options = language_model(), dict(pad_symbol=0, repetition_penalty=1.7)
    want = greedy_decode(model, LEFT, WHERE, 16, **options)
    assert not torch.equal(want, greedy_decode(model, LEFT, WHERE, 16, pad_symbol=0))
    found = beam_search(model, LEFT, WHERE, 16, num_beams=1, **options)
    assert torch.equal(found.tokens[:, 0], want)


@pytest.mark.parametrize("beams", [1, 2])
def test_length_penalty_prefers_a_longer_sequence(beams):
    """The end has probability 0.6, and the length penalty lets eight tokens beat it alone."""
    model = Loaded([0.6, 0.4])
    found = beam_search(
        model, ids[:1], None, 9, 1, end_symbol=0, pad_symbol=1, num_beams=beams, length_penalty=32
    )
    assert found.tokens.tolist() == [[[1] * 8 + [0]]] and found.lengths.tolist() == [[9]]
    want = (7 * math.log(0.4) + math.log(0.6)) / (13 / 6) ** 32
    assert math.isclose(found.scores.item(), want, rel_tol=1e-5)


def test_beam_search_stops_when_all_sources_end():
    """Those that count in steps of two reach the end before those that count in steps of one."""
    src = torch.tensor([[1], [2]])
    want = greedy_decode(Counting(), src, None, 12, 1, end_symbol=7)
    found = beam_search(Counting(), src, None, 12, 1, end_symbol=7, num_beams=2, length_penalty=0)
    assert torch.equal(found.tokens[:, 0], want) and found.lengths.tolist() == [[7], [4]]
    model, steps = Loaded([1.0, 0.0]), []
    generator = model.generator
    model.generator = lambda x: steps.append(1) or generator(x)
    found = beam_search(model, src, None, 12, 1, end_symbol=0, num_beams=2, n_best=2)
    assert found.scores.tolist() == [[0.0, -math.inf]] * 2 and len(steps) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_are_summed_in_float32_or_in_their_own_dtype(dtype):
    model = Loaded([0.3, 0.7])
    model.scores = model.scores.to(dtype)
    found = beam_search(model, ids[:1], None, 9, 1, length_penalty=0)
    assert found.scores.dtype == torch.promote_types(dtype, torch.float32)
    assert math.isclose(found.scores, 8 * model.scores[1].item(), rel_tol=1e-6)


def test_beam_search_with_one_mask_for_all():
    model, (src, mask) = translator(), sources()
    for cache in (True, False):
        found, want = (
            beam_search(model, src, x, 9, 1, end_symbol=7, num_beams=3, cache=cache)
            for x in (mask[1:2], mask[1:2].expand(3, 1, 5))
        )
        assert all(torch.equal(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize("function", [greedy_decode, sample, stream_tokens, beam_search])
def test_names_from_elsewhere_are_refused_with_ours(function):
    given = translator(), sources()[0], None
    message = "max_new_tokens is no argument here; expected max_len, which counts the prompt or"
    with pytest.raises(TypeError, match=message):
        function(*given, max_new_tokens=9)
    if function is beam_search:
        with pytest.raises(TypeError, match="beams is no argument here; expected num_beams"):
            function(*given, 9, 1, beams=3)


def test_more_beams_than_sequences():
    """Of three tokens there are three sequences of one; the others have no score."""
    model = translator(3)
    src = torch.tensor([[1, 2]])
    found = beam_search(model, src, None, 2, 1, end_symbol=2, num_beams=5, n_best=5)
    assert found.scores.isfinite().tolist() == [[True] * 3 + [False] * 2]
    assert sorted(found.tokens[0, :3, 1].tolist()) == [0, 1, 2]
    found = beam_search(model, src, None, 1, 1, num_beams=2)
    assert found.tokens.tolist() == [[[1]]] and found.scores.tolist() == [[0.0]]


# ------------------------------------------------------------------------------------------- sample


class Loaded(nn.Module):
    """A model that gives the same distribution at each step."""

    def __init__(self, probabilities):
        super().__init__()
        self.scores = torch.tensor(probabilities).log()

    def encode(self, src, src_mask):
        return src

    def decode(self, memory, src_mask, tgt, tgt_mask):
        return tgt[..., None].float()

    def generator(self, x):
        return self.scores.expand(len(x), -1)


P = [0.1, 0.4, 0.2, 0.05, 0.25]
DISTRIBUTIONS = [
    ({}, P),
    (dict(temperature=0.5), [p**2 / sum(q**2 for q in P) for p in P]),
    (dict(top_k=2), [0, 0.4 / 0.65, 0, 0, 0.25 / 0.65]),
    (dict(top_k=9), P),
    (dict(top_p=0.39), [0, 1, 0, 0, 0]),
    (dict(top_p=0.6), [0, 0.4 / 0.65, 0, 0, 0.25 / 0.65]),
    (dict(top_p=0.7), [0, 0.4 / 0.85, 0.2 / 0.85, 0, 0.25 / 0.85]),
    (dict(top_p=1.0), P),
    (dict(top_p=1e-9), [0, 1, 0, 0, 0]),
    # two thirds of what top_k leaves are one token
    (dict(top_k=2, top_p=0.6), [0, 1, 0, 0, 0]),
    (dict(temperature=2.0, top_k=3), [0, *(p**0.5 / sum(P[i]**0.5 for i in (1, 2, 4))
                                           if p in (0.4, 0.2, 0.25) else 0 for p in P[1:])]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "want"), DISTRIBUTIONS)
def test_sample_draws_from_the_distribution(options, want):
    """Within five standard deviations of the counts; what is left out is never drawn."""
    n = 40000
    src = torch.zeros(n // 4, 1, dtype=torch.long)
    tokens = sample(Loaded(P), src, None, 5, 1, seed=0, **options)[:, 1:]
    for v, p in enumerate(want):
        share = (tokens == v).float().mean().item()
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-6


def test_sample_with_a_seed():
    src = torch.zeros(50, 1, dtype=torch.long)
    one, same, other = (sample(Loaded(P), src, None, 9, 1, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert not torch.equal(one[:, 1], one[:, 2])
    torch.manual_seed(4)
    one, other = sample(Loaded(P), src, None, 9, 1), sample(Loaded(P), src, None, 9, 1)
    torch.manual_seed(4)
    assert torch.equal(sample(Loaded(P), src, None, 9, 1), one) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (sample, dict(temperature=0), ValueError, "temperature is 0.0; expected a positive"),
        (sample, dict(temperature=math.inf), ValueError, "temperature is inf"),
        (sample, dict(top_k=0), ValueError, "top_k is 0; expected 1 or more"),
        (sample, dict(top_p=0), ValueError, r"top_p is 0.0; expected a number in \(0, 1\]"),
        (sample, dict(top_p=1.01), ValueError, "top_p is 1.01"),
        (beam_search, dict(num_beams=0), ValueError, "num_beams is 0; expected 1 or more"),
        (beam_search, dict(n_best=5), ValueError, "n_best is 5; expected at most num_beams, 4"),
        (beam_search, dict(n_best=0), ValueError, "n_best is 0"),
        (beam_search, dict(length_penalty=32.5), ValueError, "length_penalty is 32.5"),
        (greedy_decode, dict(end_symbol=10), ValueError, "end_symbol is 10; .* from 0 to 9"),
        (sample, dict(pad_symbol=10), ValueError, "pad_symbol is 10; expected a token from 0 to 9"),
        (greedy_decode, dict(cache=DecoderCache(1)), ValueError, "cache has a capacity of 1; .* 2"),
        (greedy_decode, dict(start_symbol=None), ValueError, "start_symbol is None; expected the"),
        (greedy_decode, dict(max_len=0), ValueError, "max_len is 0; expected 1 or more"),
        (greedy_decode, dict(start_symbol=10), ValueError, "start_symbol is 10; .* from 0 to 9"),
        (greedy_decode, dict(end_symbol=[None]), TypeError, "end_symbol is a NoneType; expected"),
        (greedy_decode, dict(model=None), TypeError, "model is a NoneType without encode"),
        (greedy_decode, dict(model=nn.Transformer(8, 2, 1, 1, 8)), TypeError, "a Transformer with"),
        (stream_tokens, dict(top_k=3), ValueError, "top_k is 3 and temperature None, which draws"),
        (stream_tokens, dict(top_p=0.5), ValueError, "top_p is 0.5 and temperature None"),
        (stream_tokens, dict(min_p=0.5), ValueError, "min_p is 0.5 and temperature None"),
        (stream_tokens, dict(seed=0), ValueError, "seed is 0 and temperature None"),
        (stream_tokens, dict(temperature=0), ValueError, "temperature is 0.0; .* greedy_decode"),
        (stream_tokens, dict(temperature=1, min_p=1.5), ValueError, r"min_p is 1.5; .* \[0, 1\]"),
    ],
)
def test_bad_options_are_named(function, options, error, message):
    """At the call, also that of a stream."""
    model = ff.make_model(10, 10, 1, 8, 8, 2).eval()
    given = dict(model=model, src=ids, src_mask=None, max_len=3, start_symbol=1)
    with pytest.raises(error, match=message):
        function(**given | options)


@pytest.mark.parametrize(
    ("vocabulary", "options"),
    [
        (100, dict(top_k=2)),  # of few, torch's sort leaves equal ones in their order by itself
        (4, dict(top_p=0.5)),  # no token past the sum, which is 0.5 without a rounding
    ],
)
def test_the_first_of_equal_scores_are_kept(vocabulary, options):
    src = torch.zeros(50, 1, dtype=torch.long)
    tokens = sample(Loaded([1 / vocabulary] * vocabulary), src, None, 9, 1, seed=0, **options)
    assert tokens[:, 1:].unique().tolist() == [0, 1]
