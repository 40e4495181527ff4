"""Models that are objects decode like ours, stay as they were, and have runs like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.models.load import LoadedModel
from dllm_bench.site.texts import TextSource
from dllm_bench.store.cache import on_this_machine
from dllm_bench.store.record import RunRecord
from tests.api.models import PROMPTS, loaded, logits, transformers_object, wrapped

SETTINGS: dict[str, Any] = {"limit": 1, "benchmark.max_new_tokens": 32}


class OwnModule(torch.nn.Module):
    """tiny-llada within a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers_object("tiny-llada").eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits


def run_of(model: str | LoadedModel, results: Path, **settings: Any) -> RunRecord:
    return db.run(model, "fast_dllm", "minigsm", results=results, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("results")
    return folder, run_of(wrapped(transformers_object("tiny-llada")), folder)


def test_a_wrapped_model_gives_the_grades_of_its_checkpoint(stored, tmp_path) -> None:
    """And a loaded one the very run, which leaves the number of threads as it was."""
    _, record = stored
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        named = run_of("tiny-llada", tmp_path, hardware="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert record.values == named.values
    assert record.summary["tpf/committed"] == named.summary["tpf/committed"]
    assert record.identity_hash != named.identity_hash
    assert run_of(loaded("tiny-llada"), tmp_path) == named
    assert len(db.records(tmp_path)) == 1


def test_a_run_of_an_object_is_looked_up_and_continued(stored) -> None:
    folder, record = stored
    model = wrapped(transformers_object("tiny-llada"))
    again = run_of(model, folder)
    assert (again.identity_hash, again.sealed_at) == (record.identity_hash, record.sealed_at)
    more = run_of(model, folder, limit=2)
    assert more.identity_hash == record.identity_hash and more.items == 2
    assert [session.samples for session in more.sessions] == [1, 1]


def test_a_trained_or_configured_object_is_another_run(stored, tmp_path: Path) -> None:
    module = transformers_object("tiny-llada")
    model, hashes = wrapped(module), [stored[1].identity_hash]
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1
    hashes.append(run_of(model, tmp_path).identity_hash)
    module.config.rms_norm_eps *= 2
    hashes.append(run_of(wrapped(module), tmp_path).identity_hash)
    assert len(set(hashes)) == 3


def test_a_function_is_told_apart_by_the_hash_that_is_given(tmp_path: Path) -> None:
    first, second = (run_of(wrapped(logits, weights_hash=one), tmp_path) for one in ("v1", "v2"))
    assert first.identity_hash != second.identity_hash
    assert run_of(wrapped(logits, weights_hash="v1"), tmp_path).sealed_at == first.sealed_at
    assert first.spec.model.name == "logits"


def test_the_source_of_an_own_module_is_in_its_run(tmp_path, monkeypatch) -> None:
    record = run_of(wrapped(OwnModule()), tmp_path)
    assert "pieces" in record.spec.inputs
    monkeypatch.setattr("dllm_bench.store.inputs.source_of", lambda made: {"file": "edited"})
    assert run_of(wrapped(OwnModule()), tmp_path).identity_hash != record.identity_hash


COMMANDS = [
    *("status", "show RUN", "show RUN --sample 0", "compare RUN RUN", "rescore RUN", "runs verify"),
    *("export RUN --to parquet", "export RUN --to csv", "export RUN --to lm-eval"),
    "export RUN --to eee --organization me",
    pytest.param("report --runs RUN", marks=pytest.mark.drill),  # it renders every table
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_read_a_run_of_an_object(command, stored, tmp_path, monkeypatch, capsys) -> None:
    folder, record = stored
    monkeypatch.chdir(tmp_path)
    assert main([*command.replace("RUN", record.spec.short).split(), "--results", str(folder)]) == 0
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
    assert flags(module) == before and torch.equal(module(input_ids=ids).logits, causal)


def test_nothing_that_was_kept_is_reused_once_an_object_was_trained() -> None:
    module, made = transformers_object("tiny-qwen3"), {"attention": "causal", "mask_token": None}
    decoder = db.decoder("ar", **{"cache.reuse": "exact"})
    model = wrapped(module, **made)

    def cached() -> int:
        return db.generate(model, PROMPTS[0], decoder, 4)[0].trace.forwards[0].cached

    assert (cached(), cached() > 0) == (0, True)
    with torch.no_grad():
        module.lm_head.weight.add_(1)
    assert cached() == 0


def test_a_function_decodes_like_the_model_behind_it() -> None:
    model = wrapped(logits)
    theirs = db.generate(model, PROMPTS, "lopa_dream", 32)
    ours = db.generate(loaded("tiny-llada"), PROMPTS, "lopa_dream", 32)
    assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
    assert "without a cache" in repr(model)
