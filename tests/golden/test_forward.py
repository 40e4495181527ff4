"""Forwards on the golden checkpoints: Dream's recorded logits, LLaDA's recorded decisions.

Dream stores one raw (unshifted) forward. LLaDA stores no logits, so every token its vanilla
sampler wrote must be the argmax here, and logits must equal a plain `LlamaForCausalLM` with
tensors renamed as the reference notes say and a zero mask.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import DEVICE, load_denoiser

TOLERANCE = 1e-4
RENAMED = (
    ("model.transformer.wte.", "model.embed_tokens."),
    ("model.transformer.ln_f.", "model.norm."),
    ("model.transformer.ff_out.", "lm_head."),
    ("model.transformer.blocks.", "model.layers."),
    (".attn_norm.", ".input_layernorm."),
    (".ff_norm.", ".post_attention_layernorm."),
    (".attn_out.", ".self_attn.o_proj."),
    (".q_proj.", ".self_attn.q_proj."),
    (".k_proj.", ".self_attn.k_proj."),
    (".v_proj.", ".self_attn.v_proj."),
    (".ff_proj.", ".mlp.gate_proj."),
    (".up_proj.", ".mlp.up_proj."),
    (".ff_out.", ".mlp.down_proj."),
)


@pytest.fixture(scope="module")
def llada(golden: Path) -> TransformerDenoiser:
    return load_denoiser(golden / "llada")


def cases(golden: Path, file: str, method: str) -> list[dict]:
    found = json.loads((golden / file).read_text())
    return [case for case in found if case["method"] == method]


def forward(model: TransformerDenoiser, tokens_KL: Tensor) -> Tensor:
    """Return logits of every position, all fed, nothing cached."""
    length = tokens_KL.shape[1]
    plan = ForwardPlan(ForwardKind.DENOISE, (0, length), (0, length), (0, 0))
    return model.forward(tokens_KL, plan, model.new_cache(length))


def test_dream_logits(golden: Path) -> None:
    model = load_denoiser(golden / "dream")
    recorded = cases(golden, "dream/dream_cases.json", "forward")
    assert recorded
    for case in recorded:
        logits_LV = forward(model, torch.tensor([case["prompt"]], device=DEVICE))[0].cpu()
        raw_LV = torch.tensor(case["logits"])
        torch.testing.assert_close(logits_LV[1:], raw_LV[:-1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(logits_LV[0], raw_LV[0], atol=TOLERANCE, rtol=0)
        assert logits_LV[1:].argmax(-1).tolist() == case["output"][:-1]
        top_L = logits_LV[1:].softmax(-1).amax(-1)
        torch.testing.assert_close(
            top_L, torch.tensor(case["top1_prob"][:-1]), atol=TOLERANCE, rtol=0
        )


def test_llada_vanilla_writes_the_argmax(golden: Path, llada: TransformerDenoiser) -> None:
    written = 0
    for case in cases(golden, "llada/llada_cases.json", "llada_vanilla"):
        states = torch.tensor([*case["states"], case["prompt"] + case["output"]])
        for before_L, after_L in pairwise(states):
            new_L = before_L != after_L
            best_L = forward(llada, before_L[None])[0].argmax(-1)
            assert torch.equal(after_L[new_L], best_L[new_L])
            written += int(new_L.sum())
    assert written > 100


def test_llada_equals_a_renamed_llama(golden: Path, llada: TransformerDenoiser) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    published = json.loads((golden / "llada" / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=published["vocab_size"],
        hidden_size=published["d_model"],
        intermediate_size=published["mlp_hidden_size"],
        num_hidden_layers=published["n_layers"],
        num_attention_heads=published["n_heads"],
        rms_norm_eps=published["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": published["rope_theta"]},
    )
    plain = LlamaForCausalLM(config).eval()
    tensors = load_file(golden / "llada" / "model.safetensors")
    plain.load_state_dict({renamed(name): tensor for name, tensor in tensors.items()})
    case = cases(golden, "llada/llada_cases.json", "llada_vanilla")[-1]
    tokens_1L = torch.tensor([case["states"][len(case["states"]) // 2]])
    length = tokens_1L.shape[1]
    with torch.inference_mode():
        expected = plain(tokens_1L, attention_mask=torch.zeros(1, 1, length, length)).logits
    torch.testing.assert_close(forward(llada, tokens_1L), expected, atol=TOLERANCE, rtol=0)


def renamed(name: str) -> str:
    for old, new in RENAMED:
        if old in name and "self_attn" not in name and "mlp" not in name:
            name = name.replace(old, new)
    return name
