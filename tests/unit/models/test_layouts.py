"""Every published layout, loaded through the real path, against a float64 implementation of it.

Also: the published names, written out; cached forwards; rotary embeddings in old and new keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.registry import instantiate
from tests.helpers import CONFIGS, load_denoiser, shard, tiny_checkpoint
from tests.unit.models.forms import (
    BLOCK,
    FIRST,
    FORMS,
    LENGTH,
    PROMPT,
    RELATIVE,
    canvas,
    gap,
    ours,
    respell,
    step,
)
from tests.unit.models.restated import restated

NEW = 12


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_loaded_checkpoint_is_the_published_architecture(layout: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(layout, tmp_path, seed=7)
    model = load_denoiser(folder)
    forms = ["causal"] if model.attention_form == "causal" else list(FORMS)
    expected = {form: restated(folder, canvas()[0].tolist(), FORMS[form]) for form in forms}
    for form in forms:
        assert gap(ours(model, canvas(), form), expected[form]) < RELATIVE
    if len(forms) > 1:
        assert gap(expected["full"], expected["block_causal"]) > 100 * RELATIVE


@pytest.mark.parametrize("layout", CONFIGS)
def test_sharded_checkpoints_are_the_same_model(layout: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(layout, tmp_path, seed=7)
    form = ADAPTERS[layout].attention
    whole = ours(load_denoiser(folder), canvas(), form)
    shard(folder)
    assert torch.equal(ours(load_denoiser(folder), canvas(), form), whole)


@pytest.mark.parametrize("layout", CONFIGS)
def test_cached_forwards_equal_the_uncached_one(layout: str, tmp_path: Path) -> None:
    """Block by block, each kept in the forward that also feeds the next one."""
    model = load_denoiser(tiny_checkpoint(layout, tmp_path, seed=7))
    causal = model.attention_form == "causal"
    form, origin, block = ("causal", 0, 3) if causal else ("block_causal", PROMPT, BLOCK)
    kv, tokens_1L = model.new_cache(LENGTH), canvas()
    whole = step(form, (0, LENGTH), (0, LENGTH), (0, 0))
    expected = model.forward(tokens_1L, whole, model.new_cache(LENGTH))
    for stop in range(origin + block, LENGTH + 1, block):
        retired = stop - block
        plan = step(form, (kv.length, stop), (retired, stop), (kv.length, retired))
        actual = model.forward(tokens_1L, plan, kv)
        kv.keep(plan, FIRST)
        torch.testing.assert_close(actual, expected[:, retired:stop], atol=2e-5, rtol=1e-4)
        assert kv.length == retired
        again = step(form, (retired, stop), (retired, stop), (retired, retired))
        if not causal and not model.shifted:
            torch.testing.assert_close(model.forward(tokens_1L, again, kv), actual)


HEADS = "model.embed_tokens model.norm lm_head"
ATTENTION = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
NORMED = f"{ATTENTION} self_attn.q_norm self_attn.k_norm post_attention_layernorm"
MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
NAMES = {  # a layer's tensors as published, and those outside of the layers
    "llada": (
        "model.transformer.blocks.1.",
        "attn_norm q_proj k_proj v_proj attn_out ff_norm ff_proj up_proj ff_out",
        "model.transformer.wte model.transformer.ln_f model.transformer.ff_out",
    ),
    "nemotron_diffusion": (
        "encoder.layers.1.",
        f"{ATTENTION} post_attention_layernorm {MLP}",
        "encoder.embed_tokens encoder.norm diffusion_head",
    ),
    **dict.fromkeys(("sdar", "wedlm"), ("model.layers.1.", f"{NORMED} {MLP}", HEADS)),
    **dict.fromkeys(
        ("sdar_moe", "llada_moe"), ("model.layers.1.", f"{NORMED} mlp.gate EXPERTS", HEADS)
    ),
    "llada2": (
        "model.layers.1.",
        "input_layernorm attention.query_key_value attention.query_layernorm "
        "attention.key_layernorm attention.dense post_attention_layernorm mlp.gate "
        "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj mlp.shared_experts.down_proj "
        "EXPERTS",
        "model.word_embeddings model.norm lm_head",
    ),
}


@pytest.mark.parametrize("layout", NAMES)
def test_tiny_checkpoints_have_the_published_names(layout: str, tmp_path: Path) -> None:
    """The names are spelled out here, so that helper and adapter cannot agree on wrong ones."""
    folder = tiny_checkpoint(layout, tmp_path, seed=7)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = set(file.keys())
    prefix, own, outside = NAMES[layout]
    experts = [f"mlp.experts.{e}.{s}_proj" for e in range(8) for s in ("gate", "up", "down")]
    parts = [p for part in own.split() for p in (experts if part == "EXPERTS" else [part])]
    expected = {f"{prefix}{part}.weight" for part in parts}
    if layout == "llada2":
        expected.add(f"{prefix}mlp.gate.expert_bias")
    assert {name for name in found if name.startswith(prefix)} == expected
    layer = prefix.removesuffix("1.")
    assert {n for n in found if not n.startswith(layer)} == {f"{n}.weight" for n in outside.split()}


AUTOREGRESSIVE = ("model.attention_form=causal", "model.block=null", "model.shifted=true")
SETTINGS = [  # yaml of a model, the layout of its weights, and its own decoder
    ("wedlm-8b", "wedlm", ["decoder=wedlm"]),
    ("wedlm-8b-instruct", "wedlm", ["decoder=wedlm_blocks"]),
    ("i-dlm-8b", "sdar", ["decoder=idlm"]),
    ("nemotron-labs-diffusion-8b", "nemotron_diffusion", ["decoder=nemotron", *AUTOREGRESSIVE]),
]


@pytest.mark.parametrize(("name", "layout", "settings"), SETTINGS)
def test_weights_of_2026_are_decoded_by_the_settings_of_their_yaml(
    name: str, layout: str, settings: list[str], tmp_path: Path
) -> None:
    """Without a warning; those that verify give the text of one token per forward."""
    path = str(tiny_checkpoint(layout, tmp_path, seed=7))
    config = compose([f"model={name}", *settings])
    own = {"path": path, "chat": False, "mask_token": None, "dtype": "float32", "device": "cpu"}
    loaded = load_model(ModelSpec(**{**config["model"], **own}))
    text = decoded(loaded, settings)
    assert len(text.ids) == NEW
    if loaded.attention_form == "causal":
        assert text.ids == decoded(loaded, ["decoder=ar_speculative"]).ids
    else:
        summary = made(settings).summary()
        assert loaded.attention_warning(str(summary.attention), summary.block or 0) is None
        assert loaded.attention_warning("block_causal", 16)


def made(settings: list[str]) -> Any:
    plain = compose(settings)["decoder"]
    return instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")


def decoded(loaded: LoadedModel, settings: list[str]) -> Generation:
    request = Request("settings", tuple(canvas()[0].tolist()), NEW)
    generation: Generation = made(settings).generate(loaded.denoiser, request)
    return generation


def test_wedlm_of_another_base_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("wedlm", tmp_path, seed=7, qk_norm=False)
    with pytest.raises(DllmBenchError, match="qk_norm=False, which the wedlm adapter"):
        load_denoiser(folder)


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_checkpoint_finds_its_adapter(layout: str) -> None:
    fits = [name for name, adapter in ADAPTERS.items() if adapter.recognises(CONFIGS[layout])]
    assert fits == [layout]


def test_the_selection_bias_stays_in_float32(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path, seed=7)
    spec = ModelSpec("tiny", str(folder), dtype="bfloat16", device="cpu")
    gate = load_model(spec).denoiser.module.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert gate.weight.dtype == torch.bfloat16


def test_experts_admitted_by_block_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path, seed=7, expert_capacity=4)
    with pytest.raises(DllmBenchError, match="expert_capacity=4, which the llada2_moe adapter"):
        load_denoiser(folder)


def test_an_unknown_architecture_is_not_told_to_name_another_adapter(tmp_path: Path) -> None:
    folder = tiny_checkpoint("sdar", tmp_path, seed=7)
    respell(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    for adapter in (None, "llada"):
        with pytest.raises(DllmBenchError) as raised:
            load_model(ModelSpec("tiny", str(folder), adapter=adapter))
        assert "'mamba' (MambaForCausalLM), which no adapter reads" in str(raised.value)
        assert "dllm_bench.wrap" in str(raised.value) and "correct" not in str(raised.value)
    respell(folder, model_type="sdar")
    with pytest.raises(DllmBenchError, match="set model.adapter=sdar"):
        load_model(ModelSpec("tiny", str(folder), adapter="llada"))


# --- rotary spellings ----------------------------------------------------------------------------


def test_old_and_new_keys_of_the_rotary_base_are_equal(tmp_path: Path) -> None:
    folder = tiny_checkpoint("sdar", tmp_path, seed=7, rope_theta=5000.0)
    old = ours(load_denoiser(folder), canvas(), "full")
    nested = {"rope_type": "default", "rope_theta": 5000.0}
    respell(folder, rope_theta="absent", rope_parameters=nested)
    assert torch.equal(ours(load_denoiser(folder), canvas(), "full"), old)
    respell(folder, rope_parameters={**nested, "rope_theta": 20000.0})
    assert gap(ours(load_denoiser(folder), canvas(), "full"), old) > 1e-3


@pytest.mark.parametrize("layout", CONFIGS)
def test_rotary_settings_that_disagree_or_are_unknown(layout: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(layout, tmp_path, seed=7)
    respell(folder, rope_theta=10000.0, rope_parameters={"rope_theta": 500000.0})
    with pytest.raises(DllmBenchError, match=r"rope_theta=10000.0 at its top level and 500000"):
        load_denoiser(folder)
    respell(folder, rope_parameters="absent", rope_theta="absent")
    with pytest.raises(DllmBenchError, match="no 'rope_theta'"):
        load_denoiser(folder)
    respell(folder, rope_theta=1e4, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(DllmBenchError, match="dynamic"):
        load_denoiser(folder)
