"""The report and the whole store: costs are estimated from all runs, a damaged record has no page.

On made-up results (`builders`); the pages themselves are in `test_site`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.cli.main import main
from dllm_bench.figures.trade_off import front_of, overlap
from dllm_bench.site import build as site_module
from dllm_bench.site.compare_page import WIDTH, place_labels, ticks
from dllm_bench.site.pages import run_address
from dllm_bench.store import index
from dllm_bench.store.files import checked
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import slug
from dllm_bench.store.store import RECORD, SPEC, Store
from dllm_bench.tables import frame as tables
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.render import prose
from scripts.update_reference import add, pack
from tests.site import builders

PACKED = "runs.tar.xz"


def test_costs_are_judged_by_all_sealed_runs_as_the_table_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by = []

    def build(*plan: Any) -> BuiltTable:
        judged_by.append([known.config for known in plan[3].runs])
        return tables.build(*plan)

    monkeypatch.setattr(site_module, "build_table", build)
    builders.fill(tmp_path)
    builders.make(tmp_path)
    store = Store(tmp_path / "runs")
    every = [known.config for known in measured_runs(store).runs]
    assert judged_by == [every] and len(every) == len(list(store.records()))
    monkeypatch.setattr(index, "read_entry", never)
    assert len(measured_runs(store).runs) == len(every), "of the records that are listed"


def never(folder: Path) -> RunRecord:
    raise AssertionError(f"read again: {folder}")


def test_a_damaged_record_costs_its_own_page_alone(tmp_path: Path) -> None:
    lost = builders.fill(tmp_path)["lookahead"]
    folder = Store(tmp_path / "runs").path(lost.spec)
    head = {
        "identity_hash": lost.identity_hash,
        "spec": lost.spec.to_plain(),
        "total": builders.SAMPLES_PER_RUN,
    }
    (folder / SPEC).write_text(json.dumps(checked(head)))
    (folder / RECORD).write_text("{")
    builders.make(tmp_path)
    assert not (tmp_path / "site" / run_address(lost.spec.short)).exists()
    assert "is no run record" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_a_report_of_packed_runs_is_written_elsewhere(tmp_path, monkeypatch, capsys) -> None:
    builders.fill(tmp_path)
    packed = tmp_path / "reference"
    packed.mkdir()
    pack(tmp_path, packed / PACKED)
    content = (packed / PACKED).read_bytes()
    hashes = [record.identity_hash for record in Store(tmp_path / "runs").records()]
    assert pack(tmp_path, tmp_path / "some.tar.xz", hashes[:1]) == 1 < len(hashes)
    monkeypatch.setenv("DLLM_BENCH_RESULTS", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(site_module, "names_of", lambda kind: [])
    assert main(["report", "--results", str(packed)]) == 0
    assert capsys.readouterr().out
    assert (tmp_path / "own" / "site" / "index.html").exists()
    assert [path.name for path in packed.iterdir()] == [PACKED]
    assert (packed / PACKED).read_bytes() == content


def own_runs(root: Path) -> list[RunRecord]:
    """Return three runs of a model that no table has, two of them on the same samples."""
    store, records = Store(root / "runs"), []
    for label, right, n in (("slow", 20, 45), ("quick", 30, 45), ("other", 10, 20)):
        config = builders.builders.compose([f"decoder={label}", "model=mine", "benchmark=own"])
        spec = builders.builders.spec_of({**config, "seed": len(records)})
        records.append(builders.builders.record_of(spec, right=right, n=n))
        builders.builders.seal(store, replace(records[-1], summary=SPEEDS[label]))
    return records


SPEEDS = {
    "slow": {"tpf/emitted": 1.0, "tps/e2e": 20.0},
    "quick": {"tpf/emitted": 4.0, "tps/e2e": 50.0},
    "other": {"tpf/emitted": 2.0, "tps/e2e": None},
}


def test_a_table_without_a_stored_run_is_a_folded_line_and_nothing_of_it_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compose(overrides: Sequence[str]) -> Mapping[str, Any]:
        composed.append(list(overrides))
        return config_of(overrides)

    composed: list[list[str]] = []
    config_of = builders.builders.compose
    own_runs(tmp_path)
    monkeypatch.setattr(builders.builders, "compose", compose)
    builders.make(tmp_path)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not [query for query in composed if any("=tiny" in word for word in query)]
    assert "<details><summary>1 tables without a stored run" in page
    assert "<code>dllm-bench table small/table1 --run</code>" in page
    assert not (tmp_path / "site" / "tables").exists()
    builders.make(tmp_path, all_tables=True)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "<details>" not in page and (tmp_path / "site/tables/small/table1.html").exists()


def test_own_runs_and_their_trade_off_come_first(tmp_path: Path) -> None:
    slow, quick, _ = own_runs(tmp_path)
    builders.make(tmp_path)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    sections = re.findall(r'<section id="(\w+)">', page)
    assert sections == ["runs", "comparisons", "tables", "figures"]
    plots = re.findall(r'<svg class="plot".*?</svg>', page, re.DOTALL)
    assert [re.findall(r"\((t\w+/\w+)\)</text>", plot) for plot in plots] == [
        ["tpf/emitted"],
        ["tps/e2e"],
    ]
    for plot in plots:
        assert plot.count("<circle") == 2
        assert all(f"{run_address(one.spec.short)}" in plot for one in (slow, quick))
        assert plot.count(' best"') == 1  # slow is beaten
        assert '<text class="title"' in plot and "Score (%)</text>" in plot
        assert re.search(r'<text class="name series-0"[^>]*>[^<]+</text>', plot)
    fronts = re.findall(r'class="front" points="([^"]+)"', page)
    assert [len(front.split()) for front in fronts] == [3, 3]  # one step: across, to it, down
    comparison = next((tmp_path / "site" / "comparisons").glob("*.html"))
    assert comparison.read_text(encoding="utf-8").count('<svg class="plot"') == 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 4.1, [0, 1, 2, 3, 4, 5]),
        (32.0, 71.0, [30, 40, 50, 60, 70, 80]),
        (0.0, 0.0, [0, 0.2]),
    ],
)
def test_ticks_are_round_and_enclose_all_values(low, high, expected) -> None:
    assert ticks(low, high) == expected


def test_labels_of_a_crowded_front_cover_neither_points_nor_each_other() -> None:
    places = [(100 + 12 * i, 100 + 5 * i) for i in range(12)]
    points = [{"x": f"{x}", "y": f"{y}", "css": ""} for x, y in places]
    named = [(point, f"decoder_{i}") for i, point in enumerate(points)]
    labels = list(place_labels(named))
    assert len(labels) > 4
    boxes = []
    for label in labels:
        x, y, width = float(label["x"]), float(label["y"]), 7.0 * len(label["text"])
        left = x - width if label["anchor"] == "end" else x
        boxes.append((left, y - 10, left + width, y))
    dots = [(x - 5.0, y - 5.0, x + 5.0, y + 5.0) for x, y in places]
    assert not any(overlap(one, dot) for one in boxes for dot in dots)
    assert not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_label_near_the_right_edge_is_whole() -> None:
    point = {"x": f"{WIDTH - 90}", "y": "200", "css": ""}
    [label] = place_labels([(point, "lookaheads")])
    assert label["anchor"] == "end"  # ten bold characters are about 85 wide


def test_a_run_that_knows_the_text_is_off_the_front_whatever_its_name(tmp_path: Path) -> None:
    slow, quick, _ = own_runs(tmp_path)
    known = [(one, x, one.score) for one, x in ((slow, 1.0), (quick, 4.0)) if one.score]
    assert front_of(known) == [1]
    knowing = replace(quick.spec, decoder={"select": {"_target_": "select.oracle"}}, label="mine")
    assert front_of([known[0], (replace(quick, spec=knowing), 4.0, known[1][2])]) == [0]
    called_so = replace(quick.spec, label="oracle")
    assert front_of([known[0], (replace(quick, spec=called_so), 4.0, known[1][2])]) == [1]


def test_findings_have_code_and_verdicts_in_colour_and_wide_tables_stay_in_the_window(
    tmp_path: Path,
) -> None:
    assert prose("`a<b` & <i>") == "<code>a&lt;b</code> &amp; &lt;i&gt;"
    own_runs(tmp_path)
    builders.make(tmp_path)
    page = (tmp_path / "site" / "findings.html").read_text(encoding="utf-8")
    assert "`" not in page and "<code>minigsm</code>" in page and "&lt;code" not in page
    assert page.index('class="claims ') < page.index('class="chip ') < page.index('id="evidence"')
    assert page.index('id="practice"') < page.index('class="chip ') < page.index('id="history"')
    style = (tmp_path / "site" / "static" / "site.css").read_text(encoding="utf-8")
    assert all(f".chip.{slug(str(verdict))} {{" in style for verdict in ClaimVerdict)
    assert "article.table .scroll { max-height: 94vh; overflow: auto; }" in style
    assert "td.head:first-child, th.head:first-child { position: sticky; left: 0;" in style


def test_runs_are_added_to_an_archive_that_keeps_what_it_has(tmp_path: Path) -> None:
    builders.fill(tmp_path)
    packed = tmp_path / "reference"
    packed.mkdir()
    hashes = sorted(record.identity_hash for record in Store(tmp_path / "runs").records())
    pack(tmp_path, packed / PACKED, hashes[:1])
    assert add(tmp_path, packed, []) == len(hashes) - 1 > 0
    assert sorted(record.identity_hash for record in Store(packed / "runs").records()) == hashes
    assert add(tmp_path, packed, []) == 0
