"""A GPU for torch on a machine without one: tensors with a shape and no data, and a torch.cuda.

    subprocess.run(command, env=os.environ | environment(folder))

In every Python process of that command torch.cuda.is_available() is true, tensors on "cuda" are
torch's meta tensors that say so, at any size, and Triton's launches go to the stand-in driver:
kernels are compiled for an H100, and nothing computes. What a test asserts of a result passes,
whatever it is; lengths, offsets and masks alone, whatever is small and neither drawn nor computed
from what is, have values, as shapes follow from them. torch.compile compiles nothing.

Events, streams and graphs take part in what they forbid: a call that waits for the device raises in
a capture and in the sync debug mode "error". After a capture that has failed, the current stream is
that of the capture, and no random number is to be had before another capture succeeds, as in torch
2.11. The times between events are made up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu import stand_in
from benchmarks.report import STAND_IN

DRIVER = "FASTFORMER_STAND_IN"  # the folder of libcuda.so.1, in the environment of such a process
COUNTS = "FASTFORMER_STAND_IN_COUNTS"  # 1: kernels are counted, and none is compiled
MILLISECONDS = 1.0  # between any two events
MOST = {True: 1 << 8, False: 1 << 20}  # elements of a tensor that has values: floating point or not
HERE = Path(__file__).resolve().parent


def environment(folder: Path) -> dict[str, str]:
    """Variables that give a GPU to the Python processes that are started with them. The driver is
    built in the folder. Raises RuntimeError where it cannot be.
    """
    stand_in.build(folder)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(HERE / "site"), str(ROOT), *before]
    libraries = [str(folder.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        DRIVER: str(folder.resolve()),
        # Where there are a GPU and its driver, they are not these.
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_INTERPRET": "0",
    }


def kernels(folder: Path) -> int:
    """Return how many kernels were launched by the processes with this folder of the driver."""
    return len(list(folder.glob("*.kernel")))


def _compile_once(folder: Path) -> None:
    """Let one of the processes that share the folder compile a kernel, and the others wait for it:
    they find it in Triton's cache.
    """
    from filelock import FileLock
    from triton import compiler

    compile = compiler.compile

    def once(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        key = hashlib.sha256(f"{source.hash()} {target} {options}".encode()).hexdigest()
        (folder / f"{key}.kernel").touch()
        if os.environ.get(COUNTS) == "1":
            return _Counted()
        with FileLock(folder / f"{key}.lock"):
            return compile(source, target=target, options=options, **more)

    compiler.compile = once


class _Counted:
    """In place of a compiled kernel: a launch does nothing."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_: Any) -> None: ...
    def run(self, *_: Any) -> None: ...


class _State:
    """What torch.cuda says, and what has happened to the device."""

    inside = False  # an op runs: a tensor is what it is
    sync_debug = 0
    capturing = False
    invalid = False  # what is captured has been refused
    spoilt = False  # a capture has failed, and none has succeeded since
    stream: _Stream  # the current one
    lost: str | None = None  # the error of every further call


state = _State()


def wait() -> None:
    """The host waits for the device. Raises RuntimeError where that is forbidden."""
    if state.lost:
        raise RuntimeError(state.lost)
    if state.capturing:
        state.invalid = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    if state.sync_debug == 2:
        raise RuntimeError("called a synchronizing CUDA operation")


def appear(folder: Path) -> None:
    """From here on this process has a GPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.weak import WeakIdKeyDictionary

    aten = torch.ops.aten
    meta, cuda = torch.device("meta"), torch.device("cuda", 0)
    actual = torch._C.TensorBase.device.__get__
    values: Any = WeakIdKeyDictionary()  # a tensor on the CPU, of what is known

    def pretends(x: torch.Tensor) -> bool:
        return actual(x) == meta and not state.inside

    class Generator(torch.Generator):  # of the CPU: there is no other
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls)

    class Device(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            former, state.inside = state.inside, True
            try:
                return self.run(op, args, kwargs or {})
            finally:
                state.inside = former

        def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            on_device = [x for x in given if x.is_meta]
            if state.lost and on_device:
                raise RuntimeError(state.lost)
            if (
                state.spoilt
                and not state.capturing
                and torch.Tag.nondeterministic_seeded in op.tags
            ):
                raise RuntimeError("Offset increment outside graph capture encountered")
            where = kwargs.get("device")
            if where is not None and where.type == "cuda":
                kwargs = {**kwargs, "device": meta}
            if op in (aten._local_scalar_dense.default, aten.item.default) and on_device:
                wait()
                return self.number(args[0])
            if op is aten.nonzero.default and on_device:
                wait()
                return self.nonzero(args[0])
            if op in (aten.equal.default, aten.allclose.default) and on_device:
                wait()
                return True
            if op in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
                chosen = [self.positions(i) for i in args[1]]
                args = (args[0], [i for one in chosen for i in one], *args[2:])
            if op is aten._to_copy.default and where is not None:
                if args[0].is_meta != (where.type == "cuda") and not kwargs.get("non_blocking"):
                    wait()  # for a copy between host and device
                if args[0].is_meta and where.type == "cpu":
                    known = values.get(args[0])
                    x = torch.zeros_like(args[0], device="cpu") if known is None else known
                    return op(x, **kwargs)
            if op is aten.copy_.default and args[0].is_meta != args[1].is_meta:
                wait()
                if args[1].is_meta:
                    return args[0].zero_()
            output = op(*args, **kwargs)
            self.follow(op, args, kwargs, given, output)
            return output

        def follow(self, op: Any, args: Any, kwargs: Any, given: Any, output: Any) -> None:
            """The values of what follows from known values alone."""
            outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            if not outputs or not all(x.is_meta for x in outputs):
                return
            unknown = torch.Tag.nondeterministic_seeded in op.tags or "empty" in op.name()
            large = any(x.numel() > MOST[x.is_floating_point()] for x in [*given, *outputs])
            if unknown or large or any(x.is_meta and x not in values for x in given):
                for x in outputs:  # written to in place, say
                    values.pop(x, None)
                return

            def known(x: torch.Tensor) -> torch.Tensor:
                return values[x] if x.is_meta else x

            own = tree_map_only(torch.Tensor, known, (args, kwargs))
            own[1].update({"device": torch.device("cpu")} if "device" in kwargs else {})
            results = tree_leaves(op(*own[0], **own[1]))
            for x, result in zip(tree_leaves(output), results):
                if isinstance(x, torch.Tensor):
                    values[x] = result

        def number(self, x: torch.Tensor) -> Any:
            if x in values:
                return values[x].item()
            return {torch.bool: True}.get(x.dtype, 0.0 if x.is_floating_point() else 1)

        def nonzero(self, x: torch.Tensor) -> torch.Tensor:
            found = values[x].nonzero() if x in values else None
            many = x.numel() if found is None else len(found)
            output = torch.empty(many, x.dim(), dtype=torch.int64, device=meta)
            if found is not None:
                values[output] = found
            return output

        def positions(self, index: Any) -> list[Any]:
            """Of a boolean index those that it stands for: their number follows from its values."""
            if index is None or index.dtype not in (torch.bool, torch.uint8) or not index.is_meta:
                return [index]
            wait()
            return list(self.nonzero(index).unbind(1))

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        x = make_tensor(data, **options)
        return x if device is None else x.to(device)

    def indexed(value: Any) -> Any:
        """torch asks a GPU which one "cuda" is."""
        is_device = isinstance(value, (str, torch.device)) and str(value) == "cuda"
        return cuda if is_device else value

    def to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return move(x, *map(indexed, args), **{k: indexed(v) for k, v in kwargs.items()})

    def flex_attention(
        q: Any, k: Any, v: Any, score_mod: Any = None, *_: Any, enable_gqa: bool = False, **__: Any
    ) -> Any:
        added = score_mod(0, 0, 0, 0, 0) if score_mod else 0  # a bias has a gradient
        return attention(q, k, v, enable_gqa=enable_gqa) + added

    def uncompiled(model: Any = None, **_: Any) -> Any:
        flex: dict[str, Any] = {  # what cannot run otherwise
            "flex_attention": flex_attention,
            "create_block_mask": lambda *_, **__: None,
        }
        if model is None:
            return lambda function: function
        return flex.get(getattr(model, "__name__", ""), model)

    attention = torch.nn.functional.scaled_dot_product_attention
    move, torch.Tensor.to = torch.Tensor.to, to
    make_tensor, torch.tensor = torch.tensor, tensor
    torch.Generator = Generator
    torch.Tensor.device = property(lambda x: cuda if pretends(x) else actual(x))
    torch.Tensor.is_cuda = property(pretends)
    torch.Tensor.is_meta = property(lambda x: actual(x) == meta and not pretends(x))
    torch.Tensor.get_device = lambda x: 0 if pretends(x) else -1
    torch.Tensor.cuda = lambda x, *_, **__: x.to(cuda)
    torch.backends.mha.set_fastpath_enabled(False)  # its nested tensors are of data
    torch.compile = uncompiled
    # The launchers serve meta tensors as they do all others, and their outputs are right as well.
    fake = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        None if str(op).startswith("fastformer::") else fake(op, *a, **k)
    )
    for name, stand_in_for in _cuda().items():
        setattr(torch.cuda, name, stand_in_for)

    from fastformer.dispatch import backends

    original = backends._unsupported_device
    stand_in.install(folder)
    _compile_once(folder)
    backends._unsupported_device = original  # the tensors are on a GPU
    Device().__enter__()


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def elapsed_time(self, end: Any) -> float:
        return MILLISECONDS

    def synchronize(self) -> None:
        wait()


class _Graph:
    def reset(self) -> None: ...
    def replay(self) -> None:
        if state.lost:
            raise RuntimeError(state.lost)


@contextlib.contextmanager
def _capture(graph: _Graph, *_: Any, **__: Any) -> Iterator[None]:
    wait()
    before, state.stream = state.stream, _Stream()
    state.capturing, failed = True, False
    try:
        yield
    except BaseException:
        failed = True
        raise
    finally:
        failed, state.capturing = failed or state.invalid, False
        state.spoilt, state.invalid = failed, False
        if not failed:  # else the stream stays
            state.stream = before
        elif sys.exc_info()[0] is None:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def _set_sync_debug_mode(mode: Any) -> None:
    state.sync_debug = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


def _cuda() -> dict[str, Any]:
    """What torch.cuda has in place of its own."""
    major, minor = stand_in.CAPABILITY
    properties = SimpleNamespace(
        name=STAND_IN, major=major, minor=minor, total_memory=80 << 30, warp_size=32,
        multi_processor_count=stand_in.MULTIPROCESSORS,
        shared_memory_per_block_optin=stand_in.SHARED_OF_BLOCK,
        L2_cache_size=stand_in.L2_CACHE,
    )  # fmt: skip
    default = state.stream = _Stream()
    return dict(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device=None: STAND_IN,
        get_device_properties=lambda device=None: properties,
        device=_nothing,
        set_device=lambda device: None,
        synchronize=lambda device=None: wait(),
        Stream=_Stream,
        current_stream=lambda device=None: state.stream,
        set_stream=lambda stream: setattr(state, "stream", stream),
        default_stream=lambda device=None: default,
        stream=_nothing,
        Event=_Event,
        CUDAGraph=_Graph,
        graph=_capture,
        is_current_stream_capturing=lambda: state.capturing,
        get_sync_debug_mode=lambda: state.sync_debug,
        set_sync_debug_mode=_set_sync_debug_mode,
        memory_allocated=lambda device=None: 0,
        max_memory_allocated=lambda device=None: 0,
        memory_reserved=lambda device=None: 0,
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
        _sleep=lambda cycles: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
    )
