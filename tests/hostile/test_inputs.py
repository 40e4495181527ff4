"""Hostile data files and settings: one sentence each, before anything is decoded."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dllm_bench.benchmarks.items import read_jsonl
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import assets_dir
from dllm_bench.runs import runner
from dllm_bench.store import inputs
from dllm_bench.store.groups import require_numbers
from tests.benchmark_helpers import evalplus_benchmark, lm_eval_benchmark
from tests.tiers import covering

GOOD = b'{"question": "1+1?", "answer": "#### 2"}\n'
LINES: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"question": "1+', "Line 2 of .*test.jsonl is not JSON"),
    "latin-1": (b'{"question": "caf\xe9"}', "Line 2 of .*test.jsonl is not JSON in UTF-8"),
    "utf-16": (GOOD.decode().encode("utf-16"), "Line 2 of .*test.jsonl is not JSON in UTF-8"),
    "null bytes": (b"\0\0\0\0", "Line 2 of .*test.jsonl is not JSON"),
    "deep": (b'{"question":' * 50_000, "Line 2 of .*test.jsonl is not JSON"),
    "a long integer": (b"9" * 5000, "Line 2 of .*test.jsonl is not JSON"),
    "a list": (b'["1+1?"]', "Line 2 of .*test.jsonl is a JSON list"),
    "a number": (b"5", "Line 2 of .*test.jsonl is a JSON int"),
    "null": (b"null", "Line 2 of .*test.jsonl is a JSON NoneType"),
    "no answer": (b'{"question": "1+1?"}', "Row 2 of .*test.jsonl has no answer"),
    "null as an answer": (b'{"question": "?", "answer": null}', "Row 2 of .* has no answer"),
    "an empty object": (b"{}", "Row 2 of .*test.jsonl has no question, answer"),
}


@pytest.mark.parametrize("name", covering(2, LINES))
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    line, words = LINES[name]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DllmBenchError, match=words):
        lm_eval_benchmark("gsm8k", data_dir=str(tmp_path)).dataset_hash()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_jsonl(tmp_path / "rows.jsonl") == [json.loads(GOOD)]


FORMS: dict[str, tuple[str, str, str]] = {  # source -> file, content, words
    "squad_v2": ("squad_v2/dev-v2.0.json", '{"data": [{"title": "a"}]}', "KeyError"),
    "squad_v2 list": ("squad_v2/dev-v2.0.json", "[]", "TypeError"),
    "squad_v2 cut": ("squad_v2/dev-v2.0.json", '{"data": [', "JSONDecodeError"),
    "drop": ("drop/drop_dataset_dev.json", '{"a": {"passage": 5}}', "KeyError"),
    "drop list": ("drop/drop_dataset_dev.json", "[5]", "AttributeError"),
    "math": ("math/test.jsonl", '{"problem": "1+1"}', "KeyError: 'solution'"),
    "livecodebench": ("livecodebench/test6.jsonl", '{"question_id": 1}', "KeyError"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_another_form_is_named(name: str, tmp_path: Path) -> None:
    from dllm_bench.benchmarks.tasks import sources

    file, content, words = FORMS[name]
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    source = name.split()[0]
    split = {"squad_v2": "dev", "drop": "dev", "livecodebench": "v6"}.get(source, "test")
    with pytest.raises(DllmBenchError, match=f"{Path(file).name} has a row.*{words}"):
        sources.rows(source, split, str(tmp_path))


def test_a_problem_without_inputs_is_named(tmp_path: Path) -> None:
    (tmp_path / "humanevalplus").mkdir()
    problem = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    (tmp_path / "humanevalplus" / "HumanEvalPlus.jsonl").write_text(json.dumps(problem) + "\n")
    with pytest.raises(DllmBenchError, match="Row 1 of .*has no canonical_solution, base_input"):
        evalplus_benchmark("humaneval_plus", data_dir=str(tmp_path)).dataset_hash()


HUGE = {
    "length": (["benchmark.max_new_tokens=1000000000"], "lower benchmark.max_new_tokens"),
    "batch": (["batch=100000000"], "lower benchmark.max_new_tokens, batch"),
    "branches": (["decoder=lopa", "decoder.explore.k=1000000000"], "the number of branches"),
    "a million requests": (["batch=1000000"], "lower benchmark.max_new_tokens, batch"),
    "a million branches": (["decoder=lopa", "decoder.explore.k=1000000"], "number of branches"),
    "block": (["decoder.schedule.block=1000000000"], "does not divide the generation length"),
    "nan": (["decoder=fast_dllm", "decoder.select.tau=nan"], "tau is nan, which is no number"),
}


RUN = "run model=tiny-llada hardware=cpu limit=1"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A small run, which imports all that a run takes."""
    results = f"paths.results={tmp_path_factory.mktemp('imported')}"
    assert main([*RUN.split(), "benchmark.max_new_tokens=32", results]) == 0


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", covering(4, HUGE))
def test_a_setting_beyond_the_memory_is_refused_at_once(name, command, monkeypatch) -> None:
    """The bound follows from the memory; here the same 16 GiB on every machine."""
    monkeypatch.setattr(runner, "memory_bytes", lambda device: 16 * 2**30)
    overrides, words = HUGE[name]
    started = time.process_time()
    (line,) = command(RUN, *overrides, code=2).splitlines()
    assert time.process_time() - started < 2
    assert words in line


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("share", "words"), [(1.5, "set hardware.dtype=bfloat16"), (0.5, "choose a smaller model")]
)
def test_weights_beyond_the_memory_are_refused_before_a_run_exists(
    share, words, tmp_path, command, monkeypatch
) -> None:
    """`share` is the memory in sizes of the weights in bfloat16."""
    weights = (assets_dir() / "tiny-llada" / "model.safetensors").stat().st_size
    monkeypatch.setattr(inputs, "memory_bytes", lambda device: int(share * weights))
    started = time.process_time()
    (line,) = command(RUN, code=2).splitlines()
    assert time.process_time() - started < 2
    assert "in float32" in line and words in line
    assert not list(tmp_path.iterdir())


def test_a_nan_is_found_at_every_depth() -> None:
    nan = float("nan")
    for plain, name in (({"a": {"b": [1, nan]}}, "a.b"), ({"seed": nan}, "seed")):
        with pytest.raises(DllmBenchError, match=f"^{name} is nan"):
            require_numbers(plain)
    require_numbers({"tau": float("inf"), "name": "nan"})
