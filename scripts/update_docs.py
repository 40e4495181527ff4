"""Write what is stored into the documents that quote it: README.md, docs, model cards.

    .venv/bin/python -m scripts.update_docs [RESULTS_OF_THE_CARDS]

The README quotes one section of the committed Table 4 and where it was measured, and what the
verdicts rest on; docs/findings.md has these and the prose of dllm_bench/claims; docs/decoders.md
lists the decoders of conf/decoder and docs/pieces.md the settings of their pieces;
docs/reproduce.md lists the figures; a card quotes the sealed runs of its model found in the given
results directory (cards are left alone without one).
"""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from dllm_bench.api.compose import compose
from dllm_bench.claims.findings import Findings, markdown, prose, statements, tables_of
from dllm_bench.claims.verdict import Judgement, judge_stored
from dllm_bench.paths import assets_dir, conf_dir, options
from dllm_bench.registry import TARGET, find, name_of
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.store import RunState, Store, read_record
from dllm_bench.tables.derive import measure_run
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import load_profile, load_table, names_of, title_of
from dllm_bench.tables.plan import Planner
from dllm_bench.tables.render import TIMING_MARKS
from dllm_bench.tables.spec import EMBEDDED
from scripts.embedded.card import measured
from scripts.piece_settings import markdown_table, page_tables
from scripts.update_reference import REFERENCE, ROOT

TABLE = REFERENCE / "tables" / "lopa" / "table4.md"
FINDINGS = ROOT / "docs" / "findings.md"
MODEL, SECTION = "## D2F-Dream-Instruct", "### GSM8K 4-shot"
SYSTEM, COLUMNS = 1, (0, 2, 3, 4, 7, 8, 11)  # of the rendered section: BP, τ, mean TPS and score
EMITTED_HEAD = "Emitted tokens/s<br>(before the end of the text)"
PAPERS_TPS = "Avg TPS<br>(the paper's: padding counts)"
PLACE = 3  # of the emitted tokens/s among the columns
HASH = re.compile(r"`(\w+)`")  # of a run, in the last column
DECODER_TITLES = (
    "Decoder|Paper and rule|Pieces|Recorded cases|Differs from the released code".split("|")
)
USUAL = {"explore": "greedy", "revise": "none", "stop": "filled", "cache": "none"}  # not listed
GROUPS = ("cases", "runs", "extra_runs", "sampled_runs")  # of a recorded file that is not a list
GOLDEN = Path(os.environ.get("DLLM_BENCH_GOLDEN", ROOT.parent / "shared" / "golden"))


def excerpt(table: str, emitted: Callable[[str], str]) -> str:
    """Speed and score of the settings on one GPU, instruct model on GSM8K, and the hardware.

    emitted: the short hash of a run -> its emitted tokens/s, which stand before the paper's TPS.
    """
    section = table[table.index(MODEL) :]
    section = section[section.index(SECTION) :].split("\n\n")[1]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines()]
    header, rule, *body = rows
    kept = [header, rule, *(row for row in body if row[SYSTEM] == "NV")]
    hardware = table.split("**Measured on**\n\n")[1].split("\n\n")[0]
    first = [EMITTED_HEAD, "---:", *(emitted(HASH.findall(row[-1])[0]) for row in kept[2:])]
    cells = [[*(row[column] for column in COLUMNS)] for row in kept]
    for row, text in zip(cells, first, strict=True):
        row.insert(PLACE, text)
    cells[0][PLACE + 1] = cells[0][PLACE + 1].replace("Avg TPS", PAPERS_TPS, 1)
    shown = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    unused = [mark for mark in TIMING_MARKS.values() if mark not in shown]
    notes = (line for line in hardware.splitlines() if not any(mark in line for mark in unused))
    return f"{shown}\n\nMeasured on:\n\n" + "\n".join(notes)


def emitted_speed(short: str) -> str:
    """Return the emitted tokens/s of a committed run, as the table writes a number."""
    record = read_record(Store(REFERENCE / "runs").find(short).path)
    assert record is not None
    value, interval = measure_run("tps/e2e", record)
    assert value is not None
    assert interval is not None
    return f"**{value:.1f}** [{interval[0]:.1f}, {interval[1]:.1f}]"


def quote(readme: str, table: str) -> str:
    """Return the README with the excerpt between its markers."""
    return between(readme, "table4", excerpt(table, emitted_speed))


def between(text: str, name: str, body: str) -> str:
    """Return the text with `body` between the two markers of a name."""
    begin, end = (f"<!-- {name}:{place} -->" for place in ("begin", "end"))
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def library() -> str:
    """Return a row for every decoder of conf/decoder: what its yaml says of it, and its pieces."""
    return markdown_table(DECODER_TITLES, map(row, options("decoder")))


def figure_list() -> str:
    """Return a row for every figure: its name, which the commands take, and its title."""
    rows = ((f"`{name}`", title_of("figure", name)) for name in names_of("figure"))
    return markdown_table(("Figure", "Shows"), rows)


def row(name: str) -> list[str]:
    """Return the cells of one decoder."""
    said = head_of((conf_dir() / "decoder" / f"{name}.yaml").read_text())
    slots = compose([f"decoder={name}"])["decoder"]
    pieces = {
        slot: name_of(find(part[TARGET])).partition(".")[2]
        for slot, part in slots.items()
        if isinstance(part, dict) and TARGET in part
    }
    shown = [f"{slot} `{piece}`" for slot, piece in pieces.items() if USUAL.get(slot) != piece]
    cases = recorded(said["golden"].split())
    return [f"`{name}`", said["rule"], ", ".join(shown), cases, said["differs"]]


def head_of(yaml: str) -> dict[str, str]:
    """Return the comment that opens a decoder's yaml: its `rule`, what `differs`, its `golden`
    cases."""
    said, key = {"rule": "", "differs": "", "golden": ""}, "rule"
    for line in yaml.splitlines():
        if not line.startswith("# "):
            break
        text = line[2:]
        if text.startswith(("differs: ", "golden: ")):
            key, _, text = text.partition(": ")
        said[key] = f"{said[key]} {text}".strip()
    return said


def recorded(golden: Sequence[str]) -> str:
    """Return how many recorded cases a decoder reproduces in tests/golden: those that its yaml
    names, without those that are listed as differing."""
    if not golden:
        return ""
    known = yaml.safe_load((ROOT / "tests" / "golden" / "differing.yaml").read_text())
    count = 0
    for file in (word for word in golden if word.endswith(".json")):
        whole = json.loads((GOLDEN / file).read_text())
        cases = whole if isinstance(whole, list) else [c for g in GROUPS for c in whole.get(g, ())]
        differing = [*known[file].get("differ", ()), *known[file].get("ties", ())]
        count += sum(names_case(golden, c) for i, c in enumerate(cases) if i not in differing)
    return str(count)


def names_case(golden: Sequence[str], case: Mapping[str, Any]) -> bool:
    """Return whether a case of the files is named: by its method, if any, and by all
    `parameter=1|2`."""
    words = [word for word in golden if not word.endswith(".json")]
    methods = [word for word in words if "=" not in word]
    params = case.get("params", case)
    values = (word.split("=") for word in words if "=" in word)
    is_named = all(str(params.get(key)) in value.split("|") for key, value in values)
    return is_named and (not methods or case["method"] in methods)


def stored_findings(planner: Planner, judgements: Sequence[Judgement]) -> Findings:
    """Return the findings, from the committed records and what they say about the claims."""
    profile, tables = load_profile(EMBEDDED), {}
    texts = (*prose()["practice"], *prose()["unmeasured"])
    for name in dict.fromkeys(chain(*map(tables_of, texts))):
        [planned] = planner.common([load_table(name)], profile)
        tables[name] = build(*planned)
    return Findings(judgements, tables, " --results results/reference")


def findings_page(found: Findings) -> str:
    """Return the text of docs/findings.md."""
    return markdown(found, lambda table: f"../results/reference/tables/{table}.md")


def with_evidence(readme: str, found: Findings) -> str:
    """Return the README with what the verdicts rest on between its markers."""
    return between(readme, "evidence", statements(found).rstrip())


def update_cards(results: Path) -> None:
    """Every embedded model's card from the sealed runs below `results`."""
    store = Store(results / "runs")
    records = [read_record(e.path) for e in store.entries() if e.state is RunState.SEALED]
    for card in sorted(assets_dir().glob("*/CARD.md")):
        own = [r for r in records if r is not None and r.spec.model.name == card.parent.name]
        if own:
            card.write_text(measured(card.read_text(), own))


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="results directory of the cards")
    results = parser.parse_args().results
    planner = Planner.cached(SettingsCache(REFERENCE, compose), Store(REFERENCE / "runs"))
    found = stored_findings(planner, judge_stored(load_profile(EMBEDDED), planner))
    readme = ROOT / "README.md"
    readme.write_text(with_evidence(quote(readme.read_text(), TABLE.read_text()), found))
    for file, name, listed in (
        ("decoders.md", "library", library()),
        ("pieces.md", "pieces", page_tables()),
        ("reproduce.md", "figures", figure_list()),
    ):
        page = ROOT / "docs" / file
        page.write_text(between(page.read_text(), name, listed))
    FINDINGS.write_text(findings_page(found))
    if results:
        update_cards(results)
