"""Special ids come from config.json, tokenizer and generation_config.json, which must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.load import load_model
from tests.helpers import (
    ROLES,
    tiny_checkpoint,
)
from tests.unit.models.common import edit, spec


def test_special_ids_must_agree(folder: Path) -> None:
    edit(folder / "config.json", mask_token_id=None)
    assert load_model(spec(folder)).special.mask == ROLES["mask"]
    edit(folder / "config.json", pad_token_id=4000)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    edit(folder / "config.json", mask_token_id=7)
    with pytest.raises(DllmBenchError, match="pad=4000 lie outside"):
        load_model(spec(folder))


def test_the_masks_text_is_checked(folder: Path) -> None:
    assert load_model(spec(folder, mask_token="<|mask|>")).special.mask == ROLES["mask"]
    with pytest.raises(DllmBenchError, match=f"'w5' has id 5, but .*mask_token_id={ROLES['mask']}"):
        load_model(spec(folder, mask_token="w5"))
    with pytest.raises(DllmBenchError, match=r"'<\|none\|>', which is no token"):
        load_model(spec(folder, mask_token="<|none|>"))


def unmasked(folder: Path) -> Path:
    """Return a checkpoint that names no mask token."""
    edit(folder / "config.json", mask_token_id=None)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in settings.items() if k != "mask_token"}))
    return folder


def test_a_checkpoint_that_names_no_mask(folder: Path) -> None:
    """LLaDA's and SDAR's tokenizers have the token without calling it the mask."""
    with pytest.raises(DllmBenchError, match="needs a mask token of its own"):
        load_model(spec(unmasked(folder)))
    assert load_model(spec(folder, mask_token="<|mask|>")).special.mask == ROLES["mask"]
    with pytest.raises(DllmBenchError, match=f"found mask={ROLES['eos']} with"):
        load_model(spec(folder, mask_token="<|endoftext|>"))


def test_a_causal_model_needs_no_mask(tmp_path: Path) -> None:
    folder = unmasked(tiny_checkpoint("qwen3", tmp_path, seed=5))
    special = load_model(spec(folder)).special
    assert special.mask == ROLES["mask"], "the last id that is no other special token"
    assert special.mask not in (special.eos, special.eot, special.pad, special.bos)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_model(spec(folder)).special.mask == ROLES["mask"]


def test_several_eos_ids(folder: Path) -> None:
    """Llama and Gemma name several in config.json, Qwen in generation_config.json."""
    edit(folder / "config.json", eos_token_id=[7, ROLES["eos"], ROLES["eot"]])
    assert load_model(spec(folder)).special.ends == (ROLES["eos"], ROLES["eot"])
    file = folder / "tokenizer_config.json"
    edit(file, eos_token="<|eot|>")
    assert load_model(spec(folder)).special.ends == (7, ROLES["eot"])
    edit(folder / "config.json", eos_token_id=ROLES["eot"])
    assert load_model(spec(folder)).special.ends == (ROLES["eot"],)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ROLES["eot"], ROLES["eos"]]})
    )
    assert load_model(spec(folder)).special.ends == (ROLES["eos"], ROLES["eot"])
    edit(folder / "config.json", eos_token_id=[7, 8])
    with pytest.raises(
        DllmBenchError, match=rf"eos_token_id=\[7, 8\], the tokenizer {ROLES['eot']}"
    ):
        load_model(spec(folder))
