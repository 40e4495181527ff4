"""Figures as data: what the short forms stand for, and whether the committed files hold.

Run series of hand-built samples equal what is counted by hand. Figures read the samples of sealed
runs, in a folder or an archive, or say what is missing.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import log2
from pathlib import Path
from random import Random
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest

from dllm_bench.api import runs as api
from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind
from dllm_bench.figures import run_series, style
from dllm_bench.figures.draw import lines, why_kept, write
from dllm_bench.figures.panels import PANEL_KINDS, bars
from dllm_bench.figures.points import BuiltFigure, build_figure, missing_replays
from dllm_bench.figures.run_series import StoredRun
from dllm_bench.figures.run_series import run_series as series_named
from dllm_bench.figures.spec import (
    REPORTED_FIGURES,
    SeriesCall,
    SeriesSettings,
    load_figure,
    read_figure,
)
from dllm_bench.metrics import drafts
from dllm_bench.metrics.sample_stats import frame_of
from dllm_bench.paths import CONFIG_DIR, conf_dir, read_yaml
from dllm_bench.runs import token_replay
from dllm_bench.runs.token_replay import TokenReplay
from dllm_bench.store.archive import RECORD, REPLAYS, SAMPLES
from dllm_bench.store.groups import ModelGroup
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import slug
from dllm_bench.store.store import ERROR, SPEC, Store
from dllm_bench.tables.load import load_profile, names_of, read_csv
from dllm_bench.tables.plan import PlannedCell
from scripts.figure_points import counted, fewer, known, raise_counts
from scripts.update_reference import pack
from tests.figures.builders import SMALL, TINY, drafted_sample, sample, small
from tests.figures.builders import built as sealed
from tests.sample_stats import sample as stats
from tests.tables.builders import planned_small
from tests.tiers import covering

FIGURES, CONF = names_of("figure"), conf_dir() / "figure"


def test_a_sweep_is_a_value_per_number() -> None:
    figure = small()
    assert {value.name: (value.label, value.run) for value in figure.table.facets["number"]} == {
        "alpha-0.5": ("a, b fixed", ("decoder.a=0.5", "decoder.b=1")),
        "alpha-1": ("a, b fixed", ("decoder.a=1", "decoder.b=1")),
        "beta-2": ("b, a fixed", ("decoder.a=1", "decoder.b=1")),
        "beta-4": ("b, a fixed", ("decoder.a=1", "decoder.b=3")),
    }
    assert figure.at == {"alpha-0.5": "0.5", "alpha-1": "1", "beta-2": "2", "beta-4": "4"}
    assert figure.facet_labels("number") == {"alpha": "a, b fixed", "beta": "b, a fixed"}


def test_two_numbers_of_one_thing_are_one_point(tmp_path) -> None:
    head = (SMALL / "figure.yaml").read_text().partition("reported:")[0]
    pairs = "file: pairs.csv, kind: printed, pair: {metric: [speed, score]}, series: {who}"
    plain = f"{head}reported:\n  - {{{pairs}, quantity: tpf, x: {{speed}}, y: score}}\n"
    (tmp_path / "figure.yaml").write_text(plain)
    figure = read_figure("small/pairs", tmp_path / "figure.yaml", SMALL)
    assert [(p["series"], p["x"], p["y"]) for p in figure.reported] == [("x", 10.0, 60.0)]


def test_another_packages_figure_reads_the_csv_files_of_its_own_tables(
    tmp_path, monkeypatch
) -> None:
    head, _, rest = (SMALL / "figure.yaml").read_text().partition("  task:\n")
    facet = "  task: {file: tasks.csv, key: task, show: {}, run: ['benchmark={task}']}\n"
    plain = f"{head}{facet}  number:{rest.partition('  number:')[2].partition('reported:')[0]}"
    for folder in ("table", "figure/mine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "figure" / "mine" / "f.yaml").write_text(plain)
    (tmp_path / "table" / "tasks.csv").write_text("task\nquiz\ncode\n")
    monkeypatch.setenv(CONFIG_DIR, str(tmp_path))
    assert [value.name for value in load_figure("mine/f").table.facets["task"]] == ["quiz", "code"]


def test_positions_are_a_metric_each() -> None:
    figure = load_figure("dspark/figure2")
    definitions = [metric.definition for metric in figure.table.metrics]
    assert definitions == [f"acceptance/conditional@{k}" for k in range(1, 8)]
    assert figure.quantities == {"conditional": "Conditional acceptance"}


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("kind: lines", "kind: linse", "kind of a DrawSpec is not 'lines' or 'band'"),
        ("panels: task", "panels: tsak", "no facet 'tsak'; did you mean 'task'"),
        ("series: number", "series: metrics", "no facet 'metrics'; did you mean 'metric'"),
        ("{facet: number", "{facet: numbr", "no facet 'numbr'"),
        ("{facet: number", "{metric: tfp", "no metric 'tfp'"),
    ],
)
def test_a_drawing_of_what_the_figure_lacks_is_refused(right, wrong, words, tmp_path) -> None:
    text = (SMALL / "figure.yaml").read_text().replace(right, wrong)
    (tmp_path / "figure.yaml").write_text(text)
    with pytest.raises((ValueError, DllmBenchError), match=words):
        read_figure("small/figure", tmp_path / "figure.yaml", SMALL)


def test_an_unknown_name_is_told_which_there_are_and_an_unknown_series_has_a_look() -> None:
    with pytest.raises(DllmBenchError, match="reliability"):
        series_named("tea leaves")
    assert style.look("nobody's method") != style.look("somebody's method")
    with pytest.raises(DllmBenchError, match="There is no profile"):
        api.table("lopa/table4", profile=[])


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figures_hold(name: str) -> None:
    """What a figure names is there, and its series can be told apart without colour."""
    figure = load_figure(name)
    for call in figure.calls.values():
        series_named(call.name)
    values = [v.name for values in figure.table.facets.values() for v in values]
    assert values == [slug(value) for value in values]
    panels, labelled = set(figure.facet_labels(figure.draw.panels)), set(figure.draw.labels)
    entries = read_yaml(CONF / f"{name}.yaml").get("reported", ())
    assert bool(entries) == bool(figure.reported)
    for point in figure.reported:
        assert point["quantity"] in figure.quantities and point["panel"] in panels | labelled | {""}
        assert point["kind"] in ("printed", "digitised")
    draw, metrics = figure.draw, {m.name.partition("@")[0] for m in figure.table.metrics}
    measured = metrics if draw.series == "metric" else set(figure.facet_labels(draw.series))
    names = (measured or {""}) | {point["series"] for point in figure.reported}  # all but calls'
    looks = {series: style.known_looks()[series] for series in names}
    if draw.kind != "scatter":  # whose marks are named one by one
        shapes = [(look.marker, look.line) for look in looks.values()]
        if PANEL_KINDS[draw.kind].fill is bars:
            shapes = [look.hatch for look in looks.values()]
        assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("path", sorted(REPORTED_FIGURES.rglob("*.csv")), ids=lambda p: p.name)
def test_reported_points_are_the_transcribed_ones(path: Path, paper_tables: Path) -> None:
    original = paper_tables / path.relative_to(REPORTED_FIGURES)
    rows = [list(csv.reader(p.read_text().splitlines())) for p in (path, original)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", covering(4, FIGURES))
def test_figures_compose_at_the_papers_size(name: str) -> None:
    cells = load_figure(name).table.cells()
    queries = list(dict.fromkeys(cell.run for cell in cells if not cell.reported_only))
    for query in {queries[0], queries[len(queries) // 2], queries[-1]}:
        compose(load_profile("paper").translate(query))


HEADER = "panel,series,quantity,x,y,kind,run\n"


def test_every_committed_figure_has_the_measured_points_that_are_written_down() -> None:
    found = counted()
    assert not list(fewer(known(), found))
    assert known() == found, "points were gained: run `python -m scripts.figure_points`"
    assert all(found.values())


def test_counts_rise_and_never_fall(tmp_path) -> None:
    path, figure = tmp_path / "points.yaml", tmp_path / "lopa" / "figure1.csv"
    figure.parent.mkdir()
    lost = "lopa/figure1: series alpha has 1 measured points, and had 2"
    for series, said, counts in (
        (["alpha", "", ""], [], {"-": 2, "alpha": 1}),
        (["alpha", "alpha", "", "", "beta"], [], {"-": 2, "alpha": 2, "beta": 1}),
        (["alpha", "", "", "beta", "beta"], [lost], {"-": 2, "alpha": 2, "beta": 1}),
    ):
        rows = [f",{name},tpf,1,2,measured,r\n" for name in series]
        rows += [",alpha,tpf,2,,measured,r\n", ",alpha,tpf,1,2,printed,\n"]  # no number; printed
        figure.write_text(HEADER + "".join(rows), "utf-8")
        assert (raise_counts(path, tmp_path), known(path)["lopa/figure1"]) == (said, counts)


STEP = Forward(ForwardKind.DENOISE, 1, 4, 0, ms=1.0)
EMPTY: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class FakeRun:
    """Samples and token replays without a store."""

    samples: list[SampleRecord] = field(default_factory=list)
    replays: list[tuple[SampleRecord, TokenReplay]] = field(default_factory=list)
    record: Any = None


def greedy(model: str) -> Namespace:
    """Return the specification of a greedy run."""
    return Namespace(model=ModelGroup({"name": model}), decoder={}, short="0123456789")


def masked(born: list[int]) -> SampleRecord:
    return sample("a", [7] * len(born), born, [STEP] * (max(born) + 1))


def xy(reads: Any) -> list[tuple[Any, Any]]:
    return [(read["x"], read["y"]) for read in reads]


def test_tokens_per_step_are_means_over_those_still_decoding() -> None:
    run = FakeRun([masked([0, 0, 1, 2]), masked([0, 1, 1, 1])])
    reads = list(run_series.tokens_per_step(run, EMPTY))
    assert (xy(reads), [read["n"] for read in reads]) == ([(1, 1.5), (2, 2.0), (3, 1.0)], [2, 2, 1])
    assert (reads[0]["low"], reads[0]["high"]) == (1.25, 1.75)


PROGRESS = [(0, 0.0), (25, 37.5), (50, 62.5), (75, 87.5), (100, 100.0)]  # percent


@pytest.mark.parametrize(
    ("name", "settings", "born", "expected"),
    [
        ("progress", {"every": 25}, ([0, 0, 1, 2], [3, 2, 1, 0]), PROGRESS),
        ("step_of_position", {}, ([0, 2, 1], [0, 0, 3]), [(1, 1.0), (2, 2.0), (3, 3.0)]),
        ("steps_per_block", {}, ([0, 0, 1, 2], [0, 1, 2, 3]), [(1, 1), (2, 3)]),  # of two positions
    ],
)
def test_a_series_counts_the_steps_that_decoded_positions(name, settings, born, expected) -> None:
    spec = Namespace(decoder={"schedule": {"block": 2}})
    run = FakeRun([*map(masked, born)], record=Namespace(spec=spec))
    assert xy(getattr(run_series, name)(run, settings)) == expected


def test_a_series_says_what_it_lacks(tmp_path: Path) -> None:
    record: Any = Namespace(spec=Namespace(decoder={}), columns={"id": ["a"]})
    (tmp_path / SAMPLES).write_text(sample("a", [], [], []).to_line() + "\n")
    for name, run, words in (
        ("progress", FakeRun([masked([0])]), "needs the setting 'every'"),
        ("steps_per_block", FakeRun([masked([0])], record=record), "has no blocks"),
        ("tokens_per_step", StoredRun(record, tmp_path), "no decoding order, which a server"),
    ):
        with pytest.raises(DllmBenchError, match=words):
            list(series_named(name)(run, SeriesSettings()))


FOUND = np.array([[1, 0, 0], [-1, 1, 0], [-1, 0, 1], [-1, 1, -1]], dtype="int8")
"""By step and position, committed at steps 1, 4 and 3; the second is right at 2, lost, and at 4."""
CHANCE = [[0.9, 0.25, np.nan], [np.nan, 0.5, 0.75], [np.nan, 0.75, 1.0], [np.nan, 1.0, np.nan]]
RANK = np.where(FOUND == 1, 1, 4).astype("int32")
REPLAYED = masked([0, 3, 2]), TokenReplay("a", np.array(CHANCE, dtype="float32"), RANK, FOUND)
EVOLVED = FakeRun([REPLAYED[0]], [REPLAYED])


def test_gaps_count_from_the_first_right_prediction() -> None:
    assert run_series.first_right_steps(REPLAYED) == [(1, 1), (2, 4), (3, 3)]
    assert xy(run_series.waiting_steps(EVOLVED, EMPTY)) == [(0, 2), (1, 0), (2, 1)]
    both = list(run_series.first_right_and_committed(EVOLVED, EMPTY))[2:4]
    assert [(r["series"], r["x"], r["y"]) for r in both] == [("first", 2, 2), ("decoded", 2, 4)]
    assert xy(run_series.first_right_step(EVOLVED, EMPTY)) == [(1, 1), (2, 2), (3, 3)]


def test_a_tokens_way_ends_with_its_decoding() -> None:
    reads = list(run_series.RUN_SERIES["probability"](EVOLVED, {"at": [0.67], "sample": 0}))
    assert xy(reads) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert {read["panel"] for read in reads} == {"position 2"}
    assert [r["y"] for r in run_series.RUN_SERIES["rank"](EVOLVED, {"at": [0.67]})] == [4, 1, 4, 1]
    together = run_series.RUN_SERIES["probability"](EVOLVED, {"at": [0.0, 0.67], "one_panel": True})
    assert {read["series"] for read in together} == {"token 1", "token 2"}
    assert list(run_series.RUN_SERIES["probability"](EVOLVED, {"at": [0.67], "sample": 5})) == []


def test_consistency_counts_back_from_decoding() -> None:
    reads = list(run_series.probability_before_commit(EVOLVED, {"groups": [2, 4]}))
    by_group = {g: xy(r for r in reads if r["series"] == g) for g in ("up to 2", "up to 4")}
    assert by_group["up to 2"] == [(0, pytest.approx(0.95)), (1, 0.75)]
    assert by_group["up to 4"] == [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]


def test_maps_hold_a_value_per_position_and_step() -> None:
    ranks = list(run_series.rank_map(EVOLVED, EMPTY))
    assert {"x": 2, "y": 1, "z": log2(4), "n": 1} in ranks
    assert [(r["x"], r["y"]) for r in ranks if "z" not in r] == [(1, 1), (2, 4), (3, 3)]
    chances = {(r["x"], r["y"]): r["z"] for r in run_series.probability_map(EVOLVED, EMPTY)}
    assert chances[2, 3] == 0.75 and (3, 1) not in chances


def test_reliability_is_of_the_second_half() -> None:
    rng = np.random.default_rng(0)
    logits = [[float(v) for v in rng.normal(1, 1, 3)] for _ in range(40)]
    pairs = zip([[3, int(rng.integers(0, 4)), 1] for _ in range(40)], logits, strict=True)
    facts = [stats(rounds=[counts], survival=[said]) for counts, said in pairs]
    record = Namespace(samples=frame_of(facts))
    reads = list(run_series.reliability(FakeRun(record=record), {"positions": [2], "bins": 5}))
    before = [r for r in reads if r["series"] == "before"]
    bars = drafts.reliability_bins(drafts.outcomes_of(record.samples, "unscaled", 2), 5)
    assert xy(before) == [(bar.predicted, bar.happened) for bar in bars]
    assert sum(read["n"] for read in before) == 20
    assert {read["panel"] for read in reads} == {"2"}
    record.samples = frame_of([replace(facts[0], survival=None)])
    assert list(run_series.reliability(FakeRun(record=record), {"positions": [1]})) == []


PROFILE = {"tiny-qwen3": "assets/profiles/tiny-qwen3-cpu.json"}


def test_a_load_is_simulated_from_stored_drafts() -> None:
    samples = [drafted_sample(f"s{i}", Random(i), 0, surviving=True) for i in range(24)]

    def load(name: str, rule: str, model: str = "tiny-qwen3") -> list[tuple[Any, Any]]:
        run = FakeRun(samples, record=Namespace(spec=greedy(model)))
        return xy(series_named(name)(run, {"profile": PROFILE, "requests": [1, 4], "rule": rule}))

    assert load("verified_per_request", "none") == [(1, 1.0), (4, 1.0)]
    assert load("verified_per_request", "fixed") == [(1, 8.0), (4, 8.0)]
    assert all(1 <= y <= 8 for _, y in load("verified_per_request", "hardware_aware"))
    speed, front = load("device_speed", "none"), load("user_and_device_speed", "none")
    assert front == [(pytest.approx(y / x), y) for x, y in speed]
    with pytest.raises(DllmBenchError, match="no step profile of qwen3-4b"):
        load("verified_per_request", "none", "qwen3-4b")


def test_a_chain_asked_for_one_token_makes_one_call() -> None:
    """Of two drafters that cost the same in all, one block is paid whole, of seven calls one is."""

    def speed(calls: int, **rule: Any) -> float:
        made = [drafted_sample(f"s{i}", Random(i), 0, surviving=False) for i in range(4)]
        for one in made:
            one.trace["calls"] = [calls if kind == "draft" else 1 for kind in one.trace["kind"]]
            one.trace["fed"] = [7 if kind == "draft" else 1 for kind in one.trace["kind"]]
        run = FakeRun(made, record=Namespace(spec=greedy("tiny-qwen3")))
        settings = {"profile": PROFILE, "requests": [1], "rule": "fixed", **rule}
        return next(iter(series_named("device_speed")(run, settings)))["y"]

    assert speed(7, tokens=1) > 1.1 * speed(1, tokens=1) and speed(7) == pytest.approx(speed(1))


def test_a_learning_curve_belongs_to_its_weights(tmp_path: Path) -> None:
    weights = b"weights"
    (tmp_path / run_series.WEIGHTS_FILE).write_bytes(weights)
    rows = [{"epoch": e, "train": 0.5 / e, "validation": 0.6 / e} for e in (1, 2)]
    (tmp_path / run_series.CURVE_FILE).write_text("\n".join(map(json.dumps, rows)))
    head = {"source": str(tmp_path), "sha256": sha256(weights).hexdigest()}
    spec = Namespace(decoder={"select": {"first": {"head": head}}})
    run = FakeRun(record=Namespace(spec=spec))
    reads = list(run_series.filter_loss(run, EMPTY))
    assert [read["series"] for read in reads] == ["train", "validation"] * 2
    assert xy(reads) == [(1, 0.5), (1, 0.6), (2, 0.25), (2, 0.3)]
    head["sha256"] = "0" * 64
    assert list(run_series.filter_loss(run, EMPTY)) == []


def strip(root: Path) -> None:
    """Leave the record and the specification of each sealed run."""
    for record in root.rglob(RECORD):
        for path in record.parent.iterdir():
            if path.name not in (RECORD, SPEC):
                path.unlink()


def cells(root: Path) -> list[PlannedCell]:
    return planned_small(Store(root), TINY, small().table)


def drawn(root: Path) -> BuiltFigure:
    """Return the small figure, of the runs that are stored."""
    return build_figure(small(), TINY, cells(root), Store(root))


def empty_steps(built: BuiltFigure) -> list[str]:
    """Why the two sealed runs give no steps, of which they have three series."""
    empty = built.without_number
    return list(empty.reason[(empty.quantity == "steps") & (empty.state == "sealed")])


def test_a_point_without_samples_says_so_and_what_to_do(tmp_path) -> None:
    before = sealed(tmp_path / "runs")
    strip(tmp_path)
    found = drawn(tmp_path / "runs")
    reasons = empty_steps(found)
    assert len(reasons) == 3
    said = r"stored without 8 of its 8 samples; .*`dllm-bench runs rm \w+`"
    assert all(re.search(said, reason) for reason in reasons)
    assert not any(str(tmp_path) in reason for reason in found.points.reason)
    assert any(reasons[0] in line for line in lines(found))
    kept = before.drawn(measured=True)
    kept = kept[kept.quantity == "tpf"].reset_index(drop=True)
    again = found.drawn(measured=True).reset_index(drop=True)
    assert again.equals(kept), "what the records give is drawn as before"


def test_a_figure_is_drawn_from_an_archive_alone(tmp_path) -> None:
    before = sealed(tmp_path / "runs")
    runs = {record.identity_hash for record in Store(tmp_path / "runs").records()}
    pack(tmp_path, tmp_path / "runs.tar.xz", with_samples=runs)
    shutil.rmtree(tmp_path / "runs")
    assert drawn(tmp_path / "runs").drawn(measured=True).equals(before.drawn(measured=True))


def test_a_damaged_samples_file_is_named_below_the_runs_folder(tmp_path) -> None:
    sealed(tmp_path)
    for path in tmp_path.rglob(SAMPLES):
        path.write_text("no sample\n")
    reasons = empty_steps(drawn(tmp_path))
    assert len(reasons) == 3
    assert all(r.startswith("miniquiz/") and "is damaged" in r for r in reasons)


def test_written_points_are_kept_if_they_would_be_lost(tmp_path) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    before = sealed(root)
    assert why_kept(before, folder) == ""
    [path] = [path for path in write(before, folder) if path.suffix == ".csv"]
    assert why_kept(before, folder) == ""
    strip(tmp_path)
    without = drawn(root)
    said = why_kept(without, folder)
    assert said.startswith(f"{path} was not written again, since it has points of 2 runs")
    assert "stored without" in said
    path.unlink()
    write(without, folder)
    assert why_kept(without, folder) == "", "a figure that never had them is written"


def test_written_points_are_kept_if_the_run_failed_when_made_again(tmp_path) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    write(sealed(root), folder)
    record = next(root.rglob(RECORD))
    record.unlink()
    assert why_kept(drawn(root), folder) == "", "a run to be made is drawn as missing"
    (record.parent / ERROR).write_text("no memory left\n")
    assert "points of 1 runs that would be lost (failed)" in why_kept(drawn(root), folder)


def test_without_samples_no_token_replay_is_recorded(tmp_path) -> None:
    sealed(tmp_path)
    call = SeriesCall("waiting_steps", {}, {}, replay_samples=2)
    figure = replace(small(), calls={"steps": call})
    for path in tmp_path.rglob(token_replay.FILE):
        path.unlink()
    assert len(list(missing_replays(figure, cells(tmp_path), Store(tmp_path)))) == 2
    strip(tmp_path)
    assert list(missing_replays(figure, cells(tmp_path), Store(tmp_path))) == []


def test_a_file_that_holds_no_replays_is_a_sentence(tmp_path: Path) -> None:
    file, empty = tmp_path / REPLAYS, np.zeros((4, 5))
    whole = token_replay.write_replays(file, [TokenReplay("a", empty, empty, empty)]).read_bytes()
    flipped = (whole[:i] + bytes([whole[i] ^ 255]) + whole[i + 1 :] for i in range(len(whole)))
    for content in (b"", b"PK", b"\0" * 100, *flipped):
        file.write_bytes(content)
        with suppress(DllmBenchError):
            token_replay.read_replays(tmp_path)
    file.write_bytes(b"PK")
    with pytest.raises(DllmBenchError, match="holds no token replays"):
        token_replay.read_replays(tmp_path)


NAME = "learn2pd/figure4"  # two runs, and the replay of their tokens


def rows(results: Path) -> list[dict[str, str]]:
    written = read_csv(results / "figures" / "embedded" / f"{NAME}.csv")
    return [row for row in written if row["kind"] == "measured"]


def test_a_figure_says_what_is_missing_then_runs_it(tmp_path: Path, command) -> None:
    said = command(f"figure {NAME} --limit 1")
    assert "2 runs to make" in said
    assert f"bench figure {NAME} --profile embedded --limit 1 --results {tmp_path} --run" in said
    assert said.count("one of them (missing: not run yet): dllm-bench run ") == 2
    assert [(row["y"], row["state"]) for row in rows(tmp_path)] == [("", "missing")] * 2

    assert "0 without number" in command(f"figure {NAME} --limit 1 --run --jobs 1")
    assert len(list((tmp_path / "runs").rglob(token_replay.FILE))) == 2
    drawn = rows(tmp_path)
    assert {row["state"] for row in drawn} == {"sealed"}
    for panel in ("gsm8k", "humaneval"):
        mine = [row for row in drawn if row["panel"] == panel]
        tokens = sum(float(row["y"]) for row in mine)
        assert {float(row["n"]) for row in mine} == {tokens}, "every decoded token is counted once"

    line = command("status").splitlines()[-1]
    assert line.startswith(f"figure embedded/{NAME}: ") and line.endswith("measured")
