"""The page of a sealed run, and the page that shows its samples one at a time.

The first shows what the record holds: the score with its interval, every metric with its definition
in words, settings, environment, a row per sample. The second is a frame that `static/site.js` fills
with the data of `scripts`; `sample.html#17` is the run's sample 17, counted from 0.

The data are in several small scripts, because a page opened from file:// may not fetch data. Each
holds `SAMPLES_PER_SCRIPT` samples: prompt, text, verdict, facts, and the decoding order column by
column. The texts of tokens are written once per script; samples refer to them by number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from dllm_bench.core.benchmark import GradedAnswer
from dllm_bench.metrics.definitions import FAMILIES, TITLES, definition, measure_all
from dllm_bench.metrics.drafts import longest_draft
from dllm_bench.registry import TARGET
from dllm_bench.site.decoding_order import COLOURS, DecodingOrder, decoding_order
from dllm_bench.site.pages import Page, moment, run_address, script_json
from dllm_bench.site.texts import DecodeTokens, printable_lines, significant, snippet
from dllm_bench.store.files import Plain
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord, Session
from dllm_bench.store.spec import RunSpec, leaves, setting_value
from dllm_bench.tables.derive import measure_run

TILES = ("tpf/emitted", "tps/e2e", "forwards/mean", "latency/mean", "ttft/p50", "tps/throughput")
OTHER = "Other"
LISTED = ("id", "verdict", "emitted", "forwards", "seconds")  # columns in the list of samples
PER_POSITION = "@k"  # ends the name of a metric that has a value per position of a draft


def run_title(spec: RunSpec) -> str:
    """Name decoder, model and benchmark in words."""
    return f"{spec.label} · {spec.model.name} on {spec.benchmark.name}"


def run_page(record: RunRecord, texts: Mapping[str, str]) -> str:
    """Return the page of a run. `texts`: sample id -> the sample's text, as far as it is stored."""
    spec = record.spec
    page = Page(run_address(spec.short), run_title(spec), [("runs", "index.html#runs")])
    metrics, groups = metric_texts(record), ("model", "benchmark", "hardware")
    listed = [record.columns[name] for name in LISTED]
    ungrouped = {name: getattr(spec, name) for name in ("seed", "limit", "batch")}
    ungrouped |= {"decoding version": spec.decoding_version, "inputs": spec.inputs}
    view = {
        "record": record,
        "spec": spec,
        "tiles": list(tiles(record)),
        "remarks": list(remarks(record)),
        "samples": [dict(zip(LISTED, row, strict=True)) for row in zip(*listed, strict=True)],
        "snippet": lambda name: snippet(texts.get(name, "")),
        "has_texts": bool(texts),
        "metric_groups": metric_groups(metrics),
        "undefined_metrics": [name for name, value in metrics.items() if not value],
        "decoder_settings": decoder_settings(spec),
        "group_settings": [(name, piece_settings(getattr(spec, name))) for name in groups],
        "run_settings": [("settings", piece_settings(ungrouped))],
        "facts": run_facts,
    }
    return page.render("run.html", view)


def tiles(record: RunRecord) -> Iterator[Plain]:
    """Yield the score and the most important metrics, with their intervals."""
    if score := record.score:
        below = f"{bracketed((100 * score.low, 100 * score.high))} {record.basis}"
        yield {"name": "score", "value": f"{100 * score.mean:.1f}", "unit": "%", "below": below}
    for name in TILES:
        value, ends = measure_run(name, record)
        if value is not None:
            shown = {"value": significant(value), "below": bracketed(ends)}
            yield {"name": name, "unit": definition(name).unit, **shown}


def bracketed(ends: tuple[float, float] | None) -> str:
    """Return an interval in brackets; empty if there is none."""
    return f"[{significant(ends[0])}, {significant(ends[1])}]" if ends else ""


def remarks(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield verdicts, further scores, and settings that had no effect."""
    yield "Verdicts", ", ".join(f"{name} {count}" for name, count in record.verdicts.items())
    if len(record.scores) > 1:
        yield "Scores", ", ".join(f"{k} {100 * v:.1f} %" for k, v in record.scores.items())
    unused = [f"{name} on {100 * share:.0f} % of samples" for name, share in record.unused.items()]
    yield "Without effect", ", ".join(unused) or "no setting that was looked at"


# --- samples -------------------------------------------------------------------------------------


def sample_page(record: RunRecord) -> str:
    """Return the frame of the trace viewer, with what it needs to know of the run."""
    spec = record.spec
    parents = [("runs", "index.html#runs"), (run_title(spec), run_address(spec.short))]
    page = Page(f"runs/{spec.short}/sample.html", "sample", parents)
    data = {"ids": record.columns["id"], "chunk": SAMPLES_PER_SCRIPT, **COLOURS}
    return page.render("sample.html", {"data": script_json(data)})


# --- metrics -------------------------------------------------------------------------------------


def metric_texts(record: RunRecord) -> dict[str, str]:
    """Return metric -> value as text, empty if undefined; for a family one value per position."""
    samples = record.samples
    texts = {name: significant(value) for name, value in measure_all(samples).items()}
    for name, family in FAMILIES.items():
        values = [family.at(k)(samples) for k in range(1, longest_draft(samples) + 1)]
        defined = any(value is not None for value in values)
        joined = ", ".join(significant(value) or "–" for value in values)
        texts[name + PER_POSITION] = joined if defined else ""
    return texts


def metric_groups(texts: Mapping[str, str]) -> list[tuple[str, list[Plain]]]:
    """Return the metrics that have a value, by group."""
    titles = {name: TITLES.get(name.partition("/")[0], OTHER) for name in texts if texts[name]}
    return [
        (title, [metric_line(name, texts[name]) for name in titles if titles[name] == title])
        for title in dict.fromkeys((*TITLES.values(), OTHER))
        if title in titles.values()
    ]


def metric_line(name: str, value: str) -> Plain:
    """Return one metric with its definition in words."""
    family = FAMILIES.get(name.removesuffix(PER_POSITION))
    metric, column = family or definition(name), "by_position" if family else "value"
    texts = {"name": name, "unit": metric.unit, "text": metric.text}
    return {**texts, "value": "", "by_position": "", column: value}


# --- settings and environment --------------------------------------------------------------------


def decoder_settings(spec: RunSpec) -> list[tuple[str, Plain]]:
    """Return the settings of the decoding loop, then those of each piece."""
    pieces = {name: value for name, value in spec.decoder.items() if isinstance(value, Mapping)}
    own = {name: value for name, value in spec.decoder.items() if name not in pieces}
    parts = [(name, piece_settings(piece)) for name, piece in pieces.items()]
    return [("loop", piece_settings(own)), *parts]


def piece_settings(plain: Mapping[str, Any]) -> Plain:
    """Return a part of a configuration: registered name without the kind, and all settings below
    it."""
    values = [
        (key.removesuffix(TARGET).rstrip("."), setting_value(key, value))
        for key, value in leaves({k: v for k, v in plain.items() if k != TARGET})
    ]
    return {"kind": str(plain.get(TARGET, "")).rpartition(".")[2], "settings": values}


def run_facts(session: Session) -> list[tuple[str, str]]:
    """Return machine and packages of one start of the run."""
    machine = {k: v for k, v in session.environment.items() if k not in ("packages", "diff")}
    packages = session.environment.get("packages") or {}
    return [
        ("started", moment(session.started_at, "%Y-%m-%d %H:%M:%S")),
        ("samples", f"{session.samples}, after {session.warmups} warm-up requests"),
        *((name.replace("_", " "), setting_value(name, value)) for name, value in machine.items()),
        ("packages", ", ".join(f"{k} {v}" for k, v in packages.items() if v)),
    ]


# --- samples for the trace viewer ----------------------------------------------------------------


SAMPLES_PER_SCRIPT = 20
STEP_COLUMNS = "kind branches winner fed cached ms forced proposed accepted".split()
SHOWN_FACTS = ("emitted", "committed", "forwards", "rows", "forced", "seconds", "first_step_s")


TextNumbers = dict[str, int]
"""Texts of tokens and their numbers, in the order of their first use."""


def text_numbers() -> TextNumbers:
    """Return a dictionary in which a text that is looked up gets the next number."""
    return defaultdict(count().__next__)


def scripts(
    record: RunRecord,
    samples: Mapping[str, SampleRecord],
    prompts: Mapping[str, str],
    decode: DecodeTokens,
    answers: Mapping[str, GradedAnswer],
) -> Iterator[str]:
    """Yield the scripts in order; sample i of the record is in script i // SAMPLES_PER_SCRIPT."""
    rows = list(zip(*record.columns.values(), strict=True))
    for number, start in enumerate(range(0, len(rows), SAMPLES_PER_SCRIPT)):
        numbers, packed = text_numbers(), []
        for values in rows[start : start + SAMPLES_PER_SCRIPT]:
            row = dict(zip(record.columns, values, strict=True))
            key, sample = row["id"], samples.get(row["id"])
            one = {**pack_row(row), "prompt": prompts.get(key)}
            if sample:
                one |= {"text": sample.text, "raw": sample.raw}
            if sample and not sample.served:  # a server does not report its decoding order
                order = decoding_order(sample, decode, record.spec.decoder)
                one |= pack_decoding_order(order, numbers)
            packed.append(one | (asdict(answers[key]) if key in answers else {}))
        data = script_json({"samples": packed, "words": list(numbers)})
        yield f"receiveSamples({number},{data})\n"


def pack_row(row: Plain) -> Plain:
    """Return what the record's columns say about a sample."""
    scores = {k.removeprefix(SCORE): v for k, v in row.items() if k.startswith(SCORE)}
    facts = {name: row[name] for name in SHOWN_FACTS if name in row}
    return {k: row[k] for k in ("id", "verdict", "value")} | {"scores": scores, "facts": facts}


def pack_decoding_order(order: DecodingOrder, numbers: TextNumbers) -> Plain:
    """Return tokens and forwards as columns; `born` tells what a forward committed."""
    steps: Plain = {name: [getattr(step, name) for step in order.steps] for name in STEP_COLUMNS}
    for name in ("drafted", "overwritten", "remasked", "inserted", "survival"):
        if any(column := [getattr(step, name) for step in order.steps]):
            steps[name] = column
    if "drafted" in steps:
        steps["drafted"] = [[numbers[printable_lines(t)] for t in row] for row in steps["drafted"]]
    if "inserted" in steps:
        steps["filled"] = [step.filled for step in order.steps]
    return {
        "tokens": [numbers[printable_lines(token.text)] for token in order.tokens],
        "born": [-1 if token.born is None else token.born for token in order.tokens],
        "steps": steps,
        **{name: getattr(order, name) for name in ("borders", "ends", "end", "ended_by")},
    }
