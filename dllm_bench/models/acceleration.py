"""Optional speed-ups of forwards: torch.compile, quantisation, CUDA graphs.

torch.compile (`CompiledDenoiser`) compiles once for lengths that vary; logits are equal up to
rounding.

Quantisation (torchao): w8a8 (int8 weights and activations) or fp8, with dynamic scales. Linear
layers inside the transformer layers are replaced after loading; embedding, head, norms, routers and
stacked experts keep the run's dtype. Not here: calibration, quantised checkpoints, quantised K/V.

Forwards of fixed shapes, each replayed as one CUDA graph: `hardware.compile=max`.

Starting the kernels of a forward of few rows takes the host a third to a half of the time that the
device needs for it (modelled by scripts/perf/model.py, Python not counted). So forwards of up to
`ROWS` rows are recorded once and replayed by one launch. Branches are padded to powers of two and
windows to `WINDOWS`, K/V of one request at a time occupy one store, and tokens, positions and masks
are written into tensors at fixed addresses; a run has a handful of shapes. If its longest canvas
and its branches are announced (`expect_canvas`), its first forward, which is part of the warm-up,
records all of them. Rows beyond the window are hidden from the others. Longer forwards, forwards to
which padding would add much, and prefills run without graphs, and so do those of
`why_not_replayed`, with a warning. On a CPU the same function runs on the same shapes, and nothing
is recorded.

Shapes: K branches, F fed positions, both padded; N layers, G heads of keys and values, C positions
of the store, E head size, H hidden size.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError, passes_check
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.attention import HIDDEN, FixedWindows, MaskShape, attention_mask
from dllm_bench.models.kv import KeysValues, PositionCache, Span, buffer
from dllm_bench.models.layers import PlainLayer
from dllm_bench.models.transformer import TransformerDenoiser, is_causal

# --- torch.compile and quantisation ---------------------------------------------------------------

CONFIGS: dict[str, tuple[str, dict[str, str]]] = {  # torchao's names: a class, and its arguments
    "w8a8": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}
FP8_CAPABILITY = (8, 9)  # CUDA compute capability of the first devices with fp8 products (Ada)


class CompiledDenoiser(TransformerDenoiser):
    """A `TransformerDenoiser` whose layers run as one compiled function of tensors."""

    owns_layers = False

    def _set_up(self) -> None:
        self.chooses_rows = False
        self._run = torch.compile(self._run_layers, dynamic=True)

    def _layers(self, tokens_KF: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        if plan.feature_layers:
            raise DllmBenchError(
                "The drafter reads outputs of the target's layers, which a compiled model does not "
                "give; set hardware.compile=max or none."
            )
        if plan.sets is not None:
            raise DllmBenchError(
                "The cache feeds single positions, and compiled layers are made for spans; set "
                "hardware.compile=none, or choose another decoder.cache."
            )
        branches = len(tokens_KF)
        masks = {kind: self._mask(kind, plan, branches, kv) for kind in set(self._kinds)}
        hidden = self._embed_fed(tokens_KF.reshape(1, -1), plan.added_KFH)
        rotations = self._rotations(hidden, plan.positions(self.device).repeat(branches)[None])
        cache = _CacheView([[layer.read(*span) for span in kv.spans] for layer in kv.positions])
        hidden, _ = self._run(self.layers, hidden, rotations, masks, cache, ())
        for layer, keys_values in zip(kv.positions, cache.fresh, strict=True):
            if layer.stores:
                layer.fresh, layer.at = keys_values, None
        return hidden.view(*tokens_KF.shape, -1)


class _CacheView:
    """The cache as the layers see it inside of the compiled function."""

    def __init__(self, stored: list[list[KeysValues]]) -> None:
        self.stored = stored
        self.fresh: list[KeysValues] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, kwargs: object = None) -> KeysValues:
        """Return the keys and values to attend to, and collect the fresh ones."""
        self.fresh.append((keys, values))
        all_keys, all_values = zip(*self.stored[layer], (keys, values), strict=True)
        return torch.cat(all_keys, 2), torch.cat(all_values, 2)


def quantize(module: Any, kind: str, device: torch.device) -> None:
    """Quantise the layers of a `*ForCausalLM` module in place, by a kind of `CONFIGS`.

    A row of activations has its own scale, so that it does not depend on the rows it is fed with.
    DllmBenchError where the device or torchao is missing, or does not take the weights' dtype.
    """
    if kind == "fp8" and not has_fp8(device):
        raise DllmBenchError(
            f"quantization=fp8 needs a CUDA device of compute capability 8.9 or more, "
            f"found {device}; use quantization=w8a8 or none."
        )
    if kind == "fp8" and module.dtype != torch.bfloat16:
        raise DllmBenchError(
            f"quantization=fp8 has a scale for each row of bfloat16 weights, and the model is in "
            f"{str(module.dtype)[6:]}; use dtype=bfloat16, or quantization=w8a8 or none."
        )
    try:
        from torchao import quantization  # optional dependency
    except ImportError:
        raise DllmBenchError(
            f"quantization={kind} needs torchao, which is not installed; install it with: pip "
            f"install 'dllm-bench[quant]'"
        ) from None
    name, named = CONFIGS[kind]
    arguments = {key: getattr(quantization, one)() for key, one in named.items()}
    quantization.quantize_(module.model.layers, getattr(quantization, name)(**arguments))


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies fp8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


# --- graphs of fixed shapes -----------------------------------------------------------------------

ROWS = 512
"""Rows of the longest forward that is recorded, padding included: LoPA's base and seven branches
over two open blocks of 32."""
BOUND, PADDING = 256, 1.25
"""From `BOUND` rows on, products take longer than the weights take to be read, so that each row
costs time. Padding may then multiply the rows by `PADDING` at most."""
WINDOWS = (32, 64, 96, 128, 256, 512)
"""Padded window sizes: one to four blocks of 32, then powers of two."""
WITHOUT_GRAPHS = "hardware.compile=max: forwards run without CUDA graphs"
CANVAS = 256  # a store's positions are a multiple
WARM = 2  # calls before a graph is recorded, in which libraries choose kernels and take memory


def padded(branches: int) -> int:
    """Return the next power of two."""
    return 1 << (branches - 1).bit_length()


def padded_window(fed: int) -> int:
    """Return the next of `WINDOWS`; beyond these the next power of two, which is not recorded."""
    return next((window for window in WINDOWS if window >= fed), padded(fed))


def why_not_replayed(plan: ForwardPlan, spans: tuple[Span, ...]) -> str | None:
    """Return the reason why a forward that sees these cached spans has no fixed shape; None if it
    has one."""
    if plan.sets is not None:
        return "the cache feeds single positions"
    if plan.recompute is not None:
        return "every layer chooses its rows"
    if plan.added_KFH is not None:
        return "something is added to the embeddings"
    if plan.attention != "full" and spans and spans[-1][0] >= plan.feed[1]:
        return "blocks are fed in front of cached ones that they do not see"
    return None


@dataclass(frozen=True)
class FixedShape:
    """The shape for which a graph is recorded."""

    branches: int
    """K."""
    window: int
    """F."""
    cached: int
    """C, 0 if nothing is cached."""
    feature_layers: tuple[int, ...]
    """Layers whose outputs are read."""

    @property
    def rows(self) -> int:
        """K * F."""
        return self.branches * self.window


class SharedStore:
    """K/V of all layers, cached and fresh; one request uses it at a time."""

    def __init__(self, layers: int, heads: tuple[int, int], length: int, like: Tensor) -> None:
        groups, width = heads
        self.length = length
        with torch.inference_mode(False):  # written in and out of inference mode
            self.stored_N21GCE = like.new_zeros(layers, 2, 1, groups, length, width)
            self._fresh_X = like.new_zeros(layers * 2 * groups * width * ROWS)
        self.views = [(both[0], both[1]) for both in self.stored_N21GCE]
        """Keys and values (1, G, C, E) of each layer."""
        self.pool = torch.cuda.graph_pool_handle() if like.is_cuda else None
        """Memory that the graphs recorded beside this store share. A longer store has another pool:
        torch refuses to record into one whose graphs are all gone."""
        self.stream: Any = torch.cuda.Stream(like.device) if like.is_cuda else None
        """Where these graphs are recorded. By default torch would record on the current device, and
        memory is shared within a stream alone."""
        self._owner: weakref.ref[PositionCache] | None = None

    def fresh(self, branches: int, window: int) -> Tensor:
        """Return the tensor to which a forward writes its K/V, (N, 2, K, G, F, E), shared by all
        shapes."""
        layers, _, _, groups, _, width = self.stored_N21GCE.shape
        shape = (layers, 2, branches, groups, window, width)
        return self._fresh_X[: prod(shape)].view(shape)

    def lend(self, kv: PositionCache) -> None:
        """Let a request's K/V use this store; those of the previous request move out, if it still
        exists."""
        if kv.positions[0].uses(self.views[0][0]):
            return
        before = self._owner() if self._owner else None
        for index, (keys, values) in enumerate(self.views):
            if before is not None and before.positions[index].uses(keys):
                before.positions[index].move(*(buffer(s, self.length) for s in (keys, values)))
            kv.positions[index].move(keys, values)
        self._owner = weakref.ref(kv)


class FixedForward:
    """A forward of one shape: its input tensors at fixed addresses, and its recorded graph."""

    def __init__(self, shape: FixedShape, store: SharedStore, like: Tensor) -> None:
        branches, window = shape.branches, shape.window
        self.shape, self._store = shape, store
        device = like.device
        with torch.inference_mode(False):
            self.ids_KF = torch.zeros(branches, window, dtype=torch.long, device=device)
            self.position_1F = torch.zeros(1, window, dtype=torch.long, device=device)
            own_K1FF = like.new_zeros(branches, 1, window, window)
            cached_C = like.new_zeros(shape.cached) if shape.cached else None
        self.fresh_N2KGFE = store.fresh(branches, window)
        self.mask = FixedWindows(own_K1FF, cached_C)
        self._slots = [(both[0], both[1]) for both in self.fresh_N2KGFE]
        self._written: dict[str, object] = {}
        self.graph: torch.cuda.CUDAGraph | None = None  # what forwards replay
        self._outputs: tuple[Tensor, Tensor | None] | None = None

    # what layers use as a cache

    def slots(self, layer: int, rows: int) -> KeysValues:
        """Return the slots for the fresh K/V of a layer."""
        return self._slots[layer]

    def update(self, keys: Tensor, values: Tensor, layer: int, kwargs: object = None) -> KeysValues:
        """Return the fresh K/V in their slots."""
        slots = self._slots[layer]
        if keys is not slots[0]:
            slots[0].copy_(keys)
            slots[1].copy_(values)
        return slots

    def aside(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        """Return all positions of the store."""
        return self._store.views[layer]

    # a forward

    def write(self, tokens_KF: Tensor, plan: ForwardPlan, spans: tuple[Span, ...]) -> None:
        """Write the inputs of a plan's forward; unchanged ones are not written again."""
        branches, fed = tokens_KF.shape
        self.ids_KF[:branches, :fed] = tokens_KF
        if self._changed("positions", (plan.feed, plan.added)):
            self.position_1F[0, :fed] = plan.positions(self.ids_KF.device)
        cached_C = self.mask.cached_C
        if self._changed("cached", (spans, plan.alone)) and cached_C is not None:
            cached_C.fill_(HIDDEN)
            for start, stop in spans:
                cached_C[start : stop if plan.alone is None else min(stop, plan.alone)] = 0
        seen = MaskShape.of(plan, 1, ())
        if seen.sees_all:  # looks the same wherever it is
            seen = MaskShape(1, (0, fed), ())
        elif is_causal(plan) and plan.alone is None and plan.added is None:
            seen = replace(seen, feed=(0, fed))
        if self._changed("own", seen if plan.visible_K is None else object()):
            self._write_own(seen, fed, plan.visible_K)

    def _changed(self, name: str, value: object) -> bool:
        """Return whether an input differs from the one written last, and remember it."""
        same = self._written.get(name) == value
        self._written[name] = value
        return not same

    def _write_own(self, seen: MaskShape, fed: int, visible_K: Tensor | None) -> None:
        """Write each branch's own window, without the padding."""
        own_K1FF = self.mask.own_K1FF
        own_K1FF.fill_(HIDDEN)
        part_K1FF = own_K1FF[:, :, :, :fed]
        part_K1FF.zero_()
        mask_11FF = attention_mask(seen, None, own_K1FF.dtype, own_K1FF.device)
        if mask_11FF is not None:
            part_K1FF[:, :, :fed] = mask_11FF.clamp_min(HIDDEN)
        if visible_K is not None:
            hidden_KF = self.position_1F[:, :fed] >= visible_K[:, None]
            part_K1FF[: len(hidden_KF)].masked_fill_(hidden_KF[:, None, None], HIDDEN)

    def run(self, model: FixedShapeDenoiser) -> tuple[Tensor, Tensor | None]:
        """Return hidden states (K, F, H) and features; the next call overwrites both."""
        if self.graph is not None:
            self.graph.replay()
        elif self.ids_KF.is_cuda and model.records:
            self.record(model)
        else:
            self._outputs = model.run_fixed(self)
        assert self._outputs is not None
        return self._outputs

    def record(self, model: FixedShapeDenoiser) -> None:
        """Record the graph; run without it, here and from now on, where that fails."""
        model.records = passes_check(lambda: self._record(model), "recording one", WITHOUT_GRAPHS)
        if self.graph is None:  # an error of the forward itself is raised again
            self._outputs = model.run_fixed(self)

    def _record(self, model: FixedShapeDenoiser) -> None:
        """Record the graph, then replay it, because recording computes nothing."""
        side, usual = self._store.stream, torch.cuda.current_stream(self.ids_KF.device)
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._outputs = model.run_fixed(self)
        usual.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._store.pool, stream=side):
            self._outputs = model.run_fixed(self)
        graph.replay()
        self.graph = graph
        model.recordings += 1


class FixedShapeDenoiser(TransformerDenoiser):
    """A `TransformerDenoiser` whose forwards of few rows have few shapes, recorded as graphs.

    DllmBenchError for a model whose layers are not the package's own.
    """

    def _set_up(self) -> None:
        first = self.layers[0]
        if not isinstance(first, PlainLayer):
            raise DllmBenchError(
                f"hardware.compile=max replays graphs of the package's own layers, and "
                f"{type(self.module).__name__} runs transformers' (experts, quantised or adapted "
                "weights, eager attention, sliding windows); set hardware.compile=default or none."
            )
        self._heads = first.kv_heads
        self._forwards: dict[FixedShape, FixedForward] = {}
        self._store: SharedStore | None = None
        self._warned: set[str] = set()
        self._longest = CANVAS
        self._most_branches = 0  # in a forward of this run; 0: unknown
        self._prepared: set[tuple[int, ...]] = set()  # feature layers of the runs' shapes recorded
        self.shapes_met: set[FixedShape] = set()  # of all forwards, replaced ones included
        self.records = True  # whether graphs are recorded on a CUDA device
        self.recordings = 0  # graphs recorded

    def expect_canvas(self, length: int, branches: int = 1) -> None:
        """Make the store long enough for canvases of this length, and let the next forward record
        all shapes of forwards of at most that number of branches.
        """
        self._make_room(length)
        if branches > self._most_branches:
            self._most_branches = branches
            self._prepared.clear()

    def _make_room(self, length: int) -> None:
        self._longest = max(self._longest, length + -length % CANVAS)

    def new_cache(self, length: int) -> PositionCache:
        """Return an empty cache for a canvas of `length` positions."""
        self._make_room(length)
        return super().new_cache(length)

    def _begin(self, tokens_KL: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        fed_KF = super()._begin(tokens_KL, plan, kv)
        why = why_not_replayed(plan, kv.spans)
        if why is not None and why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"{WITHOUT_GRAPHS}, because {why}.", stacklevel=2)
        return fed_KF

    def _layers(self, tokens_KF: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        branches, fed = tokens_KF.shape
        shape = self._shape(branches, fed, plan, kv)
        if shape is None:
            return super()._layers(tokens_KF, plan, kv)
        before = self.recordings
        forward = self._forward(shape)
        if shape.cached or plan.stores:
            self._shared_store().lend(kv)
        forward.write(tokens_KF, plan, kv.spans)
        hidden_KFH, features = forward.run(self)
        if features is not None:
            kv.features = features[:branches, :fed].clone()
        if plan.stores:
            fresh_N2KGFE = forward.fresh_N2KGFE[:, :, :branches, :, :fed]
            kv.of_all_layers = (self._shared_store().stored_N21GCE, fresh_N2KGFE)
        kv.graph = (forward.graph is not None, self.recordings > before)
        return hidden_KFH[:branches, :fed].clone()

    def _shape(
        self, branches: int, fed: int, plan: ForwardPlan, kv: PositionCache
    ) -> FixedShape | None:
        """Return the shape that a forward is padded to; None: it runs as it is."""
        shape = FixedShape(padded(branches), padded_window(fed), 0, plan.feature_layers)
        too_long = shape.rows > ROWS or shape.rows > max(BOUND, PADDING * branches * fed)
        once = plan.kind is ForwardKind.PREFILL  # once per request, and of many lengths
        if once or too_long or why_not_replayed(plan, kv.spans):
            return None
        return replace(shape, cached=self._shared_store().length) if kv.spans else shape

    def _shared_store(self) -> SharedStore:
        """Return the store, long enough for every canvas so far; a longer store needs new
        graphs."""
        if self._store is None or self._store.length < self._longest:
            self._forwards = {s: one for s, one in self._forwards.items() if not s.cached}
            self._prepared.clear()
            weight = self.module.lm_head.weight
            self._store = SharedStore(self.num_layers, self._heads, self._longest, weight)
        return self._store

    def run_shapes(self, feature_layers: tuple[int, ...]) -> list[FixedShape]:
        """Return every shape that a forward may have, given the values of `expect_canvas`."""
        store = self._shared_store()
        every_K = [1 << n for n in range(padded(self._most_branches).bit_length())]
        windows = [window for window in WINDOWS if window <= padded_window(store.length)]
        sizes = product(every_K, windows, (0, store.length))
        shapes = (FixedShape(*size, feature_layers) for size in sizes)
        return [shape for shape in shapes if shape.rows <= ROWS]

    def _forward(self, shape: FixedShape) -> FixedForward:
        self.shapes_met.add(shape)
        unknown = self._most_branches == 0 or shape.feature_layers in self._prepared
        if self.device.type == "cuda" and not unknown:
            # every shape of a run at once, before its first request counts
            self._prepared.add(shape.feature_layers)
            for one in self.run_shapes(shape.feature_layers):
                if self.records and one not in self._forwards:
                    self._made(one).record(self)
        return self._forwards.get(shape) or self._made(shape)

    def _made(self, shape: FixedShape) -> FixedForward:
        forward = FixedForward(shape, self._shared_store(), self.module.lm_head.weight)
        self._forwards[shape] = forward
        return forward

    def run_fixed(self, forward: FixedForward) -> tuple[Tensor, Tensor | None]:
        """Run the layers over what was written into `forward`."""
        hidden_KFH = self._embed_fed(forward.ids_KF, None)
        masks = dict.fromkeys(self._kinds, forward.mask)
        rotations = self._rotations(hidden_KFH, forward.position_1F)
        features = forward.shape.feature_layers
        return self._run_layers(self.layers, hidden_KFH, rotations, masks, forward, features)
