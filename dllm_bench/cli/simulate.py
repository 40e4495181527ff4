"""`dllm-bench simulate`: stored drafts under the load of many requests on one device.

Compares autoregressive decoding, each drafter with whole drafts, and, for a drafter with a
confidence head, the threshold rule and the hardware-aware scheduler, which decides at once or two
steps ahead. The simulation itself is in `serving/`; it runs no model.
"""

from __future__ import annotations

import csv
import io
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from dllm_bench.api.comparison import sealed_record
from dllm_bench.cli.common import (
    add_results_option,
    open_store,
    positive_floats,
    positive_ints,
    print_lines,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.decoding.length.measurements import (
    StepProfile,
    Temperatures,
    check_step_profile,
    read_step_profile,
    read_temperatures,
)
from dllm_bench.metrics.calibration import fit_temperatures
from dllm_bench.serving.load_simulation import (
    FrontierPoint,
    ServicePoint,
    ServingSystem,
    asynchronous_rule,
    fixed_rule,
    frontier,
    hardware_aware_rule,
    threshold_rule,
    under_arrivals,
)
from dllm_bench.serving.stored_drafts import StoredDrafts
from dllm_bench.site.format import align
from dllm_bench.store.files import write_atomic
from dllm_bench.store.store import RunEntry, read_samples

Points = Sequence[FrontierPoint] | Sequence[ServicePoint]
FitTemperatures = Callable[[StoredDrafts], Temperatures]  # from the first half of the texts
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
    add_results_option(parser)
    parser.epilog = (
        "Each RUN must use one drafter, decode greedily and verify nothing: decoder=dspark "
        "decoder/length=fixed decoder.length.tokens=0. The temperatures of a confidence head are "
        "fitted on the first half of its texts; the second half is served."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="hash of a run, or its beginning")
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="FILE",
        help=f"step times, from `train sps` with the runs' model; default: {DEFAULT_PROFILE}",
    )
    parser.add_argument(
        "--requests",
        type=positive_ints,
        metavar="N,N,…",
        default="1,2,4,8,16,24",
        help="requests served at the same time",
    )
    parser.add_argument(
        "--tau", type=float, default=0.5, help="tau of the threshold rule; default: 0.5"
    )
    parser.add_argument("--temperatures", metavar="FILE", help="from `train temperatures`")
    parser.add_argument(
        "--raw", action="store_true", help="use the confidences of the heads without temperatures"
    )
    parser.add_argument(
        "--arrivals",
        type=positive_floats,
        metavar="R,R,…",
        help="requests per second that arrive at random, instead of a fixed number",
    )
    parser.add_argument("--level", type=float, default=0, help="tokens/s that each user should get")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the arrivals")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the points as csv")


def run(arguments: Namespace) -> int:
    """Simulate, print the points, and write them if asked to."""
    store = open_store(arguments)
    points = simulated(arguments, [store.find(name) for name in arguments.runs])
    if arguments.out:
        write_atomic(arguments.out, as_csv(points))
    return print_lines(lines(points))


def simulated(arguments: Namespace, entries: Sequence[RunEntry]) -> Points:
    """The points that the options describe."""
    profile = profile_for(arguments.profile, entries)
    systems = systems_of(entries, profile, arguments.tau, temperatures_for(arguments))
    if not arguments.arrivals:
        return frontier(systems, profile, arguments.requests)
    return under_arrivals(
        systems,
        profile,
        max(arguments.requests),
        arguments.arrivals,
        arguments.level,
        arguments.seed,
    )


def profile_for(source: str, entries: Sequence[RunEntry]) -> StepProfile:
    """The step times in a file; they must be measured with the model of all runs."""
    for model in dict.fromkeys(entry.spec.model["name"] for entry in entries):
        check_step_profile(source, model)
    return read_step_profile(source)


def temperatures_for(arguments: Namespace) -> FitTemperatures:
    """Temperatures of confidences: from a file, none, or fitted on the first half of the texts."""
    if arguments.raw or arguments.temperatures:
        given = read_temperatures(arguments.temperatures)
        return lambda first: given
    return lambda first: Temperatures(fit_temperatures(first.observed()))


def systems_of(
    entries: Sequence[RunEntry], profile: StepProfile, tau: float, fit: FitTemperatures
) -> list[ServingSystem]:
    """The compared systems: autoregressive decoding once, then each drafter under every rule."""
    systems: list[ServingSystem] = []
    labels = Counter(entry.spec.label for entry in entries)
    for entry in entries:
        name = entry.spec.label
        name = name if labels[name] == 1 else f"{name}-{entry.spec.short}"
        first, second = drafts_of(entry).halves()
        texts, draft_s = second.served(fit(first)), second.drafting(profile)
        if not systems:
            systems.append(ServingSystem("autoregressive", texts, fixed_rule(0)))
        length_rules = {"": fixed_rule()}
        if first.observed():
            length_rules |= {
                f" threshold {tau}": threshold_rule(tau),
                " scheduler": hardware_aware_rule(profile),
                " two steps ahead": asynchronous_rule(profile),
            }
        systems += [
            ServingSystem(name + rule, texts, new, draft_s) for rule, new in length_rules.items()
        ]
    return systems


def drafts_of(entry: RunEntry) -> StoredDrafts:
    """The drafts stored by a sealed greedy run."""
    record, spec = sealed_record(entry), entry.spec
    if spec.decoder.get("temperature", 0) > 0:
        raise DllmBenchError(
            f"Run {spec.short} sampled at temperature {spec.decoder['temperature']}; drafts are "
            "recorded along greedy text, run it with decoder.temperature=0."
        )
    stored = read_samples(entry.path)
    samples = [stored[name] for name in record.columns["id"]]
    drafts = StoredDrafts.of((Trace.from_columns(s.trace), s.born, s.ids) for s in samples)
    if len(drafts.texts) < 2:
        raise DllmBenchError(
            f"Run {spec.short} holds drafts of {len(drafts.texts)} texts; name a run of a "
            "speculative decoder with more items."
        )
    return drafts


def lines(points: Points) -> Iterator[str]:
    """The points as an aligned table."""
    rows = [{HEADINGS[name]: value for name, value in asdict(p).items()} for p in points]
    shown = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    yield from align([list(rows[0]), *shown])


def as_csv(points: Points) -> str:
    """The points as csv, in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(points[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return text.getvalue()
