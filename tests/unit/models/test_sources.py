"""`prefetch` and its manifest, with a fake download that writes a snapshot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import sources
from dllm_bench.models.load import load_model
from dllm_bench.models.spec import ModelSpec
from tests.helpers import tiny_checkpoint
from tests.unit.models.common import edit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the hub: every repository is a tiny Dream; what was asked of it."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(hub_id: str, **wanted: Any) -> str:
        asked.append({"hub_id": hub_id, **wanted})
        repository = f"models--{hub_id.replace('/', '--')}"
        folder = Path(wanted["cache_dir"]) / repository / "snapshots" / COMMIT
        if "Lora" in hub_id:
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text("{}")
            save_file({}, folder / "adapter_model.safetensors")
        elif "Pickled" in hub_id:
            folder.mkdir(parents=True)
        else:
            tiny_checkpoint("dream", folder, seed=5)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": "some-org/Dream", "revision": "main"} | changes)


def test_models_and_lora_adapters_are_downloaded_once_and_listed(hub, tmp_path) -> None:
    specs = [spec(), spec(name="n", lora="some-org/Lora"), spec(path="assets/tiny-llada")]
    found = dict(sources.prefetch(specs, tmp_path / "cache"))
    assert [asked["hub_id"] for asked in hub] == ["some-org/Dream", "some-org/Lora"]
    assert hub[0]["revision"] == "main"
    assert not [p for p in hub[0]["allow_patterns"] if p.endswith((".bin", ".py", ".pt"))]
    assert found["assets/tiny-llada"] is None
    manifest = json.loads((tmp_path / "cache" / sources.MANIFEST).read_text())
    assert set(manifest) == {"some-org/Dream", "some-org/Lora"}
    assert manifest["some-org/Dream"]["commit"] == COMMIT
    files = manifest["some-org/Dream"]["files"]
    weights = f"models--some-org--Dream/snapshots/{COMMIT}/model.safetensors"
    assert files[weights]["size"] == (tmp_path / "cache" / weights).stat().st_size
    assert (
        load_model(spec(path=str(found["some-org/Dream"]), device="cpu")).metadata.revision
        == COMMIT
    )


def test_a_copied_cache_is_verified(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    list(sources.prefetch([spec()], tmp_path / "cache"))
    cache = Path(shutil.move(tmp_path / "cache", tmp_path / "cluster"))
    assert list(sources.verify_manifest(cache)) == [("some-org/Dream", [])]
    folder = cache / "models--some-org--Dream" / "snapshots" / COMMIT
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    ((_, wrong),) = sources.verify_manifest(cache)
    assert sorted(w.partition(" has ")[0].partition(" is ")[0] for w in wrong) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert "model.safetensors has other content" in wrong
    with pytest.raises(DllmBenchError, match=sources.MANIFEST):
        list(sources.verify_manifest(tmp_path))


def test_an_imported_model_of_a_given_file_is_identified_without_it(tmp_path, monkeypatch) -> None:
    """So that stored runs of it are found, and tables rendered, where it was never imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = "a" * 64, "b" * 64
    imported = spec(path="imported/tiny", revision=one)
    hashed = sources.content_hash(imported)
    assert hashed != sources.content_hash(spec(path="imported/tiny", revision=other))
    with pytest.raises(DllmBenchError, match="make real"):
        load_model(imported)
    folder = tiny_checkpoint("dream", tmp_path / "dllm-bench" / "imported" / "tiny", seed=5)
    assert sources.content_hash(imported) == hashed
    with pytest.raises(DllmBenchError, match=f"not imported from the file whose sha256 is {one}"):
        load_model(imported)
    edit(folder / "config.json", imported_from={"file": "tiny.gguf", "sha256": one})
    assert load_model(spec(path="imported/tiny", revision=one, device="cpu")).denoiser


def test_what_cannot_be_downloaded_is_one_message(hub, tmp_path, monkeypatch) -> None:
    with pytest.raises(DllmBenchError, match=r"lacks model\.safetensors"):
        list(sources.prefetch([spec(path="some-org/Pickled")], tmp_path))

    def refuse(hub_id: str, **wanted: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DllmBenchError, match=r"cannot be downloaded \(no route to host\)"):
        sources.download_snapshot("some-org/Dream", None, tmp_path)


def test_the_command(hub: list[dict[str, Any]], tmp_path: Path, capsys: Capture) -> None:
    arguments = ["prefetch", "--to", str(tmp_path / "cache")]
    assert main([*arguments, "model=d2f-dream-base", "dream-base", "tiny-llada"]) == 0
    printed = capsys.readouterr().out
    assert "Dream-org/Dream-v0-Base-7B: " in printed and "D2F_Dream_Base_7B_Lora: " in printed
    assert "assets/tiny-llada: not on the hub" in printed
    assert [asked["hub_id"].partition("/")[0] for asked in hub] == ["Dream-org", "SJTU-Deng-Lab"]
    assert main([*arguments, "--verify"]) == 0
    for file in (tmp_path / "cache").rglob("config.json"):
        file.unlink()
    assert main([*arguments, "--verify"]) == 1
    assert "config.json is missing" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "needs the names of models" in capsys.readouterr().err
