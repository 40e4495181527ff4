"""A checkpoint in a folder of one's own, in the commands that take a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dllm_bench.api.compose import check_folder, compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import assets_dir
from dllm_bench.store.groups import ModelGroup


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an embedded model's files elsewhere, in a folder whose name needs quoting."""
    return shutil.copytree(assets_dir() / "tiny-llada", tmp_path / "my model, v2")


def test_a_folder_is_a_model_with_its_name(folder: Path) -> None:
    for overrides in ([f"model='{folder}'"], ["model=llada-instruct", f"model.path='{folder}'"]):
        model = compose(overrides)["model"]
        assert (model["name"], model["path"]) == (folder.name, str(folder))
    own, shipped = compose([f"model='{folder}'"])["model"], compose(["model=tiny-llada"])["model"]
    assert {key for key in shipped if own[key] != shipped[key]} == {"name", "path"}
    given = ["model.mask_token=X", "model.merge_lora=false", f"model='{folder}'", "model.name=mine"]
    assert compose(given)["model"] == own | {"name": "mine", "mask_token": "X", "merge_lora": False}
    assert compose(["model=GSAI-ML/LLaDA-8B-Instruct"])["model"]["name"] == "llada-instruct"


def test_the_folder_of_a_lora_adapter_is_the_model_it_adapts(folder: Path, tmp_path: Path) -> None:
    adapter, base_of = tmp_path / "adapter", {"base_model_name_or_path": str(folder)}
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(base_of))
    model, base = (compose([f"model='{one}'"])["model"] for one in (adapter, folder))
    assert model == {**base, "name": "adapter", "lora": str(adapter)}
    named = compose(["model=SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora"])
    assert named["model"]["name"] == "d2f-dream-base"
    absent = '{"base_model_name_or_path": "owner/base"}'
    told = f"adapter of 'owner/base', which was not .*model.lora={adapter}"
    none = "holds a LoRA adapter.*model=BASE"
    for text, words in (("{}", none), ('{"base_model_name_or_path": ["x"]}', none), (absent, told)):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(DllmBenchError, match=words):
            compose([f"model='{adapter}'"])


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tokenizer.json", "a tokenizer"),  # added_tokens.json is left
        ("model.safetensors", "weights"),
        ("config.json", "holds no config.json"),
        ("mask", "model.mask_token=TEXT"),
        ("template", "model.chat=false"),
        ("adapter", r"\(5\), which no adapter reads"),
    ],
)
def test_what_a_folder_lacks_is_said(folder: Path, missing: str, words: str) -> None:
    def change(file: str, **entries: object) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **entries}))

    (folder / "added_tokens.json").write_text("{}")
    settings = {"name": "mine", "path": str(folder), "chat": missing == "template"}
    if missing == "mask":
        change("config.json", mask_token_id=None)
        change("tokenizer_config.json", mask_token=None)
    elif missing == "adapter":
        change("config.json", model_type="gpt2", architectures=5)
    elif missing != "template":
        (folder / missing).unlink()
    with pytest.raises(DllmBenchError, match=words):
        check_folder(ModelGroup(settings))


def test_doctor_and_prefetch_take_folders(folder: Path, command) -> None:
    fetched = command("prefetch", f"model='{folder}'", "--to", f"{folder.parent}", here=False)
    assert "nothing to fetch" in fetched and "manifest" not in fetched
    said = command("doctor", str(folder), "model.chat=false", "hardware.dtype=bfloat16")
    assert "plain prompts" in said and "run in bfloat16" in said
