"""Load simulation: requests arrive at a server, share its steps, and leave with their text.

Continuous batching: at the start of a step free seats go to the waiting requests in order of
arrival; every seated request drafts, a length rule says how many tokens of each draft are verified,
and one step verifies all of them. The duration of a step comes from a measured profile. The
simulation is pure and seeded. A request is given by the outcome of drafting at each position of its
text; for greedy text this does not depend on earlier verifications.

`frontier` gives tokens/s per user against tokens/s per device, by the number of concurrent requests
(DSpark's figures 7 and 8): a free seat is filled immediately, and only steps with all seats taken
count, which excludes start and end of the simulation. `under_arrivals` gives the users' view of
random arrivals (section 5.4): a service level is a minimum of tokens/s per user, counted from the
start of decoding; waiting is reported separately. Points are simulated, not read from a fitted
curve. Left out: prefill, memory, contexts of different lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import numpy as np

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.methods.drafting import StepProfile, likely_prefix
from dllm_bench.methods.dspark import Probabilities, TwoStepsAhead, early_stop

PlainLengthRule = Callable[[Probabilities], Sequence[int]]
"""Acceptance probabilities of the drafts of a step -> tokens verified of each."""
NewLengthRule = Callable[[], PlainLengthRule]
"""Makes a new rule for each simulation, because a rule may remember earlier steps."""
Arrivals = Callable[[int, np.random.Generator], Sequence[float]]
"""Number of requests -> their arrival times in seconds, rising."""


@dataclass(frozen=True)
class DraftOutcome:
    """A draft at one position of a text."""

    probabilities: tuple[float, ...]  # estimated, of each token if all before it are accepted
    accepted: int  # first tokens that the target would accept


DraftedText = Sequence[DraftOutcome]
"""Entry p is the draft after p new tokens; one entry per new token of the text."""


@dataclass(frozen=True)
class ServingSystem:
    """A compared system: a drafter, given by its drafts and its cost, and a length rule."""

    name: str
    texts: Sequence[DraftedText]
    rule: NewLengthRule
    draft_s: Callable[[int], float] = lambda requests: 0.0
    """Number of requests -> seconds of drafting in a step."""


@dataclass(frozen=True)
class SimulatedStep:
    """One step of all seated requests."""

    start_s: float
    step_s: float  # its duration
    requests: int  # seated
    verified: int  # tokens: the drafts as cut, and one more per request
    committed: int  # tokens


@dataclass(frozen=True)
class SimulatedRequest:
    """One finished request."""

    arrival_s: float
    seated_s: float  # when it took its seat
    finished_s: float
    tokens: int
    rounds: int

    @property
    def tokens_per_s(self) -> float:
        """The user's speed, counted from when the request took its seat."""
        return self.tokens / (self.finished_s - self.seated_s)


@dataclass(frozen=True)
class SimulatedLoad:
    """The result of a simulation."""

    seats: int
    steps: tuple[SimulatedStep, ...]  # in order
    served: tuple[SimulatedRequest, ...]  # in order of arrival

    def attainment(self, tokens_per_s: float) -> float:
        """Return the share of the requests that reached this speed."""
        return sum(one.tokens_per_s >= tokens_per_s for one in self.served) / len(self.served)


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals at a mean rate."""

    requests_per_s: float

    def __call__(self, n: int, rng: np.random.Generator) -> Sequence[float]:
        times: list[float] = rng.exponential(1 / self.requests_per_s, n).cumsum().tolist()
        return times


def at_once(n: int, rng: np.random.Generator) -> Sequence[float]:
    """Return arrival times of 0 for all requests, so the number of concurrent requests stays
    constant."""
    return [0.0] * n


def calibrated_text(
    probabilities: Sequence[float], tokens: int, rng: np.random.Generator
) -> DraftedText:
    """Return a text whose drafts are accepted independently with exactly the estimated
    probabilities."""
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
    """Serve the system's texts; equal arguments give equal results."""
    if seats < 1 or not system.texts or not all(map(len, system.texts)):
        raise DllmBenchError(
            f"System {system.name!r} has {len(system.texts)} texts to serve with {seats} seats; "
            "give at least one seat, and texts of at least one token."
        )
    times = arrivals(len(system.texts), np.random.default_rng(seed))
    server = _Server(system, profile, seats, system.rule())
    server.waiting.extend(_Request(*pair) for pair in enumerate(times))
    while server.waiting or server.active:
        server.seat()
        server.step()
    return SimulatedLoad(
        seats, tuple(server.steps), tuple(server.served[i] for i in sorted(server.served))
    )


@dataclass
class _Request:
    """A request that waits or is being served."""

    index: int
    arrival_s: float
    seated_s: float = 0.0
    done: int = 0  # tokens committed
    rounds: int = 0


class _Server:
    """The state of a simulation: the clock, and the waiting and the seated requests."""

    def __init__(
        self, system: ServingSystem, profile: StepProfile, seats: int, rule: PlainLengthRule
    ) -> None:
        self.system, self.profile, self.seats, self.rule = system, profile, seats, rule
        self.clock_s = 0.0
        self.waiting: deque[_Request] = deque()
        self.active: list[_Request] = []
        self.steps: list[SimulatedStep] = []
        self.served: dict[int, SimulatedRequest] = {}

    def seat(self) -> None:
        """Give free seats to waiting requests; if none is seated, advance the clock to the next."""
        if not self.active:
            self.clock_s = max(self.clock_s, self.waiting[0].arrival_s)
        while (
            self.waiting
            and len(self.active) < self.seats
            and self.waiting[0].arrival_s <= self.clock_s
        ):
            self.active.append(replace(self.waiting.popleft(), seated_s=self.clock_s))

    def step(self) -> None:
        """Draft, choose lengths, verify, commit; finished requests leave their seats."""
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
    """A system at a number of concurrent requests."""

    system: str
    requests: int
    tokens_per_s_user: float
    tokens_per_s_device: float
    verified_per_request: float  # tokens verified per request and step, the target's own included
    tokens_per_round: float  # tokens committed per request and step


def frontier_point(system: str, load: SimulatedLoad) -> FrontierPoint:
    """Return means over the steps in which all seats are taken; DllmBenchError if there are
    none."""
    steps = [step for step in load.steps if step.requests == load.seats]
    if not steps:
        raise DllmBenchError(
            f"System {system!r} never had all {load.seats} seats taken: it has {len(load.served)} "
            "texts. Give more texts than seats, or fewer requests at a time."
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
    """Return a point for every system at every number of concurrent requests."""
    return [
        frontier_point(system.name, simulate(system, profile, seats))
        for system in systems
        for seats in concurrency
    ]


@dataclass(frozen=True)
class ServicePoint:
    """The users' view of a system at a rate of arrivals."""

    system: str
    requests_per_s: float
    attained: float  # share of requests served at the service level
    wait_s: float  # mean wait for a seat
    tokens_per_s_user: float  # median
    tokens_per_s_device: float  # over the time with at least one request


def service_point(
    system: str, requests_per_s: float, level: float, load: SimulatedLoad
) -> ServicePoint:
    """Return the result of a simulation from the users' side."""
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
    """Return a point for every system at every rate of Poisson arrivals; all systems get the same
    arrivals."""
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


# --- length rules on plain probabilities: the same decisions as those of proposals ---------------


def fixed_rule(tokens: int | None = None) -> NewLengthRule:
    """Return the rule that verifies at most `tokens` of every draft; None: all, 0: autoregressive
    decoding."""
    return lambda: lambda probabilities: [len(row[:tokens]) for row in probabilities]


def threshold_rule(tau: float) -> NewLengthRule:
    """Return the rule that verifies the tokens before the first with a probability below tau."""
    return lambda: lambda probabilities: [likely_prefix(row, tau) for row in probabilities]


def hardware_aware_rule(profile: StepProfile) -> NewLengthRule:
    """Return the rule of DSpark's Algorithm 1 with early stop."""

    def rule(probabilities: Probabilities) -> list[int]:
        return early_stop(probabilities, profile)

    return lambda: rule


def asynchronous_rule(profile: StepProfile) -> NewLengthRule:
    """Return the rule with step sizes chosen two steps ahead, filled with the most likely
    tokens."""
    return partial(TwoStepsAhead, profile)
