"""Figures as data: what the short forms stand for, and whether the committed files hold."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dllm_bench.api import runs as api
from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures import style
from dllm_bench.figures.panels import PANEL_KINDS, bars
from dllm_bench.figures.run_series import run_series
from dllm_bench.figures.spec import REPORTED_FIGURES, PaperFigure, load_figure, read_figure
from dllm_bench.paths import CONFIG_DIR, conf_dir, read_yaml
from dllm_bench.store.spec import slug
from dllm_bench.tables.load import load_profile, names_of
from scripts.figure_points import counted, fewer, known, raise_counts
from tests.figures.builders import SMALL, small
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


def test_a_rule_may_name_a_sweep() -> None:
    cells = [cell.keys for cell in small().table.cells()]
    assert {keys["number"] for keys in cells if keys["task"] == "code"} == {"alpha-0.5", "alpha-1"}
    assert len(cells) == (4 + 2) * 2


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
        run_series("tea leaves")
    assert style.look("nobody's method") != style.look("somebody's method")
    for read in (api.table, api.figure):
        with pytest.raises(DllmBenchError, match=r"There is no \w+ '\[\]'"):
            read([])
    with pytest.raises(DllmBenchError, match="There is no profile"):
        api.table("lopa/table4", profile=[])


def series_names(figure: PaperFigure) -> set[str]:
    """Return every series the figure can have, but those that run series name."""
    draw, metrics = figure.draw, {m.name.partition("@")[0] for m in figure.table.metrics}
    measured = metrics if draw.series == "metric" else set(figure.facet_labels(draw.series))
    return (measured or {""}) | {point["series"] for point in figure.reported}


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figures_hold(name: str) -> None:
    """What a figure names is there, and its series can be told apart without colour."""
    figure = load_figure(name)
    for call in figure.calls.values():
        run_series(call.name)
    values = [v.name for values in figure.table.facets.values() for v in values]
    assert values == [slug(value) for value in values]
    panels, labelled = set(figure.facet_labels(figure.draw.panels)), set(figure.draw.labels)
    entries = read_yaml(CONF / f"{name}.yaml").get("reported", ())
    assert bool(entries) == bool(figure.reported)
    assert all({"file", "kind", "quantity"} <= set(entry) for entry in entries)
    for point in figure.reported:
        assert point["quantity"] in figure.quantities and point["panel"] in panels | labelled | {""}
        assert point["kind"] in ("printed", "digitised")
    looks = {series: style.known_looks()[series] for series in series_names(figure)}
    if figure.draw.kind != "scatter":  # whose marks are named one by one
        shapes = [(look.marker, look.line) for look in looks.values()]
        if PANEL_KINDS[figure.draw.kind].fill is bars:
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
