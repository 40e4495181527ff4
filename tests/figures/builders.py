"""Made-up sealed runs for the figure tests: samples of either loop, graded, sealed, in a store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dllm_bench.core.benchmark import SampleScore
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.figures.points import BuiltFigure, build_figure
from dllm_bench.figures.spec import PaperFigure, read_figure
from dllm_bench.runs import token_replay
from dllm_bench.runs.token_replay import TokenReplay
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.seal import seal
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, Store
from dllm_bench.tables.plan import distinct_runs
from dllm_bench.tables.spec import Profile
from tests.sample_stats import stored_sample
from tests.tables.builders import ENVIRONMENT, TINY, Compose, planned_small, start

LENGTH, BLOCK, SLOTS = 24, 8, 7
MOST_RUNS = 12
SMALL = Path(__file__).parent / "small"
Samples = Sequence[SampleRecord]


def sample(
    key: str, ids: Sequence[int], born: Sequence[int], rows: Sequence[Forward]
) -> SampleRecord:
    counts = dict.fromkeys(("allocated", "committed", "content", "emitted"), len(ids))
    costs = {"forwards": len(rows), "rows": 4 * len(rows), "forced": 0}
    seconds, trace = sum(row.ms for row in rows) / 1000, Trace(list(rows))
    given: dict[str, Any] = {"id": key, "counts": {**counts, **costs}, "seconds": seconds}
    return stored_sample(ids, born, trace, first_step_s=0.001, **given)


def drafted_sample(key: str, random: Random, longest: int | None, surviving: bool) -> SampleRecord:
    """Return a request of the draft-verify loop; of a draft, at most `longest` are verified."""
    ids = [random.randrange(100) for _ in range(LENGTH)]
    rows = [Forward(ForwardKind.PREFILL, 1, 5, 0, ms=1.0)]
    born = [0]
    while len(born) < LENGTH:
        right = min(random.choice((0, 2, 3, 7)), LENGTH - len(born))
        draft = (*ids[len(born) : len(born) + right], *[100] * (SLOTS - right))  # no text has a 100
        said = tuple(random.gauss(2.0 if k < right else -0.5, 1.5) for k in range(SLOTS))
        proposed = SLOTS if longest is None else min(longest, SLOTS)
        kept = min(right, proposed)
        rows.append(Forward(ForwardKind.DRAFT, 1, SLOTS, 0, ms=1.0))
        found: dict[str, Any] = {"proposed": proposed, "accepted": kept, "drafted": draft}
        found |= {"survival": said} if surviving else {}
        rows.append(Forward(ForwardKind.VERIFY, 1, proposed + 1, 0, ms=2.0, **found))
        born += [len(rows) - 1] * (kept + 1)
    ids += [0] * (len(born) - len(ids))
    return sample(key, ids, born, rows)


def masked_sample(key: str, random: Random) -> SampleRecord:
    """Return a request of the denoising loop: block by block, one to four positions a forward."""
    born = [-1] * LENGTH
    rows: list[Forward] = []
    for first in range(0, LENGTH, BLOCK):
        left = [*range(first, first + BLOCK)]
        while left:
            masks = len(left)
            for position in random.sample(left, min(random.randint(1, 4), len(left))):
                left.remove(position)
                born[position] = len(rows)
            rows.append(Forward(ForwardKind.DENOISE, 1, BLOCK, 5, ms=1.0, masks=masks))
    return sample(key, [random.randrange(100) for _ in born], born, rows)


def samples_of(spec: RunSpec, n: int = 8) -> list[SampleRecord]:
    """Return samples as the run's decoder would leave them, different ones for different runs."""
    random = Random(spec.identity_hash)
    drafting = "draft" in spec.decoder
    longest = spec.decoder["length"].get("tokens") if drafting else None
    keys = [f"item-{i}" for i in range(56 if longest == 0 else n)]  # a load has seats to fill
    if not drafting:
        return [masked_sample(key, random) for key in keys]
    surviving = "dspark" in str(spec.decoder["draft"]["_target_"]).lower()
    return [drafted_sample(key, random, longest, surviving) for key in keys]


def record_of(spec: RunSpec, samples: Samples) -> RunRecord:
    """Return the sealed record of the samples; every third is wrong."""
    graded = (SampleScore(0.0, "wrong", {}), *[SampleScore(1.0, "correct", {})] * 2)
    scores = {s.id: graded[i % 3] for i, s in enumerate(samples)}
    return seal(spec, samples, scores, [Session(0.0, 2, dict(ENVIRONMENT), len(samples))], 0.0)


def store_run(store: Store, spec: RunSpec, samples: Samples) -> None:
    with store.open(spec) as run:
        run.expect(len(samples))
        (run.folder / SAMPLES).write_text("".join(f"{s.to_line()}\n" for s in samples), "utf-8")
        run.seal(record_of(spec, samples))
    if "draft" not in spec.decoder:
        token_replay.write_replays(store.path(spec) / token_replay.FILE, replays_of(samples))


def small() -> PaperFigure:
    return read_figure("small/figure", SMALL / "figure.yaml", SMALL)


def built(root: Path, figure: PaperFigure | None = None) -> BuiltFigure:
    """Return the small figure: quiz sealed but for beta-4, code not run."""
    figure, store = figure or small(), Store(root)
    for cell in planned_small(store, TINY, figure.table):
        keys, spec = cell.cell.keys, cell.run.spec
        if keys["task"] == "quiz" and spec and store.record(spec) is None:
            if keys["number"] == "beta-4":
                (store.path(spec)).exists() or start(store, spec, done=3, total=20)
            else:
                store_run(store, spec, samples_of(spec))
    return build_figure(figure, TINY, planned_small(store, TINY, figure.table), store)


@cache
def small_built() -> BuiltFigure:
    """Return the small figure, which callers leave as it is."""
    with TemporaryDirectory() as folder:
        return built(Path(folder))


def built_full(figure: PaperFigure, profile: Profile, root: Path, compose: Compose) -> BuiltFigure:
    """Return the figure with the runs that it can have, of a long sweep the first."""
    store, once = Store(root), cache(compose)
    cells = planned_small(store, profile, figure.table, once)
    for run in [run for run in distinct_runs(cells) if run.open and run.spec][:MOST_RUNS]:
        store_run(store, run.spec, samples_of(run.spec))
    cells = planned_small(store, profile, figure.table, once)
    return build_figure(figure, profile, cells, store)


def replays_of(samples: Samples) -> list[TokenReplay]:
    """Made-up token replays: more probable towards the commit, right from half of the way on."""
    found = []
    for s in samples:
        born_P, step_S1 = np.array(s.born), np.arange(max(s.born) + 1)[:, None]
        open_SP = step_S1 <= born_P
        chance_SP = np.where(open_SP, (step_S1 + 1) / (born_P + 1), np.nan).astype("float32")
        rank_SP = np.where(open_SP, born_P + 1 - step_S1, -1).astype("int32")
        found_SP = np.where(open_SP, 2 * step_S1 >= born_P, -1).astype("int8")
        found.append(TokenReplay(s.id, chance_SP, rank_SP, found_SP))
    return found
