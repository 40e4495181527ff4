"""`import dllm_bench as db`: decoders, completions, tokens while they are committed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dllm_bench as db
from dllm_bench.api.generation import Committed
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register
from tests.api.models import loaded

PROMPTS = ["Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:", "2 + 2 ="]


@register("select.every")
@dataclass(frozen=True)
class Every(Select):
    """Commit every masked position."""

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return window.eligible_KW


def test_the_import_is_immediate_and_offers_fifteen_functions() -> None:
    code = "import sys, dllm_bench; print({'torch', 'hydra', 'pandas'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
    names = [name for name in db.__all__ if name.islower() and not name.startswith("_")]
    assert len(names) == 15 and all(callable(getattr(db, name)) for name in names)
    with pytest.raises(AttributeError, match="tabel"):
        db.tabel  # noqa: B018


def test_masks_within_a_prompt_are_refused_before_anything_is_decoded() -> None:
    """Only what comes after a prompt is filled; the first prompt of the two has none."""
    model, seen = loaded("tiny-llada"), list[Any]()
    mask = model.text.decode_visibly([model.special.mask])
    gap = f"3 {mask} 4 = {mask}."
    assert list(model.encode(gap)).count(model.special.mask) == 2
    with pytest.raises(DllmBenchError, match="has 2 mask tokens to fill.*end the prompt before"):
        db.generate(model, ["2 + 2 =", gap], "fast_dllm", 32, on_commit=seen.append)
    assert seen == []


def test_the_stub_names_what_the_package_offers() -> None:
    from pathlib import Path

    stub = Path(db.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert all(f" {name}" in stub or f"\n{name}:" in stub for name in db.__all__)


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        ("tiny-llada", "fast_dllm"),
        ("tiny-llada", "lopa_dream"),
        ("tiny-llada", "learn2pd_eotp"),
        ("tiny-llada", "fast_dllm_prefix"),
        ("tiny-qwen3", "ar"),
        ("tiny-qwen3", "ngram_speculative"),
    ],
)
def test_every_token_is_reported_once_when_it_is_committed(model: str, decoder: str) -> None:
    seen = list[Committed]()
    (done,) = db.generate(loaded(model), PROMPTS[0], decoder, 64, on_commit=seen.append)
    places = [place for one in seen for place in one.positions]
    assert len(places) == len(set(places))
    ids = {p: i for one in seen for p, i in zip(one.positions, one.ids, strict=True)}
    filled = {p: i for p, i in enumerate(done.sample.ids) if done.sample.born[p] >= 0}
    assert filled.items() <= ids.items()
    assert len(seen) > 1
    assert [one.forward for one in seen] == sorted(one.forward for one in seen)
    (plain,) = db.generate(loaded(model), PROMPTS[0], decoder, 64)
    assert plain.sample.ids == done.sample.ids


def test_tokens_that_were_masked_again_are_reported_again() -> None:
    seen = list[Committed]()
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], "saber", 128, on_commit=seen.append)
    masked_again = sum(len(changes) for changes in done.sample.trace["changes"])
    assert masked_again > 0
    assert sum(len(one.ids) for one in seen) == len(done.sample.ids) + masked_again


def test_committed_tokens_are_iterated_while_they_are_committed() -> None:
    seen = list[Committed]()
    given = (loaded("tiny-llada"), PROMPTS[0], "lopa_dream", 32)
    db.generate(*given, on_commit=seen.append)
    assert list(db.stream(*given)) == seen
    assert next(db.stream(*given)) == seen[0]
    with pytest.raises(DllmBenchError, match="batch=2"):
        list(db.stream(*given, batch=2))


def test_a_completion_has_text_tokens_trace_metrics_and_a_picture() -> None:
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], "fast_dllm", 32)
    assert done.text == loaded("tiny-llada").decode(done.tokens) == str(done)
    metrics = done.metrics()
    assert metrics["tpf/committed"] == pytest.approx(
        sum(b >= 0 for b in done.sample.born) / len(done.trace)
    )
    assert metrics["tps/e2e"] > 0
    page = done._repr_html_()
    assert page.count("<span") == len(done.tokens)
    assert f"in {len(done.trace)} forwards" in page


def test_a_batch_gives_the_completions_of_single_prompts() -> None:
    single = db.generate(loaded("tiny-llada"), PROMPTS, "credit", 64)
    both = db.generate(loaded("tiny-llada"), PROMPTS, "credit", 64, batch=2)
    assert [one.sample.ids for one in both] == [one.sample.ids for one in single]
    assert "tps/e2e" not in both[0].metrics()


def test_a_chat_is_one_prompt() -> None:
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    model = loaded("tiny-dream-instruct")
    (one,) = db.generate(model, chat, "fast_dllm_dream", 16)
    (same,) = db.generate(model, [chat], "fast_dllm_dream", 16)
    assert one.sample.ids == same.sample.ids


def test_settings_and_pieces_of_a_decoder_can_be_replaced() -> None:
    assert "lopa_dream" in db.decoders()
    made: Any = db.decoder("fast_dllm", cache="dual", select=Every(), **{"schedule.block": 8})
    assert made.select == Every()
    assert (type(made.cache).__name__, made.schedule.block) == ("DualCache", 8)
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], made, 32)
    assert len(done.trace) <= 2 * 32 / 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"select.thau": 1}, "thau"),
        ({"select": "nope"}, "no decoder/select 'nope'"),
        ({"select.tau": "x"}, "tau as float"),
        ({"draft": Every()}, "no slot 'draft'"),
    ],
)
def test_a_wrong_setting_of_a_decoder_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        db.decoder("fast_dllm", **settings)


def test_following_a_batch_is_refused() -> None:
    with pytest.raises(DllmBenchError, match="batch=2"):
        db.generate(loaded("tiny-llada"), PROMPTS, "fast_dllm", 32, batch=2, on_commit=print)


def test_the_state_of_hydra_stays_as_it_was() -> None:
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra

    from dllm_bench.api import compose

    version.setbase("1.2")
    compose.compose_groups.cache_clear()
    db.decoder("vanilla")
    assert not GlobalHydra.instance().is_initialized()
    assert str(version.getbase()) == "1.2"
    assert torch.is_grad_enabled()
