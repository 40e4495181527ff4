"""The drafts along greedy texts, read from stored samples: the input of the load simulation.

A run with `decoder/length=fixed decoder.length.tokens=0` verifies nothing: the target decides every
token alone, and the drafter drafts at every position. Greedy text is fixed, and a draft depends
only on the tokens before it, so rounds simulated from such a run equal those of the real loop under
any length rule. Runs that verify drafts can still be used as calibration data. Sampled text is not
supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.methods.drafting import StepProfile, Temperatures
from dllm_bench.metrics.acceptance import common_prefix
from dllm_bench.metrics.calibration import ObservedDraft
from dllm_bench.serving.load_simulation import DraftedText, DraftOutcome

StoredText = tuple[Trace, Sequence[int], Sequence[int]]
"""One stored sample: trace, born (the forward that committed each token), ids."""


@dataclass(frozen=True)
class StoredDraft:
    """A draft at one position of a text."""

    logits: tuple[float, ...]  # from the confidence head; empty without one
    tokens: int  # length of the draft
    right: int  # first tokens of the draft that equal the text
    left: int  # tokens that the text still has


def drafts_of_text(
    trace: Trace, born: Sequence[int], ids: Sequence[int]
) -> tuple[StoredDraft, ...]:
    """Return the drafts of one text, in order."""
    drafts = []
    for index, row in enumerate(trace.forwards):
        if row.parents:
            raise DllmBenchError(
                "A load is simulated from drafts that are chains, but this run drafted trees; "
                "choose a run of another decoder.draft."
            )
        if row.kind == ForwardKind.VERIFY:
            follows = ids[sum(forward < index for forward in born) :]
            right = common_prefix(row.drafted, follows)
            drafts.append(StoredDraft(row.survival, len(row.drafted), right, len(follows)))
    return tuple(drafts)


@dataclass(frozen=True)
class StoredDrafts:
    """The drafts of several texts, and the cost of drafting."""

    texts: tuple[tuple[StoredDraft, ...], ...]
    steps: float  # duration of a draft divided by that of the verifications in the same run
    width: int  # positions that a call of the drafter's network feeds
    calls: float  # calls of the drafter's network per draft

    @classmethod
    def of(cls, samples: Iterable[StoredText]) -> StoredDrafts:
        """Read stored samples; texts that ended with their prefill have no draft, so they are left
        out.
        """
        kept = list(samples)
        texts = tuple(filter(None, (drafts_of_text(*sample) for sample in kept)))
        rows = [row for trace, _, _ in kept for row in trace.forwards]
        ms = {kind: sum(row.ms for row in rows if row.kind == kind) for kind in ForwardKind}
        drafts = (ForwardKind.DRAFT, ForwardKind.SELF_DRAFT)
        steps = sum(ms[kind] for kind in (*drafts, ForwardKind.HEAD)) / (
            ms[ForwardKind.VERIFY] or 1
        )
        calls = [row for row in rows if row.kind in drafts]
        return cls(texts, steps, _width(calls), sum(row.calls for row in calls) / (len(calls) or 1))

    def halves(self) -> tuple[StoredDrafts, StoredDrafts]:
        """Return the first half of the texts, to fit on, and the second."""
        half = len(self.texts) // 2
        return replace(self, texts=self.texts[:half]), replace(self, texts=self.texts[half:])

    def observed(self) -> list[ObservedDraft]:
        """Return confidences and outcomes, up to the end of the text; what lies beyond it is
        unknown."""
        return [
            ObservedDraft(one.logits[: one.left], one.right)
            for text in self.texts
            for one in text
            if one.logits
        ]

    def served(self, temperatures: Temperatures | None = None) -> list[DraftedText]:
        """Return texts for the load simulation; without a confidence head every probability is 1.

        DllmBenchError if the run did not draft at every position.
        """
        for text in self.texts:
            if [one.left for one in text] != list(range(len(text), 0, -1)):
                raise DllmBenchError(
                    "A load is simulated from drafts at every position of a text, but this run "
                    "verified some of its drafts; run it with decoder/length=fixed "
                    "decoder.length.tokens=0."
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
        """Return the number of requests -> seconds of drafting for them in one step.

        tokens: draft tokens that are needed of each; None: whole drafts. An assumption of ours,
        since single requests were measured: for one request, as many one-token steps of the profile
        as in the run; for n requests, more by the factor by which a step of the target grows with
        n times the positions. A chain stops after the last token needed, a block is always drafted
        whole.
        """
        part = 1.0 if tokens is None else min(1.0, tokens / (self.calls or 1))
        one_s = part * self.steps * profile.step_s(1) / profile.step_s(self.width)
        return lambda requests: one_s * profile.step_s(requests * self.width)


def _width(calls: Sequence[Forward]) -> int:
    """Return the mean positions per call of the drafter's network, rounded up; 1 without calls."""
    fed, number = sum(row.fed for row in calls), sum(row.calls for row in calls)
    return max(1, ceil(fed / number)) if number else 1
