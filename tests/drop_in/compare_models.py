"""Compares fastformer to eager attention in every model type of transformers, small and randomly
initialised.

    cd tests/drop_in
    python compare_models.py                 all types; exits with 1 if one got worse
    python compare_models.py bert llama      some of them
    python compare_models.py --write         also writes benchmarks/results/hugging_face.json
                                           and docs/hugging_face.md; with types, their rows
    python compare_models.py --print         prints the data, or with types only their rows

It compares the outputs and the gradient of every parameter, without padding and with padding on
either side, the loss, the tokens of generate(), and how many attentions, hidden states and cache
entries the model returns if it is asked for them. Then it compares the model after `ff.accelerate`
with the same model before it, with eager attention, with torch's and with fastformer's, and counts
what is reached of its attentions, norms and feed-forward layers. A type has one status:

    agrees            everything agrees, and fastformer's attention ran
    never calls us    everything agrees, but the model runs an attention of its own, or has none
    refused           fastformer raises an error that names what it does not support
    not built         no small model could be built and run with eager attention
    fails, differs    a fault

Each type runs in a process of its own, which may crash or take too long.
"""

import argparse
import collections
import contextlib
import copy
import inspect
import json
import multiprocessing
import os
import random
import re
import resource
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from graph_counts import count
from hugging_face_models import SMALL, B, builds, candidates, randomize
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "results" / "hugging_face.json"
PAGE = ROOT / "docs" / "hugging_face.md"
BEST_FIRST = ("agrees", "never calls us", "refused", "not built", "fails", "differs")
LARGEST = 200 * 10**6  # parameters: a copy of a model, its gradients, in float64
SECONDS = 900  # for one type: for those that hang, on any machine
MEMORY = 8 * 2**30  # bytes, for one type
NO_MEMORY = f"it needs more than {MEMORY // 2**30} GB"
ACCELERATED = ("eager", "sdpa", "fastformer")
COUNTED = ("attention", "norm", "feed_forward")
CASTS = {torch.Tensor.to, torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax}

BOUND = 1e-4  # relative error, of outputs and gradients
WIDEST = 1e-2  # for an accelerated model whose own float32 has more than a tenth of it

# By type, attentions that its model returns but does not ask its layers for: only eager has them.
UNASKED = {"kosmos-2": "projection_attentions", "pix2struct": "encoder_attentions"}

# ----------------------------------------------------------------------------------------- compare


def finite_eager_mask(dtype=torch.float32, **given):
    """Eager's masks, in float64 as finite as in float32: some models take their softmax there."""
    from transformers import masking_utils

    dtype = torch.float32 if dtype == torch.float64 else dtype
    return masking_utils.eager_mask(dtype=dtype, **given)


class Float64(TorchFunctionMode):
    """Casts to float32 leave float64 as it is: else a mask of -1e6 rounds its scores to 0.06."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64):
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0]
        if func in CASTS:
            args = [torch.float64 if x is torch.float32 else x for x in args]
            kwargs = {n: torch.float64 if x is torch.float32 else x for n, x in kwargs.items()}
        return func(*args, **kwargs)


def flat(x):
    """The floating tensors of an output; no caches, nor weights, which eager may give unasked."""
    if isinstance(x, torch.Tensor):
        return [x] if x.is_floating_point() else []
    if isinstance(x, dict):
        x = [y for name, y in x.items() if not re.search("past|cache|attentions", name)]
    return [z for y in x for z in flat(y)] if isinstance(x, (list, tuple)) else []


def seed():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def accepts(model, name):
    return name in inspect.signature(model.forward).parameters


def run(model, given, **more):
    """The output, of inputs in the dtype of the model."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    seed()
    return model(**given, **more)


def results(model, given):
    """Outputs where tokens are real, and the gradient of every parameter."""
    model.zero_grad()
    out = flat(run(model, given, **({"use_cache": False} if accepts(model, "use_cache") else {})))
    mask = given.get("attention_mask")
    real = [x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x for x in out]
    generator = torch.Generator().manual_seed(2)
    total = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in real
        if x.requires_grad
    )
    if isinstance(total, torch.Tensor):
        total.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [x.detach() for x in real], grads


def error(have, want):
    """The largest relative error; of a gradient against at least a hundredth of the largest."""
    (outs, grads), (outs_, grads_) = have, want
    if [x.shape for x in (*outs, *grads)] != [x.shape for x in (*outs_, *grads_)]:
        return float("inf")
    floor = 1e-2 * max((x.norm() for x in grads_), default=torch.tensor(0.0))
    worst = 0.0
    for x, y, least in [(x, y, 1e-30) for x, y in zip(outs, outs_)] + [
        (x, y, floor) for x, y in zip(grads, grads_)
    ]:
        if not torch.equal(x, y):
            if not torch.equal(x.isfinite(), y.isfinite()):
                return float("inf")
            x, y = (torch.where(z.isfinite(), z, 0).double() for z in (x, y))
            worst = max(worst, ((x - y).norm() / y.norm().clamp_min(float(least))).item())
    return worst


def set_implementation(model, name):
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def generated(model, given):
    seed()
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    given = {n: x.clone() for n, x in given.items() if not n.startswith("decoder_")}
    return model.generate(**given, **settings)


def entries(model, given):
    """How many attentions, hidden states and cache entries the model returns, by field."""
    accepted = inspect.signature(model.forward).parameters
    wanted = {"output_attentions": True, "output_hidden_states": True, "use_cache": True}
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        wanted = {name: x for name, x in wanted.items() if name in accepted}
    with torch.no_grad():
        out = run(model, given, **wanted)
    fields = {**out} if isinstance(out, dict) else {}
    fields.pop(UNASKED.get(model.config.model_type), None)
    found = re.compile("attentions|hidden_states|past|cache")
    return {name: filled(x) for name, x in fields.items() if found.search(name)}


def filled(x):
    """How many entries are not None: of a tuple, or the layers of a cache that hold something."""
    if hasattr(x, "self_attention_cache"):
        return filled(x.self_attention_cache) + filled(x.cross_attention_cache)
    if hasattr(x, "layers"):
        return sum(getattr(layer, "is_initialized", True) for layer in x.layers)
    return sum(y is not None for y in x) if isinstance(x, (list, tuple)) else int(x is not None)


def entries_differ(ours, model, given):
    """What fastformer's model returns other numbers of than eager's, or ""."""
    try:
        want = entries(model, given)
    except Exception:  # eager cannot be asked
        return ""
    have = entries(ours, given)
    names = sorted(n for n in {**have, **want} if have.get(n) != want.get(n))
    return ", ".join(f"{n}: {have.get(n)} for {want.get(n)}" for n in names)


@contextlib.contextmanager
def counted():
    """How often fastformer's attention runs."""
    from fastformer.ops import functional

    calls, attend = [], functional.scaled_dot_product_attention

    def record(*args, **kwargs):
        calls.append(1)
        return attend(*args, **kwargs)

    with mock.patch.object(functional, "scaled_dot_product_attention", record):
        yield calls


def first_line(e):
    """Type and message, without the folder that packages are installed in."""
    if isinstance(e, MemoryError) or "can't allocate memory" in str(e):
        return NO_MEMORY
    text = re.sub(r"/\S*/site-packages/", "", f"{type(e).__name__}: {e}")
    return re.sub(r"\s+", " ", text)[:200]


def by_us(e):
    """Whether fastformer raised it, and not what it called."""
    trace = e.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals["__name__"].startswith("fastformer.")


def runs(model):
    """(what, inputs, eager's results) of each comparison."""
    found, why = [], None
    for padding in ("none", "right", "left"):
        for given in candidates(model, padding):
            if padding != "none" and "attention_mask" not in given:
                continue
            try:
                want = results(model, given)
            except Exception as e:
                why = why or first_line(e)
                continue
            if not all(x.isfinite().all() for x in (*want[0], *want[1])):
                why = why or "eager is not finite"
            elif want[0]:
                found.append((f"{padding} padding", given, want))
                break
        if padding == "none" and not found:
            raise RuntimeError(why or "no inputs are known for its " + model.main_input_name)
    return found


def runnable(config, cls):
    """The model of a configuration and what eager computes in it, or an error if it cannot."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"more than {LARGEST // 10**6} million parameters")
    model = cls(copy.deepcopy(config)).eval()
    randomize(model)
    try:
        model = model.double()
        wanted = runs(model)
    except Exception:
        model = model.float()
        wanted = runs(model)
    for _, given, want in wanted:
        if error(results(model, given), want) > BOUND / 10:
            raise ValueError("eager does not agree with itself")
    return config, cls, model, wanted


def check(kind, accelerated=ACCELERATED):
    """(status, note, reached) of a model type: of its attention, and of the accelerated models, by
    the attention that they have.
    """
    from transformers import masking_utils

    import fastformer as ff

    ff.register_transformers()
    masking_utils.AttentionMaskInterface.register("eager", finite_eager_mask)
    torch.set_num_threads(1)
    why = None
    for made in builds(kind):
        try:
            config, cls, model, wanted = runnable(*made())
            break
        except Exception as e:
            why = why or first_line(e)
    else:
        return "not built", why, {}
    tokens = text = None
    if getattr(model, "can_generate", lambda: False)():
        side = "right padding" if config.is_encoder_decoder else "left padding"
        text = next((given for what, given, _ in wanted if what == side), wanted[0][1])
        try:
            tokens = generated(model, text)
        except Exception as e:
            text = first_line(e)
    wanted += with_labels(model, wanted[0][1])
    status, note = check_attention(config, cls, model, wanted, tokens, text)
    if status not in ("agrees", "never calls us", "refused"):
        return status, note, {}
    found = {"wanted": counts(model, wanted[0][1])}
    text = text if tokens is not None else None
    for name in accelerated:
        if name == "fastformer" and status == "refused":
            continue
        given = (wanted, text) if name == "eager" else (wanted[:2], None)
        fault, found[name] = check_accelerated(config, cls, model, name, *given)
        if fault:
            return "differs" if found[name] else "fails", f"accelerated, {name}: {fault}", found
    return status, note, found


def difference(model, wanted, tokens, text, bounds):
    """What the model computes otherwise, or ""."""
    for (what, given, want), bound in zip(wanted, bounds):
        worst = error(results(model, given), want)
        if not worst < bound:
            return f"{what}: {worst:.1e}"
    if tokens is not None and not torch.equal(generated(model, text), tokens):
        return "generate()"
    return ""


def built(config, cls, model, name):
    """The same model with another attention."""
    config = copy.deepcopy(config)
    config._attn_implementation = name
    made = cls(config).eval().to(next(model.parameters()).dtype)
    made.load_state_dict(model.state_dict())
    return made


def check_attention(config, cls, model, wanted, tokens, text):
    """(status, note)"""
    try:
        ours = built(config, cls, model, "fastformer")
        with counted() as calls:
            fault = difference(ours, wanted, tokens, text, [BOUND] * len(wanted))
            inputs = [given for _, given, _ in wanted]
            if fault not in ("", "generate()") and all(agrees_with_sdpa(ours, x) for x in inputs):
                return "not built", "eager differs from sdpa; fastformer equals sdpa"
            fault = fault or entries_differ(ours, model, wanted[0][1])
    except Exception as e:
        if by_us(e):
            return "refused", re.sub(r"\s+", " ", str(e))
        why = first_line(e)
        return "not built" if why == NO_MEMORY else "fails", why
    if fault:
        return "differs", fault
    done = [what.split()[0] for what, *_ in wanted]
    done += ["generate()"] * (tokens is not None) + ["entries"]
    return "agrees" if calls else "never calls us", ", ".join(done)


def agrees_with_sdpa(ours, given):
    """Whether torch's attention gives what fastformer's does: then eager is what is wrong."""
    try:
        have = results(ours, given)
        set_implementation(ours, "sdpa")
        return error(have, results(ours, given)) < BOUND
    except Exception:
        return False
    finally:
        set_implementation(ours, "fastformer")


def with_labels(model, given):
    """The comparison of the loss, as a list, which is empty where the model has none."""
    if not accepts(model, "labels"):
        return []
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    for labels in (tokens, torch.zeros(B, dtype=torch.long)):
        if labels is not None:
            try:
                want = results(model, {**given, "labels": labels})
            except Exception:
                continue
            if want[0] and all(x.isfinite().all() for x in (*want[0], *want[1])):
                return [("loss", {**given, "labels": labels}, want)]
    return []


def check_accelerated(config, cls, model, name, wanted, text):
    """("" or a fault, (how much of each kind is reached, what stays, the bound) or why it is not
    compared) of the accelerated model with an attention, beside the same model as it is. In
    float32: models that take their softmax in it round its weights in float64, which the rewriter
    leaves alone. The bound is BOUND, or ten times the error of float32 in the model as it is, up to
    WIDEST.
    """
    import fastformer as ff

    try:
        exact = exactly(built(config, cls, model, name), wanted)
        ours = built(config, cls, model, name).float()
        plain = [(what, given, results(ours, given)) for what, given, _ in wanted]
        tokens = generated(ours, text) if text is not None else None
    except Exception as e:
        return "", first_line(e)
    noise = [error(have, want) for (*_, have), want in zip(plain, exact)]
    bounds = [max(BOUND, min(10 * x, WIDEST)) for x in noise]
    before = [type(m) for m in ours.modules()]
    report = ff.accelerate(ours)
    try:
        with ff.use_backend("reference"):  # under "auto" the modules run their own code
            fault = difference(ours, plain, tokens, text, bounds)
        of, stays = reached(report)
        found = of, stays, float(f"{max(bounds):.1e}")
        ff.restore(ours)
    except Exception as e:
        return first_line(e), ""
    if [type(m) for m in ours.modules()] != before:
        return "restore() leaves other classes", found
    return fault, found


def exactly(model, wanted):
    """The results in float64, also of what the model computes in float32, if it can."""
    try:
        with Float64():
            return [results(model, given) for _, given, _ in wanted]
    except RuntimeError:  # it has numbers in float32
        return [results(model, given) for _, given, _ in wanted]


def counts(model, given):
    """How much of each kind is in Dynamo's graphs of a model, or why this is not known."""
    found = collections.Counter()

    def backend(gm, _):
        count(gm, found, routers=False)
        return gm.forward

    try:
        results(torch.compile(copy.deepcopy(model), backend=backend), given)
    except Exception as e:
        return first_line(e)
    finally:
        torch._dynamo.reset()
    return [found[kind] for kind in COUNTED]


def reached(report):
    """How much of each kind `accelerate` has put into a model, and what falls back or stays."""
    parts = [(name, x) for name, found in report.rewritten.items() for x in found]
    kinds = {"sum_norm": "norm"}  # a norm may be part of a sum in one graph, and not in another
    fused = {(name, x.module, kinds.get(x.kind, x.kind), x.line) for name, x in parts if x.op}
    of = collections.Counter(kind for _, _, kind, _ in fused)
    replaced = (x for name, x in report.replaced.items() if name not in report.rewritten)
    of["norm"] += sum(x.endswith("Norm") for x in replaced)
    why = {why for reasons in report.fallbacks.values() for why in reasons}
    why |= {*report.skipped.values(), *(f"{x.kind}: {x.reason}" for _, x in parts if not x.op)}
    return [of[kind] for kind in COUNTED], "; ".join(sorted(why))


# ------------------------------------------------------------------------------------------ sweep


def types():
    """Those that a model class is registered for; the others are parts of these."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names = {
        name
        for mapping in vars(modeling_auto)
        if mapping.startswith("MODEL_") and mapping.endswith("_MAPPING_NAMES")
        for name in vars(modeling_auto)[mapping]
    }
    return sorted(names & set(configuration_auto.CONFIG_MAPPING_NAMES))


def answer(kind, sender):
    """Send (type, status, note, reached)."""
    import fastformer as ff

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        with ff.use_backend("reference"):
            sender.send((kind, *check(kind)))
    except Exception as e:
        sender.send((kind, "not built", first_line(e), {}))


def sweep(kinds, seconds=SECONDS):
    """Yields (type, status, note, reached) of each."""
    from transformers import GenerationMixin  # noqa: F401 (once, for all processes)

    processes = multiprocessing.get_context("fork")
    for kind in kinds:
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=answer, args=(kind, sender))
        process.start()
        sender.close()
        why = f"it takes more than {seconds} s"
        try:
            found = receiver.recv() if receiver.poll(seconds) else None
        except EOFError:
            process.join()
            found, why = None, f"the process ends with {process.exitcode}"
        process.kill()
        process.join()
        yield found or (kind, "not built", why, {})


def page(rows, version):
    """Return the text of PAGE: how many types have each status, and those that need a remark."""
    of = {status: [row[0] for row in rows if row[1] == status] for status in BEST_FIRST}
    large = [row[0] for row in rows if NO_MEMORY in (row[2], *row[3].values())]
    return f"""# Model types of transformers

Every model type of transformers {version}, against eager attention. Each is built small, with
random weights. Compared are the outputs and the gradient of every parameter, to a relative error of
{BOUND:.0e}, without padding and with padding on the right and on the left, and every token of
`generate()`. Where the note says `entries`, also how many attentions, hidden states and cache
entries a model returns that is asked for them.

The head dim of the small models is {SMALL["head_dim"]}, where their configuration names it. A
Llama with head dims of 128, 512 and 520 is compared too (tests/drop_in/test_integrations.py), and a
Gemma 4 whose head dims are its own, 256 in the layers with a window and 512 in the others: its
attention agrees, and so does the accelerated model.
Above what the kernels take on a GPU, 256 or 512 ([support](support.md)), the reference computes the
layer: `explain` and one line of the log say so.

| status | types | meaning |
|---|---|---|
| agrees | {len(of["agrees"])} | all that was compared agrees, and fastformer's attention ran |
| never calls us | {len(of["never calls us"])} | the outputs agree; fastformer changes nothing |
| refused | {len(of["refused"])} | fastformer raises an error that names what it does not support |
| not built | {len(of["not built"])} | no small model runs with eager attention |
| fails, differs | {len(of["fails"] + of["differs"])} | a fault |

## Accelerated models

{accelerated(rows)}

## The data

`python tests/drop_in/compare_models.py --print` prints each type with its status, a note (what
was compared, or the reason) and, where it was compared, what `accelerate` replaced.
`--print bert llama` prints those types only. The data are in
benchmarks/results/hugging_face.json; `python tests/drop_in/compare_models.py --write` measures them
again, and writes this page.

**Refused:** {", ".join(of["refused"])}.

**Need more than {MEMORY // 2**30} GB**: {", ".join(large) or "none"}.

**Never calls us**, because the model runs an attention of its own, or has none:
{", ".join(of["never calls us"])}.
"""


def accelerated(rows):
    """The text of the page about accelerated models."""
    compared = [found for *_, found in rows if found]
    lines = []
    for name in ACCELERATED:
        of = [(x[name][0], x["wanted"]) for x in compared if isinstance(x.get(name), list)]
        pairs = [(*zip(have, want),) for have, want in of if isinstance(want, list)]
        totals = ((sum(map(min, kind)), sum(n for _, n in kind)) for kind in zip(*pairs))
        shares = [f"{have} of {want}" for have, want in totals] or ["-"] * len(COUNTED)
        if name == "fastformer":
            shares[0] = "its own"
        lines.append(f"| {name} | {len(of)} | {' | '.join(shares)} |")
    table = "\n".join(lines)
    built = sum(row[1] != "not built" for row in rows)
    answers = [[x[name] for name in ACCELERATED if isinstance(x.get(name), list)] for x in compared]
    wide = sum(any(bound > BOUND for *_, bound in of) for of in answers)
    return f"""`ff.accelerate(model)` was compared in {len(compared)} of the {built} types that can
be built, by each attention that they have, in float32 and under `ff.use_backend("reference")`: the
outputs and all gradients, without padding and with it, equal those of the same model as it was, to
the same bound. Where its own float32 differs from float64 by more than a tenth of that, the bound
is ten times this difference, at most {WIDEST:.0e}: in {wide} types, for which the data name it.
With eager attention the loss and the tokens of `generate()` are equal, too. `ff.restore(model)`
gives every module its class back. Reached of what is in the graphs of the plain model, in these
types together:

| attention | types | attentions | norms | feed-forward layers |
|---|---|---|---|---|
{table}

The data name for each type what is reached, and what falls back or stays and why."""


def write(rows, version):
    lines = ",\n".join(map(json.dumps, rows))
    DATA.write_text(f'{{"transformers": "{version}", "rows": [\n{lines}\n]}}\n')
    PAGE.write_text(page(rows, version))


def read_rows():
    """(type, status, note, reached) of each type; the last is empty where it was not compared."""
    return [(*row, {})[:4] for row in json.loads(DATA.read_text())["rows"]]


def committed():
    return {row[0]: row[1] for row in read_rows()}


def worse(status, before):
    return BEST_FIRST.index(status) > BEST_FIRST.index(before)


def lost(found, before):
    """The attentions with which less is reached than before, or which are no longer compared."""
    compared = {name: before[name] for name in {*found} & {*before} & {*ACCELERATED}}
    return [
        name for name, was in compared.items()
        if not isinstance(was, str)
        and (isinstance(found[name], str) or any(map(int.__lt__, found[name][0], was[0])))
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help="write the data and the page")
    parser.add_argument("--print", action="store_true", help="print the data, and measure nothing")
    args = parser.parse_args()
    if args.print:
        for row in read_rows():
            if not args.types or row[0] in args.types:
                print(*row, sep="\t")
        return 0
    rows, bad = [], 0
    before = {row[0]: row for row in read_rows()} if DATA.exists() else {}
    for row in sweep(args.types or types()):
        rows.append(row)
        _, was, _, reached = before.get(row[0], row)
        bad += worse(row[1], was) or row[1] in ("fails", "differs") or bool(lost(row[3], reached))
        print(json.dumps(row), flush=True)
    if args.write:
        import transformers

        old = read_rows() if args.types else []
        rows = sorted({row[0]: row for row in [*old, *rows]}.values())
        write(rows, transformers.__version__)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
