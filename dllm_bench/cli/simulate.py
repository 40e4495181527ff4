"""`dllm-bench simulate`: simulate many concurrent requests on one device from stored drafts.

Compares autoregressive decoding with each drafter, first verifying whole drafts. For a drafter with
a confidence head, also the threshold rule and the hardware-aware scheduler, which chooses lengths
for the current step or two steps ahead. The simulation itself is in `serving/`; it runs no model.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from dllm_bench.api.comparison import sealed_record
from dllm_bench.cli import common
from dllm_bench.cli.common import open_store, positive_floats, positive_ints, print_lines
from dllm_bench.site.format import align
from dllm_bench.store.files import csv_text, write_atomic
from dllm_bench.store.store import RunEntry

if TYPE_CHECKING:
    from dllm_bench.serving.load_simulation import FrontierPoint, ServicePoint, ServingSystem

    Points = Sequence[FrontierPoint] | Sequence[ServicePoint]

HEADINGS = {
    "system": "system",
    "requests": "requests",
    "requests_per_s": "requests/s",
    "tokens_per_s_user": "tokens/s/user",
    "tokens_per_s_device": "tokens/s/device",
    "verified_per_request": "verified/request",
    "tokens_per_round": "tokens/round",
    "attained": "at the level",
    "wait_s": "wait s",
}


DEFAULT_PROFILE = "assets/profiles/tiny-qwen3-cpu.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `simulate`."""
    common.add_runs_argument(parser)
    parser.epilog = (
        "Each RUN must use one drafter, decode greedily and verify nothing: decoder=dspark "
        "decoder/length=fixed decoder.length.tokens=0. The temperatures of a confidence head are "
        "fitted on the first half of its texts; the second half is served."
    )
    text = f"step times, from `train sps` with the runs' model; default: {DEFAULT_PROFILE}"
    parser.add_argument("--profile", default=DEFAULT_PROFILE, metavar="FILE", help=text)
    numbers = partial(parser.add_argument, type=positive_ints, metavar="N,N,…")
    numbers("--requests", default="1,2,4,8,16,24", help="requests served at the same time")
    text = "tau of the threshold rule; default: 0.5"
    parser.add_argument("--tau", type=float, default=0.5, help=text)
    parser.add_argument("--temperatures", metavar="FILE", help="from `train temperatures`")
    text = "use the confidences of the heads without temperatures"
    parser.add_argument("--raw", action="store_true", help=text)
    text = "requests per second that arrive at random, instead of a fixed number"
    parser.add_argument("--arrivals", type=positive_floats, metavar="R,R,…", help=text)
    parser.add_argument("--level", type=float, default=0, help="required tokens/s per user")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the arrivals")
    common.add_out_option(parser, "also write the points as csv", "FILE")


def run(arguments: Namespace) -> int:
    """Simulate, print the points, and write them if requested."""
    store = open_store(arguments)
    entries = [store.find(name) for name in arguments.runs]
    points = simulated(arguments, entries)
    if arguments.out:
        write_atomic(arguments.out, as_csv(points))
    return print_lines(lines(points))


def simulated(arguments: Namespace, entries: Sequence[RunEntry]) -> Points:
    """Return the points that the options describe: autoregressive decoding once, then each drafter
    under every rule."""
    # torch takes seconds to import
    from dllm_bench.figures.run_series import StoredRun
    from dllm_bench.methods.drafting import read_temperatures
    from dllm_bench.runs import simulated_load as load
    from dllm_bench.serving.load_simulation import frontier, under_arrivals

    is_given = arguments.raw or arguments.temperatures
    given = read_temperatures(arguments.temperatures) if is_given else None
    profile = load.profile_of(arguments.profile, (entry.spec.model.name for entry in entries))
    systems: list[ServingSystem] = []
    labels = Counter(entry.spec.label for entry in entries)
    for entry in entries:
        label = entry.spec.label
        name = label if labels[label] == 1 else f"{label}-{entry.spec.short}"
        run = StoredRun(sealed_record(entry), entry.path)
        drafts = load.drafts_of(entry.spec, run.samples)
        rules = load.compared_rules(name, drafts, arguments.tau)
        plain, *drafted = load.systems_of(drafts, profile, rules, given)
        systems += drafted if systems else [plain, *drafted]
    if not arguments.arrivals:
        return frontier(systems, profile, arguments.requests)
    most, level = max(arguments.requests), arguments.level
    return under_arrivals(systems, profile, most, arguments.arrivals, level, arguments.seed)


def lines(points: Points) -> Iterator[str]:
    """Yield the points as an aligned table."""
    rows = [{HEADINGS[name]: value for name, value in asdict(p).items()} for p in points]
    shown = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    yield from align([list(rows[0]), *shown])


def as_csv(points: Points) -> str:
    """Return the points as csv, in full precision."""
    return csv_text(list(asdict(points[0])), map(asdict, points))
