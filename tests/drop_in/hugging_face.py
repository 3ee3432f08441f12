"""Compares fastformer to eager attention in every model type of transformers, small and randomly
initialised.

    cd tests/drop_in
    python hugging_face.py                 all types; exits with 1 if one got worse
    python hugging_face.py bert llama      some of them
    python hugging_face.py --write         also writes benchmarks/results/hugging_face.json
                                           and docs/hugging_face.md; with types, their rows
    python hugging_face.py --print         prints the data, or with types only their rows

It compares the outputs and the gradient of every parameter, without padding and with padding on
either side, and the tokens of generate(). A type has one status:

    agrees            everything agrees, and fastformer's attention ran
    never calls us    everything agrees, but the model runs an attention of its own, or has none
    refused           fastformer raises an error that names what it does not support
    not built         no small model could be built and run with eager attention
    fails, differs    a fault

Each type runs in a process that others share until one crashes or takes too long.
"""

import argparse
import contextlib
import copy
import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "results" / "hugging_face.json"
PAGE = ROOT / "docs" / "hugging_face.md"
BEST_FIRST = ("agrees", "never calls us", "refused", "not built", "fails", "differs")
LARGEST = 200 * 10**6  # parameters: a copy of a model, its gradients, in float64
SECONDS = 900  # for one type: for those that hang, on any machine

B, S, T, V = 2, 7, 5, 99  # sequences, source and target tokens, vocabulary
BOUND = 1e-4  # relative error, of outputs and gradients

# ------------------------------------------------------------------------------------------- tiny

# Attributes of configurations, by the size that they get; of a list each element gets it.
SMALL = {
    name: size
    for size, names in {
        64: """
            adapter_in_dim attention_hidden_size audio_embed_dim audio_hidden_size
            backbone_hidden_size condition_dim conv_dim cross_attention_dim d_embed d_model
            decoder_dim decoder_hidden_size dim emb_dim embed_dim embedding_size
            encoder_hidden_size hidden_dim hidden_size image_text_hidden_size lru_width
            max_2d_position_embeddings max_position_embeddings max_seq_len max_target_positions
            n_ctx n_embd n_embed n_positions out_hidden_size output_channels output_dim
            output_hidden_size pooler_hidden_size projection_dim sam_output_channels
            text_hidden_size word_embed_proj_dim
        """,
        16: """
            attention_head_dim codevector_dim context_size d_head d_kv dim_head expert_dim
            feature_projection_input_dim global_head_dim head_dim hidden_size_per_layer_input
            index_head_dim input_feat_per_channel key_value_proj_dim kv_channels kv_lora_rank
            linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim
            moe_intermediate_size n_mels num_mel_bins proj_codevector_dim q_lora_rank
            qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar rotary_dim
            shared_expert_intermediate_size shared_intermediate_size swa_head_dim v_head_dim
        """,
        4: """
            attention_heads attention_window attention_window_size decoder_attention_heads
            decoder_num_attention_heads encoder_attention_heads encoder_num_attention_heads
            laurel_rank linear_num_value_heads mamba_dt_rank moe_num_experts n_head n_heads
            n_routed_experts num_attention_heads num_conv_pos_embedding_groups
            num_conv_pos_embeddings num_experts num_frames num_heads num_local_experts
            num_query_tokens prediction_length time_step_rank window
        """,
        2: """
            decoder_layers decoder_num_hidden_layers depth encoder_layers
            encoder_num_hidden_layers index_n_heads linear_num_key_heads moe_k moe_topk n_layer
            n_layers num_decoder_layers num_encoder_layers num_experts_per_tok
            num_experts_per_token num_hidden_layers num_layers
        """,
        96: """
            d_ff d_inner decoder_ffn_dim dense_intermediate_size dim_ff encoder_ffn_dim
            feed_forward_proj_dim ffn_dim ffn_hidden_size intermediate_size mlp_dim
            mlp_hidden_size n_inner
        """,
        1: """
            decoder_sparse_step depths first_k_dense_replace index_kpool mamba_n_groups n_group
            n_groups n_langs n_shared_experts num_expert_group rotary_pct spatial_merge_size
            topk_group
        """,
        8: """
            chunk_size context_length mamba_chunk_size mamba_d_state mamba_n_heads
            mamba_num_heads num_codevectors_per_group patch_size relative_attention_num_buckets
            ssm_state_size state_size
        """,
        3: """
            attention_chunk_size index_topk local_attention sliding_window sliding_window_size
        """,
        32: "image_size img_size max_length qk_head_dim",
        V: "vocab_size vocab_size_per_layer_input",
        0: "num_kv_shared_layers num_nextn_predict_layers",
        128: "mamba_d_ssm",
        20: "max_source_positions",
        5: "num_queries",
        6: "relative_attention_max_distance",
        0.3: "initializer_range",
    }.items()
    for name in names.split()
}
NO_DROPOUT = re.compile(r"drop|layerdrop")
HEADS = re.compile(r"(num_|n_)?(key_value|kv)_?(heads|groups)$|^num_kv_heads$")

# What a type needs besides.
SWIN = {"patch_size": 2, "embed_dim": 16, "window_size": 2}
EXTRA = {
    "csm": {"upsample_groups": 64},
    "donut-swin": SWIN,
    "bamba": {"attn_layer_indices": [1]},
    "embedding_gemma2_text": {"global_head_dim": 16},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma3n_text": {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 3},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "maskformer-swin": SWIN,
    "mimi": {"upsample_groups": 64},
    "mpnet": {"relative_attention_num_buckets": 32},
    "swin": SWIN,
    "swin2sr": SWIN,
    "swinv2": SWIN,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_NONE = ("head_dim", "vocab_size", "prediction_length", "n_routed_experts", "n_shared_experts")
NOT_NONE += ("num_experts_per_tok", "context_length")


def fields(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {n: x for n, x in vars(cls()).items() if not n.startswith("_")}


def small(cls):
    """Arguments of a tiny configuration."""
    from transformers import PretrainedConfig

    given, kinds = {}, []
    defaults = fields(cls)
    names = inspect.signature(cls.__init__).parameters
    for name, x in defaults.items():
        if name in names and isinstance(x, PretrainedConfig):
            given[name] = {"model_type": x.model_type, **small(type(x))}
        elif name in SMALL and isinstance(x, (list, tuple)) and not isinstance(SMALL[name], list):
            given[name] = [SMALL[name]] * len(x)
        elif name in SMALL and (x is not None or name in NOT_NONE):
            given[name] = SMALL[name]
        elif name == "rope_parameters" and isinstance(x, dict) and "rope_theta" in x:
            pairs = int(16 * x.get("partial_rotary_factor", 1.0)) // 2
            parts = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
            given[name] = {**x, "mrope_section": parts}
        elif HEADS.match(name) and isinstance(x, int):
            heads = next((defaults.get(n) for n in ("num_attention_heads", "n_head", "num_heads")
                          if defaults.get(n)), x)  # fmt: skip
            given[name] = 4 if x == heads else 2 if x > 1 else 1
        elif NO_DROPOUT.search(name) and isinstance(x, float):
            given[name] = 0.0
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types") and x:
            kinds = list(dict.fromkeys(x))
            given[name] = x
    layers = max(2, *(len(set(given[n])) for n in given if n.endswith(("_types", "_type"))), 2)
    for name in list(given):
        if name.endswith(("_types", "_type")):
            kinds = list(dict.fromkeys(given[name]))
            given[name] = (kinds * layers)[:layers]
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in given and kinds:
            given[name] = layers
    special = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}
    for name, x in defaults.items():
        match = re.match(r"(.*)_token_(id|index)$", name)
        if match and (isinstance(x, int) or match[1] in special):
            word = match[1]
            if x is not None or word == "pad":
                given[name] = special.setdefault(word, 3 + hash_of(word) % 6)
    return {**given, **EXTRA.get(cls.model_type, {})}


def hash_of(word):
    return sum(map(ord, word))


def model_class(config):
    """The class that does most: generating before classifying, that before bare states."""
    from transformers.models.auto import modeling_auto as auto

    first = ["IMAGE_TEXT_TO_TEXT"] if hasattr(config, "text_config") else []
    for name in (
        *first, "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT",
        "MASKED_LM", "", "TIME_SERIES_PREDICTION", "PRETRAINING", "CTC", "IMAGE_CLASSIFICATION",
        "BACKBONE", "OBJECT_DETECTION", "MASK_GENERATION", "TEXT_TO_WAVEFORM",
        "TEXT_TO_SPECTROGRAM", "AUDIO_CLASSIFICATION", "DEPTH_ESTIMATION", "IMAGE_SEGMENTATION",
        "UNIVERSAL_SEGMENTATION",
    ):  # fmt: skip
        mapping = getattr(
            auto, f"MODEL_{'FOR_' if name else ''}{name}_MAPPING".replace("__", "_"), {}
        )
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, (tuple, list)) else cls
    raise LookupError("no model class is registered for the type")


def build(kind):
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    config = cls(**small(cls))
    torch.manual_seed(0)
    return config, model_class(config)


def randomize(model):
    """Weights with which no softmax is flat; what has one dimension stays as it is."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() >= 2 and p.is_floating_point():
            x = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data.copy_(x / max(1, p[0].numel()) ** 0.5)


# ----------------------------------------------------------------------------------------- inputs


def part(config, *names):
    for name in names:
        if getattr(config, name, None) is not None and not isinstance(getattr(config, name), int):
            return getattr(config, name)
    return config


def number(config, *names, default):
    for name in names:
        x = getattr(config, name, None)
        if isinstance(x, (list, tuple)) and x:
            x = x[-1]
        if isinstance(x, int) and x > 0:
            return x
    return default


def candidates(model, padding):
    """Keyword arguments that the model may want, the likelier first."""
    names = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def tokens(n):
        return torch.randint(12, V, (B, n), generator=generator)

    mask = torch.ones(B, S, dtype=torch.long)
    if padding == "right":
        mask[1, 4:] = 0
    elif padding == "left":
        mask[1, :3] = 0
    ids = tokens(S).masked_fill(mask == 0, 0)
    ids[torch.arange(B), (mask * torch.arange(S)).argmax(1)] = 2  # some take the state of the end
    text = {"input_ids": ids}
    if padding != "none":
        text["attention_mask"] = mask
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = tokens(T)
    vision = part(config, "vision_config", "backbone_config")
    channels = number(vision, "num_channels", "in_channels", "in_chans", default=3)
    image = number(vision, "image_size", default=32)
    images = [randn(B, channels, n, n) for n in dict.fromkeys((image, 32, 64, 224))]
    frames = number(config, "num_frames", default=4)
    audio = part(config, "audio_config", "encoder_config")
    mels = number(audio, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size",
                  "feature_projection_input_dim", "input_dim", default=16)  # fmt: skip
    length = 2 * number(audio, "max_source_positions", "max_length", default=20)
    also = {n: x for n, x in text.items() if n != "input_ids"}
    if main == "input_ids":
        yield text
        if "pixel_values" in names:
            for pixels in images[:2]:
                yield {**text, "pixel_values": pixels}
        if "bbox" in names:
            yield {**text, "bbox": torch.ones(B, S, 4, dtype=torch.long)}
    elif main == "pixel_values":
        decoder = {"decoder_input_ids": tokens(T)} if "decoder_input_ids" in names else {}
        for pixels in images:
            yield {"pixel_values": pixels, **decoder}
        if "input_ids" in names:
            yield text
            yield {**text, "pixel_values": images[0]}
        yield {"pixel_values": images[0][:, None].repeat(1, frames, 1, 1, 1)}
        yield {"pixel_values": images[0][:, :, None].repeat(1, 1, frames, 1, 1)}
    elif main in ("input_features", "input_values"):
        also.pop("attention_mask", None)
        shapes = [
            (B, mels, length),
            (B, length, mels),
            (B, 1, length, mels),
            (B, 400 * S),
            (B, 1, 400 * S),
        ]
        if main == "input_values":
            shapes = shapes[3:5] + shapes[:3] + shapes[5:]
        for shape in shapes:
            x = randn(*shape)
            masks = [{}]
            if padding == "right" and "attention_mask" in names:
                frames_mask = torch.ones(B, max(shape), dtype=torch.long)
                frames_mask[1, max(shape) * 2 // 3 :] = 0
                masks = [{"attention_mask": frames_mask}]
            for given in masks:
                yield {main: x, **also, **given}
    elif main == "past_values":
        n = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
        size = number(config, "input_size", "num_input_channels", default=1)
        x = randn(B, n, size)
        one = {"past_values": x[..., 0] if size == 1 else x}
        if "past_time_features" in names:
            m = config.prediction_length
            one["past_time_features"] = randn(B, n, config.num_time_features)
            one["past_observed_mask"] = torch.ones_like(one["past_values"])
            one["future_values"] = randn(B, m) if size == 1 else randn(B, m, size)
            one["future_time_features"] = randn(B, m, config.num_time_features)
            if config.num_static_categorical_features:
                one["static_categorical_features"] = torch.zeros(B, 1, dtype=torch.long)
        yield one
        yield {"past_values": x}
    if "grid_thw" in names:
        side = vision.patch_size
        size = channels * side**2 * number(vision, "temporal_patch_size", default=1)
        patches = {"grid_thw": torch.tensor([[1, 4, 4], [1, 8, 4]])}
        for first in ("hidden_states", "pixel_values"):
            if first in names:
                yield {first: randn(48, size), **patches}
    if "input_ids" in names and main != "input_ids":
        yield text


# ----------------------------------------------------------------------------------------- compare


def finite_eager_mask(dtype=torch.float32, **given):
    """Eager's masks, in float64 as finite as in float32: some models take their softmax there."""
    from transformers import masking_utils

    dtype = torch.float32 if dtype == torch.float64 else dtype
    return masking_utils.eager_mask(dtype=dtype, **given)


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


def results(model, given):
    """Outputs where tokens are real, and the gradient of every parameter."""
    model.zero_grad()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    seed()
    more = (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )
    out = flat(model(**given, **more))
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
    given = {n: x for n, x in given.items() if not n.startswith("decoder_")}
    return model.generate(**given, **settings)


@contextlib.contextmanager
def counted():
    """How often fastformer's attention runs."""
    from fastformer.ops import functional

    calls, attend = [], functional.scaled_dot_product_attention

    def record(*args, **kwargs):
        calls.append(1)
        return attend(*args, **kwargs)

    functional.scaled_dot_product_attention = record
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = attend


def first_line(e):
    """Type and message, without the folder that packages are installed in."""
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


def check(kind):
    """(status, note) of a model type."""
    from transformers import masking_utils

    import fastformer as ff

    ff.register_transformers()
    masking_utils.AttentionMaskInterface.register("eager", finite_eager_mask)
    torch.set_num_threads(1)
    try:
        config, cls = build(kind)
        config._attn_implementation = "eager"
        model = cls(copy.deepcopy(config)).eval()
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            return "not built", f"more than {LARGEST // 10**6} million parameters"
        randomize(model)
        try:
            model = model.double()
            wanted = runs(model)
        except Exception:
            model = model.float()
            wanted = runs(model)
        for _, given, want in wanted:
            if error(results(model, given), want) > BOUND / 10:
                return "not built", "eager does not agree with itself"
    except Exception as e:
        return "not built", first_line(e)
    tokens = text = None
    if getattr(model, "can_generate", lambda: False)():
        side = "right padding" if config.is_encoder_decoder else "left padding"
        text = next((given for what, given, _ in wanted if what == side), wanted[0][1])
        try:
            tokens = generated(model, text)
        except Exception as e:
            text = first_line(e)
    done = []
    try:
        config._attn_implementation = "fastformer"
        ours = cls(config).eval().to(next(model.parameters()).dtype)
        ours.load_state_dict(model.state_dict())
        with counted() as calls:
            for what, given, want in wanted:
                worst = error(results(ours, given), want)
                if not worst < BOUND:
                    return "differs", f"{what}: {worst:.1e}"
                done.append(what.split()[0])
            if tokens is not None:
                have = generated(ours, text)
                if not torch.equal(have, tokens):
                    return "differs", "generate()"
                done.append("generate()")
    except Exception as e:
        if by_us(e):
            return "refused", re.sub(r"\s+", " ", str(e))
        return "fails", first_line(e)
    return "agrees" if calls else "never calls us", ", ".join(done)


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


def work():
    """Reads types, writes what `check` says of each, a line each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints is no answer
    for line in sys.stdin:
        kind = line.strip()
        try:
            answer = check(kind)
        except Exception as e:
            answer = "not built", first_line(e)
        print(json.dumps([kind, *answer]), file=out, flush=True)


def sweep(kinds, seconds=SECONDS):
    """Yields (type, status, note) of each."""
    left, worker = list(kinds), None
    while left:
        kind = left.pop(0)
        if worker is None:
            command = [sys.executable, __file__, "--work"]
            worker = subprocess.Popen(
                command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            )
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            worker.stdin.write(kind + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        late = not timer.is_alive()
        timer.cancel()
        if line:
            yield tuple(json.loads(line))
        else:
            code = worker.wait()
            worker = None
            why = f"it takes more than {seconds} s" if late else f"the process ends with {code}"
            yield kind, "not built", why
    if worker is not None:
        worker.stdin.close()
        worker.wait()


def page(rows, version):
    """Return the text of PAGE: how many types have each status, and those that need a remark."""
    of = {status: [row[0] for row in rows if row[1] == status] for status in BEST_FIRST}
    return f"""# Model types of transformers

Every model type of transformers {version}, against eager attention. Each is built small, with
random weights. Compared are the outputs and the gradient of every parameter, to a relative error of
{BOUND:.0e}, without padding and with padding on the right and on the left, and every token of
`generate()`.

| status | types | meaning |
|---|---|---|
| agrees | {len(of["agrees"])} | all that was compared agrees, and fastformer's attention ran |
| never calls us | {len(of["never calls us"])} | the outputs agree; fastformer changes nothing |
| refused | {len(of["refused"])} | fastformer raises an error that names what it does not support |
| not built | {len(of["not built"])} | no small model runs with eager attention |
| fails, differs | {len(of["fails"] + of["differs"])} | a fault |

`python tests/drop_in/hugging_face.py --print` prints each type with its status and a note: what
was compared, or the reason. `--print bert llama` prints those types only. The data are in
benchmarks/results/hugging_face.json; `python tests/drop_in/hugging_face.py --write` measures them
again, and writes this page.

**Refused:** {", ".join(of["refused"])}.

**Never calls us**, because the model runs an attention of its own, or has none:
{", ".join(of["never calls us"])}.
"""


def write(rows, version):
    lines = ",\n".join(map(json.dumps, rows))
    DATA.write_text(f'{{"transformers": "{version}", "rows": [\n{lines}\n]}}\n')
    PAGE.write_text(page(rows, version))


def read_rows():
    """(type, status, note) of each type."""
    return [tuple(row) for row in json.loads(DATA.read_text())["rows"]]


def committed():
    return {kind: status for kind, status, _ in read_rows()}


def worse(status, before):
    return BEST_FIRST.index(status) > BEST_FIRST.index(before)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help="write the data and the page")
    parser.add_argument("--print", action="store_true", help="print the data, and measure nothing")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one by one")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    if args.print:
        for row in read_rows():
            if not args.types or row[0] in args.types:
                print(*row, sep="\t")
        return 0
    rows, bad = [], 0
    before = committed() if DATA.exists() else {}
    for row in sweep(args.types or types()):
        rows.append(row)
        bad += worse(row[1], before.get(row[0], row[1])) or row[1] in ("fails", "differs")
        print(*row, sep="\t", flush=True)
        if args.json:
            args.json.write_text("\n".join(map(json.dumps, rows)) + "\n")
    if args.write:
        import transformers

        old = read_rows() if args.types else []
        rows = sorted({row[0]: row for row in [*old, *rows]}.values())
        write(rows, transformers.__version__)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
