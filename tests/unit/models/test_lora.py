"""LoRA adapters: merged as peft merges them, unmerged as peft runs them, or an error."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.load import load_model
from dllm_bench.models.sources import content_hash
from tests.helpers import tiny_checkpoint, tiny_config, tiny_denoiser, tiny_weights
from tests.unit.models.common import PARAMETER, logits, resident, spec, tensors


def test_a_merge_equals_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = tiny_checkpoint("dream", tmp_path / "base", 5)
    base = tiny_denoiser("dream", seed=5)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(base.module, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ours = load_model(spec(folder, lora=str(tmp_path / "adapter"))).denoiser.module.state_dict()
    theirs = adapted.merge_and_unload().state_dict()
    before = tiny_weights("dream", 5, tiny_config("dream"))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-6, rtol=1e-6)
        is_target = any(f"{target}.weight" in name for target in targets)
        assert torch.equal(ours[name], before[name]) != is_target


def write_adapter(path: Path, key: str, sides: tuple[Tensor, Tensor], **changes: Any) -> Path:
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"} | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    stem = f"base_model.model.{key.removesuffix('.weight')}"
    pair = {f"{stem}.lora_{side}.weight": t for side, t in zip("AB", sides, strict=True)}
    save_file(pair, path / "adapter_model.safetensors")
    return path


def test_an_adapter_uses_the_published_names(layout: str, folder: Path, tmp_path: Path) -> None:
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    adapter = write_adapter(tmp_path / "adapter", PARAMETER[layout], (down, up))
    merged = load_model(spec(folder, lora=str(adapter))).denoiser.module
    expected = tensors(folder)[PARAMETER[layout]] + 3 * up @ down
    torch.testing.assert_close(merged.model.layers[1].self_attn.o_proj.weight.data, expected)
    assert content_hash(spec(folder)) != content_hash(spec(folder, lora=str(adapter)))
    assert not resident(folder / "model.safetensors"), "weights are no longer parts of the file"
    whole = load_model(spec(folder))
    assert resident(folder / "model.safetensors"), whole.metadata


SIDES = torch.ones(2, 32), torch.ones(32, 2)
PART = {"target_modules": ["attn_out", "o_proj"]}
KEY = PARAMETER["dream"]
ABSENT = KEY.replace(".1.", ".0.").replace(".", r"\.")


@pytest.mark.parametrize(
    ("key", "sides", "changes", "words"),
    [
        (KEY, SIDES, {"use_dora": True}, "use_dora=True"),
        (KEY, (torch.ones(2, 31), SIDES[1]), {}, rf"{KEY} \(32, 31\)"),
        ("model.nothing.weight", SIDES, {}, "nothing"),
        (KEY, SIDES, {"r": 16}, "says r=16 and holds 1 pairs of rank 2;"),
        (KEY, None, {}, "holds 0 pairs of rank none;"),
        (KEY, SIDES, {"r": None}, "adapter_config.json has no 'r'"),
        (KEY, SIDES, PART, rf"holds no pair for \({ABSENT}\)"),
        (KEY, SIDES, {**PART, "layers_to_transform": [1]}, None),
    ],
)
def test_an_adapter_that_a_merge_would_get_wrong_is_refused(
    key: str, sides: Any, changes: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    """Among them a scale for another rank, no pairs, a listed module without one in a layer."""
    folder = tiny_checkpoint("dream", tmp_path / "base", 5)
    adapter = write_adapter(tmp_path / "adapter", key, sides or SIDES, **changes)
    if sides is None:
        save_file({}, adapter / "adapter_model.safetensors")
    with nullcontext() if words is None else pytest.raises(DllmBenchError, match=words):
        load_model(spec(folder, lora=str(adapter)))


def test_an_unmerged_adapter_equals_the_merged_one(layout, folder, tmp_path) -> None:
    sides = torch.randn(2, 32), torch.randn(32, 2)
    adapter = write_adapter(tmp_path / "adapter", PARAMETER[layout], sides, use_rslora=True)
    merged = load_model(spec(folder, lora=str(adapter)))
    unmerged = load_model(spec(folder, lora=str(adapter), merge_lora=False))
    torch.testing.assert_close(logits(unmerged), logits(merged), atol=1e-4, rtol=1e-4)
    assert (logits(unmerged) - logits(load_model(spec(folder)))).abs().max() > 1e-2
    layer = unmerged.denoiser.module.model.layers[1].self_attn.o_proj
    assert torch.equal(layer.base_layer.weight, tensors(folder)[PARAMETER[layout]])
    assert unmerged.metadata.parameters == merged.metadata.parameters + 2 * 2 * 32


def test_an_adapter_on_a_fused_tensor_must_be_merged(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path / "base", seed=5)
    name = "model.layers.1.attention.query_key_value.weight"
    rows, columns = tensors(folder)[name].shape
    sides = torch.randn(2, columns), torch.randn(rows, 2)
    adapter = write_adapter(tmp_path / "adapter", name, sides)
    merged = load_model(spec(folder, lora=str(adapter))).denoiser.module.model.layers[1].self_attn
    whole = tensors(folder)[name] + 3 * sides[1] @ sides[0]
    found = torch.cat([getattr(merged, f"{side}_proj").weight for side in "qkv"])
    torch.testing.assert_close(found, whole)
    with pytest.raises(DllmBenchError, match="query_key_value.*merge_lora: true"):
        load_model(spec(folder, lora=str(adapter), merge_lora=False))
