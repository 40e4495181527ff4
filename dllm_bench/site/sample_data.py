"""The samples of a run as data for the page that shows one of them, in several small scripts.

Scripts, since a page opened from file:// may not fetch data. Each holds `CHUNK` samples: prompt,
text, verdict, facts, and the `Filling` with its columns side by side; texts of tokens are written
once per script and named by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm_bench.site.decoding_order import DecodingOrder, decoding_order
from dllm_bench.site.format import printable
from dllm_bench.site.html import data
from dllm_bench.site.texts import DecodeTokens
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord

CHUNK = 20
STEP_COLUMNS = (
    *("kind", "branches", "winner", "fed", "cached", "ms", "forced"),
    *("proposed", "accepted"),
)
SHOWN_FACTS = ("emitted", "committed", "forwards", "rows", "forced", "seconds", "first_step_s")

Plain = dict[str, Any]


@dataclass
class Words:
    """Texts by number, in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(visible(text), len(self.numbers))


def visible(text: str) -> str:
    """The text with control and format characters written out, but for line ends."""
    return "\n".join(map(printable, text.split("\n")))


def scripts(
    record: RunRecord,
    samples: Mapping[str, SampleRecord],
    prompts: Mapping[str, str],
    decode: DecodeTokens,
) -> Iterator[str]:
    """The scripts in order; sample i of the record is in script i // CHUNK."""
    ids = record.columns["id"]
    for number, start in enumerate(range(0, len(ids), CHUNK)):
        words = Words()
        packed = [
            pack(record, index, samples.get(ids[index]), prompts, decode, words)
            for index in range(start, min(start + CHUNK, len(ids)))
        ]
        known = {"samples": packed, "words": list(words.numbers)}
        yield f"receiveSamples({number},{data(known)})\n"


def pack(
    record: RunRecord,
    index: int,
    sample: SampleRecord | None,
    prompts: Mapping[str, str],
    decode: DecodeTokens,
    words: Words,
) -> Plain:
    """One sample; without text and filling where its line is gone from the run's folder."""
    columns = record.columns
    scores = {
        name.removeprefix(SCORE): column[index]
        for name, column in columns.items()
        if name.startswith(SCORE)
    }
    known = {
        "id": columns["id"][index],
        "verdict": columns["verdict"][index],
        "value": columns["value"][index],
        "scores": scores,
        "facts": {name: columns[name][index] for name in SHOWN_FACTS if name in columns},
        "prompt": prompts.get(columns["id"][index]),
    }
    if sample is None:
        return known
    if sample.served:  # its filling is not known
        return {**known, "text": sample.text, "raw": sample.raw}
    order = decoding_order(sample, decode, record.spec.decoder)
    return {**known, "text": sample.text, "raw": sample.raw, **pack_decoding_order(order, words)}


def pack_decoding_order(order: DecodingOrder, words: Words) -> Plain:
    """The filling: tokens and forwards as columns; what a forward committed follows from `born`."""
    steps: Plain = {name: [getattr(s, name) for s in order.steps] for name in STEP_COLUMNS}
    if any(step.drafted for step in order.steps):
        steps["drafted"] = [[*map(words, step.drafted)] for step in order.steps]
    if any(step.survival for step in order.steps):
        steps["survival"] = [step.survival for step in order.steps]
    return {
        "tokens": [words(token.text) for token in order.tokens],
        "born": [-1 if token.born is None else token.born for token in order.tokens],
        "steps": steps,
        "borders": order.borders,
        "ends": order.ends,
        "end": order.end,
        "ended_by": order.ended_by,
    }
