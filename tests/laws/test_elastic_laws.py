"""Laws of Elastic-Cache, against a second statement of it that keeps hidden states by layer.

There is no recorded run of it. The statement shares no line with the cache or with `RowLayer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.row_caches import ElasticCache
from tests.helpers import Watched, tiny_denoiser

NEW, LAYERS = 24, 4
REQUEST = Request("elastic", tuple(range(3, 14)), NEW)
PROMPT = len(REQUEST.prompt_ids)
TOTAL = PROMPT + NEW
BASE = MaskedDecoder(Confidence(), Threshold(0.95), Blocks(None), NoCache())


@pytest.fixture(scope="module", params=("llada", "dream"))
def model(request: pytest.FixtureRequest) -> Any:
    size = "n_layers" if request.param == "llada" else "num_hidden_layers"
    return tiny_denoiser(request.param, 1, **{size: LAYERS})


def elastic(window: int, gamma: float) -> MaskedDecoder:
    return replace(BASE, cache=ElasticCache(window, gamma))


@dataclass
class Restated:
    """Elastic-Cache's forward (Algorithm 1), one row after another."""

    module: Any
    gamma: float
    hidden: list[Tensor] = field(default_factory=list)
    """Input of each layer, and the output of the last, (X, H)."""
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    tracked: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    """Token of each layer, and what each row gave to it."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: list[int], decoded: list[int]) -> tuple[Tensor, float]:
        """Return the last hidden states and the mean number of rows that a layer computed."""
        body, length, first = self.module.model, len(tokens), not self.hidden
        fresh = body.embed_tokens(tokens)
        rotation = body.rotary_emb(fresh[None], torch.arange(length)[None])
        if first:
            self.hidden = [torch.zeros_like(fresh) for _ in range(len(body.layers) + 1)]
            self.keys, self.values = ([torch.zeros(0)] * len(body.layers) for _ in range(2))
        whole, count, before, self.tracked = first, 0, self.tracked, []
        chosen = [*range(length)] if first else rows
        self.hidden[0][chosen] = fresh[chosen]
        for index, layer in enumerate(body.layers):
            chosen = [*range(length)] if whole else rows
            count += len(chosen)
            weights_AXX = self._layer(index, layer, chosen, rotation)
            mean_RX = weights_AXX.mean(0)[[chosen.index(row) for row in rows]]
            if not whole:
                token, old = before[index]
                both = [row for row in rows if row in old]
                new = mean_RX[[rows.index(row) for row in both], token]
                similar = cosine_similarity(new, torch.tensor([old[row] for row in both]), dim=0)
                whole = not both or bool(similar < self.gamma)
            token = max(decoded, key=lambda position: float(mean_RX[:, position].sum()))
            self.tracked.append((token, dict(zip(rows, mean_RX[:, token].tolist(), strict=True))))
        return self.hidden[-1], count / len(body.layers)

    def _layer(self, index: int, layer: Any, rows: list[int], rotation: Any) -> Tensor:
        """Compute rows of a layer; their attention weights (A, R, X)."""
        attention, before = layer.self_attn, self.hidden[index]
        normed = layer.input_layernorm(before[rows])
        query, key, value = (
            part(normed).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)[None]
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *(part[:, rows] for part in rotation))
        if len(self.keys[index]) == 0:
            self.keys[index], self.values[index] = key[0].clone(), value[0].clone()
        self.keys[index][:, rows], self.values[index][:, rows] = key[0], value[0]
        repeats = query.shape[1] // key.shape[1]
        keys, values = (s[index].repeat_interleave(repeats, 0) for s in (self.keys, self.values))
        weights = (query[0] @ keys.mT * attention.head_dim**-0.5).softmax(-1)
        middle = before[rows] + attention.o_proj((weights @ values).transpose(0, 1).flatten(1))
        self.hidden[index + 1][rows] = middle + layer.mlp(layer.post_attention_layernorm(middle))
        return weights


class Compared(Watched):
    """A model whose every forward is compared with the restatement."""

    def __init__(self, model: Any, gamma: float) -> None:
        super().__init__(model)
        self.restated = Restated(model.module, gamma)
        self.rows: list[float] = []
        self.tracked: list[list[int]] = []

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: Any) -> Tensor:
        logits_KRV = super().forward(tokens_KL, plan, kv)
        tokens, rows = tokens_KL[0], plan.recompute.always_R.tolist()
        decoded = (tokens != self.special.mask).nonzero()[:, 0].tolist()
        hidden, count = self.restated.forward(tokens, rows, decoded)
        row = torch.arange(*plan.rows)[plan.scored_M] - int(self.model.shifted)
        with torch.inference_mode():
            logits = self.model.module.lm_head(self.model.module.model.norm(hidden[row]))
        torch.testing.assert_close(logits_KRV[0, plan.scored_M], logits, atol=2e-5, rtol=2e-5)
        assert kv.work.rows == pytest.approx(count, abs=1e-3)
        self.tracked.append([token for token, _ in self.restated.tracked])
        self.rows.append(kv.work.rows)
        return logits_KRV


@pytest.mark.parametrize("window", [4, 99])
@pytest.mark.parametrize("gamma", [0.0, 0.999, 2.0])
def test_every_forward_is_that_of_the_algorithm(model: Any, window: int, gamma: float) -> None:
    compared = Compared(model, gamma)
    elastic(window, gamma).generate(compared, REQUEST)
    first, *others = compared.rows
    assert len(others) > 2
    fed = [len(plan.recompute.always_R) for plan in compared.plans[1:]]
    assert first == TOTAL and max(fed) < TOTAL
    if gamma == 0:  # nothing drifts
        assert others == fed
    if gamma > 1:  # every layer does, the first included
        assert others == pytest.approx([(n + (LAYERS - 1) * TOTAL) / LAYERS for n in fed])
    if (gamma, window) == (0.999, 99):  # layers drift at different depths
        pairs = zip(others, fed, strict=True)
        assert len({round((rows - n) / (TOTAL - n) * LAYERS) for rows, n in pairs}) > 1


@pytest.mark.parametrize("window", [1, 4, 99])
def test_a_window_of_masks_moves_over_the_canvas(model: Any, window: int) -> None:
    """Computed are its masks and their rows, what was just committed, and the tracked tokens."""
    compared = Compared(model, 0.9)
    born = [-2] * PROMPT + list(elastic(window, 0.9).generate(compared, REQUEST).born)
    for now, plan in enumerate(compared.plans):
        masks = [p for p, forward in enumerate(born) if forward >= now][:window]
        assert torch.arange(*plan.rows)[plan.scored_M].tolist() == masks
        assert {p for p, forward in enumerate(born) if forward == now} <= set(masks)
        rows = {*masks, *(p - int(model.shifted) for p in masks)}
        if now:
            rows |= {p for p, forward in enumerate(born) if forward == now - 1}
            rows |= {*compared.tracked[now - 1]}
        assert plan.recompute.always_R.tolist() == sorted(rows)


def test_blocks_limit_the_window(model: Any) -> None:
    decoder, watched = replace(elastic(99, 0.9), schedule=Blocks(8)), Compared(model, 0.9)
    born = decoder.generate(watched, REQUEST).born
    assert all(max(one) < min(other) for one, other in pairwise([born[:8], born[8:16], born[16:]]))
    kinds = [ForwardKind.PREFILL] + [ForwardKind.DENOISE] * (len(watched.plans) - 1)
    assert [plan.kind for plan in watched.plans] == kinds
