"""Figures, claims and the trade-off plot from stored runs; nothing is run."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_bench.api.compose import compose
from dllm_bench.api.runs import open_store
from dllm_bench.claims.verdict import ROW_HEADS, judge_stored
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.draw import as_csv, headline, images
from dllm_bench.figures.points import BuiltFigure, build_figure
from dllm_bench.figures.spec import load_figure
from dllm_bench.figures.trade_off import KnownRun, front_of, image
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.metrics.definitions import definition
from dllm_bench.store.files import write_atomic
from dllm_bench.store.record import RunRecord
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.spec import slug
from dllm_bench.store.store import Store, read_record
from dllm_bench.tables.load import load_profile, matching_names
from dllm_bench.tables.plan import Planner
from dllm_bench.tables.spec import EMBEDDED

if TYPE_CHECKING:
    from pandas import DataFrame

FORMS = ("png", "svg")


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing and the numbers in it; notebooks display it."""

    title: str
    """One line that says what is drawn."""
    numbers: Callable[[], DataFrame] = field(repr=False)
    """Returns all points as a pandas DataFrame."""
    image: Callable[[str], bytes] = field(repr=False)
    """Returns the drawing as a file in one of the formats of `FORMS`."""

    def to_pandas(self) -> DataFrame:
        """Return a row per point."""
        return self.numbers()

    def save(self, path: str | Path) -> Path:
        """Write the drawing; the path ends in .png or .svg."""
        form = Path(path).suffix.removeprefix(".")
        if form not in FORMS:
            raise DllmBenchError(
                f"A picture is saved as {' or '.join(FORMS)}, and {str(path)!r} ends in "
                f"{form or 'neither'}; name a file that ends in .png or .svg."
            )
        return write_atomic(Path(path), self.image(form))

    def __repr__(self) -> str:
        return f"Picture({self.title})"

    def _repr_html_(self) -> str:
        """Return the drawing at half its pixels, so that it is sharp."""
        return f'<img style="max-width: 100%" width="860" src="data:image/png;base64,{self._text}">'

    @cached_property
    def _text(self) -> str:
        return b64encode(self.image("png")).decode()


def figure(name: str, *, profile: str = EMBEDDED, results: str | Path | None = None) -> Picture:
    """Return a figure of a paper ("lopa/figure1") from stored runs; nothing is run.

    profile: "embedded" for the models and tasks that ship, "paper" for the published ones.
    """
    drawn, store, chosen = load_figure(name), open_store(results), load_profile(profile)
    settings = SettingsCache(store.root.parent, compose)
    planner = Planner.cached(settings, store)
    [planned] = planner.common([drawn.table], chosen)
    settings.save()
    built = build_figure(drawn, planned.profile, planned.cells, store)
    return Picture(headline(built), lambda: _points(built), lambda form: images(built)[form])


def _points(built: BuiltFigure) -> DataFrame:
    import io

    import pandas as pd

    return pd.read_csv(io.StringIO(as_csv(built)))


def verdicts(
    name: str = "all", *, profile: str = EMBEDDED, results: str | Path | None = None
) -> DataFrame:
    """Return the verdict of published claims from stored runs, a row each; nothing is run.

    name: a claim ("lopa/faster"), a paper, or "all". All claims are judged in any case, since p is
    corrected for all of them.
    """
    import pandas as pd

    shown, store = matching_names("claim", name), open_store(results)
    settings = SettingsCache(store.root.parent, compose)
    planner = Planner.cached(settings, store)
    judged = judge_stored(load_profile(profile), planner)
    settings.save()
    rows = [one.row for one in judged if one.claim.name in shown]
    return pd.DataFrame(rows, columns=list(ROW_HEADS)).set_index(ROW_HEADS[0])


def trade_off(
    model: str = "",
    benchmark: str = "",
    *,
    results: str | Path | None = None,
    speed: str = "tpf/emitted",
) -> Picture:
    """Return score against speed of the complete runs of a model on a benchmark, with the Pareto
    front.

    model, benchmark: names. Among the runs that fit, the largest group over the same items is
    drawn. speed: the metric of the x axis, such as "tps/e2e".

    Raises DllmBenchError if no complete run has both numbers.
    """
    import pandas as pd

    store, metric = open_store(results), definition(speed)
    groups: dict[tuple[object, ...], list[KnownRun]] = {}
    for record in records_of(store, model, benchmark):
        spec, reached = record.spec, record.summary.get(speed)
        if record.score and reached is not None:
            key = spec.model.name, spec.benchmark.name, frozenset(record.values)
            groups.setdefault(key, []).append((record, reached, record.score))
    if not groups:
        wanted = f"{model or 'any model'} on {benchmark or 'any benchmark'}"
        raise DllmBenchError(
            f"A trade-off plot was asked for, and no complete run of {wanted} below {store.root} "
            f"has a score and {speed}; make some, for example with `dllm-bench run -m "
            "model=tiny-llada decoder=vanilla,fast_dllm,credit benchmark=minigsm`."
        )
    largest = max(groups.values(), key=len)
    best = front_of(largest)
    points = pd.DataFrame([_trade_off_point(*one, i in best) for i, one in enumerate(largest)])
    first = largest[0][0]
    title = f"{first.spec.model.name} on {first.spec.benchmark.name}, n = {len(first.values)}"

    def drawn(form: str) -> bytes:
        return image(points, title, f"{metric.name} ({metric.unit})", form)

    return Picture(title, lambda: points.sort_values("speed", ignore_index=True), drawn)


def records_of(store: Store, model: str, benchmark: str) -> list[RunRecord]:
    """Return the complete runs whose folders name a model and a benchmark; empty names mean any."""
    model, benchmark = (name and slug(name) for name in (model, benchmark))
    found = [
        read_record(folder)
        for folder in store.folders()
        if model in ("", folder.parent.name) and benchmark in ("", folder.parent.parent.name)
    ]
    return [record for record in found if record is not None]


def _trade_off_point(
    record: RunRecord, speed: float, score: MeanScore, front: bool
) -> dict[str, str | float]:
    return {
        "run": record.spec.short,
        "decoder": record.spec.label.partition("+")[0],
        "speed": speed,
        "score": 100 * score.mean,
        "low": 100 * score.low,
        "high": 100 * score.high,
        "front": front,
    }
