"""Models for timing the loops: embedded ones, random weights of any shape, and stored logits.

A model with random weights generates nonsense, but its forward costs what its shape costs. `Table`
returns stored logits, so that only the loop's own time is left.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dllm_bench.cli.compose import compose
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.registry import instantiate
from dllm_bench.store.inputs import model_spec

EMBEDDED = {"width": 128, "layers": 4, "heads": 4, "mlp": 384}  # as the embedded models
QWEN_05B = {"width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp": 4864}  # Qwen2.5-0.5B
DREAM_7B = {"width": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "mlp": 18944}


QUESTION = """\
Question: Tom has 12 apples. He buys 4 times as many apples as he has. Then he gives 15 apples to \
Amy and shares the rest equally with 2 friends. How many apples does Tom have now?
Answer:"""


@cache
def embedded(name: str) -> LoadedModel:
    """An embedded model, in float32 on the CPU."""
    return load_model(model_spec({**compose([f"model={name}"])["model"], "device": "cpu"}))


def question(name: str, new: int) -> Request:
    """A question that the embedded models can answer."""
    return Request("perf", tuple(embedded(name).encode(QUESTION)), new, seed=1)


def decoder(name: str, *overrides: str) -> MaskedDecoder | SpeculativeDecoder:
    """The decoder of a yaml file, with overrides."""
    plain = compose([f"decoder={name}", *overrides])["decoder"]
    found: MaskedDecoder | SpeculativeDecoder = instantiate(
        {key: value for key, value in plain.items() if key != "name"}
    )
    return found


def special(vocab: int) -> SpecialTokens:
    """Mask and EOS: the last two ids of the vocabulary."""
    return SpecialTokens(mask=vocab - 1, eos=vocab - 2)


def request(prompt: int, new: int, vocab: int) -> Request:
    """A prompt of random ordinary tokens, the same at every call."""
    ids = torch.randint(5, vocab - 8, (prompt,), generator=torch.Generator().manual_seed(1))
    return Request("perf", tuple(ids.tolist()), new, seed=1)


def random_model(
    vocab: int,
    shape: dict[str, int],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
) -> TransformerDenoiser:
    """Dream's architecture in the given shape, with rows that predict their own position."""
    from dllm_bench.models.acceleration import quantize

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
    return TransformerDenoiser(module, special(vocab), shifted=False)


class Table(Denoiser):
    """The same stored logits (K, R, V) at every forward; no row is copied and no layer is run."""

    picks_rows = False

    def __init__(self, vocab: int, branches: int, rows: int) -> None:
        self.special, self.vocab_size, self.device = special(vocab), vocab, torch.device("cpu")
        generator = torch.Generator().manual_seed(2)
        self.logits_KRV = torch.randn(branches, rows, vocab, generator=generator)

    def new_cache(self, length: int) -> PositionCache:
        return PositionCache(0, length)

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        assert isinstance(kv, PositionCache)
        kv.begin(plan, tokens_KL.shape[1])
        kv.hold(plan, tokens_KL[:, slice(*plan.feed), None])
        return self.logits_KRV[: len(tokens_KL), : plan.rows[1] - plan.rows[0]]
