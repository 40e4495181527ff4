"""What one sample cost and gave: `Facts`, counted from its tokens and trace, or read from columns.

The raw material of every named number (`definitions`); one value per sample and fact. Facts of
draft and verification, and of the run's baseline, are None where the run has none or the record is
older than the fact; what a served engine does not tell is None too, and so are times of requests
decoded side by side. Nothing is aggregated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.trace import ForwardKind

NO_TRACE = "a served engine tells nothing of its forwards"
NO_USAGE = "the server did not count tokens (usage), and model.tokenizer names no tokenizer"
UNREPORTED = {
    **dict.fromkeys(("forwards", "rows", "forced", "allocated", "content"), NO_TRACE),
    **dict.fromkeys(("committed", "emitted"), NO_USAGE),
}
"""Why a fact of a served engine's sample may be None."""
NO_TIME = "requests were decoded side by side (batch), so none has a time of its own"
UNTIMED = dict.fromkeys(("seconds", "steps_s", "first_step_s"), NO_TIME)
"""Why a time of a sample may be None."""


@dataclass(frozen=True)
class SampleStats:
    """What one sample cost and gave."""

    allocated: int | None  # positions of all opened blocks, decoded or not
    committed: int | None  # decoded positions among them, whatever follows the end included
    content: int | None  # decoded positions that hold no end or padding token
    emitted: int | None  # tokens before the first reason to stop
    forwards: int | None  # of the model; a drafter's own calls are not among them
    rows: int | None  # sum over forwards of branches x positions fed per branch
    forced: int | None  # positions committed by the stall rule
    seconds: float | None  # the whole of `generate`
    steps_s: float | None  # its forwards and their rounds, the trace's milliseconds added up
    first_step_s: float | None  # the first of them (prompt and first denoising step)
    truncated: bool  # nothing but the length ended the text
    empty: bool  # the text is blank
    idle: int | None = None  # forwards over full blocks that Fast-dLLM's cached loops would add
    idle_dinfer: int | None = None  # the same for dInfer's loop as released
    rounds: Sequence[Sequence[int]] | None = None  # [proposed, accepted, committed] of each round
    survival: Sequence[Sequence[float]] | None = None  # logits of each round's whole proposal
    right: Sequence[int] | None = None  # first tokens of each whole proposal equal to the text
    prefill_s: float | None = None  # time of the trace by kind of forward, where there are rounds
    draft_s: float | None = None
    head_s: float | None = None
    verify_s: float | None = None
    baseline_s: float | None = None  # the whole of the baseline's `generate`
    baseline_equal: bool | None = None  # whether its tokens are the same
    ttft_s: float | None = None  # of a served engine: to the first content
    began_s: float | None = None  # where several are in flight: from the session's start to its own
    ended_s: float | None = None  # and to the end of the answer
    session: int | None = None  # the one these two belong to
    tries: int | None = None  # until it answered
    retokenised: bool | None = None  # whether tokens were counted here, not by the server

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the facts, the columns a record keeps per sample."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def required(cls) -> tuple[str, ...]:
        """The facts that every record has a column of, told or not."""
        return tuple(field.name for field in fields(cls) if field.default is MISSING)


def idle_forwards(generation: Generation, unroll: int = 1, tokens_per_forward: int = 1) -> int:
    """Forwards that published block loops make over a block that is full; none are made here.

    A forward that renews the cache is followed by one over the window in the same round, even where
    it filled the block. dInfer's loop makes clamp(masks // tokens_per_forward, 1, unroll) rounds
    before it looks whether masks are left.
    """
    taken = Counter(generation.born)
    idle = rounds = 0
    for index, forward in enumerate(generation.trace.forwards):
        if forward.masks == 0:  # a draft or a verification, not of a block loop
            continue
        rounds = rounds or min(max(forward.masks // tokens_per_forward, 1), unroll)
        rounds -= forward.kind == ForwardKind.DENOISE
        if forward.masks == taken[index]:
            idle, rounds = idle + rounds, 0
    return idle


def count_sample(generation: Generation, special: SpecialTokens) -> dict[str, int]:
    """The facts that follow from tokens and trace alone; times and text are the runner's."""
    blank = {*special.ends, special.pad}
    decoded = [
        token
        for token, born in zip(generation.ids, generation.born, strict=True)
        if born >= 0 and token != special.mask
    ]
    end = min([*generation.cut.values(), len(generation.ids)])
    forwards = [
        call
        for call in generation.trace.forwards
        if call.kind not in (ForwardKind.DRAFT, ForwardKind.HEAD)
    ]
    return {
        "allocated": len(generation.ids),
        "committed": len(decoded),
        "content": sum(token not in blank for token in decoded),
        "emitted": sum(token != special.mask for token in generation.ids[:end]),
        "forwards": len(forwards),
        "rows": sum(forward.branches * forward.fed for forward in forwards),
        "forced": sum(forward.forced for forward in forwards),
        "idle": idle_forwards(generation),
        "idle_dinfer": idle_forwards(generation, unroll=4, tokens_per_forward=8),
    }


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[SampleStats]:
    """Facts from a record's per-sample columns; further columns are ignored."""
    names = [name for name in SampleStats.columns() if name in columns]
    absent = [name for name in SampleStats.required() if name not in columns]
    if absent:
        raise DllmBenchError(
            f"The record has no column {', '.join(absent)}; it is damaged, run the cell again."
        )
    rows_ = zip(*(columns[name] for name in names), strict=True)
    return [SampleStats(**dict(zip(names, row, strict=True))) for row in rows_]
