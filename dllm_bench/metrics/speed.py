"""Speed by name: every published meaning of TPF, TPS and latency over the same stored facts.

The same word means different counts in different repositories (which tokens, which forwards, which
clock, which mean), so a number is always asked for by a definition's name, and `DEFINITIONS` says
what that definition counts. All are pure functions of `Facts`, one per sample; a value that the
facts do not define (no sample, no time after the first step) is None. Scores live in `accuracy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from statistics import fmean, quantiles
from typing import Any

from dllm_bench.core.request import DllmBenchError, Generation, SpecialTokens
from dllm_bench.core.trace import Kind


@dataclass(frozen=True)
class Facts:
    """What one sample cost and gave."""

    allocated: int  # positions of all opened blocks, decoded or not
    committed: int  # decoded positions among them, whatever follows the end included
    content: int  # decoded positions that hold no end or padding token
    emitted: int  # tokens before the first reason to stop
    forwards: int  # of the model; a drafter's own calls are not among them
    rows: int  # sum over forwards of branches x positions fed per branch
    forced: int  # positions committed by the stall rule
    seconds: float  # the whole of `generate`
    steps_s: float  # its forwards and what belongs to them, the trace's milliseconds added up
    first_step_s: float  # the first of them (prompt and first denoising step)
    truncated: bool  # nothing but the length ended the text
    empty: bool  # the text is blank
    idle: int | None = None  # forwards over full blocks that Fast-dLLM's cached loops would add
    idle_dinfer: int | None = None  # the same for dInfer's loop as released; None: older record

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the facts, the columns a record keeps per sample."""
        return tuple(field.name for field in fields(cls))


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
        rounds -= forward.kind == Kind.DENOISE
        if forward.masks == taken[index]:
            idle, rounds = idle + rounds, 0
    return idle


def count(generation: Generation, special: SpecialTokens) -> dict[str, int]:
    """The facts that follow from tokens and trace alone; times and text are the runner's."""
    blank = {*special.ends, special.pad}
    decoded = [
        token
        for token, born in zip(generation.ids, generation.born, strict=True)
        if born >= 0 and token != special.mask
    ]
    end = min([*generation.cut.values(), len(generation.ids)])
    forwards = [call for call in generation.trace.forwards if call.kind != Kind.DRAFT]
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


Measure = Callable[[Sequence[Facts]], float | None]
Amount = Callable[[Facts], float]


@dataclass(frozen=True)
class Definition:
    """A named number: its unit, what it counts in words, and the function over samples.

    `fact` names a fact that older records do not have; the number is undefined without it.
    """

    name: str
    unit: str
    text: str
    function: Measure
    fact: str | None = None

    def __call__(self, facts: Sequence[Facts]) -> float | None:
        if self.fact and any(getattr(fact, self.fact) is None for fact in facts):
            return None
        return self.function(facts)


def total_ratio(top: Amount, bottom: Amount) -> Measure:
    """Sum over samples of `top` / sum over samples of `bottom`."""

    def measure(facts: Sequence[Facts]) -> float | None:
        divisor = sum(bottom(fact) for fact in facts)
        return sum(top(fact) for fact in facts) / divisor if divisor > 0 else None

    return measure


def each_ratio(top: Amount, bottom: Amount, facts: Sequence[Facts]) -> list[float]:
    """`top` / `bottom` of every sample that has a positive `bottom`."""
    return [top(fact) / bottom(fact) for fact in facts if bottom(fact) > 0]


def mean_ratio(top: Amount, bottom: Amount) -> Measure:
    """Mean over samples of `top` / `bottom`."""
    return best_ratio(top, bottom, None)


def best_ratio(top: Amount, bottom: Amount, n: int | None) -> Measure:
    """Mean of the `n` largest (None: all) per-sample ratios."""

    def measure(facts: Sequence[Facts]) -> float | None:
        ratios = sorted(each_ratio(top, bottom, facts), reverse=True)[:n]
        return fmean(ratios) if ratios else None

    return measure


def mean_of(amount: Amount) -> Measure:
    """Mean over samples."""
    return lambda facts: fmean(amount(fact) for fact in facts) if facts else None


def percentile_of(amount: Amount, percent: int) -> Measure:
    """Percentile over samples, linear between neighbours."""

    def measure(facts: Sequence[Facts]) -> float | None:
        values = [amount(fact) for fact in facts]
        if len(values) < 2:
            return values[0] if values else None
        return quantiles(values, n=100, method="inclusive")[percent - 1]

    return measure


def allocated(fact: Facts) -> float:
    return fact.allocated


def committed(fact: Facts) -> float:
    return fact.committed


def content(fact: Facts) -> float:
    return fact.content


def emitted(fact: Facts) -> float:
    return fact.emitted


def forwards(fact: Facts) -> float:
    return fact.forwards


def fast_dllm_forwards(fact: Facts) -> float:
    return fact.forwards + (fact.idle or 0)


def dinfer_forwards(fact: Facts) -> float:
    return fact.forwards + (fact.idle_dinfer or 0)


def rounds(fact: Facts) -> float:
    """Forwards as LoPA counts them: its last, empty round included."""
    return fact.forwards + 1


def seconds(fact: Facts) -> float:
    return fact.seconds


def steps_s(fact: Facts) -> float:
    return fact.steps_s


def later_s(fact: Facts) -> float:
    """Seconds after the first step; 0 for a sample that took one step only."""
    return fact.seconds - fact.first_step_s if fact.forwards > 1 else 0.0


def rows(fact: Facts) -> float:
    return fact.rows


def forced(fact: Facts) -> float:
    return fact.forced


_TAIL = "decoded tokens of all opened blocks (what follows the end included)"
_LATER = f"{_TAIL} ÷ (generation time − first step)"
_ALL = (
    Definition(
        "tpf/committed",
        "tokens/forward",
        f"{_TAIL} ÷ forwards; ratio of sums over samples.",
        total_ratio(committed, forwards),
    ),
    Definition(
        "tpf/emitted",
        "tokens/forward",
        "tokens before the first reason to stop ÷ forwards; ratio of sums over samples.",
        total_ratio(emitted, forwards),
    ),
    Definition(
        "tpf/lopa",
        "tokens/forward",
        "positions of all opened blocks ÷ (forwards + 1 per sample), as LoPA's single-device "
        "script counts; ratio of sums over samples; k + 1 branches are one forward.",
        total_ratio(allocated, rounds),
    ),
    Definition(
        "tpf/lopa_dist",
        "tokens/forward",
        f"{_TAIL} ÷ (forwards + 1 per sample), as LoPA-Dist counts; ratio of sums over samples.",
        total_ratio(committed, rounds),
    ),
    Definition(
        "tpf/lopa_coder",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards, as LoPA's DiffuCoder script "
        "counts; ratio of sums over samples.",
        total_ratio(content, forwards),
    ),
    Definition(
        "tpf/dinfer",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards as dInfer counts them (see "
        "forwards/dinfer); mean over samples of the ratio.",
        mean_ratio(content, dinfer_forwards),
        fact="idle_dinfer",
    ),
    Definition(
        "tps/decode",
        "tokens/s",
        "tokens before the first reason to stop ÷ time of the forwards and what belongs to them; "
        "ratio of sums over samples.",
        total_ratio(emitted, steps_s),
    ),
    Definition(
        "tps/e2e",
        "tokens/s",
        "tokens before the first reason to stop ÷ whole generation time (tokenisation and disk "
        "outside); ratio of sums over samples.",
        total_ratio(emitted, seconds),
    ),
    Definition(
        "tps/no_first_step",
        "tokens/s",
        f"LoPA-Dist's average TPS: {_LATER}; mean over samples of the ratio.",
        mean_ratio(committed, later_s),
    ),
    Definition(
        "tps/max",
        "tokens/s",
        f"LoPA-Dist's maximum TPS: {_LATER} of the fastest sample.",
        best_ratio(committed, later_s, 1),
    ),
    Definition(
        "tps/top10",
        "tokens/s",
        f"LoPA-Dist's top-10 TPS: {_LATER}; mean of the ten fastest samples.",
        best_ratio(committed, later_s, 10),
    ),
    Definition(
        "latency/mean", "s", "generation time of a sample; mean over samples.", mean_of(seconds)
    ),
    Definition(
        "latency/p50",
        "s",
        "generation time of a sample; median over samples.",
        percentile_of(seconds, 50),
    ),
    Definition(
        "latency/p95",
        "s",
        "generation time of a sample; 95th percentile over samples.",
        percentile_of(seconds, 95),
    ),
    Definition(
        "latency/no_first_step",
        "s",
        "LoPA-Dist's latency: generation time − first step; mean over samples.",
        mean_of(later_s),
    ),
    Definition(
        "step_ms",
        "ms",
        "time of the forwards and what belongs to them ÷ forwards; ratio of sums over samples.",
        total_ratio(lambda fact: 1000 * fact.steps_s, forwards),
    ),
    Definition(
        "forwards/mean", "forwards", "forwards of a sample; mean over samples.", mean_of(forwards)
    ),
    Definition(
        "forwards/fast_dllm",
        "forwards",
        "forwards of a sample as Fast-dLLM's block loops count: with the prefix or dual cache one "
        "more for each block that the forward renewing the cache filled; mean over samples.",
        mean_of(fast_dllm_forwards),
        fact="idle",
    ),
    Definition(
        "forwards/dinfer",
        "forwards",
        "forwards of a sample as dInfer's block loop counts as released: the same, and rounds run "
        "in groups of masks ÷ 8 (1 to 4) of which those after the last mask count too; mean over "
        "samples.",
        mean_of(dinfer_forwards),
        fact="idle_dinfer",
    ),
    Definition(
        "row_cost",
        "positions/token",
        "branches × positions fed, summed over forwards ÷ tokens before the first reason to stop; "
        "ratio of sums over samples: what the tokens per forward were bought with.",
        total_ratio(rows, emitted),
    ),
    Definition(
        "forced_steps",
        "share",
        "positions the stall rule committed because the selector chose none ÷ decoded positions.",
        total_ratio(forced, committed),
    ),
    Definition(
        "empty_rate", "share", "samples whose text is blank.", mean_of(lambda fact: fact.empty)
    ),
    Definition(
        "end_only_rate",
        "share",
        "samples whose decoded tokens are all end or padding.",
        mean_of(lambda fact: fact.committed > 0 and fact.content == 0),
    ),
    Definition(
        "truncated_rate",
        "share",
        "samples that nothing but the length ended.",
        mean_of(lambda fact: fact.truncated),
    ),
)
DEFINITIONS: dict[str, Definition] = {definition.name: definition for definition in _ALL}


def definition(name: str) -> Definition:
    """The definition called `name`; a sentence that lists them when there is none."""
    if name not in DEFINITIONS:
        known = ", ".join(DEFINITIONS)
        raise DllmBenchError(f"No speed definition is called {name!r}; choose one of: {known}.")
    return DEFINITIONS[name]


def measure(name: str, facts: Sequence[Facts]) -> float | None:
    """The number called `name` over `facts`."""
    return definition(name)(facts)


def measure_all(facts: Sequence[Facts]) -> dict[str, float | None]:
    """Every named number over `facts`."""
    return {name: entry(facts) for name, entry in DEFINITIONS.items()}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Facts]:
    """Facts from a record's per-sample columns; further columns are ignored."""
    names = [name for name in Facts.columns() if name in columns]
    absent = [f.name for f in fields(Facts) if f.default is MISSING and f.name not in columns]
    if absent:
        raise DllmBenchError(
            f"The record has no column {', '.join(absent)}; it is damaged, run the cell again."
        )
    rows_ = zip(*(columns[name] for name in names), strict=True)
    return [Facts(**dict(zip(names, row, strict=True))) for row in rows_]
