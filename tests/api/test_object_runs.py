"""Models that are objects decode like ours, stay as they were, and have runs like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.load import LoadedModel
from dllm_bench.paths import assets_dir
from dllm_bench.site.texts import TextSource
from dllm_bench.store.cache import on_this_machine
from dllm_bench.store.record import RunRecord
from tests.api.models import loaded, logits, transformers_object

SETTINGS: dict[str, Any] = {"limit": 1, "benchmark.max_new_tokens": 32}


class OwnModule(torch.nn.Module):
    """tiny-llada within a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers_object("tiny-llada").eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits


def wrapped(model: Any, **settings: Any) -> LoadedModel:
    """Return a model wrapped with tiny-llada's tokenizer."""
    tokenizer = loaded("tiny-llada").text.tokenizer
    return db.wrap(model, tokenizer, mask_token="<|mask|>", **settings)


def run_of(model: str | LoadedModel, results: Path, **settings: Any) -> RunRecord:
    """Return a short run of fast_dllm."""
    return db.run(model, "fast_dllm", "minigsm", results=results, **SETTINGS, **settings)


@pytest.fixture(scope="module")
def module() -> Any:
    """Return a transformers object that a user has loaded."""
    return transformers_object("tiny-llada")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, module: Any) -> tuple[Path, RunRecord]:
    """Return a stored run of the object."""
    folder = tmp_path_factory.mktemp("results")
    return folder, run_of(wrapped(module), folder)


def test_a_wrapped_model_gives_the_grades_of_its_checkpoint(stored, tmp_path) -> None:
    _, record = stored
    named = run_of("tiny-llada", tmp_path, hardware="cpu")
    assert record.values == named.values
    assert record.summary["tpf/committed"] == named.summary["tpf/committed"]
    assert record.identity_hash != named.identity_hash


def test_a_loaded_model_makes_the_run_of_its_name(tmp_path: Path) -> None:
    named = run_of("tiny-llada", tmp_path, hardware="cpu")
    assert run_of(loaded("tiny-llada"), tmp_path) == named
    assert len(db.records(tmp_path)) == 1


def test_a_run_of_an_object_is_looked_up_and_continued(stored, module) -> None:
    folder, record = stored
    again = run_of(wrapped(module), folder)
    assert (again.identity_hash, again.sealed_at) == (record.identity_hash, record.sealed_at)
    more = db.run(
        wrapped(module), "fast_dllm", "minigsm", results=folder, **{**SETTINGS, "limit": 2}
    )
    assert more.identity_hash == record.identity_hash and more.items == 2
    assert [session.samples for session in more.sessions] == [1, 1]


def trained(module: Any) -> None:
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1


def configured(module: Any) -> None:
    module.config.rms_norm_eps *= 2


@pytest.mark.parametrize("change", [trained, configured])
def test_a_changed_object_is_another_run(change: Callable[[Any], None], tmp_path: Path) -> None:
    module = transformers_object("tiny-llada")
    model = wrapped(module)
    before = run_of(model, tmp_path)
    change(module)
    again = model if change is trained else wrapped(module)
    assert run_of(again, tmp_path).identity_hash != before.identity_hash


def test_a_function_is_told_apart_by_the_hash_that_is_given(tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match="weights_hash=TEXT"):
        run_of(wrapped(logits), tmp_path)
    first, second = (run_of(wrapped(logits, weights_hash=one), tmp_path) for one in ("v1", "v2"))
    assert first.identity_hash != second.identity_hash
    assert run_of(wrapped(logits, weights_hash="v1"), tmp_path).sealed_at == first.sealed_at
    assert first.spec.model.name == "logits"
    with pytest.raises(DllmBenchError, match="leave weights_hash out"):
        wrapped(transformers_object("tiny-llada"), weights_hash="v1")


def test_the_source_of_an_own_module_is_in_its_run(tmp_path, monkeypatch) -> None:
    record = run_of(wrapped(OwnModule()), tmp_path)
    assert "pieces" in record.spec.inputs
    monkeypatch.setattr("dllm_bench.store.inputs.source_of", lambda made: {"file": "edited"})
    assert run_of(wrapped(OwnModule()), tmp_path).identity_hash != record.identity_hash


def test_a_run_leaves_the_number_of_threads_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_of("tiny-llada", tmp_path, hardware="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "status": lambda run: ["status"],
    "show": lambda run: ["show", run],
    "sample": lambda run: ["show", run, "--sample", "0"],
    "compare": lambda run: ["compare", run, run],
    "rescore": lambda run: ["rescore", run],
    "verify": lambda run: ["runs", "verify"],
    "report": lambda run: ["report", "--runs", run],
    "parquet": lambda run: ["export", run, "--to", "parquet"],
    "csv": lambda run: ["export", run, "--to", "csv"],
    "lm-eval": lambda run: ["export", run, "--to", "lm-eval"],
    "eee": lambda run: ["export", run, "--to", "eee", "--organization", "me"],
}


SLOW = {"report": pytest.mark.exhaustive}  # it renders every table


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=SLOW.get(name, ())) for name in COMMANDS]
)
def test_every_command_reads_a_run_of_an_object(
    command: str,
    stored: tuple[Path, RunRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, record = stored
    monkeypatch.chdir(tmp_path)
    assert main([*COMMANDS[command](record.spec.short), "--results", str(folder)]) == 0
    assert "dllm-bench:" not in capsys.readouterr().err


def test_the_tokens_of_an_object_are_shown_by_its_tokenizer(stored, monkeypatch, tmp_path) -> None:
    """Also by another process; elsewhere, and without a tokenizer that can be stored, as ids."""
    _, record = stored
    ids = loaded("tiny-llada").encode("3 + 4 =")
    assert TextSource(compose).decode(record.spec)(ids) == loaded("tiny-llada").text.decode(ids)
    assert TextSource(compose).decode(replace(record.spec, inputs={}))(ids) == str(ids)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TextSource(compose).decode(record.spec)(ids) == str(ids)


def test_an_object_called_like_a_model_does_not_read_that_model(tmp_path: Path) -> None:
    module = transformers_object("tiny-llada")
    module.config.name_or_path = "tiny-qwen3"
    record = run_of(wrapped(module), tmp_path)
    assert record.spec.model.name == "tiny-qwen3"
    assert "path" not in on_this_machine("model", record.spec.model, compose)


# --- decoding -------------------------------------------------------------------------------------


PROMPTS = ["Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:", "2 + 2 ="]


def flags(module: Any) -> list[Any]:
    """Everything that decoding could have changed."""
    attention = [vars(layer.self_attn).get("is_causal") for layer in module.model.layers]
    return [*attention, module.config.to_dict(), [part.training for part in module.modules()]]


@pytest.mark.parametrize("decoder", ["fast_dllm_dual", "lopa_dream"])
def test_a_transformers_object_decodes_like_our_own_and_stays_as_it_was(decoder: str) -> None:
    module, own = transformers_object("tiny-llada"), loaded("tiny-llada")
    before, ids = flags(module), torch.tensor([own.encode(PROMPTS[0])])
    causal = module(input_ids=ids).logits
    model = wrapped(module)
    for batch in (1, 2):
        theirs = db.generate(model, PROMPTS, decoder, 32, batch=batch)
        ours = db.generate(own, PROMPTS, decoder, 32, batch=batch)
        assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
        assert [len(one.trace) for one in theirs] == [len(one.trace) for one in ours]
    assert flags(module) == before
    assert torch.equal(module(input_ids=ids).logits, causal)


@pytest.mark.parametrize("decoder", ["fast_dllm", "lopa_dream", "vanilla"])
def test_a_function_decodes_like_the_model_behind_it(decoder: str) -> None:
    model = wrapped(logits)
    theirs = db.generate(model, PROMPTS, decoder, 32)
    ours = db.generate(loaded("tiny-llada"), PROMPTS, decoder, 32)
    assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
    assert "without a cache" in repr(model)


def test_a_folder_is_the_model_of_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.symlink_to(assets_dir() / "tiny-llada")
    model = db.load_model(folder, dtype="float32")
    assert model.metadata.name == "mine"
    assert model.metadata.weights_sha256 == loaded("tiny-llada").metadata.weights_sha256
