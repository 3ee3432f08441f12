"""`parallelize`: shard the weights of a model over several devices, by torch's tensor parallelism.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    fastformer.parallelize(model, mesh)

torch.distributed.tensor.parallel applies the plan, DTensor moves the data, and the ops run on the
shards: see `fastformer.dispatch.sharding.placements`. docs/parallel.md shows what each device
holds.

    tokens [B, S], the same on each device
      embedding, by features ............ [B, S, d/n]    all-to-all
    the residual stream and its norms ... [B/n, S, d]    by sequences, or by tokens
      attention, by heads ............... [B, S, d]      all-gather before, reduce-scatter after
      feed-forward, by hidden units ..... [B, S, d]      all-gather before, reduce-scatter after
      generator and loss, by classes .... [B, S, d]      all-gather; two numbers per token
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from fastformer._version import __version__
from fastformer.checks import require_instance
from fastformer.dispatch.backends import sequences_from as sequences_from
from fastformer.drop_in.replacements.base import Accelerated
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.embeddings import Embeddings
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.stacks import Decoder, Encoder
from fastformer.nn.transformer import EncoderDecoder, Generator, LanguageModel

Model = TypeVar("Model", bound=nn.Module)
_OURS = EncoderDecoder, LanguageModel, Encoder, Decoder
# In these modules all parameters become DTensors; in others, only those that a style places.
_ALL_DISTRIBUTED = (*_OURS, nn.TransformerEncoder, nn.TransformerDecoder)
_HIDDEN_GROUP, _FEATURE_GROUP = 16, 4  # share random words of dropout: see `require_group`


def parallelize(
    model: Model, mesh: Any, plan: Mapping[str, Any] | None = None, *, check: bool = True
) -> Model:
    """Shard the weights of a model over a mesh, in place: tensor parallelism.

    Attention is sharded by heads, the feed-forward by hidden units, embeddings by features, the
    generator and its loss by classes. An embedding that shares its weight with the generator is
    sharded by tokens of the vocabulary. Between these modules the residual stream, its norms and
    their dropout are sharded by sequences, or by tokens if the mesh size does not divide the batch.
    All ranks take the same tokens and masks, as plain tensors, or the same packed batch and its
    `Packing`. They use the dropout masks of a single device if their generators have the same
    state. Outputs are DTensors; `SimpleLossCompute` returns a plain loss.

    The parameters become DTensors with unchanged names and global shapes:
    torch.distributed.checkpoint saves and loads them in any layout. `fully_shard` over another
    dimension of the mesh, activation checkpointing and torch's optimizers work with them.

    Args:
        model: a model of `make_model` or `make_decoder`, or a module that contains stacks of their
            layers; or a module that contains nn.Transformer, its encoder or its decoder, after
            `accelerate`. Modules outside of torch's stacks keep plain parameters, and exchange
            plain tensors with the stacks.
        mesh: a DeviceMesh of one dimension, such as init_device_mesh("cuda", (8,)) or mesh["tp"].
        plan: by module name, a torch.distributed.tensor.parallel.ParallelStyle that replaces the
            default style of that module, or None to remove it. Parameters that no style distributes
            are replicated.
        check: whether to compare the ranks first, with one collective of a few hundred bytes: see
            `require_same_ranks`.

    Returns:
        The model.

    Raises:
        ValueError: the mesh has several dimensions; its size does not divide the heads, hidden
            units or features; the ranks differ.
        TypeError: model is not a module, mesh is not a DeviceMesh, or plan is not a mapping.
        RuntimeError: there is no process group.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3; the residual stream: Korthikanti et al.
    2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
    """
    require_instance("model", model, nn.Module, "an nn.Module")
    require_process_group()
    _require_mesh(mesh)
    if plan is not None:
        require_instance("plan", plan, Mapping, "styles by the name of a module")
    if check:
        require_same_ranks(model, mesh.get_group())
    from torch.distributed.tensor.parallel import parallelize_module

    from fastformer.distributed.styles import Placed, replicate_others

    styles = dict(_plan(model, mesh.size(), Placed)) | dict(plan or {})
    names = {name for name, _ in model.named_modules()}
    for name in plan or ():
        if name not in names:
            raise ValueError(f"plan names {name!r}; expected a module of the model")
    parallelize_module(model, mesh, {k: v for k, v in styles.items() if v is not None})
    for module in model.modules():
        if isinstance(module, _ALL_DISTRIBUTED):
            replicate_others(module, mesh)
    return model


def _plan(model: nn.Module, devices: int, placed: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, style) for each module that has a style."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from fastformer.distributed.styles import Gathered, Rows

    made: dict[int, Any] = {}  # DTensors by the id of the parameter that they replace
    shared = {id(m.proj.weight) for m in model.modules() if isinstance(m, Generator)}
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    for name, module in model.named_modules():
        within = f"{name}." if name else ""
        if isinstance(module, MultiHeadedAttention):
            _require_divisible(f"{within}h", module.h, devices)
            _require_divisible(f"{within}kv_heads", module.kv_heads, devices)
            yield name, Gathered(made, sinks=Shard(0))
            for i in range(3):
                yield f"{within}linears.{i}", columns
            yield f"{within}linears.3", rows
        elif isinstance(module, PositionwiseFeedForward):
            width, p = module.w_2.in_features, module.dropout.p
            group = _HIDDEN_GROUP if p else 1
            _require_divisible(f"{within}d_ff", width, devices * group, devices)
            yield f"{within}w_1", placed(made, weight=Shard(0), bias=Shard(0))
            yield f"{within}w_2", placed(made, weight=Shard(1), bias=Replicate())
        elif isinstance(module, Embeddings):
            by_tokens = id(module.lut.weight) in shared
            if not by_tokens:
                _require_divisible(
                    f"{within}d_model", module.d_model, devices * _FEATURE_GROUP, devices
                )
            yield f"{within}lut", placed(made, weight=Shard(0 if by_tokens else 1))
        elif isinstance(module, Generator):
            yield f"{within}proj", placed(made, weight=Shard(0), bias=Shard(0))
        elif isinstance(module, (Encoder, Decoder)):
            yield name, Rows()
        elif isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
            _require_accelerated(name, module)
            yield name, Rows(plain=True)
        elif isinstance(module, nn.MultiheadAttention):
            _require_accelerated(name, module)
            _require_divisible(f"{within}num_heads", module.num_heads, devices)
            names = ("in_proj_weight", "in_proj_bias", *(f"{x}_proj_weight" for x in "qkv"))
            yield name, placed(made, **dict.fromkeys(names, Shard(0)))
            yield f"{within}out_proj", placed(made, weight=Shard(1), bias=Replicate())
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            group = _HIDDEN_GROUP if module.dropout.p else 1
            width = module.linear1.out_features
            _require_divisible(f"{within}dim_feedforward", width, devices * group, devices)
            yield f"{within}linear1", placed(made, weight=Shard(0), bias=Shard(0))
            yield f"{within}linear2", placed(made, weight=Shard(1), bias=Replicate())


def _require_accelerated(name: str, module: nn.Module) -> None:
    if not isinstance(module, Accelerated):
        raise ValueError(
            f"{name or 'model'} is torch's {type(module).__name__}; "
            "expected fastformer.accelerate(model) before, so that it takes DTensors"
        )


def _require_divisible(name: str, size: int, by: int, devices: int | None = None) -> None:
    if size % by:
        devices = by if devices is None else devices
        raise ValueError(
            f"{name} is {size}; expected a multiple of {by}, on a mesh of {devices} devices"
        )


def require_process_group() -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "there is no process group; expected torch.distributed.init_process_group() before, in "
            "processes that torchrun starts"
        )


def _require_mesh(mesh: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    require_instance("mesh", mesh, DeviceMesh, "a DeviceMesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("unnamed",) * mesh.ndim
        raise ValueError(
            f"mesh has the dimensions {', '.join(names)}; expected one, such as mesh[{names[-1]!r}]"
        )


def require_same_ranks(model: nn.Module | None = None, group: Any = None, **more: Any) -> None:
    """Require that the processes of a group have the same versions, random state and model.

    If they differ, all processes raise the same error, so that none is left waiting.

    Args:
        model: the model whose parameters are compared by name, shape and dtype, or None.
        group: the process group; None for all processes.
        more: other values that must be equal, by name.

    Raises:
        ValueError: two ranks differ; the message names them and the value.
        RuntimeError: there is no process group.
    """
    require_process_group()
    own: dict[str, Any] = {
        "fastformer": __version__,
        "torch": torch.__version__,
        "the seed of torch.manual_seed": torch.initial_seed(),
        "the next random number": _next_random_number(torch, "cpu"),
        **more,
    }
    if torch.cuda.is_initialized():
        own["the next random number of the GPU"] = _next_random_number(torch.cuda, "cuda")
    if model is not None:
        shapes = [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()]
        own["the model's parameters"] = hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
    size = torch.distributed.get_world_size(group)
    all_ranks: list[Any] = [None] * size
    torch.distributed.all_gather_object(all_ranks, own, group)
    for name, ours in all_ranks[0].items():
        for rank, theirs in enumerate(all_ranks[1:], 1):
            if theirs.get(name) != ours:
                raise ValueError(
                    f"rank {rank} has {name} {theirs.get(name)}, and rank 0 {ours}; "
                    "expected the same on all ranks"
                )


def _next_random_number(module: Any, device: str) -> int:
    """Return the next random number of a generator without changing its state."""
    generator = torch.Generator(device)
    generator.set_state(module.get_rng_state())
    return int(torch.randint(2**62, (), generator=generator, device=device))
