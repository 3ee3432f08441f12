"""Builds small models of the model types of transformers, and inputs for them."""

import inspect
import re
import warnings

import torch

B, S, T, V = 2, 7, 5, 99  # sequences, source and target tokens, vocabulary

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
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SWIN = {"patch_size": 2, "embed_dim": 16, "window_size": 2}
NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
BACKBONE = {
    "model_type": "dinov2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
    "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, "image_size": 32, "patch_size": 8,
}  # fmt: skip
HEAD = {"head_hidden_size": 8, "reassemble_hidden_size": 64}
DEPTH = {**NECK, **HEAD, "backbone_config": BACKBONE}
EXTRA = {
    "chmv2": {
        "backbone_config": {
            **{**BACKBONE, "model_type": "dinov3_vit", "reshape_hidden_states": True},
            **{"apply_layernorm": True, "return_class_token": True, "intermediate_size": 96},
        },
        **{"post_process_channels": [8, 8, 16, 16], "fusion_hidden_size": 16},
        **{"head_hidden_size": 8, "number_output_channels": 8},
    },
    "depth_anything": DEPTH,
    "prompt_depth_anything": DEPTH,
    "tipsv2_dpt": {
        "backbone_config": {**BACKBONE, "model_type": "tipsv2_vision_model"},
        **{**NECK, "num_depth_bins": 8},
    },
    "csm": {"upsample_groups": 64},
    "donut-swin": SWIN,
    "bamba": {"attn_layer_indices": [1]},
    "embedding_gemma2_text": {"global_head_dim": 16},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma3n_text": {"intermediate_size": [96, 96]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 3},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "maskformer-swin": SWIN,
    "mimi": {"upsample_groups": 64},
    "mpnet": {"relative_attention_num_buckets": 32},
    "swin": SWIN,
    "swin2sr": {**SWIN, "patch_size": 1},
    "swinv2": SWIN,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "blip-2": {"image_token_index": 5},
    "dia_decoder": {
        **{"cross_hidden_size": 64, "cross_head_dim": 16},
        **{"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4},
    },
    "instructblip": {"image_token_index": 5},
    "instructblipvideo": {"video_token_index": 5},
    "kyutai_speech_to_text": {"num_codebooks": 8},
    "autoformer": {"label_length": 4, "moving_average": 3, "d_model": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kosmos-2": {"latent_query_num": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mimi_decoder": {"upsample_groups": 64},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "patchtsmixer": {"patch_length": 2, "patch_stride": 2},
    "perceiver": {"d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "sam_vision_model": {"num_pos_feats": 32},
    "sam_hq_vision_model": {"num_pos_feats": 32},
    "sam2_hiera_det_model": {
        **{"hidden_size": 16, "num_attention_heads": 1, "blocks_per_stage": [1, 1, 2, 1]},
        **{"embed_dim_per_stage": [16, 32, 64, 128], "global_attention_blocks": [3]},
    },
    "sam2_vision_model": {
        **{"backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 64},
        **{"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    },
    "vitpose_backbone": {"part_features": 16, "num_experts": 1},
    "vjepa2": {
        **{"crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 64},
        **{"pred_num_attention_heads": 4, "num_pooler_layers": 1},
    },
    "xclip_vision_model": {"mit_hidden_size": 64, "mit_num_attention_heads": 4},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "seggpt": {"image_size": [64, 32]},
    "lw_detr_vit": {"num_windows": 4},
    "mobilevitv2": {"patch_size": 2},
    "glm5_next_text": {"qk_rope_head_dim": 0},
}
NOT_NONE = ("head_dim", "vocab_size", "prediction_length", "n_routed_experts", "n_shared_experts")
NOT_NONE += ("num_experts_per_tok", "context_length")


def fields(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {n: x for n, x in vars(cls()).items() if not n.startswith("_")}


# Fewer sizes, for types whose parts have to fit each other in ways of their own.
LEAN = {name: SMALL[name] for name in SMALL if SMALL[name] in (0, 2, V) or "position" in name}


def small(cls, sizes=SMALL, own=None, keeps=False):
    """Arguments of a configuration of these sizes. own: what the configuration is by default as a
    part of a larger one, whose settings stay, and whose layers do if some of them are outputs.
    keeps: whether to pass the parts of this one on as theirs.
    """
    from transformers import PretrainedConfig

    given, kinds = {}, []
    defaults = fields(cls)
    if own is not None:
        given = {n: x for n, x in vars(own).items() if n in defaults and x != defaults[n]}
        given = {n: x for n, x in given.items() if not isinstance(x, PretrainedConfig)}
        given = {n.lstrip("_"): x for n, x in given.items()}
        defaults = {**defaults, **given}
        if getattr(own, "out_features", None) or getattr(own, "out_indices", None):
            given |= {"out_features": list(own.out_features)}
            sizes = {n: x for n, x in sizes.items() if x not in (1, 2)}
    names = inspect.signature(cls.__init__).parameters
    for name, x in defaults.items():
        if name in names and isinstance(x, PretrainedConfig):
            given[name] = {
                "model_type": x.model_type,
                **small(type(x), sizes, x if keeps else None, keeps),
            }
        elif name in sizes and isinstance(x, (list, tuple)):
            given[name] = [sizes[name]] * len(x)
        elif name in sizes and (x is not None or name in NOT_NONE):
            given[name] = sizes[name]
        elif NO_DROPOUT.search(name) and isinstance(x, float):
            given[name] = 0.0
        elif "head_dim" not in sizes:
            continue
        elif name == "rope_parameters" and isinstance(x, dict) and "rope_theta" in x:
            pairs = int(16 * x.get("partial_rotary_factor", 1.0)) // 2
            parts = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
            given[name] = {**x, "mrope_section": parts}
        elif HEADS.match(name) and isinstance(x, int):
            heads = next((defaults.get(n) for n in ("num_attention_heads", "n_head", "num_heads")
                          if defaults.get(n)), x)  # fmt: skip
            given[name] = 4 if x == heads else 2 if x > 1 else 1
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types") and x:
            kinds = list(dict.fromkeys(x))
            given[name] = x
    of_layers = [name for name in given if name.endswith(("_types", "_type"))]
    layers = max([2, *(len(set(given[name])) for name in of_layers)])
    for name in of_layers:
        kinds = list(dict.fromkeys(given[name]))
        given[name] = (kinds * layers)[:layers]
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in given and kinds:
            given[name] = layers
    if "vocab_size" not in sizes:
        return given
    special = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}
    for name, x in defaults.items():
        match = re.match(r"(.*)_token_(id|index)$", name)
        if match and (isinstance(x, int) or match[1] in special):
            word = match[1]
            if x is not None or word == "pad":
                given[name] = special.setdefault(word, 3 + sum(map(ord, word)) % 6)
    return {**given, **(EXTRA.get(cls.model_type, {}) if "head_dim" in sizes else {})}


NAMES = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "",
    "TIME_SERIES_PREDICTION", "PRETRAINING", "CTC", "IMAGE_CLASSIFICATION", "BACKBONE",
    "OBJECT_DETECTION", "MASK_GENERATION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM",
    "AUDIO_CLASSIFICATION", "DEPTH_ESTIMATION", "IMAGE_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
)  # fmt: skip


def model_classes(config):
    """The classes for a type, what does most first: generating before classifying, that before
    bare states.
    """
    from transformers.models.auto import modeling_auto as auto

    first = ["IMAGE_TEXT_TO_TEXT"] if hasattr(config, "text_config") else []
    names = [f"MODEL_{'FOR_' if x else ''}{x}_MAPPING".replace("__", "_") for x in (*first, *NAMES)]
    names += [x for x in vars(auto) if x.startswith("MODEL_") and x.endswith("_MAPPING")]
    found = []
    for name in names:
        mapping = getattr(auto, name, {})
        if type(config) in mapping:
            cls = mapping[type(config)]
            found.append(cls[0] if isinstance(cls, (tuple, list)) else cls)
    if not found:
        raise LookupError("no model class is registered for the type")
    return list(dict.fromkeys(found))


def build(kind, sizes=SMALL, keeps=False, i=0):
    """A configuration of a type, and one of its classes: the first may be for a part of it."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    config = cls(**small(cls, sizes, keeps=keeps))
    torch.manual_seed(0)
    return config, model_classes(config)[i]


def builds(kind):
    """Yields functions that return a configuration and its class, until a model of it runs."""
    yield lambda: build(kind)
    yield lambda: build(kind, keeps=True)
    yield lambda: build(kind, i=1)
    yield lambda: build(kind, i=2)
    yield lambda: build(kind, LEAN, keeps=True)


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


SQUARE = torch.tensor([[i, j] for i in range(4) for j in range(4)])  # the places of 16 patches
GRID = torch.tensor([[1, 4, 4], [1, 8, 4]])  # of 48 patches


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
    if config.model_type == "diffusion_gemma" and padding != "none":  # its decoder reads the cache
        text["decoder_attention_mask"] = torch.cat([mask, torch.ones(B, T, dtype=torch.long)], 1)
    vision = part(config, "vision_config", "backbone_config")
    channels = number(vision, "num_channels", "in_channels", "in_chans", default=3)
    image = number(vision, "image_size", default=32)
    images = [randn(B, channels, n, n) for n in dict.fromkeys((image, 32, 64, 224))]
    frames = number(config, "num_frames", default=4)
    audio = part(config, "audio_config", "encoder_config")
    mels = number(audio, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size",
                  "feature_projection_input_dim", "input_dim", default=16)  # fmt: skip
    length = 2 * number(audio, "max_source_positions", "max_length", default=20)
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
        also = {n: x for n, x in text.items() if n not in ("input_ids", "attention_mask")}
        spectra = [(B, mels, length), (B, length, mels), (B, 1, length, mels)]
        waves = [(B, 400 * S), (B, 1, 400 * S)]
        shapes = waves + spectra if main == "input_values" else spectra + waves
        for shape in (*shapes, (B, length // 2, mels)):
            given = {main: randn(*shape), **also}
            if padding == "right" and "attention_mask" in names:
                given["attention_mask"] = torch.ones(B, max(shape), dtype=torch.long)
                given["attention_mask"][1, max(shape) * 2 // 3 :] = 0
            yield given
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
        size = channels * vision.patch_size**2 * number(vision, "temporal_patch_size", default=1)
        for first in ("hidden_states", "pixel_values"):
            if first in names:
                yield {first: randn(48, size), "grid_thw": GRID}
    if "input_ids" in names and main != "input_ids":
        yield text
    if padding == "none":
        yield from by_name(model, text, images, frames, randn, tokens)


def by_name(model, text, images, frames, randn, tokens):
    """Guesses by the names of arguments: those that have to be given, then all that are known."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    names = [n for n in parameters if n not in ("self", "kwargs", "args")]
    needed = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    ids = text["input_ids"].clone()
    for name in ("image_token_id", "image_token_index", "video_token_index"):
        if isinstance(getattr(config, name, None), int):
            ids[:, : number(config, "num_query_tokens", default=4)] = getattr(config, name)
    known = {**text, **by_name_alone(config, names, images[0].shape[1], randn, tokens)}
    for found in by_shape(config, names, needed, images, frames, randn):
        for chosen in (needed, [n for n in names if n not in ("inputs_embeds", "labels")]):
            for given_ids in (known.get("input_ids"), ids, tokens(S * 9).view(B, S, 9)):
                every = {**known, "input_ids": given_ids, **found}
                given = {n: every[n] for n in chosen if n in every}
                if "decoder_input_ids" in names and given_ids.dim() == 3:
                    given |= {"input_ids": text["input_ids"]}
                    given |= {"decoder_input_ids": tokens(T * 9).view(B, T, 9)}
                yield given
                if "input_ids" not in given:
                    break


def by_name_alone(config, names, channels, randn, tokens):
    """Values of arguments whose names say enough."""
    vision = part(config, "vision_config", "backbone_config")
    width = number(part(config, "text_config"), "hidden_size", "d_model", default=64)
    area = number(vision, "patch_size", default=8) ** 2
    known = {
        "qformer_input_ids": tokens(S),
        "query_embeds": randn(B, 5, width),
        "encoder_hidden_states": randn(B, 9, number(config, "encoder_hidden_size", default=width)),
        "bbox": torch.linspace(0.1, 0.9, B * S * 4).view(B, S, 4),
        "visual_feats": randn(B, 5, number(config, "visual_feat_dim", default=64)),
        "visual_pos": randn(B, 5, 4),
        "latents": randn(B, width, 6),
        "inputs": randn(B, 2800),
        "states": randn(B, T, number(config, "state_dim", default=4)),
        "actions": randn(B, T, number(config, "act_dim", default=4)),
        "rewards": randn(B, T, 1),
        "returns_to_go": randn(B, T, 1),
        "timesteps": torch.arange(T).repeat(B, 1),
        "inputs_embeds": randn(B, S, width),
        "merge_sizes": torch.tensor([1, 1]),
        "image_embeds_position_mask": (torch.arange(S) < 3).long().repeat(B, 1),
        "image_attention_mask": torch.ones(B, S, 1, dtype=torch.long),
        "past_values": randn(B, 64),
        "past_values_padding": torch.zeros(B, 64),
        "freq": torch.zeros(B, 1, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        "pixel_attention_mask": torch.ones(B, 16, dtype=torch.long),
        "target_sizes": torch.tensor([[4, 4], [4, 4]]),
        "task_inputs": tokens(77),
    }
    size = number(config, "patch_embed_hidden_size", default=channels * area)
    if "flattened_patches" in names:
        size = number(vision, "patch_embed_hidden_size", default=size)
        places = SQUARE.repeat(B, 1, 1).float() + 1
        known["flattened_patches"] = torch.cat([places, randn(B, 16, size)], -1)
    return known


def by_shape(config, names, needed, images, frames, randn):
    """Values of images and sounds, in the shapes that models take them in."""
    vision = part(config, "vision_config", "backbone_config")
    audio = part(config, "audio_config", "encoder_config")
    channels = images[0].shape[1]
    patch = number(vision, "patch_size", default=8)
    time = number(vision, "temporal_patch_size", default=1)
    mels = number(audio, "num_mel_bins", "n_mels", "input_feat_size", "input_dim", default=16)
    area = patch * patch
    tries = [{}]
    if "audio_mel" in names:
        n = number(config, "input_feat_size", default=128)
        hidden = torch.zeros(B, 40, dtype=torch.bool)
        tries = [{"audio_mel": randn(B, 40, n), "audio_mel_mask": hidden}]
    elif "input_features" in names:
        tries = [
            {"input_features": randn(*shape),
             "input_features_mask": torch.ones(B, max(shape[1:]), dtype=torch.long)}
            for n in dict.fromkeys((mels, 64, 80, 112, 128, 160))
            for shape in ((B, n, 200), (B, 200, n), (B, 1, 200, n), (B, n, 40))
        ]  # fmt: skip
    elif "input_values" in names:
        shapes = (B, 32, mels), (B, 1, 3200), (1, 1, 3200), (B, 3200)
        tries = [{"input_values": randn(*shape)} for shape in shapes]
    elif "spatial_shapes" in names or "pixel_position_ids" in names:
        places = SQUARE.repeat(B, 1, 1)
        tries = [{"pixel_values": randn(B, 16, channels * area), "pixel_position_ids": places}]
    elif "target_sizes" in names:
        tries = [{"pixel_values": randn(1, channels, patch, 32 * patch)}]
    elif {"grid_thw", "image_grid_thw"} & {*needed}:
        shapes = [(channels * area * time,), (channels * area * 2,), (channels, patch, patch)]
        shapes += [(channels, time, patch, patch), (time, channels, patch, patch)]
        both = {"grid_thw": GRID, "image_grid_thw": GRID}
        tries = [{"pixel_values": randn(48, *shape), **both} for shape in shapes]
    elif {"pixel_values", "pixel_values_videos"} & {*names}:
        for x in images[:3]:
            films = (x[:, None].repeat(1, n, 1, 1, 1) for n in (frames, 2, 1))
            for y in (x, *films):
                more = {"prompt_pixel_values": y, "prompt_masks": y, "prompt_depth": x[:, :1]}
                tries.append({"pixel_values": y, "pixel_values_videos": y, **more})
    return tries
