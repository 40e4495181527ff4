"""No recorded case is left out unseen: each has its test, and docs/decoders.md counts the tests."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from dllm_bench.paths import conf_dir, options
from scripts import update_docs
from tests.golden.cases import GOLDEN, is_known, known, recorded

OTHERWISE = {
    "config.json": "a checkpoint",
    "pc_sampler_baseline.json": "token counts that cases of PC-Sampler read",
    "decoder_units.json": "test_dinfer_traces",
    "dflash2_modules.json": "test_speculative_traces",
    "modules.json": "test_speculative_traces, test_drafter_training, test_sample_stats",
    "target_greedy.json": "test_speculative_traces",
}
PAGE = Path(__file__).parents[2] / "docs" / "decoders.md"
absent = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden traces at {GOLDEN}")


@cache
def replays() -> set[tuple[str, int]]:
    """(file, place) of every case that is an argument of a test."""
    files = Path(__file__).parent.glob("test_*_traces.py")
    modules = [import_module(f"tests.golden.{file.stem}") for file in files]
    tests = [value for module in modules for value in vars(module).values()]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    replayed = [mark for mark in marks if mark.name == "parametrize" and mark.args[0] == "case"]
    found = [one.values[0] for mark in replayed for one in mark.args[1] if isinstance(one, tuple)]
    return {(case["file"], case["index"]) for case in found if case and "file" in case}


@absent
@pytest.mark.parametrize("file", known())
def test_every_case_of_a_file_has_a_test(file: str) -> None:
    assert {(file, case["index"]) for case in recorded(file)} <= replays()


@absent
def test_every_recorded_file_is_listed() -> None:
    folders = ("llada", "dream", "samplers", "caches", "dinfer", "spec", "new2026")
    files = [file for folder in folders for file in (GOLDEN / folder).glob("*.json")]
    found = {str(file.relative_to(GOLDEN)) for file in files if file.name not in OTHERWISE}
    assert found == set(known())


@absent
@pytest.mark.parametrize("decoder", options("decoder"))
def test_the_page_counts_the_cases_that_a_decoder_reproduces(decoder: str) -> None:
    golden = update_docs.head_of((conf_dir() / "decoder" / f"{decoder}.yaml").read_text())["golden"]
    if not all(is_known(word) for word in golden.split() if word.endswith(".json")):
        pytest.skip(f"{golden}: other cases than those that the page counts")
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{decoder}`"))
    assert row.split(" | ")[3].strip() == update_docs.recorded(golden.split())


@absent
@pytest.mark.exhaustive
def test_the_page_says_of_a_decoder_what_its_yaml_does() -> None:
    listed = PAGE.read_text().split("<!-- library:begin -->")[1].split("<!-- library:end -->")[0]
    texts = listed.strip(), update_docs.library()
    rows = [[line.split(" | ") for line in text.splitlines()] for text in texts]
    for ours, today in zip(*rows, strict=True):
        assert ours[:3] + ours[4:] == today[:3] + today[4:], "run scripts.update_docs"
