"""A CUDA device that computes nothing: shapes, dtypes and devices are real, values are not.

`FakeTensorMode` carries the tensors; `guard.cpp` lets them claim a CUDA device. What the host reads
is recorded while the same requests are decoded on the CPU and replayed by call site, so that
control flow that depends on values goes the same way. `Watch` counts what a round costs: operations
that start a kernel, and moments at which the host waits for the device. Attention and Triton's
kernels count as one launch each.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import Mock
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves

import dllm_bench.decoding
from dllm_bench.decoding import fused
from dllm_bench.models import attention as attention_module
from dllm_bench.models import drafters, layer_ops
from dllm_bench.models.transformer import TransformerDenoiser

FAKE = FakeTensorMode(allow_non_fake_inputs=True)
PACKAGE = str(Path(dllm_bench.__file__).parent)
READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero")
ONCE = ("start", "generation")  # functions that run once a request, where the host may wait
OVERWRITES = ("fill_", "zero_", "copy_", "uniform_")  # do not read what they write
COMPOSITE = "CompositeImplicitAutograd"
FUSED = "aten::_fused_rms_norm"  # one kernel on a device; a build of torch without CUDA lacks it
attention = torch.nn.functional.scaled_dot_product_attention


def load_guard(folder: Path) -> None:
    """Build and load the guard; skips the test where it cannot be built."""
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("guard.cpp")
    options = {"extra_cflags": ["-O0"], "is_python_module": False}
    try:
        cpp_extension.load("fake_cuda_guard", str(source), build_directory=str(folder), **options)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the device guard needs a C++ compiler and ninja ({error})")


def package_frames() -> Iterator[FrameType]:
    """Yield the package's functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame
        frame = frame.f_back


def site() -> str:
    """Innermost line of the package that is running."""
    frame = next(package_frames(), None)
    if frame is None:
        return "outside"
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE + '/')}:{frame.f_lineno}"


@dataclass
class HostReads:
    """What the host read of tensors on the CPU, in order, by the line that read it."""

    values: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    replays: bool = False

    @contextmanager
    def hooked(self, watch: Watch | None = None) -> Iterator[HostReads]:
        """Record the reads in the block, or replay them and count those of the device as waits."""
        self.replays = watch is not None
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                read = self._reader(name, getattr(Tensor, name), watch)
                for kind in (Tensor, FakeTensor):
                    if name in vars(kind) or kind is Tensor:
                        patch.setattr(kind, name, read)
            yield self

    def _reader(self, name: str, read: Callable[..., Any], watch: Watch | None) -> Any:
        def hook(tensor: Tensor, *args: Any) -> Any:
            key = f"{site()} {name}"
            if isinstance(tensor, FakeTensor):
                assert watch is not None
                if tensor.is_cuda:
                    watch.wait(key)
                assert self.values[key], f"{key} reads what was not read on the CPU"
                value = self.values[key].popleft()
                if not isinstance(value, Tensor):
                    return value
                return torch.empty(value.shape, dtype=value.dtype, device=tensor.device)
            value = read(tensor, *args)
            if not self.replays:
                self.values[key].append(value)
            return value

        return hook

    def left(self) -> dict[str, int]:
        """Reads that were not replayed: those of lines that only the CPU runs."""
        return {key: len(found) for key, found in self.values.items() if found}


class Watch(TorchDispatchMode):
    """Counts launches and waits. A round begins with a forward of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward = False
        self.forwards = 0
        self.each: list[int] = []  # launches of each forward
        self.launches: Counter[str] = Counter()  # by "forward" and "round"
        self.sites: Counter[str] = Counter()  # of the round's launches
        self.waits: list[list[str]] = [[]]  # of each round, the first entry before all forwards
        self.vocabulary = 0  # size of the dimension that makes a tensor wide
        self.logits = 0  # numbers that forwards returned
        self.wide: Counter[str] = Counter()  # numbers of wide tensors read or written, by site

    @property
    def passes(self) -> float:
        """Reads and writes of wide tensors beside the forward, in units of the logits."""
        return self.wide.total() / self.logits

    def watched(self, model: TransformerDenoiser) -> TransformerDenoiser:
        """Return the model, its forwards known as such."""
        self.vocabulary = model.vocab_size
        for name in ("forward", "forward_batch"):
            setattr(model, name, self._forward(getattr(model, name)))
        return model

    def _forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            self.waits.append([])
            self.forwards += 1
            self.in_forward = True
            before = self.launches["forward"]
            try:
                logits = run(*args)
            finally:
                self.in_forward = False
            self.each.append(self.launches["forward"] - before)
            self.logits += sum(one.numel() for one in tree_leaves(logits))
            return logits

        return forward

    def wait(self, why: str) -> None:
        """The host waits for the device."""
        if not any(frame.f_code.co_name in ONCE for frame in package_frames()):
            self.waits[-1].append(why)

    def launch(self, what: str) -> None:
        """A kernel starts."""
        self.launches["forward" if self.in_forward else "round"] += 1
        if not self.in_forward:
            self.sites[f"{site()} {what}"] += 1

    def touch(self, tensors: Sequence[Any], what: str) -> None:
        """Tensors are read or written; those of a network, a drafter's too, do not count."""
        where = site()
        if not self.in_forward and not where.startswith("models/"):
            found = [x for x in tensors if isinstance(x, Tensor)]
            wide = [x.numel() for x in found if x.shape[-1:] == (self.vocabulary,)]
            self.wide[f"{where} {what}"] += sum(wide)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE)
        if composite and func.name() != FUSED:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        tensors = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors + results if x.dim() or x.is_cuda}
        if "cuda" in devices and self._count(func, devices, kwargs):
            written = func._schema.name.removeprefix("aten::") in OVERWRITES
            self.touch([*tensors[written:], *results], func._schema.name)
        return out

    def _count(self, func: Any, devices: set[str], kwargs: dict[str, Any]) -> bool:
        """Count one operation on the device, unless it starts no kernel; one that reads or writes
        both sides makes the host wait, unless it was told not to.
        """
        name = func._schema.name.removeprefix("aten::")
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = bool(aliases) and aliases[0] is not None and not aliases[0].is_write
        if is_view or name == "_unsafe_view" or name.startswith(("empty", "new_empty")):
            return False
        self.launch(name)
        if "cpu" in devices and not kwargs.get("non_blocking"):
            self.wait(f"{site()} {name}")
        return True


class FakeGenerator(torch.Generator):
    """A CPU generator that says it is the device's."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def __new__(cls, device: Any = "cpu") -> Any:
        kind = cls if torch.device(device).type == "cuda" else Generator
        return Generator.__new__(kind, "cpu")


Generator = torch.Generator


def claimed(value: Any) -> Any:
    """Return a copy whose tensors claim to be on the device."""
    if isinstance(value, Tensor):
        with FAKE:
            return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    assert isinstance(value, torch.nn.Module)
    module = copy.deepcopy(value)
    module.__dict__.pop("own_layers", None)  # of a drafter, computed from its weights
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(claimed(weight), requires_grad=False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else claimed(buffer)
    return module


def claimed_model(model: TransformerDenoiser) -> TransformerDenoiser:
    parts = (claimed(model.module), model.special, model.shifted)
    return type(model)(*parts, attention_form=model.attention_form, block=model.block)


@contextmanager
def device(watch: Watch) -> Iterator[None]:
    """Let the device be there: stand-ins for what needs a driver."""
    with pytest.MonkeyPatch.context() as patch:
        event = Mock(**{"elapsed_time.return_value": 1.0})
        patch.setattr(torch.cuda, "Event", lambda enable_timing: event)
        patch.setattr(torch.cuda, "current_stream", lambda device: Mock(device=device))
        patch.setattr(torch.cuda, "Stream", lambda device: Mock(device=device))
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "CUDAGraph", lambda: _FakeGraph(watch))
        patch.setattr(torch.cuda, "graph", _FakeGraph.recording)
        patch.setattr(torch.cuda, "graph_pool_handle", list[ReferenceType[_FakeGraph]])
        patch.setattr(torch.cuda, "synchronize", lambda device=None: watch.wait("synchronize"))
        patch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
        patch.setattr(torch, "Generator", FakeGenerator)
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(fused, "works", lambda *dtypes: True)
        kernels = ModuleType("dllm_bench.decoding.kernels")
        names = ("of_parts", "of_rows", "entropy_of_parts")
        search = ("mass_of_parts", "equals_of_parts", "cut_parts")
        vars(kernels).update(dict.fromkeys((*names, *search), _kernel(watch)), tl=torch)
        patch.setitem(sys.modules, kernels.__name__, kernels)
        patch.setattr(dllm_bench.decoding, "kernels", kernels, raising=False)
        patch.setattr(layer_ops, "kernels_work", lambda *form: True)
        patch.setattr(attention_module, "mass_kernel_works", lambda *form: True)
        patch.setattr(layer_ops, "start", lambda *args, **options: watch.launch("triton"))
        for module in (torch.nn.functional, attention_module):
            patch.setattr(module, "scaled_dot_product_attention", _attention)
        for name, copied in (("_network", claimed), ("_model", claimed_model)):
            patch.setattr(drafters, name, _of_drafter(getattr(drafters, name), copied))
        with FAKE, watch:
            yield


class _FakeGraph:
    """A graph: what is recorded starts nothing, and its replay starts once."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @contextmanager
    def recording(self, pool: list[ReferenceType[_FakeGraph]], stream: Any) -> Iterator[None]:
        """Record into a pool of memory, which takes no graph after those that it had are gone.

        torch's own stream for this belongs to the device that was current when it was made.
        """
        assert stream.device == torch.device("cuda", 0)
        if pool and not any(graph() for graph in pool):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pool.append(ref(self))
        before = self._watch.launches.copy(), self._watch.sites.copy()
        yield
        self._watch.launches, self._watch.sites = before

    def replay(self) -> None:
        self._watch.launch("graph")


def _kernel(watch: Watch) -> Any:
    """Return a Triton kernel, which is started by `kernel[grid](...)` and reads its arguments
    once."""

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return self.start

        def start(self, *args: Any, **options: Any) -> None:
            watch.launch("triton")
            watch.touch(tree_leaves(list(args)), "triton")

    return Kernel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return one launch; mixed devices or dtypes are an error, as on a device."""
    if not isinstance(query, FakeTensor):
        return attention(query, key, value, *args, **options)
    mask = options.get("attn_mask", args[0] if args else None)
    assert query.device == key.device == value.device
    assert query.dtype == key.dtype == value.dtype
    assert mask is None or (mask.device, mask.dtype) == (query.device, query.dtype)
    return torch.ops.aten.clone(query)


def _of_drafter(read: Callable[..., Any], copied: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a drafter's network on the device, copied once."""

    @cache
    def on_device(drafter: Any, place: torch.device, dtype: torch.dtype) -> Any:
        with _disable_current_modes():
            return copied(read(drafter, torch.device("cpu"), dtype))

    return on_device
