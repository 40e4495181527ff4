"""Load simulation: requests arrive, share an engine's steps, and leave with their text.

Continuous batching: at the start of a step free seats are taken in order of arrival; every seated
request drafts, a rule says how much of each draft is verified, one step verifies all of it; its
time comes from the measured profile. Pure and seeded. A request is given by what drafting at each
position of its text comes to, which for greedy text is a fact about the text, whatever was
verified before. Left out: prefill, memory, contexts of unlike length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import numpy as np

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.length.hardware_aware import Probabilities, TwoStepsAhead, early_stop
from dllm_bench.decoding.length.measurements import StepProfile
from dllm_bench.decoding.length.threshold import likely_prefix

PlainRule = Callable[[Probabilities], Sequence[int]]
Arrivals = Callable[[int, np.random.Generator], Sequence[float]]  # n -> seconds, rising


@dataclass(frozen=True)
class DraftOutcome:
    """A draft at one position of a text: estimated probabilities, and how many tokens are right."""

    probabilities: tuple[float, ...]
    accepted: int


DraftedText = Sequence[
    DraftOutcome
]  # entry p: the draft when p tokens are there; as many as new tokens


@dataclass(frozen=True)
class ServingSystem:
    """What is compared: a drafter, seen in its texts and its cost, and a rule of lengths.

    rule: makes the rule of one simulation, which may remember; draft_s: seconds the drafter takes
    for so many requests, paid in every step.
    """

    name: str
    texts: Sequence[DraftedText]
    rule: Callable[[], PlainRule]
    draft_s: Callable[[int], float] = lambda requests: 0.0


@dataclass(frozen=True)
class SimulatedStep:
    """One step: seated requests, tokens verified (one more than drafted each), tokens committed."""

    start_s: float
    step_s: float
    requests: int
    verified: int
    committed: int


@dataclass(frozen=True)
class SimulatedRequest:
    """One request: when it came, took a seat and was finished; its tokens and its rounds."""

    arrival_s: float
    seated_s: float
    finished_s: float
    tokens: int
    rounds: int

    @property
    def tokens_per_s(self) -> float:
        """The speed its user sees once it is seated."""
        return self.tokens / (self.finished_s - self.seated_s)


@dataclass(frozen=True)
class SimulatedLoad:
    """What happened: steps in order, requests in order of arrival."""

    seats: int
    steps: tuple[SimulatedStep, ...]
    served: tuple[SimulatedRequest, ...]

    def attainment(self, tokens_per_s: float) -> float:
        """Share of the requests that were served at least so fast."""
        return sum(one.tokens_per_s >= tokens_per_s for one in self.served) / len(self.served)


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals."""

    requests_per_s: float

    def __call__(self, n: int, rng: np.random.Generator) -> Sequence[float]:
        times: list[float] = rng.exponential(1 / self.requests_per_s, n).cumsum().tolist()
        return times


def at_once(n: int, rng: np.random.Generator) -> Sequence[float]:
    """All are there from the start, so that a free seat is taken at once: constant concurrency."""
    return [0.0] * n


def calibrated_text(
    probabilities: Sequence[float], tokens: int, rng: np.random.Generator
) -> DraftedText:
    """A text whose drafts are accepted independently with exactly the estimated probabilities."""
    right_TN = rng.random((tokens, len(probabilities))) < np.asarray(probabilities)
    accepted_T = right_TN.cumprod(axis=1).sum(axis=1)
    return [DraftOutcome(tuple(probabilities), int(accepted)) for accepted in accepted_T]


def simulate(
    system: ServingSystem,
    profile: StepProfile,
    seats: int,
    arrivals: Arrivals = at_once,
    seed: int = 0,
) -> SimulatedLoad:
    """Serve the system's texts; equal arguments give equal loads."""
    if seats < 1 or not system.texts or not all(map(len, system.texts)):
        raise DllmBenchError(
            f"System {system.name!r} is to serve {len(system.texts)} texts with {seats} seats; "
            "give at least one seat, and texts of at least one token."
        )
    times = arrivals(len(system.texts), np.random.default_rng(seed))
    engine = _Engine(system, profile, seats, system.rule())
    engine.waiting.extend(_Seat(*pair) for pair in enumerate(times))
    while engine.waiting or engine.active:
        engine.seat()
        engine.step()
    return SimulatedLoad(
        seats, tuple(engine.steps), tuple(engine.served[i] for i in sorted(engine.served))
    )


@dataclass
class _Seat:
    """One request on its way through the engine."""

    index: int
    arrival_s: float
    seated_s: float = 0.0
    done: int = 0
    rounds: int = 0


class _Engine:
    """The clock, who waits and who is seated."""

    def __init__(
        self, system: ServingSystem, profile: StepProfile, seats: int, rule: PlainRule
    ) -> None:
        self.system, self.profile, self.seats, self.rule = system, profile, seats, rule
        self.clock_s = 0.0
        self.waiting: deque[_Seat] = deque()
        self.active: list[_Seat] = []
        self.steps: list[SimulatedStep] = []
        self.served: dict[int, SimulatedRequest] = {}

    def seat(self) -> None:
        """Give free seats to those who are there; an empty engine waits for the next one."""
        if not self.active:
            self.clock_s = max(self.clock_s, self.waiting[0].arrival_s)
        while (
            self.waiting
            and len(self.active) < self.seats
            and self.waiting[0].arrival_s <= self.clock_s
        ):
            self.active.append(replace(self.waiting.popleft(), seated_s=self.clock_s))

    def step(self) -> None:
        """Draft, choose lengths, verify, commit; finished requests leave."""
        texts = self.system.texts
        drafts = [texts[one.index][one.done] for one in self.active]
        lengths = self.rule([draft.probabilities for draft in drafts])
        verified = len(drafts) + sum(lengths)
        step_s = self.profile.step_s(verified) + self.system.draft_s(len(drafts))
        before = sum(one.done for one in self.active)
        for one, draft, length in zip(self.active, drafts, lengths, strict=True):
            left = len(texts[one.index]) - one.done
            one.done += min(min(draft.accepted, length) + 1, left)
            one.rounds += 1
        committed = sum(one.done for one in self.active) - before
        self.steps.append(SimulatedStep(self.clock_s, step_s, len(drafts), verified, committed))
        self.clock_s += step_s
        self._leave()

    def _leave(self) -> None:
        for one in self.active:
            if one.done == len(self.system.texts[one.index]):
                self.served[one.index] = SimulatedRequest(
                    one.arrival_s, one.seated_s, self.clock_s, one.done, one.rounds
                )
        self.active = [one for one in self.active if one.index not in self.served]


@dataclass(frozen=True)
class FrontierPoint:
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


def frontier_point(system: str, load: SimulatedLoad) -> FrontierPoint:
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
    return FrontierPoint(
        system, load.seats, device / load.seats, device, verified / rounds, committed / rounds
    )


def frontier(
    systems: Iterable[ServingSystem], profile: StepProfile, concurrency: Sequence[int]
) -> list[FrontierPoint]:
    """Every system at every number of concurrent requests."""
    return [
        frontier_point(system.name, simulate(system, profile, seats))
        for system in systems
        for seats in concurrency
    ]


def best_at_level(
    points: Iterable[FrontierPoint], tokens_per_s_user: float
) -> FrontierPoint | None:
    """The point with most tokens/s per device among those fast enough for every user."""
    fast = [found for found in points if found.tokens_per_s_user >= tokens_per_s_user]
    return max(fast, key=lambda found: found.tokens_per_s_device, default=None)


@dataclass(frozen=True)
class ServicePoint:
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


def service_point(
    system: str, requests_per_s: float, level: float, load: SimulatedLoad
) -> ServicePoint:
    """A load as its users saw it."""
    return ServicePoint(
        system,
        requests_per_s,
        load.attainment(level),
        fmean(one.seated_s - one.arrival_s for one in load.served),
        median(one.tokens_per_s for one in load.served),
        sum(step.committed for step in load.steps) / sum(step.step_s for step in load.steps),
    )


def under_arrivals(
    systems: Iterable[ServingSystem],
    profile: StepProfile,
    seats: int,
    rates: Sequence[float],
    level: float,
    seed: int = 0,
) -> list[ServicePoint]:
    """Every system at every rate of Poisson arrivals."""
    return [
        service_point(
            system.name,
            rate,
            level,
            simulate(system, profile, seats, PoissonArrivals(rate), seed=seed),
        )
        for system in systems
        for rate in rates
    ]


NewLengthRule = Callable[[], PlainRule]


def fixed_rule(tokens: int | None = None) -> NewLengthRule:
    """At most so many tokens of every draft; None: all, 0: autoregressive decoding."""
    return lambda: lambda probabilities: [len(row[:tokens]) for row in probabilities]


def threshold_rule(tau: float) -> NewLengthRule:
    """Up to the first token whose own chance is below tau."""
    return lambda: lambda probabilities: [likely_prefix(row, tau) for row in probabilities]


def hardware_aware_rule(profile: StepProfile) -> NewLengthRule:
    """DSpark's Algorithm 1 with early stop."""

    def rule(probabilities: Probabilities) -> list[int]:
        return early_stop(probabilities, profile)

    return lambda: rule


def asynchronous_rule(profile: StepProfile) -> NewLengthRule:
    """Sizes of steps chosen two steps ahead, filled with the surest tokens."""
    return partial(TwoStepsAhead, profile)
