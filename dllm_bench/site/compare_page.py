"""Decoders compared: the runs of one model on the same samples, each against a reference run.

The reference is the run with the fewest tokens per forward, which pays for every token. Scores are
compared pairwise on shared samples (`accuracy.compare`: exact McNemar, or paired bootstrap), speeds
as ratios. Any other pair is `dllm-bench compare A B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dllm_bench.metrics import accuracy
from dllm_bench.site.format import LISTED_METRICS, significant
from dllm_bench.site.html import Column, Html, Page, el, grid, link
from dllm_bench.site.index_page import settings_apart
from dllm_bench.site.run_page import run_address
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import SHOWN, digest, slug

TPF, TPS = LISTED_METRICS
UP, YES = "../", "yes"


@dataclass(frozen=True)
class Group:
    """Runs of one model on the same samples, the reference first."""

    records: Sequence[RunRecord]

    @property
    def title(self) -> str:
        """Model, benchmark and size."""
        spec = self.records[0].spec
        n = len(self.records[0].columns["id"])
        return f"{spec.model['name']} on {spec.benchmark['name']}, {n} samples"

    @property
    def address(self) -> str:
        """Where the page lies below the root."""
        spec = self.records[0].spec
        names = f"{spec.benchmark['name']}-{spec.model['name']}"
        return f"comparisons/{slug(names)}-{key_of(self.records[0])[:SHOWN]}.html"


def key_of(record: RunRecord) -> str:
    """What runs of a group share: model, benchmark, samples."""
    identity = record.spec.identity()
    return digest([identity["model"], identity["benchmark"], record.columns["id"]])


def groups(records: Iterable[RunRecord]) -> list[Group]:
    """The groups of two and more graded runs, largest first."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.score is not None:
            found.setdefault(key_of(record), []).append(record)
    several = [Group(sorted(group, key=cost)) for group in found.values() if len(group) > 1]
    return sorted(several, key=lambda group: (-len(group.records), group.address))


def cost(record: RunRecord) -> tuple[float, str]:
    """The order of a group: tokens per forward, then hash."""
    tpf = record.summary.get(TPF)
    return (float("inf") if tpf is None else tpf, record.identity_hash)


def compare_page(group: Group, paged: set[str]) -> str:
    """The page of a group."""
    reference, *others = group.records
    apart = settings_apart(record.spec for record in group.records)
    columns = [Column("Run"), Column("Decoder"), Column("Settings")]
    titles = ("Score %", "Difference", "95 % interval", "p", "TPF", "ratio", "TPS", "ratio")
    columns += [Column(title, number=True) for title in titles]
    columns += [Column("Differs")]
    page = Page(group.address, group.title, [("comparisons", "index.html#comparisons")])
    rows = [compare_row(record, reference, apart, paged) for record in (reference, *others)]
    return page(
        el("h1", {}, group.title),
        el("p", {}, *about(reference, paged)),
        grid(columns, rows, "Runs against the reference"),
    )


def about(reference: RunRecord, paged: set[str]) -> tuple[str, ...]:
    """What is compared with what."""
    return (
        "Differences in percentage points and ratios are against ",
        run_link(reference, paged),
        f" ({reference.spec.label}), the run with the fewest tokens per forward ({TPF}). Scores "
        "are compared pairwise on the same samples; TPS is ",
        el("code", {}, TPS),
        " and holds for the machines the runs were made on.",
    )


def run_link(record: RunRecord, paged: set[str]) -> Html:
    """The run's hash, leading to its page where it has one."""
    short = record.spec.short
    return link(f"{UP}{run_address(short)}" if short in paged else "", el("code", {}, short))


def compare_row(
    record: RunRecord, reference: RunRecord, apart: dict[str, str], paged: set[str]
) -> tuple[str, ...]:
    """One run; the reference has no difference to itself."""
    spec, score = record.spec, record.score
    paired = ("", "", "", "reference")
    if record is not reference:
        paired = difference(accuracy.compare(record.values, reference.values))
    *numbers, verdict = paired
    speeds = []
    for name in (TPF, TPS):
        mine, theirs = record.summary.get(name), reference.summary.get(name)
        speeds += [significant(mine), f"{mine / theirs:.2f}" if mine is not None and theirs else ""]
    return (
        run_link(record, paged),
        spec.label,
        apart[spec.short],
        f"{100 * score.mean:.1f}" if score else "",
        *numbers,
        *speeds,
        el("span", {"class": "differs" if verdict == YES else "soft"}, verdict),
    )


def difference(found: accuracy.Comparison) -> tuple[str, str, str, str]:
    """Difference in points, its interval, p where there is a test, and what follows."""
    return (
        f"{100 * found.difference:+.1f}",
        f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
        "" if found.p_value is None else f"{found.p_value:.2g}",
        YES if found.differs else "not shown",
    )
