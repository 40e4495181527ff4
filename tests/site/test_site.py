"""The report as files: every link leads to a file of the site, what models wrote stays text.

On made-up results (`builders`); what a reader does with the pages is in `test_browser`. Costs are
estimated from all runs of the store, and a damaged record has no page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from jinja2 import UndefinedError

from dllm_bench.api.compose import compose
from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.figures.trade_off import front_of
from dllm_bench.metrics import accuracy
from dllm_bench.site import build as site_module
from dllm_bench.site import compare_page
from dllm_bench.site import pages as site_pages
from dllm_bench.site import run_page as site_samples
from dllm_bench.site import texts as site_texts
from dllm_bench.site.decoding_order import decoding_order
from dllm_bench.site.pages import SHOWN_POINTS, figure_page, run_address, shown_entry
from dllm_bench.store import inputs
from dllm_bench.store.files import checked
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec, slug
from dllm_bench.store.store import RECORD, SPEC, Store
from dllm_bench.tables import frame as tables
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.render import prose
from scripts import update_reference
from scripts.update_reference import add, pack, prune
from tests.site import builders
from tests.unit.test_index import PACKED


class Parsed(HTMLParser):
    """Links, ids, elements and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.links = [value for name, value in self.attributes if name in ("href", "src")]
        self.ids = [value for name, value in self.attributes if name == "id"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    builders.fill(folder)
    builders.make(folder)
    return folder


@pytest.fixture(scope="module")
def site(root: Path) -> Path:
    return root / "site"


@pytest.fixture(scope="module")
def records(root: Path) -> dict[str, RunRecord]:
    return {record.spec.label: record for record in Store(root / "runs").records()}


@cache
def parsed(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


def payloads(site: Path, record: RunRecord) -> Iterator[dict]:
    """Yield the samples of a run as its scripts hold them, words in place of their numbers."""
    for number in range(100):
        path = site / "runs" / record.spec.short / f"samples-{number}.js"
        if not path.is_file():
            return
        called = re.fullmatch(r"receiveSamples\((\d+),(.*)\)\n", path.read_text(encoding="utf-8"))
        assert called and int(called[1]) == number
        pack = json.loads(called[2])
        for sample in pack["samples"]:
            sample["tokens"] = [pack["words"][word] for word in sample.get("tokens", ())]
            yield sample


def test_links_lead_to_places_in_files_and_reach_every_page_from_the_first(site) -> None:
    seen, waiting, counted = set[Path](), [(site / "index.html").resolve()], 0
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".html":
            continue
        seen.add(page)
        for link in parsed(page).links:
            address, _, place = link.partition("#")
            target = (page.parent / address).resolve() if address else page
            assert target.is_file() and target.is_relative_to(site), f"{page}: {link}"
            if place.isdecimal():
                assert target.name == "sample.html" and int(place) < builders.SAMPLES_PER_RUN
            elif place:
                assert place in parsed(target).ids, f"{page}: {link}"
            waiting.append(target)
            counted += 1
    assert seen == {page.resolve() for page in site.rglob("*.html")} and counted > 100


def test_nothing_leads_out_of_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = parsed(page)
        values = [value for name, value in found.attributes if name == "content"]
        [policy] = [text for text in values if text.startswith("default-src 'none'")]
        assert "base-uri 'none'" in policy and "unsafe" not in policy
        assert not [link for link in found.links if re.match(r"[a-z+.-]*:|//", link)], page
        assert not [name for name, _ in found.attributes if name.startswith("on")], page
        assert "style" not in found.elements
    leads_out = re.compile(r"https?:|//\w+\.|url\(|@import|fetch\(|XMLHttp|import\s*\(")
    for name in ("site.css", "site.js"):
        assert not leads_out.search((site / "static" / name).read_text(encoding="utf-8")), name


def test_each_number_of_a_table_leads_to_the_run_that_gave_it(site, records) -> None:
    page = parsed(site / "tables" / "small" / "table1.html")
    linked = {link.split("/")[-2] for link in page.links if "/runs/" in link}
    of_table = {r.spec.short for r in records.values() if r.spec.label == "lopa"}
    assert of_table and of_table <= linked
    assert all(short in "".join(parsed(site / run_address(short)).texts) for short in linked)


def test_points_of_a_figure_lead_to_runs_that_have_a_page(site, records) -> None:
    page = parsed(site / "figures" / "embedded" / "small" / "figure1.html")
    assert f"../../../{run_address(records['lookahead'].spec.short)}" in page.links
    assert sum("/runs/" in link for link in page.links) == 1
    assert {"figure1.svg", "figure1.csv"} <= set(page.links) and builders.HOSTILE[:20] in page.texts


def test_entries_of_points_are_rounded() -> None:
    texts = "y=93.833333 y=9999.96 y=0.000123 x=64.0 x=a.b n=420 n=0 y=0"
    shown = [shown_entry(*text.split("=")) for text in texts.split()]
    assert site_samples.bracketed((123456.7, 0.5)) == "[123457, 0.5]"
    assert shown == ["93.83", "10000", "0.000123", "64", "a.b", "420", "", "0"]


def test_columns_without_an_entry_among_the_points_shown_are_left_out() -> None:
    points = [{"x": "1", "y": "2.5", "n": "0", "reason": ""}] * SHOWN_POINTS
    page = figure_page("figures/embedded/small/f", "F", [*points, {**points[0], "reason": "no"}],
                       ["svg"], frozenset())  # fmt: skip
    assert re.findall(r"([^<>]+)</button></th>", page) == ["x", "y"]
    assert "1 more are in the csv" in page


def test_hostile_names_and_texts_stay_text(site: Path, records: dict[str, RunRecord]) -> None:
    hostile = records[builders.HOSTILE]
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text and "<img src=x" not in text, page
        assert parsed(page).elements.count("script") == 1 + (page.name == "sample.html"), page
    texts = parsed(site / run_address(hostile.spec.short)).texts
    assert builders.HOSTILE.replace("\u202e", "\\u202e") in texts, "the order of what follows stays"
    assert not any("\u202e" in text for text in texts)
    data = (site / "runs" / hostile.spec.short / "samples-0.js").read_text(encoding="utf-8")
    assert data.isascii() and not set("<>&") & set(data)
    assert next(payloads(site, hostile))["text"] == f"four and two {builders.HOSTILE}"


def test_token_texts_have_no_invisible_characters(site, records) -> None:
    for sample in payloads(site, records["lookahead"]):
        assert all(word.replace("\n", "").isprintable() for word in sample["tokens"])
    assert sample["tokens"][0] == "four" and sample["tokens"][4] == "\n"
    assert "\\u202e" in sample["tokens"][9]


def test_no_template_turns_escaping_off_or_names_what_is_not_there() -> None:
    templates = site_pages.templates()
    for name in templates.list_templates():
        source = templates.loader.get_source(templates, name)[0]
        assert "autoescape" not in source and "safe" not in re.findall(r"\| *(\w+)", source), name
    with pytest.raises(UndefinedError):
        templates.from_string("{{ view.titel }}").render(view=site_pages.Page("a", "title"))


@pytest.mark.parametrize("make", [builders.lookaheads, builders.drafts, builders.revisions])
def test_the_viewer_gets_the_whole_filling(make: Any) -> None:
    order = decoding_order(make("a"), lambda ids: builders.WORDS[ids[0]], builders.LOOKAHEADS)
    words = site_samples.text_numbers()
    packed = json.loads(site_pages.script_json(site_samples.pack_decoding_order(order, words)))
    texts = list(words)
    shown = [site_texts.printable_lines(token.text) for token in order.tokens]
    assert [texts[n] for n in packed["tokens"]] == shown
    assert packed["born"] == [-1 if t.born is None else t.born for t in order.tokens]
    for index, step in enumerate(order.steps):
        for name in site_samples.STEP_COLUMNS:
            assert packed["steps"][name][index] == getattr(step, name)
        for name in ("overwritten", "remasked"):
            assert packed["steps"].get(name, [[]] * len(order.steps))[index] == getattr(step, name)
        assert step.committed == [p for p, born in enumerate(packed["born"]) if born == index]
        drafted = packed["steps"].get("drafted", [[]] * len(order.steps))[index]
        assert [texts[n] for n in drafted] == step.drafted
    assert (packed["end"], packed["borders"]) == (order.end, order.borders)


def test_a_run_page_says_what_the_record_says(site: Path, records: dict[str, RunRecord]) -> None:
    record = records["lookahead"]
    text = " ".join(parsed(site / run_address(record.spec.short)).texts)
    score = record.score
    assert score and f"{100 * score.mean:.1f}" in text and f"{100 * score.high:.4g}]" in text
    assert record.identity_hash in text and "correct 30, wrong 15" in text
    tpf = sum(record.columns["emitted"]) / sum(record.columns["forwards"])
    assert f"{tpf:.4g}" in text
    assert [sample["id"] for sample in payloads(site, record)] == record.columns["id"]
    assert [sample["verdict"] for sample in payloads(site, record)] == record.columns["verdict"]


def test_the_board_counts_cells_by_standing(site: Path) -> None:
    page = parsed(site / "index.html")
    labels = [value for name, value in page.attributes if name == "aria-label"]
    bar = next(label for label in labels if "measured" in label)
    counts = {name: int(n) for n, name in (part.split(" ", 1) for part in bar.split(", "))}
    assert sum(counts.values()) == 18 and counts["measured"] == 9  # three sealed runs of six
    assert {"partial", "failed", "missing"} <= set(counts)
    assert "The disk is full." in [value for name, value in page.attributes if name == "title"]


def test_the_comparison_is_the_paired_one(site: Path, records: dict[str, RunRecord]) -> None:
    pair = [records["lookahead"], records[builders.HOSTILE]]
    # both have the same tokens per forward: the hash decides which is the reference
    reference, other = sorted(pair, key=lambda record: record.identity_hash)
    found = accuracy.compare(other.values, reference.values)
    texts = ("|".join(parsed(path).texts) for path in (site / "comparisons").glob("*.html"))
    [text] = [text for text in texts if reference.spec.short in text]
    assert f"|{100 * found.value:+.1f}|" in text
    assert f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]" in text
    assert "|reference|" in text and "|yes|" in text
    ungraded = replace(other, columns={**other.columns, "value": [None] * len(other.values)})
    alone = compare_page.comparison_page(compare_page.ComparedRuns([reference, ungraded]), set())
    assert alone.count("<tr>") == 2, "a head and the reference; it shares no graded sample"


def test_a_changed_definition_or_look_makes_pages_and_plots_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(site_module, "PACKAGE", tmp_path)
    versions = {site_module.code_version.__wrapped__()}
    for name in ("metrics/definitions.yaml", "figures/looks.yaml", "tables/derive.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
        versions.add(site_module.code_version.__wrapped__())
    assert len(versions) == 4


class Quiz:
    def requests(self, encode: Any) -> list[Request]:
        turns = json.dumps([{"role": "user", "content": "How many?"}])
        texts = ("a", "Two and two?", "Two and two?"), ("b", "How many?", turns)
        return [Request(key, tuple(encode(text)), 4, prompt=prompt) for key, text, prompt in texts]


def test_a_prompt_is_shown_only_where_its_ids_are_those_decoded(monkeypatch) -> None:
    spec = RunSpec({"name": "tiny-llada", "path": "assets/tiny-llada"}, {}, {"name": "quiz"}, {})
    monkeypatch.setattr(inputs, "benchmark_of", lambda plain: Quiz())
    requests = site_texts.requests_of(spec)
    hashes = {"a": "of another prompt", "b": site_texts.prompt_sha256(requests[1])}
    samples = {k: SimpleNamespace(prompt="", prompt_sha256=v) for k, v in hashes.items()}
    assert site_texts.TextSource(compose).prompts(spec, samples) == {"b": "user:\nHow many?"}  # type: ignore[arg-type]


def made(sentences: list[str]) -> int:
    """Return how many pages of runs were made."""
    return int(sentences[0].split(" ")[0])


def test_only_what_is_new_is_made_again(root, tmp_path, monkeypatch) -> None:
    out = tmp_path / "site"
    sealed = len(list(Store(root / "runs").records()))
    assert made(builders.make(root, out)) == sealed
    before = (out / "index.html").read_bytes()
    assert made(builders.make(root, out)) == 0
    assert (out / "index.html").read_bytes() == before
    entry = next(e for e in Store(root / "runs").entries() if e.state == "sealed")
    page = out / run_address(entry.spec.short)
    later = page.stat().st_mtime + 10
    os.utime(entry.path / RECORD, (later, later))
    try:
        assert made(builders.make(root, out)) == 1
    finally:
        os.utime(entry.path / RECORD)
    page.unlink()
    assert made(builders.make(root, out)) == 1
    monkeypatch.setattr(site_module, "code_version", lambda: "another")
    told = builders.make(root, out, only=[entry.spec.short])
    assert told[0].startswith("1 pages of runs made, 0 were up to date"), "the others are old"
    links = Parsed((out / "index.html").read_text(encoding="utf-8")).links
    assert {link for link in links if link.startswith("runs/")} == {run_address(entry.spec.short)}
    assert made(builders.make(root, out)) == sealed - 1


def test_what_was_composed_for_a_table_is_not_again(root, site, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(builders.builders, "compose", None)  # any use of it fails
    builders.make(root, tmp_path / "again")
    pages = [path.relative_to(site) for path in site.glob("tables/**/*.html")]
    assert pages
    for page in pages:
        assert (tmp_path / "again" / page).read_bytes() == (site / page).read_bytes()


def test_of_many_runs_the_last_sealed_have_pages_and_earlier_pages_stay(tmp_path) -> None:
    root, out = tmp_path / "results", tmp_path / "site"
    records = builders.fill(root)
    store = Store(root / "runs")
    every = list(store.records())
    last, first = records["lookahead"], records["drafts"]
    sealed_at = {last.identity_hash: 3e9, first.identity_hash: 0.0}
    for one in every:
        date = sealed_at.get(one.identity_hash, 1e9)
        (store.path(one.spec) / RECORD).write_text(replace(one, sealed_at=date).to_json())
    builders.make(root, out, only=[first.spec.short])
    told = builders.make(root, out, most_pages=1)
    assert made(told) == 1 and f"{len(every) - 2} runs have no page; --runs HASH" in told[1]
    pages_made = {path.name for path in (out / "runs").iterdir()}
    assert pages_made == {last.spec.short, first.spec.short}
    index = Parsed((out / "index.html").read_text(encoding="utf-8"))
    assert all(one.spec.short in "|".join(index.texts) for one in every)
    linked = {link for link in index.links if link.startswith("runs/")}
    assert linked == {run_address(short) for short in pages_made}
    for page in out.rglob("*.html"):
        for link in Parsed(page.read_text(encoding="utf-8")).links:
            assert (page.parent / link.partition("#")[0]).exists(), f"{page}: {link}"
    assert len(builders.make(root, out)) == len(told) - 1


def test_the_command_refuses_what_it_cannot_do(root, tmp_path, capsys) -> None:
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "made-by.json").write_text("[" * 100_000)
    with pytest.raises(DllmBenchError, match="holds other files"):
        builders.make(root, tmp_path)
    assert (tmp_path / "index.html").read_text() == "mine"
    (tmp_path / "site").write_text("")
    assert main(["report", "--results", str(root), "--out", str(tmp_path / "site")]) == 2
    assert "which is a file" in capsys.readouterr().err


def test_costs_are_judged_by_all_sealed_runs_as_in_a_table(tmp_path, monkeypatch) -> None:
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


def test_a_damaged_record_costs_its_own_page_alone(tmp_path: Path) -> None:
    lost = builders.fill(tmp_path)["lookahead"]
    folder = Store(tmp_path / "runs").path(lost.spec)
    head = {"identity_hash": lost.identity_hash, "spec": lost.spec.to_plain(), "total": 45}
    (folder / SPEC).write_text(json.dumps(checked(head)))
    (folder / RECORD).write_text("{")
    builders.make(tmp_path)
    assert not (tmp_path / "site" / run_address(lost.spec.short)).exists()
    assert "is no run record" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_only_the_report_of_packed_runs_is_written_elsewhere(tmp_path, monkeypatch, capsys) -> None:
    builders.fill(tmp_path)
    packed = tmp_path / "reference"
    packed.mkdir()
    pack(tmp_path, packed / PACKED)
    content = (packed / PACKED).read_bytes()
    hashes = [record.identity_hash for record in Store(tmp_path / "runs").records()]
    assert pack(tmp_path, tmp_path / "some.tar.xz", hashes[:1]) == 1 < len(hashes)
    monkeypatch.setenv("DLLM_BENCH_RESULTS", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(site_module, "names_of", lambda kind: ["no/such"])
    for asked, written in ((packed, tmp_path / "own"), (tmp_path / "new", tmp_path / "new")):
        assert main(["report", "--results", str(asked)]) == 0
        assert (written / "site" / "index.html").exists() and capsys.readouterr().err == ""
    assert [path.name for path in packed.iterdir()] == [PACKED]
    assert (packed / PACKED).read_bytes() == content


def own_runs(root: Path) -> list[RunRecord]:
    """Return three runs of a model that no table has, two of them on the same samples."""
    store, records = Store(root / "runs"), []
    for label, right, n in (("slow", 20, 45), ("quick", 30, 45), ("other", 10, 20)):
        config = builders.builders.compose([f"decoder={label}", "model=mine", "benchmark=own"])
        spec = builders.builders.spec_of({**config, "seed": len(records)})
        records.append(builders.builders.record_of(spec, right=right, n=n))
        builders.builders.seal(store, replace(records[-1], summary=SUMMARIES[label]))
    return records


SPEEDS = {"slow": (1.0, 20.0), "quick": (4.0, 50.0), "other": (2.0, None)}
SUMMARIES = {name: {"tpf/emitted": x, "tps/e2e": y} for name, (x, y) in SPEEDS.items()}


def test_a_table_without_a_stored_run_is_folded_and_not_composed(tmp_path, monkeypatch) -> None:
    own_runs(tmp_path)
    composing = Mock(wraps=builders.builders.compose)
    monkeypatch.setattr(builders.builders, "compose", composing)
    builders.make(tmp_path)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "=tiny" not in str(composing.call_args_list)
    assert "<details><summary>1 tables without a stored run" in page
    assert "<code>dllm-bench table small/table1 --run</code>" in page
    assert not (tmp_path / "site" / "tables").exists()
    builders.make(tmp_path, all_tables=True)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "<details>" not in page and (tmp_path / "site/tables/small/table1.html").exists()


@pytest.fixture(scope="module")
def own_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    own_runs(root)
    builders.make(root)
    return root / "site"


def test_own_runs_and_their_trade_off_come_first(own_site: Path) -> None:
    page = parsed(own_site / "index.html")
    text = (own_site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == ["runs", "comparisons", "tables", "figures"]
    plots = [link for link in page.links if link.endswith(".svg") and "comparisons" in link]
    speeds = [re.sub(r".*-(t\w+-\w+).svg", r"\1", plot) for plot in plots]
    assert speeds == ["tpf-emitted", "tps-e2e"]
    title = "mine on own, 45 samples"
    for plot, speed in zip(plots, ("tpf/emitted", "tps/e2e"), strict=True):
        assert ("alt", f"Score against {speed} of 2 runs: {title}") in page.attributes
        assert markers(own_site / plot) == 2
    comparison = parsed(next((own_site / "comparisons").glob("*.html")))
    assert {f"../{plot}" for plot in plots} <= set(comparison.links)


def markers(drawing: Path) -> int:
    """Return how many points the drawing has."""
    groups = ElementTree.parse(drawing).iter(f"{site_pages.SVG}g")
    points = [group for group in groups if group.get("id", "").startswith("PathCollection")]
    return sum(len(list(group.iter(f"{site_pages.SVG}use"))) for group in points)


def test_names_in_plots_stay_text_and_the_bytes_are_the_same_again(tmp_path: Path) -> None:
    named = replace(own_runs(tmp_path)[0].spec, label=f"$x_{builders.HOSTILE}$", seed=9)
    made = builders.builders.record_of(named, right=25, n=45)
    builders.builders.seal(Store(tmp_path / "runs"), replace(made, summary=SUMMARIES["slow"]))
    builders.make(tmp_path)
    drawings = sorted((tmp_path / "site" / "comparisons").glob("*.svg"))
    once = [path.read_bytes() for path in drawings]
    assert once and not any(b"<script" in one or b"<img" in one for one in once)
    assert all(markers(path) == 3 for path in drawings)
    drawings[0].write_text("kept, since its runs are the same")
    drawings[1].rename(stale := drawings[1].with_name("of_earlier_runs.svg"))
    builders.make(tmp_path)
    assert drawings[0].read_text().startswith("kept") and drawings[1].read_bytes() == once[1]
    assert not stale.exists()


def test_a_run_that_knows_the_text_is_off_the_front_whatever_its_name(tmp_path: Path) -> None:
    slow, quick, _ = own_runs(tmp_path)
    known = [(one, x, one.score) for one, x in ((slow, 1.0), (quick, 4.0)) if one.score]
    assert front_of(known) == [1]
    knowing = replace(quick.spec, decoder={"select": {"_target_": "select.oracle"}}, label="mine")
    assert front_of([known[0], (replace(quick, spec=knowing), 4.0, known[1][2])]) == [0]
    called_so = replace(quick.spec, label="oracle")
    assert front_of([known[0], (replace(quick, spec=called_so), 4.0, known[1][2])]) == [1]


def test_findings_have_code_and_verdicts_in_colour(own_site: Path) -> None:
    assert prose("`a<b` & <i>") == "<code>a&lt;b</code> &amp; &lt;i&gt;"
    page = (own_site / "findings.html").read_text(encoding="utf-8")
    assert "`" not in page and "<code>minigsm</code>" in page and "&lt;code" not in page
    assert page.index('class="claims ') < page.index('class="chip ') < page.index('id="evidence"')
    assert page.index('id="practice"') < page.index('class="chip ') < page.index('id="history"')
    style = (own_site / "static" / "site.css").read_text(encoding="utf-8")
    assert all(f".chip.{slug(str(verdict))} {{" in style for verdict in ClaimVerdict)


def test_an_archive_gains_runs_and_loses_those_that_nothing_shows(tmp_path, monkeypatch) -> None:
    """What the archive has stays; one run is shown by a claim."""
    builders.fill(tmp_path)
    packed = tmp_path / "reference"
    packed.mkdir()
    kept, *others = sorted(Store(tmp_path / "runs").records(), key=lambda one: one.identity_hash)
    pack(tmp_path, packed / PACKED, [kept.identity_hash])
    assert add(tmp_path, packed, []) == len(others) > 0
    stored = Store(packed / "runs").records
    assert {one.identity_hash for one in stored()} == {o.identity_hash for o in (kept, *others)}
    judged = SimpleNamespace(runs=[SimpleNamespace(record=kept)])
    monkeypatch.setattr(update_reference, "judge_stored", lambda *_: [judged])
    assert (add(tmp_path, packed, []), prune(packed)) == (0, len(others))
    assert [one.identity_hash for one in stored()] == [kept.identity_hash]
