"""A model of any shape with random weights, the time of its rounds, and the shortest possible time.

It generates nonsense, but its forward costs what its shape costs. The shortest possible time, the
roofline, is the longer of two: the round's bytes over the measured bandwidth, and its operations
over the measured rate. Both ceilings are measured on the device, in the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache
from dllm_bench.methods.common import Blocks, Budget, NegEntropy, Threshold
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.runs.runner import timed

DREAM_7B = {"width": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "mlp": 18944}
SMALL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128}
ONE_EACH = 1.0  # a threshold that no confidence is above
WARM = 4  # warm-up rounds that are not counted: prefill, choice of kernels


def special(vocab: int) -> SpecialTokens:
    """Return mask and EOS: the last two ids of the vocabulary."""
    return SpecialTokens(mask=vocab - 1, eos=vocab - 2)


def random_request(prompt: int, new: int, vocab: int) -> Request:
    """Return a prompt of random ordinary tokens, the same at every call."""
    ids = torch.randint(5, vocab - 8, (prompt,), generator=torch.Generator().manual_seed(1))
    return Request("random", tuple(ids.tolist()), new, seed=1)


def random_model(
    vocab: int,
    shape: dict[str, int],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    compile_mode: str = "none",
) -> TransformerDenoiser:
    """Build Dream's architecture in the given shape, with rows that predict their own position."""
    from dllm_bench.models.acceleration import quantize
    from dllm_bench.models.load import build_module, denoiser_class

    published = {
        "vocab_size": vocab,
        "hidden_size": shape["width"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape.get("kv_heads", shape["heads"]),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    with torch.device("meta"):
        module = build_module(ADAPTERS["dream"], published, "sdpa")
    module = module.to(dtype).to_empty(device=device)
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:
                weight.fill_(float("norm" in name))
            else:  # this spread of the head makes some positions confident and others not
                spread = 8.0 if "lm_head" in name else 1.0
                weight.normal_(0, spread / weight.shape[1] ** 0.5, generator=generator)
    if quantization != "none":
        quantize(module, quantization, torch.device(device))
    return denoiser_class(compile_mode)(module, special(vocab), shifted=False)


def random_rounds(
    model: TransformerDenoiser, prefix: int, k: int, window: int, rounds: int
) -> list[Forward]:
    """Return the forwards of a decoder with one open block after a cached prompt.

    prefix: positions of the prompt; k: lookahead branches.
    """
    decoder = MaskedDecoder(
        NegEntropy(),
        Threshold(ONE_EACH, strict=True),
        Blocks(window, sees_future=False),
        BlockCache("full"),
        explore=Lookahead(k),
        stop=Budget(min(rounds, window)),
    )
    prompt = random_request(prefix, 1, model.vocab_size).prompt_ids
    return decoder.generate(model, Request("round", prompt, window)).trace.forwards


# --- the shortest possible time of a round --------------------------------------------------------


@dataclass(frozen=True)
class RoundShape:
    """A forward of lookahead branches and the base over a window after a cached prefix."""

    device: str
    dtype: torch.dtype
    shape: dict[str, int]
    """Of the model, as `DREAM_7B`."""
    vocab: int
    prefix: int
    """Cached positions."""


@dataclass(frozen=True)
class Ceilings:
    """What a device can do."""

    bytes_per_s: float
    """Read and written by a large copy."""
    flop_per_s: float
    """Of large matrix products, in operations a second."""
    layers_flop_per_s: float
    """The same in the precision of the linear layers, where that is another one."""


def layer_parameters(shape: dict[str, int]) -> int:
    """Return the number of weights in the linear layers of all transformer blocks."""
    width, kv = shape["width"], shape["width"] * shape["kv_heads"] // shape["heads"]
    return shape["layers"] * (2 * width * (width + kv) + 3 * width * shape["mlp"])


def roofline_ms(one: RoundShape, kind: str, made: Forward, ceilings: Ceilings) -> float:
    """Return the shortest possible time of a round under the measured ceilings.

    made: its forward, of `random_rounds`; kind: the quantisation of the weights, "none" or "fp8".
    Bytes: every weight, the cached K/V and the logits once. Operations: two per weight and row, and
    four per head dimension, query and key. FP8 halves the bytes of layers, not of the head. Logits
    are those of the masks: each lookahead branch has one fewer than the base.
    """
    shape, rows = one.shape, made.branches * made.fed
    read = made.branches * (made.masks - 1) + 1
    size = one.dtype.itemsize
    layers, head = layer_parameters(shape), shape["width"] * one.vocab
    cached = 2 * one.prefix * shape["layers"] * shape["width"] * shape["kv_heads"] // shape["heads"]
    moved = layers * (1 if kind == "fp8" else size) + size * (head + cached + read * one.vocab)
    attention = 4 * shape["layers"] * shape["width"] * rows * (one.prefix + made.fed)
    plain_s = (2 * read * head + attention) / ceilings.flop_per_s
    layers_s = 2 * rows * layers / ceilings.layers_flop_per_s
    return 1000 * max(moved / ceilings.bytes_per_s, plain_s + layers_s)


def measured_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """Measure bytes per second of a large copy, and operations per second of large products."""
    cuda = device == "cuda"
    side = 8192 if cuda else 256
    a = torch.randn(side, side, dtype=dtype, device=device)  # products of equal numbers are faster
    flop_per_s = 2 * side**3 / seconds(lambda: a @ a, cuda)
    return Ceilings(copied_per_s(device), flop_per_s, flop_per_s)


def copied_per_s(device: str) -> float:
    """Measure the bytes read and written per second in a large copy."""
    cuda = device == "cuda"
    source = torch.empty(2**31 if cuda else 2**22, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), cuda)


def seconds(work: Callable[[], object], cuda: bool) -> float:
    """Return the median time of ten calls after three for warm-up."""
    return median([timed(work, "cuda" if cuda else "cpu")[1] for _ in range(13)][3:])


def recorded(work: Callable[[], object], cuda: bool) -> Callable[[], object]:
    """Return `work` as one CUDA graph, whose time is the device's alone; on the CPU, `work`."""
    if not cuda:
        return work
    work()  # compiles kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
