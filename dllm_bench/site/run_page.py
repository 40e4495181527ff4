"""The page of a sealed run and the page that shows its samples one at a time.

The first holds what the record says: score with its interval, every named number with its
definition in words, settings, environment, a row per sample. The second is a frame that the script
fills from the data of `site_samples`; `sample.html#17` is the run's sample 17, counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from dllm_bench.metrics.definitions import FAMILIES, definition, measure_all
from dllm_bench.registry import TARGET
from dllm_bench.site import colours
from dllm_bench.site.format import commit, number, printable, significant
from dllm_bench.site.html import (
    Column,
    Html,
    Page,
    data,
    el,
    facts,
    filters,
    grid,
    join,
    link,
    scroll,
    section,
)
from dllm_bench.site.sample_data import CHUNK
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec, leaves

TILES = ("tpf/emitted", "tps/e2e", "forwards/mean", "latency/mean", "ttft/p50", "tps/throughput")
GROUPS = {
    "tpf": "Tokens per forward",
    "tps": "Tokens per second",
    "latency": "Latency",
    "forwards": "Forwards",
    "acceptance": "Acceptance of drafts",
    "round_ms": "Time of a round",
    "calibration": "Calibration of the confidence head",
    "ttft": "Served engine",
    "tpot": "Served engine",
    "requests": "Served engine",
    "speedup": "Against the baseline",
    "equal": "Against the baseline",
}
OTHER = "Other"
SNIPPET = 90  # characters of a sample's text in the list
VERDICT_COLUMN = 1


def run_address(short: str) -> str:
    """Where a run's page lies below the root."""
    return f"runs/{short}/index.html"


def title_of(spec: RunSpec) -> str:
    """Decoder, model and benchmark in words."""
    return f"{spec.label} · {spec.model['name']} on {spec.benchmark['name']}"


def run_page(record: RunRecord, texts: Mapping[str, str]) -> str:
    """The page of a run; `texts`: what each sample says, where it is still there."""
    spec = record.spec
    page = Page(run_address(spec.short), title_of(spec), [("runs", "index.html#runs")])
    return page(
        el("h1", {}, spec.label),
        el("p", {"class": "lead"}, f"{spec.model['name']} on {spec.benchmark['name']}"),
        el("p", {"class": "soft"}, join(origin(record))),
        tiles(record),
        notices(record),
        samples_section(record, texts),
        numbers_section(record),
        settings_section(spec),
        environment_section(record),
    )


def origin(record: RunRecord) -> Iterator[str]:
    """Hash, time, size and machine."""
    yield "run "
    yield el("code", {}, record.spec.short)
    when = datetime.fromtimestamp(record.sealed_at, UTC)
    yield f" · sealed {when:%Y-%m-%d %H:%M} UTC · {len(record.columns['id'])} samples"
    yield f" · {record.devices}"
    yield f" · commit {commit(record.environment)}"


def tiles(record: RunRecord) -> Html:
    """The score and the numbers looked at first, with their intervals."""
    facts, found = record.sample_stats, []
    if score := record.score:
        ends = (100 * score.low, 100 * score.high)
        how = f"{score.method}, n = {score.n}"
        found.append(tile("score", f"{100 * score.mean:.1f}", "%", f"{bracketed(ends)} {how}"))
    for name in TILES:
        what = definition(name)
        value = what(facts)
        if value is not None:
            found.append(tile(name, significant(value), what.unit, bracketed(what.interval(facts))))
    return el("ul", {"class": "tiles"}, *found)


def tile(name: str, value: str, unit: str, below: str) -> Html:
    """One number, large."""
    return el(
        "li",
        {},
        el("span", {"class": "name"}, name),
        el("span", {"class": "value"}, value, el("small", {}, f" {unit}")),
        el("span", {"class": "below"}, below),
    )


def bracketed(ends: tuple[float, float] | None) -> str:
    """An interval; empty where there is none."""
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]" if ends else ""


def notices(record: RunRecord) -> Html:
    """Verdicts, further scores, and settings that did nothing."""
    verdicts = ", ".join(f"{name} {count}" for name, count in record.verdicts.items())
    rows = [("Verdicts", verdicts)]
    if len(record.scores) > 1:
        rows.append(("Scores", ", ".join(f"{k} {100 * v:.1f} %" for k, v in record.scores.items())))
    idle = [f"{name} on {100 * share:.0f} % of samples" for name, share in record.unused.items()]
    rows.append(("Without effect", ", ".join(idle) or "no setting that was looked at"))
    return facts(rows)


# --- samples -------------------------------------------------------------------------------------


def samples_section(record: RunRecord, texts: Mapping[str, str]) -> Html:
    """The list of samples with fields that narrow it."""
    columns = [Column("Sample"), Column("Verdict")]
    columns += [Column(title, number=True) for title in ("Tokens", "Forwards", "TPF", "Seconds")]
    columns += [Column("Text", wide=True)]
    rows = (sample_row(record, index, texts) for index in range(len(record.columns["id"])))
    return section(
        "Samples",
        filters("samples", VERDICT_COLUMN, record.verdicts, "Verdict"),
        grid(columns, rows, "Samples of this run", "samples"),
        name="samples-of-run",
    )


def sample_row(record: RunRecord, index: int, texts: Mapping[str, str]) -> tuple[str, ...]:
    """One sample: its name leads to its page."""
    key, verdict, tokens, forwards, seconds = (
        record.columns[name][index] for name in ("id", "verdict", "emitted", "forwards", "seconds")
    )
    text = " ".join(texts.get(key, "").split())
    return (
        link(f"sample.html#{index}", key),
        el("span", {"class": f"verdict {verdict}"}, verdict),
        number(tokens, 0),
        number(forwards, 0),
        number(tokens / forwards if forwards and tokens is not None else None),
        number(seconds, 3),
        printable(text[:SNIPPET]) + ("…" if len(text) > SNIPPET else ""),
    )


def sample_page(record: RunRecord) -> str:
    """The frame of the sample viewer, with what it needs to know of the run."""
    spec = record.spec
    page = Page(
        f"runs/{spec.short}/sample.html",
        "sample",
        [("runs", "index.html#runs"), (title_of(spec), run_address(spec.short))],
    )
    known = {"ids": record.columns["id"], "chunk": CHUNK, "scale": colours.SCALE}
    known |= {"luminance": colours.LUMINANCE, "even": colours.EVEN_CONTRAST}
    return page(
        el("div", {"id": "viewer"}, el("noscript", {}, "The trace viewer needs JavaScript.")),
        el("script", {"type": "application/json", "id": "run-data"}, Html(data(known))),
    )


# --- numbers, settings, environment --------------------------------------------------------------


def numbers_section(record: RunRecord) -> Html:
    """Every named number by group, with what it counts; those this run does not define, by name."""

    def group(name: str) -> str:
        return GROUPS.get(name.partition("/")[0], OTHER)

    values = numbers_of(record)
    order = [*dict.fromkeys(GROUPS.values()), OTHER]
    names = sorted((name for name in values if values[name]), key=lambda n: order.index(group(n)))
    bodies = [number_rows(title, values, found) for title, found in groupby(names, key=group)]
    heads = (("Number", None), ("Value", "number"), ("Unit", None), ("What it counts", "wide"))
    top = [el("th", {"class": kind, "scope": "col"}, text) for text, kind in heads]
    table = el("table", {"class": "grid"}, el("thead", {}, el("tr", {}, *top)), *bodies)
    absent = ", ".join(name for name, value in values.items() if not value)
    note = el("p", {"class": "soft"}, f"Not defined by the facts of this run: {absent}.")
    return section(
        "Numbers",
        scroll(table, "Named numbers of this run"),
        note if absent else "",
        name="numbers",
    )


def numbers_of(record: RunRecord) -> dict[str, str]:
    """Name -> value as text, one value per position for a family; empty where it is undefined."""
    facts = record.sample_stats
    shown = {name: significant(value) for name, value in measure_all(facts).items()}
    longest = max((turn[0] for fact in facts for turn in fact.rounds or ()), default=0)
    for name, family in FAMILIES.items():
        found = [family.at(k)(facts) for k in range(1, longest + 1)]
        known = any(value is not None for value in found)
        shown[f"{name}@k"] = ", ".join(significant(v) or "–" for v in found) if known else ""
    return shown


def number_rows(title: str, values: Mapping[str, str], names: Iterable[str]) -> Html:
    """One group of numbers under its title."""
    rows = [el("tr", {}, el("th", {"class": "group", "colspan": 4, "scope": "rowgroup"}, title))]
    for name in names:
        family = FAMILIES.get(name.removesuffix("@k"))
        what = family or definition(name)
        positions = [el("div", {"class": "positions"}, values[name])] if family else []
        cells = (
            el("td", {}, el("code", {}, name)),
            el("td", {"class": "number"}, "" if family else values[name]),
            el("td", {}, what.unit),
            el("td", {"class": "wide"}, *positions, what.text),
        )
        rows.append(el("tr", {}, *cells))
    return el("tbody", {}, *rows)


def settings_section(spec: RunSpec) -> Html:
    """All that makes the run what it is, piece by piece."""
    pieces = {name: value for name, value in spec.decoder.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in spec.decoder.items() if name not in pieces}
    whole: dict[str, Any] = {"seed": spec.seed, "limit": spec.limit, "batch": spec.batch}
    whole |= {"decoding version": spec.decoding_version, "inputs": spec.inputs}
    return section(
        "Settings",
        el("h3", {}, "Decoder"),
        facts([("loop", described(plain)), *((name, described(p)) for name, p in pieces.items())]),
        el("h3", {}, "Model, benchmark, hardware"),
        facts(
            (name, described(getattr(spec, name))) for name in ("model", "benchmark", "hardware")
        ),
        el("h3", {}, "Run"),
        facts([("settings", described(whole)), ("identity", spec.identity_hash)]),
        name="settings",
    )


def described(plain: Mapping[str, Any]) -> Html:
    """A mapping in one line: the class first, then what it was told."""
    target = str(plain.get(TARGET, "")).rpartition(".")[2]
    parts = [el("b", {}, target)] if target else []
    for key, value in leaves({k: v for k, v in plain.items() if k != TARGET}):
        shown = str(value).rpartition(".")[2] if key.endswith(TARGET) else shorten(value)
        name = key.removesuffix(TARGET).rstrip(".")
        parts.append(el("span", {"class": "setting"}, f"{name} ", el("code", {}, shown)))
    return join(parts)


def shorten(value: Any) -> str:
    """A setting's value; hashes by their first digits."""
    text = "none" if value is None else str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] + "…" if is_hash else text


def environment_section(record: RunRecord) -> Html:
    """Machine and packages of every start of the run."""
    parts: list[str] = []
    for index, session in enumerate(record.sessions):
        known = {k: v for k, v in session.environment.items() if k not in ("packages", "diff")}
        packages = session.environment.get("packages") or {}
        when = datetime.fromtimestamp(session.started_at, UTC)
        rows = [
            ("started", f"{when:%Y-%m-%d %H:%M:%S} UTC"),
            ("samples", f"{session.samples}, after {session.warmups} warm-up requests"),
            *((name.replace("_", " "), shorten(value)) for name, value in known.items()),
            ("packages", ", ".join(f"{k} {v}" for k, v in packages.items() if v)),
        ]
        parts += [el("h3", {}, f"Start {index + 1}"), facts(rows)]
        if diff := session.environment.get("diff"):
            shown = el("pre", {}, diff)
            parts.append(el("details", {}, el("summary", {}, "Local changes to the code"), shown))
    return section("Environment", *parts, name="environment")
