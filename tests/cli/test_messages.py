"""Messages of mistakes: they name what the user can write, never a file of the package."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.cli.main import COMMANDS
from dllm_bench.core.errors import SHOWN, DllmBenchError, unknown_name
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.paths import assets_dir

Capture = pytest.CaptureFixture[str]
MASK_TEXT = "<|mask|>"


def test_of_many_names_the_nearest_five_are_shown() -> None:
    known = [f"model-{number}" for number in range(90)]
    message = unknown_name("model", "model-7x", known, listing="dllm-bench run --help")
    assert message.count("model-") == SHOWN + 1 + 1  # those shown, the asked one, the question
    assert "the nearest of 90; `dllm-bench run --help` lists them" in message
    assert "did you mean 'model-7'" in message


def test_a_mask_token_is_given_as_its_text() -> None:
    for text in (f"model.mask_token={MASK_TEXT}", f"model.mask_token='{MASK_TEXT}'"):
        assert compose(["model=tiny-llada", text])["model"]["mask_token"] == MASK_TEXT


def test_a_lora_folder_whose_base_is_absent_is_told_how_to_name_it(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "owner/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DllmBenchError, match="adapter of 'owner/base', which was not") as error:
        db.load_model(tmp_path)
    assert f"model.lora={tmp_path}" in str(error.value)


def test_an_autoregressive_layout_is_told_how_to_be_a_diffusion_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(assets_dir() / "tiny-qwen3", folder)
    with pytest.raises(DllmBenchError, match=r"model\.attention_form=full"):
        db.generate(folder, "Tom has 3 apples.", "vanilla", 32)
    model = db.load_model(folder, attention_form="full")
    assert len(db.generate(model, "Tom has 3 apples.", "vanilla", 32)) == 1


@pytest.mark.parametrize("adapter", ["dream", "sdar", "llada_moe", "llada2"])
def test_a_rotary_embedding_that_is_spelled_out_as_usual_is_accepted(adapter: str) -> None:
    layout = ADAPTERS[adapter]
    for usual in (None, {"rope_type": "default"}, {"type": "default"}):
        layout.check({"rope_scaling": usual})
    with pytest.raises(DllmBenchError, match="rope_scaling"):
        layout.check({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


def test_messages_name_only_commands_that_there_are() -> None:
    texts = [path.read_text() for path in Path(db.__file__).parent.rglob("*.py")]
    named = re.findall(r"`dllm-bench ([a-z][a-z-]*)", " ".join(texts))
    assert {"run", "status"} < set(named) <= set(COMMANDS)
