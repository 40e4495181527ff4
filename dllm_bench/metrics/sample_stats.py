"""Counts and timings of one sample, `SampleStats`, and the frame of samples that every metric
reads.

They are counted from a sample's tokens and trace, or read from a record's columns. Values about
drafts and about the baseline are None if the run has none, or if the record is older than the
column. Values that a model server does not report are None, and so are the timings of samples
decoded in a batch or with `measure_kl`. Nothing is aggregated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Union

from dllm_bench.core.declared import Amount, Count, Range, Seconds
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.trace import GIVEN, ForwardKind
from dllm_bench.metrics import drafts

if TYPE_CHECKING:
    from pandas import DataFrame

NO_TRACE = "a server does not report its forwards"
NO_USAGE = "the server did not count tokens (usage), and model.tokenizer names no tokenizer"
UNREPORTED = {
    **dict.fromkeys(("forwards", "rows", "forced", "allocated", "content"), NO_TRACE),
    **dict.fromkeys(("committed", "emitted"), NO_USAGE),
}
"""Column -> why it may be None for a served model's sample."""
NO_TIME = (
    "requests were decoded in a batch, or compared with no cache, so none has a time of its own"
)
UNTIMED = dict.fromkeys(("seconds", "steps_s", "first_step_s"), NO_TIME)
"""Column -> why it is None for a sample decoded in a batch, or with `measure_kl`."""
NO_PARENT = "no model read the texts; name one with model@parent"
UNREAD = dict.fromkeys(("parent_nats", "parent_choices", "trigrams"), NO_PARENT)
"""Column -> why it is None for a sample of a run without a parent."""


SessionIndex = Annotated[int, Range(0, 9_999)]
DraftLength = Annotated[int, Range(0, 4_096)]  # tokens of a draft, or of a round
Logit = Annotated[float, Range(-1e6, 1e6)]


@dataclass(frozen=True)
class SampleStats:
    """Counts and times of one sample; None where unknown. Field names are column names."""

    allocated: Count | None  # positions of all opened blocks, decoded or not
    committed: Count | None  # decoded positions among them, including those after the end
    content: Count | None  # decoded positions that hold no end or padding token
    emitted: Count | None  # decoded tokens before the first reason to stop
    forwards: Count | None  # forwards of the model; a drafter's own calls are not counted
    rows: Amount | None  # branches x rows computed per branch, summed over forwards: positions
    # fed, or their mean over layers where each layer chooses
    forced: Count | None  # positions committed by the stall rule
    seconds: Seconds | None  # duration of `generate`
    steps_s: Seconds | None  # all forwards including the work between them, from the trace
    first_step_s: Seconds | None  # the first of them: prompt and first denoising step
    truncated: bool  # only the length limit ended the text
    empty: bool  # the text is blank
    idle: Count | None = None  # extra forwards over full blocks in Fast-dLLM's cached loops
    idle_dinfer: Count | None = None  # the same for dInfer's loop as released
    rounds: Sequence[Sequence[DraftLength]] | None = None  # [proposed, accepted, committed]
    # each, and of a tree its depth
    survival: Sequence[Sequence[Logit]] | None = None  # logits of each round's whole draft
    right: Sequence[DraftLength] | None = None  # first tokens of each draft that equal the text
    prefill_s: Seconds | None = None  # time by kind of forward, of speculative decoding
    draft_s: Seconds | None = None
    head_s: Seconds | None = None
    verify_s: Seconds | None = None
    baseline_s: Seconds | None = None  # the whole of the baseline's `generate`
    baseline_equal: bool | None = None  # whether the baseline has the same tokens
    ttft_s: Seconds | None = None  # served model: time to the first content
    began_s: Seconds | None = None  # concurrent requests: start, since the session's start
    ended_s: Seconds | None = None  # and the end of the answer
    session: SessionIndex | None = None  # the session of these two times
    tries: Count | None = None  # served model: tries until the server answered
    first_tokens: Count | None = None  # decoded by the first step
    remasked: Count | None = None  # positions masked again, counted each time
    cache_read: Count | None = None  # bytes that forwards read from the cache, summed
    cache_kept: Count | None = None  # maximum bytes that the cache kept after a forward
    kl_nats: float | None = None  # KL(uncached ‖ cached), summed over `kl_rows`
    kl_rows: Count | None = None  # masked positions at which it was measured, over all forwards
    replayed: Count | None = None  # forwards that were recorded CUDA graphs
    recorded: Count | None = None  # forwards that recorded a graph; timings include this
    moved: Count | None = None  # forwards for which the cache moved K/V to longer buffers
    error_nats: Amount | None = None  # standard error of log-likelihoods over draws, options' mean
    retokenised: bool | None = None  # served model: tokens were counted by us, not by the server
    encoding: Count | None = None  # forwards that encode text and predict no canvas; None: none
    parent_nats: Amount | None = None  # -log p of the emitted tokens under the run's parent
    parent_choices: Count | None = None  # emitted tokens that the parent finds most probable
    trigrams: Count | None = None  # of emitted tokens, with a parent
    distinct_trigrams: Count | None = None
    through_end: Count | None = None  # with such forwards: tokens up to and including the first end

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return names of all fields: the columns that a record keeps per sample."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def required(cls) -> tuple[str, ...]:
        """Return columns that every record has, even if all their values are None."""
        return tuple(field.name for field in fields(cls) if field.default is MISSING)


Samples = Union["DataFrame", Sequence[SampleStats]]
"""Samples as a frame with the columns of `SampleStats`, or one by one."""
NESTED = ("rounds", "survival", "right")
"""Columns that hold a list per sample, or `drafts.rounds_array`; all others hold numbers."""


def frame_of(samples: Samples) -> DataFrame:
    """Return the samples' frame, a row per sample; a missing number is NaN, a missing list is
    None."""
    if hasattr(samples, "columns"):
        return samples
    return from_columns(
        {name: [getattr(one, name) for one in samples] for name in SampleStats.columns()}
    )


def idle_forwards(generation: Generation, unroll: int = 1, tokens_per_forward: int = 1) -> int:
    """Return the number of forwards over blocks without masks in published loops; this package
    makes none.

    In Fast-dLLM's loop a forward that renews the cache is always followed by one over the window,
    even if it filled the block. dInfer's loop makes clamp(masks // tokens_per_forward, 1, unroll)
    rounds before it checks whether masks are left. A round whose number in the request is a
    multiple of `renewal_rounds` first renews the cache, which is a separate forward.
    """
    committed, every = Counter(generation.born), generation.renewal_rounds
    idle = done = 0  # rounds of the request so far, including idle ones
    left = 0  # rounds until the loop checks whether masks are left
    for index, forward in enumerate(generation.trace.forwards):
        if forward.masks == 0:  # a draft or a verification belongs to no block
            continue
        if left == 0:
            left = min(max(forward.masks // tokens_per_forward, 1), unroll)
        is_renewal = forward.kind != ForwardKind.DENOISE  # its round ends with the next forward
        if not is_renewal:
            left, done = left - 1, done + 1
        if forward.masks == committed[index]:  # the block is full
            idle += left
            if every is not None:
                renewable = range(done + 1 if is_renewal else done, done + left)
                idle += sum(number % every == 0 for number in renewable)
            left, done = 0, done + left
    return idle


def emitted_ids(
    ids: Sequence[int], born: Sequence[int], cut: Mapping[str, int], mask: int
) -> list[int]:
    """Return the emitted tokens: those that were decoded, before the first cut. For the arguments
    see `Generation`.
    """
    before_cut = slice(min(cut.values(), default=len(ids)))
    placed = zip(ids[before_cut], born[before_cut], strict=True)
    return [token for token, forward in placed if token != mask and forward != GIVEN]


def count_sample(generation: Generation, special: SpecialTokens) -> dict[str, float]:
    """Return the counts that follow from tokens and trace alone; the runner adds timings and
    text."""
    ids, born, trace = generation.ids, generation.born, generation.trace
    placed = zip(ids, born, strict=True)
    written = [(token, forward) for token, forward in placed if token != special.mask]
    decoded = [token for token, forward in written if forward >= 0]
    blank = {*special.ends, special.pad}
    of_drafters = (ForwardKind.DRAFT, ForwardKind.HEAD)
    forwards = [forward for forward in trace.forwards if forward.kind not in of_drafters]
    writes = trace.writes(born)
    counts: dict[str, float] = {}
    if generation.likelihoods:
        counts["error_nats"] = fmean(likelihood.error for likelihood in generation.likelihoods)
    pairs = zip(trace.forwards, writes, strict=True)
    encoding = sum(call.kind == ForwardKind.PREFILL and not any(made) for call, made in pairs)
    if encoding:
        counts |= {"encoding": encoding, "through_end": generation.cut.get("eos", len(ids) - 1) + 1}
    return counts | {
        "allocated": len(ids),
        "committed": len(decoded),
        "content": sum(token not in blank for token in decoded),
        "first_tokens": sum(forward == 0 for _, forward in written),
        "emitted": len(emitted_ids(ids, born, generation.cut, special.mask)),
        "forwards": len(forwards),
        "rows": sum(
            forward.branches * (forward.fed if forward.rows is None else forward.rows)
            for forward in forwards
        ),
        "cache_read": sum(forward.read_bytes for forward in forwards),
        "cache_kept": max((forward.kept_bytes for forward in forwards), default=0),
        "forced": sum(forward.forced for forward in forwards),
        "replayed": sum(forward.replayed for forward in forwards),
        "recorded": sum(forward.recorded for forward in forwards),
        "moved": sum(forward.moved for forward in forwards),
        "remasked": sum(made.remasked for made in writes),
        "idle": idle_forwards(generation),
        "idle_dinfer": idle_forwards(generation, unroll=4, tokens_per_forward=8),
    }


def from_columns(columns: Mapping[str, Sequence[Any]]) -> DataFrame:
    """Return the samples' frame of a record's columns; unknown columns are ignored.

    DllmBenchError if a required column is missing.
    """
    import numpy as np
    import pandas as pd

    missing = [name for name in SampleStats.required() if name not in columns]
    if missing:
        raise DllmBenchError(
            f"The record has no column {', '.join(missing)}; it is damaged, make the run again."
        )
    names, count = _names_in_frame(), len(columns[SampleStats.required()[0]])
    blank = np.full(count, np.nan)
    numbers = [np.asarray(columns.get(name, blank), float) for name in names[: -len(NESTED)]]
    nested = {name: columns.get(name, [None] * count) for name in NESTED}
    nested["rounds"] = list(map(drafts.rounds_array, nested["rounds"]))
    lists = (pd.Series(values, dtype=object) for values in nested.values())
    return pd.concat([pd.DataFrame(np.array(numbers).T), *lists], axis=1).set_axis(names, axis=1)


@cache
def _names_in_frame() -> Any:
    """Return the index of a frame's columns, one for all frames: making its hash table takes longer
    than computing a metric."""
    import pandas as pd

    numbers = (name for name in SampleStats.columns() if name not in NESTED)
    return pd.Index([*numbers, *NESTED], dtype=object)
