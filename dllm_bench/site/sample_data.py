"""The samples of a run as data for the trace viewer, in several small scripts.

They are scripts because a page opened from file:// may not fetch data. Each holds
`SAMPLES_PER_SCRIPT` samples: prompt, text, verdict, facts, and the decoding order column by column.
The texts of tokens are written once per script; samples refer to them by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dllm_bench.core.benchmark import GradedAnswer
from dllm_bench.site.decoding_order import DecodingOrder, decoding_order
from dllm_bench.site.format import printable
from dllm_bench.site.pages import script_json
from dllm_bench.site.texts import DecodeTokens
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord

SAMPLES_PER_SCRIPT = 20
STEP_COLUMNS = (
    *("kind", "branches", "winner", "fed", "cached", "ms", "forced"),
    *("proposed", "accepted"),
)
SHOWN_FACTS = ("emitted", "committed", "forwards", "rows", "forced", "seconds", "first_step_s")

Plain = dict[str, Any]


@dataclass
class TextNumbers:
    """Texts of tokens and their numbers, in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        """Return the number of a text; a new text gets the next one."""
        return self.numbers.setdefault(visible(text), len(self.numbers))


def visible(text: str) -> str:
    """Return the text with invisible characters written out; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def scripts(
    record: RunRecord,
    samples: Mapping[str, SampleRecord],
    prompts: Mapping[str, str],
    decode: DecodeTokens,
    answers: Mapping[str, GradedAnswer],
) -> Iterator[str]:
    """Yield the scripts in order; sample i of the record is in script i // SAMPLES_PER_SCRIPT."""
    ids = record.columns["id"]
    for number, start in enumerate(range(0, len(ids), SAMPLES_PER_SCRIPT)):
        texts = TextNumbers()
        packed = [
            {
                **pack_sample(record, index, samples.get(ids[index]), prompts, decode, texts),
                **(asdict(answers[ids[index]]) if ids[index] in answers else {}),
            }
            for index in range(start, min(start + SAMPLES_PER_SCRIPT, len(ids)))
        ]
        data = {"samples": packed, "words": list(texts.numbers)}
        yield f"receiveSamples({number},{script_json(data)})\n"


def pack_sample(
    record: RunRecord,
    index: int,
    sample: SampleRecord | None,
    prompts: Mapping[str, str],
    decode: DecodeTokens,
    texts: TextNumbers,
) -> Plain:
    """Return one sample; without text and decoding order if its line is missing in the run's
    folder."""
    columns = record.columns
    scores = {
        name.removeprefix(SCORE): column[index]
        for name, column in columns.items()
        if name.startswith(SCORE)
    }
    packed = {
        "id": columns["id"][index],
        "verdict": columns["verdict"][index],
        "value": columns["value"][index],
        "scores": scores,
        "facts": {name: columns[name][index] for name in SHOWN_FACTS if name in columns},
        "prompt": prompts.get(columns["id"][index]),
    }
    if sample is None:
        return packed
    packed |= {"text": sample.text, "raw": sample.raw}
    if sample.served:  # a server does not report its decoding order
        return packed
    order = decoding_order(sample, decode, record.spec.decoder)
    return {**packed, **pack_decoding_order(order, texts)}


def pack_decoding_order(order: DecodingOrder, texts: TextNumbers) -> Plain:
    """Return tokens and forwards as columns; `born` tells what a forward committed."""
    steps: Plain = {name: [getattr(step, name) for step in order.steps] for name in STEP_COLUMNS}
    if any(step.drafted for step in order.steps):
        steps["drafted"] = [[*map(texts, step.drafted)] for step in order.steps]
    for name in ("overwritten", "remasked", "inserted"):
        if any(getattr(step, name) for step in order.steps):
            steps[name] = [getattr(step, name) for step in order.steps]
    if "inserted" in steps:
        steps["filled"] = [step.filled for step in order.steps]
    if any(step.survival for step in order.steps):
        steps["survival"] = [step.survival for step in order.steps]
    return {
        "tokens": [texts(token.text) for token in order.tokens],
        "born": [-1 if token.born is None else token.born for token in order.tokens],
        "steps": steps,
        "borders": order.borders,
        "ends": order.ends,
        "end": order.end,
        "ended_by": order.ended_by,
    }
