"""Model cards of the embedded models: the recipe, and scores from sealed runs of the model.

Training writes the card without scores (`write`), by the template card.md and its words;
`measured` adds them later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.metrics.accuracy import paired_shares
from dllm_bench.metrics.definitions import measure
from dllm_bench.paths import read_yaml
from dllm_bench.site.texts import percent
from dllm_bench.store.record import RunRecord
from dllm_bench.training.loop import rendered
from scripts.embedded.recipes import RECIPES, Recipe
from scripts.piece_settings import markdown_table

PAGE, WORDS = map(Path(__file__).with_name, ("card.md", "card_words.yaml"))
MEASURED = "## Measured"
MEASURED_NOTE = """\
Sealed runs of `dllm-bench run` on the test split: {tokens} new tokens, greedy unless a
temperature is given, float32, CPU. Brackets hold 95 % Wilson intervals, `tpf/emitted` counts
tokens before the end of the text per forward. minicode is right when every base and extra input
gives the reference's result."""

GAINS_NOTE = """\
Gain of editing: score with edits minus score without (`decoder/revise=none`) on the same items,
with its 95 % interval (Agresti and Min's)."""
UNREVISED = "+revise.none"


def write(folder: Path, recipe: Recipe, wall_s: float) -> None:
    """Write CARD.md, with no scores yet."""
    (folder / "CARD.md").write_text(render(recipe, wall_s))


def measured(card: str, records: Sequence[RunRecord]) -> str:
    """Return the card with its last section rebuilt from sealed runs of its model."""
    head = card[: card.index(MEASURED) + len(MEASURED)]
    rows = sorted(_row(record) for record in records)
    lengths = sorted({record.spec.benchmark.max_new_tokens for record in records})
    note = MEASURED_NOTE.format(tokens=" or ".join(map(str, lengths)))
    titles = ("task", "decoder", "settings", "n", "score %", "tpf/emitted", "run")
    parts = [note, markdown_table(titles, rows)]
    if gains := sorted(_gains(records)):
        parts += [GAINS_NOTE, markdown_table(("task", "settings", "n", "gain, points"), gains)]
    return "\n\n".join([head, *parts]) + "\n"


def _gains(records: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pair of runs that differ in nothing but whether tokens are edited."""
    plain = {_without_revision(r): r for r in records if r.spec.label.endswith(UNREVISED)}
    for record in records:
        other = plain.get(_without_revision(record))
        if other is None or other is record:
            continue
        unedited = other.values
        gain = paired_shares(
            [(list(record.values.values()), [unedited[item] for item in record.values])]
        )
        value, low, high = (f"{100 * x:+.1f}" for x in (gain.value, gain.low, gain.high))
        settings = _settings(record.spec.decoder)
        yield record.spec.benchmark.name, settings, str(gain.n), f"{value} [{low}, {high}]"


def _without_revision(record: RunRecord) -> tuple[str, str]:
    """Return what a pair of runs with and without revision has in common."""
    decoder = {slot: piece for slot, piece in record.spec.decoder.items() if slot != "revise"}
    return str(record.spec.benchmark), str(decoder | {"name": None})


def _row(record: RunRecord) -> tuple[str, ...]:
    spec, score, tpf = record.spec, record.score, measure("tpf/emitted", record.samples)
    if score is None or tpf is None:
        raise ValueError(f"run {spec.short} has no score")
    numbers = (str(len(record.columns["id"])), percent(score), f"{tpf:.2f}", f"`{spec.short}`")
    return spec.benchmark.name, spec.label, _settings(spec.decoder), *numbers


def _settings(decoder: Mapping[str, Any]) -> str:
    """Return the settings in which the runs of a card differ."""
    names = (
        ("schedule", "block"), ("select", "tau"), ("select", "steps"), ("explore", "k"),
        ("cache", "inside"), ("revise", "tau"), ("anneal", "steps"),
    )  # fmt: skip
    chosen = dict(decoder)
    chosen["select"] = {**chosen.get("select", {}), **chosen.get("select", {}).get("first", {})}
    values = ((slot, name, chosen.get(slot, {}).get(name)) for slot, name in names)
    parts = [
        f"{'edits above' if slot == 'revise' else name} {value}"
        for slot, name, value in values
        if value is not None
    ]
    if temperature := decoder.get("temperature"):
        parts.append(f"temperature {temperature:g}")
    if anneal := decoder.get("anneal"):
        parts.append(f"temperature {anneal['first']:g} to {anneal['last']:g}")
    return ", ".join(parts)


def render(recipe: Recipe, wall_s: float) -> str:
    """Return the card as Markdown."""
    start = RECIPES[recipe.start] if recipe.start else None
    facts = {"recipe": recipe, "start": start, "minutes": wall_s / 60}
    return rendered(PAGE, {**facts, **read_yaml(WORDS)})
