"""Load simulation: requests arrive, share an engine's steps, and leave with their text.

Continuous batching: at the start of a step free seats are taken in order of arrival; every seated
request drafts, a rule says how much of each draft is verified, one step verifies all of it; its
time comes from the measured profile. Pure and seeded. A request is given by what drafting at each
position of its text comes to, which for greedy text is a fact about the text, whatever was
verified before. Left out: prefill, memory, contexts of unlike length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.length.prefix import Chances
from dllm_bench.decoding.length.profile import StepProfile

Rule = Callable[[Chances], Sequence[int]]
Arrivals = Callable[[int, np.random.Generator], Sequence[float]]  # n -> seconds, rising


@dataclass(frozen=True)
class Drafted:
    """A draft at one position of a text: estimated chances, and how many tokens are right."""

    chances: tuple[float, ...]
    accepted: int


Text = Sequence[Drafted]  # entry p: the draft when p tokens are there; as many as new tokens


@dataclass(frozen=True)
class System:
    """What is compared: a drafter, seen in its texts and its cost, and a rule of lengths.

    rule: makes the rule of one simulation, which may remember; draft_s: seconds the drafter takes
    for so many requests, paid in every step.
    """

    name: str
    texts: Sequence[Text]
    rule: Callable[[], Rule]
    draft_s: Callable[[int], float] = lambda requests: 0.0


@dataclass(frozen=True)
class Step:
    """One step: seated requests, tokens verified (one more than drafted each), tokens committed."""

    start_s: float
    step_s: float
    requests: int
    verified: int
    committed: int


@dataclass(frozen=True)
class Served:
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
class Load:
    """What happened: steps in order, requests in order of arrival."""

    seats: int
    steps: tuple[Step, ...]
    served: tuple[Served, ...]

    def attainment(self, tokens_per_s: float) -> float:
        """Share of the requests that were served at least so fast."""
        return sum(one.tokens_per_s >= tokens_per_s for one in self.served) / len(self.served)


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals."""

    requests_per_s: float

    def __call__(self, n: int, rng: np.random.Generator) -> Sequence[float]:
        times: list[float] = rng.exponential(1 / self.requests_per_s, n).cumsum().tolist()
        return times


def at_once(n: int, rng: np.random.Generator) -> Sequence[float]:
    """All are there from the start, so that a free seat is taken at once: constant concurrency."""
    return [0.0] * n


def calibrated_text(chances: Sequence[float], tokens: int, rng: np.random.Generator) -> Text:
    """A text whose drafts are accepted independently with exactly the estimated chances."""
    right_TN = rng.random((tokens, len(chances))) < np.asarray(chances)
    accepted_T = right_TN.cumprod(axis=1).sum(axis=1)
    return [Drafted(tuple(chances), int(accepted)) for accepted in accepted_T]


def simulate(
    system: System, profile: StepProfile, seats: int, arrivals: Arrivals = at_once, seed: int = 0
) -> Load:
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
    return Load(seats, tuple(engine.steps), tuple(engine.served[i] for i in sorted(engine.served)))


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

    def __init__(self, system: System, profile: StepProfile, seats: int, rule: Rule) -> None:
        self.system, self.profile, self.seats, self.rule = system, profile, seats, rule
        self.clock_s = 0.0
        self.waiting: deque[_Seat] = deque()
        self.active: list[_Seat] = []
        self.steps: list[Step] = []
        self.served: dict[int, Served] = {}

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
        lengths = self.rule([draft.chances for draft in drafts])
        verified = len(drafts) + sum(lengths)
        step_s = self.profile.step_s(verified) + self.system.draft_s(len(drafts))
        before = sum(one.done for one in self.active)
        for one, draft, length in zip(self.active, drafts, lengths, strict=True):
            left = len(texts[one.index]) - one.done
            one.done += min(min(draft.accepted, length) + 1, left)
            one.rounds += 1
        committed = sum(one.done for one in self.active) - before
        self.steps.append(Step(self.clock_s, step_s, len(drafts), verified, committed))
        self.clock_s += step_s
        self._leave()

    def _leave(self) -> None:
        for one in self.active:
            if one.done == len(self.system.texts[one.index]):
                self.served[one.index] = Served(
                    one.arrival_s, one.seated_s, self.clock_s, one.done, one.rounds
                )
        self.active = [one for one in self.active if one.index not in self.served]
