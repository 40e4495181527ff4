"""Models for timing the loops: embedded ones, shapes for random weights, and stored logits.

`Table` returns stored logits, so that only the loop's own time is left.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dllm_bench.api.compose import compose
from dllm_bench.api.random_model import special
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.registry import instantiate
from dllm_bench.store.inputs import model_spec

EMBEDDED = {"width": 128, "layers": 4, "heads": 4, "mlp": 384}  # as the embedded models
WIDE = {"width": 768, "layers": 8, "heads": 12, "mlp": 2048}  # of a small published model's width
QWEN_05B = {"width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp": 4864}  # Qwen2.5-0.5B


QUESTION = """\
Question: Tom has 12 apples. He buys 4 times as many apples as he has. Then he gives 15 apples to \
Amy and shares the rest equally with 2 friends. How many apples does Tom have now?
Answer:"""


@cache
def embedded(name: str) -> LoadedModel:
    """Return an embedded model, in float32 on the CPU."""
    return load_model(model_spec({**compose([f"model={name}"])["model"], "device": "cpu"}))


def question(name: str, new: int) -> Request:
    """Return a question that the embedded models can answer."""
    return Request("perf", tuple(embedded(name).encode(QUESTION)), new, seed=1)


def decoder(name: str, *overrides: str) -> MaskedDecoder | SpeculativeDecoder:
    """Return the decoder of a yaml file, with overrides."""
    plain = compose([f"decoder={name}", *overrides])["decoder"]
    found: MaskedDecoder | SpeculativeDecoder = instantiate(
        {k: v for k, v in plain.items() if k != "name"}, "decoder"
    )
    return found


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
