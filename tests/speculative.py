"""Helpers of the speculative decoding tests: drafters, scripted random numbers.

`write_drafter` writes a random checkpoint in one of the published dialects; `scripted` gives a
decoder its random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, Uniforms
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.models.drafters import empty_network, freeze_tables
from tests.helpers import IDS, LAYERS, STANDARD, tiny_checkpoint, with_method

MASK = IDS["<|mask|>"]
SHARED: dict[str, Any] = {
    **STANDARD,
    "model_type": "qwen3",
    "head_dim": 16,
    "attention_bias": False,
    "num_hidden_layers": 2,
    "num_target_layers": LAYERS,
}
DEEPSPEC: dict[str, Any] = {
    **SHARED,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 0],
    "markov_rank": 0,
    "enable_confidence_head": False,
}
DSPARK: dict[str, Any] = {
    **DEEPSPEC,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2: dict[str, Any] = {
    **SHARED,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "block_size": 6,
        "mask_token_id": MASK,
        "target_layer_ids": [0],
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 8,
        "selector_top_k": 5,
    },
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": DEEPSPEC,
    "dflash_zlab": {
        **SHARED,
        "architectures": ["DFlashDraftModel"],
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]},
    },
    "dflash2": DFLASH2,
    "dflash2_sliding": {
        **DFLASH2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "dflash_config": {
            **DFLASH2["dflash_config"],
            "input_embedding_scale": 1.5,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        },
    },
    "dspark": DSPARK,
    "dspark_gated": {**DSPARK, "markov_head_type": "gated"},
    "dspark_rnn": {**DSPARK, "markov_head_type": "rnn"},
    "dspark_plain_confidence": {**DSPARK, "confidence_head_with_markov": False},
    "eagle3": {
        **SHARED,
        "architectures": ["Qwen3Eagle3Model"],
        "num_hidden_layers": 1,
        "target_layer_ids": [0, 1],
        "ttt_length": 5,
    },
}


def write_drafter(folder: Path, config: dict[str, Any], seed: int = 0) -> str:
    """Write a checkpoint folder with random weights; return its path as a source."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, like in empty_network(config).state_dict().items():
        noise = torch.randn(like.shape, generator=generator)
        scale = 0.3 if name.endswith("bias") else 2.0 / like.shape[-1] ** 0.5
        weights[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else scale * noise
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def generate_batch(decoder: Any, target: Any, requests: Sequence[Request]) -> list[Generation]:
    """Decode requests with distinct ids in one batch; results in the order of the requests."""
    found = decoder.generate_stream(target, requests, len(requests))
    return sorted(found, key=lambda one: [r.id for r in requests].index(one.request_id))


def trainable(folder: Path) -> Any:
    """Return a drafter's network in float32 as training has it, from its folder."""
    from safetensors.torch import load_file

    network = empty_network(json.loads((folder / "config.json").read_text()))
    network.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    return freeze_tables(network)


def with_drafter(decoder: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configured decoder whose draft, where it reads a checkpoint, reads a random one."""
    found = deepcopy(decoder)
    draft = found.get("draft", {})
    if "drafter" in draft:
        kind = draft["_target_"].rpartition(".")[2].lower()
        source = (
            str(tiny_checkpoint("qwen3", folder, 1))
            if kind == "modeldraft"
            else write_drafter(folder, DRAFTERS["dflash" if kind == "ddtree" else kind])
        )
        draft["drafter"]["source"] = source
    return found


def scripted(
    plain: SpeculativeDecoder, script: Sequence[float], **changes: Any
) -> SpeculativeDecoder:
    """Return a decoder with given uniform numbers, and some other pieces."""

    def uniforms(self: Any, request: Request, device: torch.device) -> Uniforms:
        numbers = iter(script)
        return lambda n: torch.tensor(
            [next(numbers) for _ in range(n)], dtype=torch.float64, device=device
        )

    made: SpeculativeDecoder = with_method(replace(plain, **changes), "uniforms", uniforms)
    return made


@dataclass(frozen=True)
class FromDistribution(Draft):
    """Drafts from one fixed distribution, whatever the text.

    `probabilities` None: repeats the last token, which is always wrong.
    """

    tokens: int
    probabilities: tuple[float, ...] | None = None

    @property
    def longest(self) -> int:
        return self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        if self.probabilities is None:
            return Proposal(context.tokens_L[-1:].repeat(self.tokens))
        logits_DV = torch.tensor([self.probabilities] * self.tokens).log()
        return Proposal(*sampler.sample(logits_DV))


class Chain(Denoiser):
    """A target whose next token depends on the last one alone: a table, no network."""

    def __init__(self, special: Any, table_VV: Tensor) -> None:
        from dllm_bench.models.kv import PositionCache

        self.special, self.table_VV = special, table_VV
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.vocab_size, self.attention_form = len(table_VV), "causal"
        self.new_cache = lambda length: PositionCache(0, length)

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        kv.begin(plan, tokens_KL.shape[1])
        kv.hold(plan, tokens_KL[:, slice(*plan.feed), None])
        before_KR = tokens_KL[:, plan.rows[0] - 1 : plan.rows[1] - 1]
        if plan.added is not None:
            before_KR = torch.cat([before_KR, plan.added.tokens_E[None]], dim=1)
        return self.table_VV[before_KR].log()
