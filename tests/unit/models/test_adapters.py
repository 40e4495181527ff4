"""Models as transformers saves them against transformers' own whole models; published sizes.

Causal models are fed in pieces too; Gemma's sliding windows end within the text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.checkpoint import published_shapes, shapes_of
from tests.helpers import VOCAB, load_denoiser
from tests.unit.models.forms import (
    FIRST,
    LENGTH,
    RELATIVE,
    canvas,
    gap,
    ours,
    respell,
    step,
)

PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "data/published_sizes.yaml").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_give_published_parameter_counts(name: str) -> None:
    """On the meta device: nothing is allocated, and names of all tensors are worked out."""
    published = PUBLISHED[name]
    adapter = ADAPTERS[published["adapter"]]
    with torch.device("meta"):
        module = adapter.build(published["sizes"], "sdpa")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert round(parameters / 1e9, 3) == published["billions"]
    expected = published_shapes(adapter, shapes_of(module))
    buffers = sum(b.numel() for n, b in module.named_buffers() if n in shapes_of(module))
    assert sum(math.prod(shape) for shape in expected.values()) == parameters + buffers


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "pad_token_id": 1,
}


def qwen2() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1e6}
    tied = {"tie_word_embeddings": True, "rope_parameters": rope}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **tied, num_hidden_layers=2))


def qwen3() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {**SIZES, "head_dim": 16, "rope_parameters": rope}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=2))


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, num_hidden_layers=2))


def gemma4() -> torch.nn.Module:
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = {
        **SIZES,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 6,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "final_logit_softcapping": 5.0,
    }
    vision = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 4, "patch_size": 2}
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}
    )
    return Gemma4UnifiedForConditionalGeneration(config)


@pytest.mark.parametrize("make", [qwen2, qwen3, llama, gemma4], ids=lambda make: make.__name__)
def test_a_model_saved_by_transformers_is_the_same_here(make: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert callable(make)
    theirs = make().eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))
    model = load_denoiser(tmp_path)
    tokens_1L = torch.randint(4, VOCAB, (1, LENGTH))
    with torch.inference_mode():
        expected = theirs(tokens_1L).logits[0].double()
    assert model.attention_form == "causal"
    assert gap(ours(model, tokens_1L, "causal"), expected) < RELATIVE
    kv, outputs = model.new_cache(LENGTH), []
    for start, stop in ((0, 9), (9, 10), (10, 17), (17, LENGTH)):
        plan = step("causal", (start, stop), (start + 1, stop + 1), (start, stop))
        outputs.append(model.forward(tokens_1L, plan, kv)[0])
        kv.keep(plan, FIRST)
    assert gap(torch.cat(outputs), expected) < RELATIVE


def test_gemma_with_the_config_keys_of_its_release(tmp_path: Path) -> None:
    """Its config.json has the sizes of global layers flat, transformers 5 writes them nested."""
    torch.manual_seed(0)
    theirs = gemma4().eval()
    theirs.save_pretrained(str(tmp_path))
    nested = ours(load_denoiser(tmp_path), canvas(), "causal")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    del text["per_layer_config"]
    respell(tmp_path, text_config={**text, "global_head_dim": 16, "num_global_key_value_heads": 1})
    assert torch.equal(ours(load_denoiser(tmp_path), canvas(), "causal"), nested)
    respell(tmp_path, text_config={**text, "global_head_dim": 16, "num_kv_shared_layers": 2})
    with pytest.raises(DllmBenchError, match="num_kv_shared_layers=2"):
        load_denoiser(tmp_path)
