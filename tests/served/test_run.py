"""Runs on a served engine: the house's own texts and scores, resume, identity, tables.

The server holds the embedded tiny-qwen3 in transformers' own class and streams what it decodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.local import RunJob, run
from dllm_bench.metrics import definitions
from dllm_bench.metrics.sample_stats import NO_TRACE, NO_USAGE, SampleStats
from dllm_bench.paths import assets_dir, read_yaml
from dllm_bench.runs import sessions
from dllm_bench.site import run_page as site_run
from dllm_bench.site.texts import TextSource
from dllm_bench.store import inputs
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SESSIONS, OpenRunFolder, Store, read_samples
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import parse_table
from dllm_bench.tables.plan import CellState, Planner
from dllm_bench.tables.render import render
from dllm_bench.tables.spec import Profile
from tests.sample_stats import sample
from tests.served.server import Causal, ReceivedRequest, Reply, Server, said, scripted

SERVED = ["model=served", "model.name=tiny-qwen3", "model.chat=false", "model.engine=here"]
TASK = ["benchmark=minigsm", "limit=3"]
WARMUPS = 2
FAST = ["model.retries=0", "model.backoff_s=0.0"]


@pytest.fixture(scope="module")
def causal() -> Causal:
    return Causal(assets_dir() / "tiny-qwen3")


@pytest.fixture(scope="module")
def tiny(causal: Causal) -> Iterator[Server]:
    with Server(causal, {"id": "tiny-qwen3", "owned_by": "tests", "created": 1}) as server:
        yield server


def spec_of(*overrides: str) -> RunSpec:
    return RunSpec.from_config(compose([*TASK, *SERVED, *FAST, *overrides]))


def texts_of(store: Store, spec: RunSpec) -> dict[str, str]:
    return {key: sample.text for key, sample in read_samples(store.path(spec)).items()}


@pytest.fixture(scope="module")
def swept(tiny: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a sweep over concurrency, and of the model decoded here."""
    results = tmp_path_factory.mktemp("results")
    where = [f"paths.results={results}", *TASK]
    sweep = ["-m", f"model.url={tiny.url}", "model.concurrency=1,2"]
    assert main(["run", *sweep, *where, *SERVED]) == 0
    assert main(["run", *where, "model=tiny-qwen3", "decoder=ar", "hardware=cpu"]) == 0
    return results


def test_a_served_model_gives_the_texts_and_scores_of_the_same_model_here(swept: Path) -> None:
    store = Store(swept / "runs")
    one, two, here = sorted(store.records(), key=lambda r: r.spec.model.get("concurrency", 9))
    assert (one.spec.label, two.spec.label, here.spec.label) == ("served", "served", "ar")
    texts = texts_of(store, here.spec)
    assert len(set(texts.values())) == 3
    assert texts_of(store, one.spec) == texts_of(store, two.spec) == texts
    assert one.score == two.score == here.score
    samples = read_samples(store.path(here.spec)).values()
    ended = {sample.id: sample.counts["emitted"] + ("eos" in sample.cut) for sample in samples}
    assert dict(zip(two.columns["id"], two.columns["emitted"], strict=True)) == ended


def test_a_record_has_what_the_server_told_and_why_the_rest_is_empty(swept, command) -> None:
    store = Store(swept / "runs")
    record = store.record(spec_of("model.concurrency=2"))
    assert record is not None
    numbers = record.summary
    for name in ("tpf/emitted", "forwards/mean", "row_cost", "tps/decode"):
        assert numbers[name] is None, name
    for name in ("ttft/p50", "tpot/p50", "tps/request_p50", "tps/throughput", "requests/s"):
        assert (numbers[name] or 0) > 0, name
    assert numbers["requests/retried"] == numbers["requests/retokenised"] == 0
    assert (numbers["ttft/p95"] or 0) <= max(record.columns["seconds"])
    assert record.environment["device"] == "here"
    assert record.environment["server"] == {"id": "tiny-qwen3", "owned_by": "tests"}  # no times
    show, name = f"show {record.spec.short} --results {swept}", record.columns["id"][0]
    assert f"left empty: {NO_TRACE}" in command(show, here=False)
    shown = command(f"{show} --sample {name}", here=False)
    assert "right answer:" in shown
    assert shown.strip().endswith(texts_of(store, record.spec)[name].strip())
    page, samples = site_run.run_page(record, {}), read_samples(store.path(record.spec))
    assert "ttft/p50" in page and ">None<" not in page
    prompts = TextSource(compose).prompts(record.spec, samples)
    assert "Question:" in prompts[name] and "Question:" in samples[name].prompt
    assert all("null" in s for s in site_run.scripts(record, samples, prompts, str, {}))


def test_what_makes_another_run() -> None:
    """Where the server is and how long it is waited for does not; what is sent to it does."""
    first = spec_of()
    assert compose([])["decoder"]["name"] == inputs.DEFAULT_DECODER
    for same in ("model.url=http://other:1/v1", "model.key_env=NAME", "model.retries=9"):
        assert spec_of(same) == first
    others = ("model.concurrency=2", "model.engine=there", "+model.body.top_p=0.5", "seed=1")
    hashes = {spec_of(other).identity_hash for other in others}
    named = spec_of("model.tokenizer=assets/tiny-qwen3").identity_hash
    assert len({first.identity_hash, named, *hashes}) == len(others) + 2
    assert first.hardware.name == "served" and not first.decoder


def test_so_many_requests_are_in_flight(tmp_path: Path) -> None:
    """No answer is given before three are requested: with fewer in flight this would time out."""
    together = threading.Barrier(3, timeout=20)

    def answer(received: ReceivedRequest) -> Reply:
        together.wait()
        return said("#### 1", new=3, chat=False)

    with Server(answer) as server:
        spec = spec_of("model.concurrency=3", f"model.url={server.url}", "limit=6")
        record = run(spec, store=Store(tmp_path))
    assert len(record.columns["id"]) == 6 and not together.broken
    assert record.sessions[0].warmups == 3


def test_a_broken_off_run_goes_on_and_asks_only_what_is_missing(causal, tmp_path, swept) -> None:
    """The server refuses after some answers, and comes back."""

    def answer(received: ReceivedRequest) -> Reply:
        return causal(received) if len(server.received) <= WARMUPS + 2 else Reply(status=500)

    store = Store(tmp_path)
    with Server(answer, {"id": "tiny-qwen3", "owned_by": "tests"}) as server:
        spec = spec_of(f"model.url={server.url}")
        with pytest.raises(DllmBenchError, match="gave no answer"):
            run(spec, store=store)
        assert len(texts_of(store, spec)) == 2
        first, server.received = server.received, []
        server.answer = causal
        record = run(spec, store=store)
    prompts = {one.body["prompt"] for one in first[WARMUPS : WARMUPS + 2]}
    assert len(server.received) == WARMUPS + 1
    assert not prompts & {one.body["prompt"] for one in server.received}
    assert [session.samples for session in record.sessions] == [2, 1]
    assert texts_of(store, spec) == texts_of(Store(swept / "runs"), spec_of())
    assert (record.summary["requests/s"] or 0) > 0


def test_after_a_failure_what_is_in_flight_is_kept_and_no_more_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests in flight one is refused; the other is answered when the run knows it."""
    both, known = threading.Barrier(2, timeout=20), threading.Event()
    count = iter(range(100))

    def answer(received: ReceivedRequest) -> Reply:
        turn = next(count)
        if turn in (WARMUPS, WARMUPS + 1):
            both.wait()
        if turn == WARMUPS:
            return Reply(status=500)
        if turn == WARMUPS + 1:
            known.wait(20)
        return said("#### 1", new=3, chat=False)

    def first_known(received: list[Future[Any]]) -> Iterator[Future[Any]]:
        for done in as_completed(received):
            known.set()
            yield done

    monkeypatch.setattr(sessions, "as_completed", first_known)
    store = Store(tmp_path)
    with Server(answer) as server:
        spec = spec_of("model.concurrency=2", f"model.url={server.url}", "limit=9")
        [outcome] = RunJob((spec,), store)()
    assert "answered 500" in outcome.error
    assert known.is_set() and len(texts_of(store, spec)) == 1
    assert len(server.received) == WARMUPS + 2


@pytest.mark.parametrize("where", ["while it waits", "while it stores"])
def test_an_interrupted_run_waits_for_no_answer(where, tmp_path, monkeypatch) -> None:
    """Two requests are in flight; one is never answered."""
    interrupted = threading.Event()

    def answer(received: ReceivedRequest) -> Reply:
        if len(server.received) > WARMUPS + 1:
            assert interrupted.wait(20), "the run waits for this answer"
        return said("#### 1", new=3, chat=False)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    place = (sessions, "as_completed") if where == "while it waits" else (OpenRunFolder, "append")
    monkeypatch.setattr(*place, interrupt)
    with Server(answer) as server:
        spec = spec_of("model.concurrency=2", f"model.url={server.url}")
        with pytest.raises(KeyboardInterrupt):
            run(spec, store=Store(tmp_path))
        interrupted.set()


def test_a_run_is_of_one_server(tmp_path: Path) -> None:
    def attempt(owner: str, *replies: Reply) -> RunRecord:
        with Server(scripted(*replies), {"id": "tiny-qwen3", "owned_by": owner}) as server:
            return run(spec_of(f"model.url={server.url}"), store=Store(tmp_path))

    answer = said("#### 1", new=3, chat=False)
    with pytest.raises(DllmBenchError, match="gave no answer"):
        attempt("vllm", answer, answer, answer, Reply(status=500))
    with pytest.raises(DllmBenchError, match=r"vllm.*but this one is .*sglang.*model.engine"):
        attempt("sglang", answer)
    (sessions_file,) = tmp_path.glob(f"**/{SESSIONS}")
    sessions_file.write_text("damaged\n")
    assert len(attempt("vllm", answer).columns["id"]) == 3


@pytest.mark.parametrize("tokenizer", ["null", "assets/tiny-qwen3"])
def test_a_server_that_does_not_count(tokenizer: str, causal: Causal, tmp_path: Path) -> None:
    """Events are never counted: the local tokenizer is, where one is named."""
    words = ("Tom has 5 ", "apples", ". #### 5")
    with Server(scripted(said(*words, chat=False))) as server:
        spec = spec_of(f"model.url={server.url}", f"model.tokenizer={tokenizer}", "limit=2")
        record = run(spec, store=Store(tmp_path))
    tokens = len(causal.tokenizer.encode("".join(words), add_special_tokens=False))
    assert tokens != len(words)
    here = tokenizer != "null"
    assert record.columns["emitted"] == [tokens if here else None] * 2
    assert (record.summary["tps/e2e"] is not None) == here
    assert record.summary["requests/retokenised"] == here
    assert (record.summary["latency/mean"] or 0) > 0
    if not here:
        assert definitions.definition("tps/e2e").why_undefined(record.samples) == NO_USAGE


def test_stop_strings_cut_what_the_server_did_not(tmp_path: Path) -> None:
    with Server(scripted(said("#### 1\nQuestion: more", new=6, chat=False))) as server:
        spec = spec_of(f"model.url={server.url}", "limit=1")
        run(spec, store=Store(tmp_path))
    (made,) = read_samples(Store(tmp_path).path(spec)).values()
    assert (made.text, made.raw) == ("#### 1\n", "#### 1\nQuestion: more") and "stop" in made.cut
    assert server.received[0].body["stop"] == ["Question:"]
    assert SampleRecord.from_line(made.to_line()) == made


def test_a_table_reads_a_served_run(swept: Path, tmp_path: Path) -> None:
    table = parse_table("small/served", read_yaml(Path(__file__).with_name("table.yaml")), tmp_path)
    profile = Profile("paper", embedded=False, replace={}, set=("seed=0", "hardware=h200"))
    store = Store(swept / "runs")
    built = build(
        table, profile, Planner(compose, store).cells(table, profile), list(store.records())
    )
    assert set(built.cells.state) == {CellState.SEALED}  # no GPU is needed
    cells = {row.Index[-1]: row for row in built.cells.itertuples()}
    record = store.record(spec_of("model.concurrency=2"))
    assert record is not None and record.score is not None
    assert cells["score"].value == 100 * record.score.mean
    assert cells["ttft"].value == record.summary["ttft/p50"] and cells["tps"].value > 0
    assert (cells["tpf"].status, cells["tpf"].reason) == ("undefined", NO_TRACE)
    assert built.hardware == ["here, 2 request(s) in flight"]
    assert NO_TRACE in "".join(render(built).values())
    missing = Planner(compose, Store(tmp_path)).cells(table, profile)
    assert {cell.run.state for cell in missing} == {CellState.MISSING}
    assert "model=served" in missing[0].run.command


def test_throughput_by_hand() -> None:
    """Two sessions; in the first two requests overlap, a wait and a failed try lie between."""

    def stats(session: int, began: float, ended: float, seconds: float, tokens: int) -> SampleStats:
        times = {"began_s": began, "ended_s": ended, "seconds": seconds, "ttft_s": 0.5}
        tries = 1 + (seconds < ended - began)
        return sample(**times, session=session, committed=tokens, emitted=tokens, tries=tries)

    facts = [stats(0, 0.0, 4.0, 4.0, 8), stats(1, 1.0, 2.0, 1.0, 3), stats(0, 1.0, 6.0, 2.5, 5)]
    by_hand = {
        "requests/s": 3 / 7,
        "tps/throughput": 16 / 7,
        "tps/request_p50": 2.0,  # of 2, 2 and 3
        "tpot/p50": 500.0,  # of 3.5 / 7, 2 / 4 and 0.5 / 2
        "ttft/mean": 0.5,
        "requests/retried": 1 / 3,
    }
    for name, number in by_hand.items():
        assert definitions.measure(name, facts) == pytest.approx(number), name
