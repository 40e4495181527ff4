"""What Python and a notebook show of results: short forms, comparisons, pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import dllm_bench as db
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.trade_off import draw, front_of, looks, place_names
from dllm_bench.metrics.sample_stats import from_columns
from dllm_bench.store.record import RunRecord
from tests.api.models import loaded

HOSTILE = "<script>alert(1)</script>"
SETTINGS = {"hardware": "cpu", "limit": 2, "benchmark.max_new_tokens": 32}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunRecord]]:
    """Return two thresholds of one decoder, and another decoder."""
    folder = tmp_path_factory.mktemp("results")
    choices = (("fast_dllm", 0.5), ("fast_dllm", 0.9), ("credit", 0.9))
    made = [
        db.run("tiny-llada", name, "minigsm", results=folder, **SETTINGS, **select(tau))
        for name, tau in choices
    ]
    return folder, made


def select(tau: float) -> dict[str, float]:
    """Return the setting of a threshold."""
    return {"decoder.select.tau": tau}


def test_columns_of_a_comparison_are_decoders(runs: tuple[Path, list[RunRecord]]) -> None:
    _, (low, high, credit) = runs
    assert list(db.compare(high, credit).to_pandas()) == ["fast_dllm", "credit"]
    names = ["fast_dllm select.tau=0.5", "fast_dllm select.tau=0.9"]
    assert list(db.compare(low, high).to_pandas()) == names
    heads, hashes, *_ = str(db.compare(low, high)).splitlines()
    assert all(name in heads for name in names) and low.spec.short in hashes


def test_two_runs_of_one_kind_are_told_apart_by_their_hash(runs) -> None:
    record = runs[1][0]
    other = replace(record, spec=replace(record.spec, seed=1, batch=2))
    frame = db.compare(record, other).to_pandas()
    assert list(frame) == [f"fast_dllm {one.spec.short}" for one in (record, other)]


def test_short_forms_are_one_line(runs: tuple[Path, list[RunRecord]]) -> None:
    folder, (record, other, _) = runs
    (completion,) = db.generate(loaded("tiny-llada"), "2 + 2 =", "fast_dllm", 32)
    table = db.table("lopa/table4", results=folder)
    shown = {
        repr(completion): "forwards)",
        repr(record): "fast_dllm, tiny-llada on minigsm: score",
        repr(table): "Table(lopa/table4, ",
        repr(db.compare(record, other)): "RunComparison(fast_dllm",
    }
    for text, part in shown.items():
        assert part in text and len(text) < 200 and "\n" not in text


def test_a_notebook_shows_a_view_that_escapes(runs: tuple[Path, list[RunRecord]]) -> None:
    _, (record, other, _) = runs
    hostile = replace(record, spec=replace(record.spec, label=HOSTILE))
    for shown in (hostile, db.compare(hostile, other)):
        assert HOSTILE not in shown._repr_html_() and "&lt;script&gt;" in shown._repr_html_()
    assert "<table" in record._repr_html_()


def test_a_trade_off_is_drawn_from_stored_runs(runs, tmp_path) -> None:
    folder, made = runs
    picture = db.trade_off("tiny-llada", "minigsm", results=folder)
    points = picture.to_pandas()
    assert sorted(points["run"]) == sorted(one.spec.short for one in made)
    assert picture.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in picture.save(tmp_path / "a.svg").read_bytes()
    assert "<img" in picture._repr_html_() and repr(picture).startswith("Picture(tiny-llada on")
    with pytest.raises(DllmBenchError, match=r"ends in .png or .svg"):
        picture.save(tmp_path / "a.pdf")


def test_a_trade_off_without_runs_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match="`dllm-bench run -m"):
        db.trade_off("tiny-llada", results=tmp_path)


CROWD = pd.DataFrame(
    [
        (name, 4 + 0.05 * i, 95 - i, 90 - i, 97)
        for i, name in enumerate(("vanilla", "fast_dllm", "credit", "lopa_dream", "klass", "mine"))
    ],
    columns=["decoder", "speed", "score", "low", "high"],
)


def test_names_do_not_overlap_and_the_front_is_drawn() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation, Text

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    points = CROWD.assign(front=True)
    draw(ax, points)
    figure.draw_without_rendering()
    unnamed = place_names(ax, points)
    figure.draw_without_rendering()
    names = [one for one in ax.texts if isinstance(one, Annotation)]
    boxes = [Text.get_window_extent(name) for name in names]
    assert {name.get_text() for name in names} | unnamed == set(CROWD.decoder)
    assert len(names) >= 4
    for index, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:index])
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith("front")]
    assert list(line.get_xdata()) == sorted(points.speed[points.front])


def test_the_oracle_is_not_on_the_front(runs: tuple[Path, list[RunRecord]]) -> None:
    record = runs[1][0]
    assert record.score
    knowing = replace(record.spec, decoder={"select": {"_target_": "select.oracle"}})
    known = (record, 1.0, record.score)
    assert front_of([known, (replace(record, spec=knowing), 9.0, record.score)]) == [0]


def test_a_decoder_has_the_colour_of_its_family() -> None:
    found = looks(["lopa", "lopa_dream", "fast_dllm", "mine"])
    assert found["lopa"].colour == found["lopa_dream"].colour != found["fast_dllm"].colour
    assert len({(look.colour, look.marker) for look in found.values()}) == 4


def test_acceptance_has_a_row_per_position(runs: tuple[Path, list[RunRecord]]) -> None:
    record = runs[1][0]
    assert db.acceptance(record).empty
    rounds = [[[3, 2, 3], [2, 0, 1]], [[0, 0, 1]]]
    stats = from_columns({**record.columns, "rounds": rounds})
    assert [len(one) for one in stats.rounds] == [2, 1]
    drafted = replace(record, columns={**record.columns, "rounds": rounds})
    found = db.acceptance(drafted)
    assert list(found.position) == [1, 2, 3] and list(found.survival) == [0.5, 0.5, 0.0]
    none = replace(record, columns={**record.columns, "rounds": [[[0, 0, 1]], [[0, 0, 1]]]})
    assert db.acceptance(none).empty


def test_figures_and_claims_are_read_from_stored_runs(runs, tmp_path) -> None:
    folder, _ = runs
    picture = db.figure("lopa/figure1", results=folder)
    assert "kind" in picture.to_pandas()
    assert picture.save(tmp_path / "a.png").stat().st_size > 1000
    found = db.verdicts("lopa", results=folder)
    assert len(found) and "verdict" in found
    assert all(name.startswith("lopa/") for name in found.index)
