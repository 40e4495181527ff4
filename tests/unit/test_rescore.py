"""Stored texts graded again, items asked several times, and settings that did nothing.

A model without a network answers from the gold texts; grading is the real benchmark's.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dllm_bench.methods
from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.runs import rescore as again
from dllm_bench.runs.runner import run
from dllm_bench.store.files import checked_line
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord
from dllm_bench.store.seal import seal, settings_without_effect
from dllm_bench.store.store import RECORD, SAMPLES, RunEntry, Store, read_record, read_samples
from tests.benchmark_helpers import GOLD
from tests.resume import fakes

MINIGSM = {
    **compose(["benchmark=minigsm", "model=tiny-llada"])["benchmark"],
    "_target_": "benchmark.lm_eval",
    "max_new_tokens": 200,
}


class Knowing(fakes.FakeDecoder):
    """Writes the gold answer, then a second question; wrong for every third request."""

    asked = 0

    def generate(self, model: Any, request: Request) -> Generation:
        items = {item["id"]: item for item in benchmark_of(MINIGSM).items}  # type: ignore[attr-defined]
        text = GOLD["minigsm"](items[item_id_of(request.id)]) + "\nQuestion: x #### 9"
        number = int(request.id.rpartition("#")[2]) if "#" in request.id else self.asked
        self.asked += 1
        text = text if number % 3 else "#### 1000"
        ids = (*fakes.FakeModel().encode(text), fakes.SPECIAL.eos)
        forwards = [Forward(ForwardKind.DENOISE, 2, 12, 0, ms=1.0, winner=w) for w in (1, 0, 1)]
        return Generation(request.id, ids, (0,) * len(ids), {}, Trace(forwards))


def made(root: Path, n: int = 6, **changes: Any) -> tuple[Store, RunRecord]:
    """Return a store with one run of minigsm with changed settings, and its record."""
    asked, store = fakes.spec(n, benchmark={**MINIGSM, **changes}), Store(root / "runs")
    deps = fakes.deps(decoder=Knowing(), benchmark=benchmark_of(asked.benchmark))
    return store, run(asked, store=store, deps=deps)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, list[SampleRecord]]:
    """Return the record and the samples of a run."""
    store, record = made(tmp_path_factory.mktemp("samples"))
    return record, list(read_samples(store.path(record.spec)).values())


def test_the_raw_text_is_kept_where_a_stop_string_cut_it(stored) -> None:
    record, samples = stored
    cut = [one.raw == one.text + "Question: x #### 9" for one in samples]
    assert cut == [verdict == "correct" for verdict in record.columns["verdict"]]
    assert cut == [one.raw is not None for one in samples] and any(cut)
    for one in samples:
        assert SampleRecord.from_line(one.to_line()) == one
        without = {k: v for k, v in json.loads(one.to_line()).items() if k not in ("raw", "check")}
        assert SampleRecord.from_line(checked_line(without)) == replace(one, raw=None)


def graded_again(entry: RunEntry) -> again.Rescored:
    return again.rescore(entry, again.settings(entry, {}, compose))


def test_a_damaged_grade_is_mended_unless_the_texts_are_gone(tmp_path, monkeypatch) -> None:
    store, record = made(tmp_path)
    (entry,) = store.entries()
    for name in ("value", next(name for name in record.columns if name.startswith(SCORE))):
        broken = replace(record, columns={**record.columns, name: [0.0] * 6})
        (entry.path / RECORD).write_text(broken.to_json())
        found = graded_again(entry)
        assert found.stored and set(found.changed.values()) == {("correct", "correct")}
        mended = read_record(entry.path)
        assert (mended.columns, mended.score) == (record.columns, record.score)
        assert mended.sessions == record.sessions
    (entry.path / RECORD).write_text(broken.to_json())

    def continued(plain: Any) -> Any:
        """Another process continues the run while these texts are graded."""
        deps = fakes.deps(decoder=Knowing(), benchmark=benchmark_of(plain))
        run(replace(record.spec, limit=8), store=store, deps=deps)
        return benchmark_of(plain)

    monkeypatch.setattr(again, "benchmark_of", continued)
    with pytest.raises(DllmBenchError, match="sealed anew"):
        graded_again(entry)
    assert len(read_record(entry.path).columns["id"]) == 8
    (entry.path / SAMPLES).unlink()
    with pytest.raises(DllmBenchError, match="has no stored text"):
        graded_again(entry)


def test_rescore_shows_another_reading_and_writes_nothing(command, tmp_path) -> None:
    """Without the stop string the last number is that of the second question."""
    store, record = made(tmp_path)
    file, again = store.path(record.spec) / RECORD, f"rescore {record.identity_hash[:8]}"
    before = file.read_bytes()
    assert "0 of 6 samples changed; nothing written" in command(again)
    printed = command(f"{again} escape_until=true primary=exact_match,flexible-extract")
    assert "correct -> wrong" in printed and "4 of 6 samples changed" in printed
    assert file.read_bytes() == before
    for words, refused in (
        ("colour=3", "no setting 'colour'"),
        ("shots=3", "no setting 'shots'"),
        ("primary=[1", "NAME=VALUE"),
        ("primary=exact_match,strict", "did you mean 'exact_match,strict-match'"),
        ("--evalplus x.jsonl", "which EvalPlus does not know"),
    ):
        assert refused in command(f"{again} {words}", code=2)


def test_evalplus_wants_every_problem_of_a_limited_run(command, tmp_path, monkeypatch) -> None:
    short, out = made(tmp_path)[1].identity_hash[:8], tmp_path / "x.jsonl"
    monkeypatch.setattr(again, "evalplus_lines", lambda *_: ["{}\n"])
    assert "a line for every problem" in command(f"rescore {short} --evalplus {out}")
    assert out.is_file()


def test_repeats_give_avg_and_pass_at_k(tmp_path: Path) -> None:
    """Three items four times each, wrong in repetitions 0 and 3: a limit counts items."""
    store, record = made(tmp_path, 3, repeats=4)
    assert (len(record.columns["id"]), record.score.n, record.score.mean) == (12, 3, 0.5)
    assert [record.scores[f"{name}@4"] for name in ("avg", "pass")] == [0.5, 1]
    assert set(record.values) == {item_id_of(key) for key in record.columns["id"]}
    assert store.record(record.spec) == record


def test_a_run_that_is_not_graded_has_no_score(tmp_path: Path) -> None:
    folder = tmp_path / "deepspec_eval"
    folder.mkdir()
    rows = [json.dumps({"turns": [f"Say {i}."]}) for i in range(30)]
    (folder / "aime25.jsonl").write_text("\n".join(rows) + "\n")
    target, settings = "benchmark.prompts", {"max_new_tokens": 12, "data_dir": str(tmp_path)}
    benchmark = {"_target_": target, "name": "acceptance", "dataset": "aime25", **settings}
    asked, store = fakes.spec(4, benchmark=benchmark), Store(tmp_path / "runs")
    record = run(asked, store=store, deps=fakes.deps(benchmark=benchmark_of(benchmark)))
    assert (record.score, record.values, record.columns["value"]) == (None, {}, [None] * 4)
    assert (record.verdicts, store.record(asked)) == ({"not graded": 4}, record)
    assert record.summary["tpf/emitted"]


def test_settings_without_effect_are_named(stored) -> None:
    assert list(stored[0].unused.items()) == [  # in the order of a stored record
        ("benchmark.stop", 2 / 6),  # the two wrong answers have no second question
        ("benchmark.template", 1),  # chat turns for a model without turns
    ]


EXPLORE = {"explore": {"_target_": "explore.lookahead", "k": 1}}
GUIDED = {**EXPLORE, "guidance": 1.5}  # each branch twice; branch 0 of two is not the base
KEPT = {"cache": {"_target_": "cache.dllm_cache"}}  # feeds every position and reads layers' outputs


@pytest.mark.parametrize(
    ("benchmark", "decoder", "trace", "named"),
    [
        ({"template": "chat_multiturn"}, {}, {}, {"benchmark.template"}),
        ({"template": "chat_multiturn", "shots": 3}, {}, {}, set()),
        ({"escape_until": True}, {}, {}, {"benchmark.escape_until"}),
        ({"escape_until": True, "stop": ["zz"]}, {}, {}, set()),
        ({}, {"cache": {"_target_": "cache.prefix"}}, {}, {"decoder.cache"}),
        ({}, {"cache": {"_target_": "cache.none"}}, {}, set()),
        ({}, {"stop": {"_target_": "stop.eos"}}, {}, set()),
        ({}, {"revise": {"_target_": "revise.edit", "tau": 0.9}}, {}, {"decoder.revise"}),
        ({}, {"revise": {"_target_": "revise.none"}}, {}, set()),
        ({}, EXPLORE, {}, set()),  # a branch won once in every sample
        ({}, EXPLORE, {"winner": [1, 1, 1]}, {"decoder.explore"}),
        ({}, GUIDED, {"branches": [4, 4, 4], "winner": [1, 1, 1]}, {"decoder.explore"}),
        ({}, GUIDED, {"branches": [4, 4, 4], "winner": [1, 0, 1]}, set()),
        ({}, KEPT, {}, {"decoder.cache"}),
        ({}, KEPT, {"read_bytes": [0, 8, 8]}, set()),
    ],
)
def test_each_setting_is_judged_by_what_happened(benchmark, decoder, trace, named, stored) -> None:
    plain = {**MINIGSM, "chat": True, "stop": [], **benchmark}
    asked = fakes.spec(6, benchmark=plain, decoder=decoder)
    traced = [replace(one, trace={**one.trace, **trace}) for one in stored[1]]
    found = settings_without_effect(asked, traced)
    assert {name for name, share in found.items() if share == 1} == named


@pytest.mark.parametrize(
    ("decoder", "seed", "named"),
    [
        ("fast_dllm", 1, True),
        ("fast_dllm", 0, False),
        ("remdm", 1, False),  # samples
        ("dkv_cache_greedy", 1, False),  # commits in a drawn order
    ],
)
def test_a_seed_that_nothing_draws_by_is_named(decoder, seed, named, stored) -> None:
    plain = {k: v for k, v in compose([f"decoder={decoder}"])["decoder"].items() if k != "name"}
    asked = replace(fakes.spec(6, decoder=plain), seed=seed)
    assert (settings_without_effect(asked, stored[1]).get("seed") == 1) is named


def test_pieces_that_draw_say_so() -> None:
    """A piece that takes a generator or uniform numbers gives `DRAWS`."""
    folder = Path(dllm_bench.methods.__path__[0])
    drawing = re.compile(r"\bgenerator\(state|sampler\.uniforms\(self")
    files = [path for path in folder.glob("*.py") if drawing.search(path.read_text())]
    assert len(files) >= 4
    assert [path.name for path in files if "Condition.DRAWS" not in path.read_text()] == []


def test_a_text_of_end_tokens_is_told_from_a_blank_one(stored) -> None:
    record, [first, *others] = stored
    blank = replace(first, counts={**first.counts, "content": 0}, text="")
    scores = benchmark_of(MINIGSM).score({one.id: one.text for one in stored[1]})
    sealed = seal(record.spec, [blank, *others], scores, record.sessions, 0.0)
    rates = [sealed.summary[f"{kind}_rate"] for kind in ("end_only", "empty")]
    assert rates == pytest.approx([1 / 6, 1 / 6])
    assert record.summary["end_only_rate"] == 0
