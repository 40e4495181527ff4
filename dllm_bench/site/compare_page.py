"""Compare decoders: the runs of one model on the same samples, each with a reference run.

The reference is the run with the fewest tokens per forward, that is, with the most forwards per
token. Scores are compared pairwise on shared samples (`accuracy.compare`: exact McNemar, or paired
bootstrap), speeds as ratios. Any other pair is compared by `dllm-bench compare A B`.

A group has a plot of score against each of `SHOWN_METRICS` (`figures.trade_off`), a file of its own
that the group's page and the first page show. It is named by a digest of its runs, so that a report
draws only what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from dllm_bench.figures import trade_off
from dllm_bench.metrics import accuracy
from dllm_bench.site.pages import Page
from dllm_bench.store.record import SHOWN_METRICS, RunRecord
from dllm_bench.store.spec import SHOWN, differing_settings, digest, slug

COMPARISONS = "comparisons"  # folder of the pages and plots


@dataclass(frozen=True)
class TradeOffPlot:
    """Score against speed of the runs of a group.

    runs: the runs that have a score and the metric.
    title: the group's title.
    metric: name of the speed on the x axis, such as "tpf/emitted".
    address: path of the SVG below the root of the site.
    """

    runs: Sequence[trade_off.KnownRun]
    title: str
    metric: str
    address: str

    def svg(self) -> bytes:
        """Return the drawing; the first one imports matplotlib."""
        return trade_off.image(trade_off.points_of(self.runs), self.title, self.metric, "svg")


@dataclass(frozen=True)
class ComparedRuns:
    """Graded runs of one model on the same samples.

    records: the records of the runs, the reference first.
    """

    records: Sequence[RunRecord]

    @property
    def title(self) -> str:
        """Model, benchmark and number of samples."""
        spec = self.records[0].spec
        n = len(self.records[0].columns["id"])
        return f"{spec.model.name} on {spec.benchmark.name}, {n} samples"

    @property
    def decoders(self) -> str:
        """The names of the decoders, the first three and how many more."""
        names = list(dict.fromkeys(record.spec.label for record in self.records))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @property
    def heading(self) -> str:
        """Title and decoders, for lists of comparisons."""
        return f"{self.title}: {self.decoders}"

    @property
    def address(self) -> str:
        """The path of the page below the root of the site."""
        spec = self.records[0].spec
        names = f"{spec.benchmark.name}-{spec.model.name}"
        return f"{COMPARISONS}/{slug(names)}-{comparison_key(self.records[0])[:SHOWN]}.html"

    @property
    def plots(self) -> list[TradeOffPlot]:
        """A plot against each of `SHOWN_METRICS` that at least two of the runs have."""
        made = digest([[record.identity_hash, record.sealed_at] for record in self.records])
        stem = f"{self.address.removesuffix('.html')}-{made[:SHOWN]}"
        return [
            TradeOffPlot(runs, self.title, metric, f"{stem}-{slug(metric)}.svg")
            for metric in SHOWN_METRICS
            if len(runs := trade_off.known_runs(self.records, metric)) > 1
        ]


def comparison_key(record: RunRecord) -> str:
    """Return a digest of what compared runs share: model, benchmark, samples."""
    identity = record.spec.identity()
    return digest([identity["model"], identity["benchmark"], record.columns["id"]])


def comparable_runs(records: Iterable[RunRecord]) -> list[ComparedRuns]:
    """Return groups of two and more graded runs on the same samples, the largest first."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.score is not None:
            groups.setdefault(comparison_key(record), []).append(record)
    several = (group for group in groups.values() if len(group) > 1)
    compared = (ComparedRuns(sorted(group, key=tokens_per_forward)) for group in several)
    return sorted(compared, key=lambda group: (-len(group.records), group.address))


def tokens_per_forward(record: RunRecord) -> tuple[float, str]:
    """Return the sort key within a group: tokens per forward, then hash."""
    tpf = record.summary.get(SHOWN_METRICS[0])
    return (float("inf") if tpf is None else tpf, record.identity_hash)


def comparison_page(runs: ComparedRuns, with_page: Set[str]) -> str:
    """Return the page of a group of runs. `with_page`: runs that have a page."""
    page = Page(runs.address, runs.title, [("comparisons", "index.html#comparisons")], with_page)
    reference, *others = runs.records
    others = [one for one in others if one.values.keys() & reference.values.keys()]  # both graded
    compared = [(one, accuracy.compare(one.values, reference.values)) for one in others]
    view = {
        "title": runs.title,
        "reference": reference,
        "settings": differing_settings(record.spec for record in runs.records),
        "compared": [(reference, None), *compared],
        "ratio": lambda record, metric: ratio(record, reference, metric),
        "plots": runs.plots,
    }
    return page.render("comparison.html", view)


def ratio(record: RunRecord, reference: RunRecord, metric: str) -> str:
    """Return a metric's ratio to the reference's as text; empty if undefined."""
    value, other = record.summary.get(metric), reference.summary.get(metric)
    return f"{value / other:.2f}" if value is not None and other else ""
