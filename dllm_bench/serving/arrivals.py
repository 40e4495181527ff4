"""A served model under arrivals at random: who is served fast enough, at how many a second.

A service level is a least number of tokens/s for a user (DSpark, section 5.4), counted from the
seat on; waiting for a seat is told apart. All systems meet the same arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dllm_bench.decoding.length.profile import StepProfile
from dllm_bench.serving.simulation import Load, Poisson, System, simulate


@dataclass(frozen=True)
class Service:
    """What a system's users saw at a rate of arrivals.

    attained: share of requests served at the service level; tokens_per_s_user: the median;
    tokens_per_s_device: over the time in which there was anything to do.
    """

    system: str
    requests_per_s: float
    attained: float
    wait_s: float
    tokens_per_s_user: float
    tokens_per_s_device: float


def service(system: str, requests_per_s: float, level: float, load: Load) -> Service:
    """A load as its users saw it."""
    return Service(
        system,
        requests_per_s,
        load.attainment(level),
        fmean(one.seated_s - one.arrival_s for one in load.served),
        median(one.tokens_per_s for one in load.served),
        sum(step.committed for step in load.steps) / sum(step.step_s for step in load.steps),
    )


def under_arrivals(
    systems: Iterable[System],
    profile: StepProfile,
    seats: int,
    rates: Sequence[float],
    level: float,
    seed: int = 0,
) -> list[Service]:
    """Every system at every rate of Poisson arrivals."""
    return [
        service(
            system.name, rate, level, simulate(system, profile, seats, Poisson(rate), seed=seed)
        )
        for system in systems
        for rate in rates
    ]
