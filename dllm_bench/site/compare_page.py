"""Compare decoders: the runs of one model on the same samples, each with a reference run.

The reference is the run with the fewest tokens per forward, that is, with the most forwards per
token. Scores are compared pairwise on shared samples (`accuracy.compare`: exact McNemar, or paired
bootstrap), speeds as ratios. Any other pair is compared by `dllm-bench compare A B`.

`tradeoff_plots` gives plots of score against speed, SVGs that `macros.html` draws. A point is a
run. The front is the edge of everything that some run beats (`pareto_front`): steps, since nothing
was measured between two runs. The runs on it are large, have the 95 % interval of their score, and
are named where there is room. Places are computed here; the template only writes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from dllm_bench.figures.trade_off import KnownRun, front_of, least_covered, outside
from dllm_bench.metrics import accuracy
from dllm_bench.site.pages import Page, Plain, RunPages
from dllm_bench.site.texts import percent, significant
from dllm_bench.store.record import SHOWN_METRICS, RunRecord
from dllm_bench.store.spec import SHOWN, differing_settings, digest, slug

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 16, 40, HEIGHT - 48  # edges of the area with points
COLOURS = 7  # decoders with a colour of their own; `site.css` has these and one for all others
FEW = 15  # with no more runs than this, all have their interval
LABEL = (8.5, 13.0)  # width of a bold character and height of a line, about
INSIDE = 0.05  # from a label to an edge, at least: places have one decimal
DOT = 7.0  # around the middle of a point, where no label may stand
OFFSETS = [  # from a point to its label, the best first: (x, y, text-anchor)
    (far * x, far * y, anchor)
    for far in (1, 2, 3)
    for x, y, anchor in ((9, -7, "start"), (9, 15, "start"), (-9, 15, "end"), (-9, -7, "end"))
]
TICKS = 5  # on an axis, about
AXES = dict(zip(SHOWN_METRICS, ("Tokens per forward", "Tokens/s"), strict=True))


# --- plots of score against speed ----------------------------------------------------------------


def tradeoff_plots(
    records: Sequence[RunRecord], title: str, run_pages: RunPages, up: str = ""
) -> list[Plain]:
    """Return a plot against each of `SHOWN_METRICS` that at least two of the runs have."""
    found = []
    for metric in SHOWN_METRICS:
        known = [
            (record, x, record.score)
            for record in records
            if record.score and (x := record.summary.get(metric)) is not None and math.isfinite(x)
        ]
        if len(known) > 1:
            found.append((metric, known))
    colours = decoder_colours([known for _, known in found])
    return [_plot(known, metric, title, colours, run_pages, up) for metric, known in found]


def decoder_colours(plotted: Sequence[Sequence[KnownRun]]) -> dict[str, str]:
    """Return decoder -> CSS class of its colour.

    Decoders on the fronts come first, then those with most runs.
    """
    best = [family(known[i][0]) for known in plotted for i in front_of(known)]
    often = Counter(family(record) for known in plotted for record, _, _ in known)
    names = dict.fromkeys([*best, *(name for name, _ in often.most_common())])
    return {name: f"series-{min(place, COLOURS)}" for place, name in enumerate(names)}


def family(record: RunRecord) -> str:
    """Return the decoder's name without the pieces that the run replaced."""
    return record.spec.label.partition("+")[0]


def _plot(
    known: Sequence[KnownRun],
    metric: str,
    title: str,
    colours: dict[str, str],
    run_pages: RunPages,
    up: str,
) -> Plain:
    """Return one plot. label: the x axis, and in brackets the metric; summary: the plot in words;
    points: those on the front last, so that none hides them; front: its corners, as SVG has them;
    beaten: the corners of the area below it; legend: (decoder, CSS class).
    """
    x_ticks = ticks(0.0, max(x for _, x, _ in known))
    lowest = min(score.low for _, _, score in known)
    y_ticks = ticks(100 * lowest, 100 * max(score.high for _, _, score in known))

    def across(x: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * x / x_ticks[-1]:.1f}"

    def up_to(share: float) -> str:
        bottom, top = y_ticks[0], y_ticks[-1]
        return f"{BOTTOM - (BOTTOM - TOP) * (100 * share - bottom) / (top - bottom):.1f}"

    front = front_of(known)
    points = [
        {
            "x": across(x),
            "y": up_to(score.mean),
            "low": up_to(score.low),
            "high": up_to(score.high),
            "css": colours[family(record)],
            "title": f"{record.spec.label}: {percent(score)} %, {significant(x)} ({metric})",
            "address": run_pages.address(record.spec.short, up),
            "has_bar": i in front or len(known) <= FEW,
            "is_best": i in front,
        }
        for i, (record, x, score) in enumerate(known)
    ]
    corners = list(front_corners([points[i] for i in front]))
    named = [(points[i], known[i][0].spec.label) for i in front]
    return {
        "title": title,
        "label": f"{AXES[metric]} ({metric})",
        "summary": f"Score against {metric} of {len(points)} runs: {title}",
        "x_ticks": [{"at": across(x), "text": f"{x:g}"} for x in x_ticks],
        "y_ticks": [{"at": up_to(y / 100), "text": f"{y:g}"} for y in y_ticks],
        "points": sorted(points, key=itemgetter("is_best")),
        "front": " ".join(corners),
        "beaten": " ".join([*corners, f"{LEFT},{BOTTOM}"]),
        "labels": list(place_labels(named)),
        "legend": list(colours.items())[:COLOURS],
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
    }


def front_corners(best: Sequence[Plain]) -> Iterator[str]:
    """Yield the corners of the steps that lead down from point to point, given from slow to
    fast."""
    yield f"{LEFT},{best[0]['y']}"
    for point, following in zip(best, [*best[1:], None], strict=True):
        yield f"{point['x']},{point['y']}"
        yield f"{point['x']},{following['y'] if following else BOTTOM}"


def place_labels(named: Sequence[tuple[Plain, str]]) -> Iterator[Plain]:
    """Yield a label for each point whose name differs from the one before, where it covers no point
    of the front and no other label; none where there is no such place.
    """
    middles = [(float(point["x"]), float(point["y"])) for point, _ in named]
    height, before = LABEL[1], ""
    taken = outside(LEFT + INSIDE, TOP - height + INSIDE, WIDTH - INSIDE, BOTTOM - INSIDE)
    taken += [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in middles]
    for (x, y), (point, text) in zip(middles, named, strict=True):
        if text == before:
            continue
        width = LABEL[0] * len(text)
        starts = [
            (x + across - (width if anchor == "end" else 0), y + down)
            for across, down, anchor in OFFSETS
        ]
        boxes = [(left, line - height, left + width, line + 2) for left, line in starts]
        index, covered = least_covered(boxes, taken)
        if not covered:
            taken.append(boxes[index])
            across, down, anchor = OFFSETS[index]
            place = {"x": f"{x + across:.1f}", "y": f"{y + down:.1f}", "anchor": anchor}
            yield {**place, "text": text, "css": point["css"]}
            before = text


def ticks(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers, the first at most `low` and the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]


# --- comparisons ---------------------------------------------------------------------------------


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
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    @property
    def heading(self) -> str:
        """Title and decoders, for lists of comparisons."""
        return f"{self.title}: {self.decoders}"

    @property
    def address(self) -> str:
        """The path of the page below the root of the site."""
        spec = self.records[0].spec
        names = f"{spec.benchmark.name}-{spec.model.name}"
        return f"comparisons/{slug(names)}-{comparison_key(self.records[0])[:SHOWN]}.html"


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
    several = [
        ComparedRuns(sorted(group, key=tokens_per_forward))
        for group in groups.values()
        if len(group) > 1
    ]
    return sorted(several, key=lambda group: (-len(group.records), group.address))


def tokens_per_forward(record: RunRecord) -> tuple[float, str]:
    """Return the sort key within a group: tokens per forward, then hash."""
    tpf = record.summary.get(SHOWN_METRICS[0])
    return (float("inf") if tpf is None else tpf, record.identity_hash)


def comparison_page(runs: ComparedRuns, run_pages: RunPages) -> str:
    """Return the page of a group of runs."""
    page = Page(runs.address, runs.title, [("comparisons", "index.html#comparisons")])
    reference, *others = runs.records
    view = {
        "title": runs.title,
        "reference": reference,
        "address": lambda short: run_pages.address(short, page.up),
        "settings": differing_settings(record.spec for record in runs.records),
        "compared": [
            (reference, None),
            *((one, accuracy.compare(one.values, reference.values)) for one in others),
        ],
        "ratio": lambda record, metric: ratio(record, reference, metric),
        "plots": tradeoff_plots(runs.records, runs.title, run_pages, page.up),
    }
    return page.render("comparison.html", view)


def ratio(record: RunRecord, reference: RunRecord, metric: str) -> str:
    """Return a metric's ratio to the reference's as text; empty if undefined."""
    value, other = record.summary.get(metric), reference.summary.get(metric)
    return f"{value / other:.2f}" if value is not None and other else ""
