"""A model of any shape with random weights, and the time of its rounds.

It generates nonsense, but its forward costs what its shape costs.
"""

from __future__ import annotations

from statistics import median

import torch

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache
from dllm_bench.methods.common import Blocks, Budget, NegEntropy, Threshold
from dllm_bench.methods.lopa import Lookahead
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.transformer import TransformerDenoiser

DREAM_7B = {"width": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "mlp": 18944}
SMALL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128}
ONE_EACH = 1.0  # a threshold that no confidence is above
WARM = 4  # rounds that are not counted: prefill, choice of kernels


def special(vocab: int) -> SpecialTokens:
    """Mask and EOS: the last two ids of the vocabulary."""
    return SpecialTokens(mask=vocab - 1, eos=vocab - 2)


def random_request(prompt: int, new: int, vocab: int) -> Request:
    """A prompt of random ordinary tokens, the same at every call."""
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
    """Dream's architecture in the given shape, with rows that predict their own position."""
    from dllm_bench.models.acceleration import quantize
    from dllm_bench.models.load import denoiser_class

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
        module = ADAPTERS["dream"].build(published, "sdpa")
    module = module.to(dtype).to_empty(device=device)
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:
                weight.fill_(float("norm" in name))
            else:  # with this spread of the head, some positions are confident and others not
                spread = 8.0 if "lm_head" in name else 1.0
                weight.normal_(0, spread / weight.shape[1] ** 0.5, generator=generator)
    if quantization != "none":
        quantize(module, quantization, torch.device(device))
    return denoiser_class(compile_mode)(module, special(vocab), shifted=False)


def round_ms(model: TransformerDenoiser, prefix: int, k: int, window: int, steps: int) -> float:
    """Median milliseconds of `random_rounds`, those left out that warm up.

    steps: rounds that are timed.
    """
    return median(one.ms for one in random_rounds(model, prefix, k, window, WARM + steps)[WARM:])


def random_rounds(
    model: TransformerDenoiser, prefix: int, k: int, window: int, rounds: int
) -> list[Forward]:
    """The forwards of a decoder with one open block after a cached prompt.

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
