"""What a drafter drafted along greedy texts, from stored samples: the raw material of a load.

A run with `decoder/length=fixed decoder.length.tokens=0` verifies nothing: the target decides every
token alone, and its drafter is asked at each. Greedy text is fixed and a draft depends on the
tokens before it, so rounds simulated from such a run are the loop's own under any rule of lengths.
Runs that verify drafts give calibration data all the same. Left out: sampled text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.decoding.length.measurements import StepProfile, Temperatures
from dllm_bench.metrics.acceptance import common_prefix
from dllm_bench.metrics.calibration import ObservedDraft
from dllm_bench.serving.load_simulation import DraftedText, DraftOutcome

Sample = tuple[Trace, Sequence[int], Sequence[int]]  # of one text: trace, born, ids


@dataclass(frozen=True)
class StoredDraft:
    """A draft at one place of a text.

    logits: of its confidences, none without such a head; tokens: its length; right: how many of its
    first tokens are those of the text; left: how many tokens the text still has.
    """

    logits: tuple[float, ...]
    tokens: int
    right: int
    left: int


def drafts_of_text(
    trace: Trace, born: Sequence[int], ids: Sequence[int]
) -> tuple[StoredDraft, ...]:
    """The drafts of one text, in order."""
    found = []
    for index, row in enumerate(trace.forwards):
        if row.kind == ForwardKind.VERIFY:
            follows = ids[sum(at < index for at in born) :]
            right = common_prefix(row.drafted, follows)
            found.append(StoredDraft(row.survival, len(row.drafted), right, len(follows)))
    return tuple(found)


@dataclass(frozen=True)
class StoredDrafts:
    """The drafts of several texts, and what drafting cost.

    steps: time of a draft, in times of a verification beside it; width: positions a call of the
    drafter feeds; calls: of its network, in a draft.
    """

    texts: tuple[tuple[StoredDraft, ...], ...]
    steps: float
    width: int
    calls: float

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> StoredDrafts:
        """From stored samples; texts that ended with their prefill have no draft."""
        kept = list(samples)
        texts = tuple(filter(None, (drafts_of_text(*sample) for sample in kept)))
        rows = [row for trace, _, _ in kept for row in trace.forwards]
        ms = {kind: sum(row.ms for row in rows if row.kind == kind) for kind in ForwardKind}
        steps = (ms[ForwardKind.DRAFT] + ms[ForwardKind.HEAD]) / (ms[ForwardKind.VERIFY] or 1.0)
        asked = [row for row in rows if row.kind == ForwardKind.DRAFT]
        return cls(texts, steps, _width(asked), sum(row.calls for row in asked) / (len(asked) or 1))

    def halves(self) -> tuple[StoredDrafts, StoredDrafts]:
        """The first half of the texts, to fit on, and the second."""
        half = len(self.texts) // 2
        return replace(self, texts=self.texts[:half]), replace(self, texts=self.texts[half:])

    def observed(self) -> list[ObservedDraft]:
        """Confidences and outcomes; of a draft past the end of its text nothing is known."""
        return [
            ObservedDraft(one.logits[: one.left], one.right)
            for text in self.texts
            for one in text
            if one.logits
        ]

    def served(self, temperatures: Temperatures | None = None) -> list[DraftedText]:
        """Texts of the load simulation; without a confidence head every chance is 1."""
        for text in self.texts:
            if [one.left for one in text] != list(range(len(text), 0, -1)):
                raise DllmBenchError(
                    "A load is simulated from drafts at every position of a text, this run "
                    "verified some; run it with decoder/length=fixed decoder.length.tokens=0."
                )
        probabilities = (temperatures or Temperatures()).probabilities
        return [
            [
                DraftOutcome(tuple(probabilities(o.logits) or [1.0] * o.tokens), o.right)
                for o in text
            ]
            for text in self.texts
        ]

    def drafting(self, profile: StepProfile, tokens: int | None = None) -> Callable[[int], float]:
        """Seconds of drafting for R requests at once; `tokens` each, None: whole drafts.

        Our assumption, since one request at a time was measured: for one, as many of the profile's
        one-token steps as in the run, whatever the machine was busy with; for R, it grows as a
        step of the target with R times the positions grows. A chain of calls ends with the last
        token asked for, a block is always drafted whole.
        """
        part = 1.0 if tokens is None else min(1.0, tokens / (self.calls or 1))
        one_s = part * self.steps * profile.step_s(1) / profile.step_s(self.width)
        return lambda requests: one_s * profile.step_s(requests * self.width)


def _width(calls: Sequence[Forward]) -> int:
    fed, made = sum(row.fed for row in calls), sum(row.calls for row in calls)
    return max(1, ceil(fed / made)) if made else 1
