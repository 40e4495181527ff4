"""The frontier of a served model: tokens/s per user against tokens/s per device, by concurrency.

One point per system and number of concurrent requests, as DSpark's figures 7 and 8: every seat is
taken again as soon as it is free, and only steps with all seats taken count, so that neither start
nor end of the simulation does. `attained` reads the frontier at a service level. Curves are
measured points, none is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.length.profile import StepProfile
from dllm_bench.serving.simulation import Load, System, simulate


@dataclass(frozen=True)
class Point:
    """A system at a number of concurrent requests.

    verified_per_request: tokens verified per request and step, the target's own included;
    tokens_per_round: tokens committed per request and step.
    """

    system: str
    requests: int
    tokens_per_s_user: float
    tokens_per_s_device: float
    verified_per_request: float
    tokens_per_round: float


def point(system: str, load: Load) -> Point:
    """The steady part of a load."""
    steps = [step for step in load.steps if step.requests == load.seats]
    if not steps:
        raise DllmBenchError(
            f"System {system!r} never had all {load.seats} seats taken, it has {len(load.served)} "
            "texts; give more texts than seats, or fewer requests at a time."
        )
    committed = sum(step.committed for step in steps)
    rounds = load.seats * len(steps)
    device = committed / sum(step.step_s for step in steps)
    verified = sum(step.verified for step in steps)
    return Point(
        system, load.seats, device / load.seats, device, verified / rounds, committed / rounds
    )


def frontier(
    systems: Iterable[System], profile: StepProfile, concurrency: Sequence[int]
) -> list[Point]:
    """Every system at every number of concurrent requests."""
    return [
        point(system.name, simulate(system, profile, seats))
        for system in systems
        for seats in concurrency
    ]


def attained(points: Iterable[Point], tokens_per_s_user: float) -> Point | None:
    """The point with most tokens/s per device among those fast enough for every user."""
    fast = [found for found in points if found.tokens_per_s_user >= tokens_per_s_user]
    return max(fast, key=lambda found: found.tokens_per_s_device, default=None)
