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

`StoredDrafts` reads the texts from stored samples. A run with `decoder/length=fixed
decoder.length.tokens=0` verifies nothing: the target decides every token alone, and the drafter
drafts at every position. Greedy text is fixed, and a draft depends only on the tokens before it, so
rounds simulated from such a run equal those of the real loop under any length rule. Runs that
verify drafts can still be used as calibration data. Sampled text is not supported, nor are drafts
made in the forward that verifies the last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, repeat
from math import ceil
from statistics import fmean, median
from typing import Any

import numpy as np

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.methods.drafting import StepProfile, Temperatures, likely_prefix
from dllm_bench.methods.trained_drafts import Probabilities, TwoStepsAhead, early_stop
from dllm_bench.metrics.drafts import ObservedDraft, common_prefix

PlainLengthRule = Callable[[Probabilities], Sequence[int]]
"""Acceptance probabilities of the drafts of a step -> tokens verified of each."""
NewLengthRule = Callable[[], PlainLengthRule]
"""Makes a new rule for each simulation, because a rule may remember earlier steps."""


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


@dataclass
class SimulatedRequest:
    """One request: waiting, being served, or finished."""

    text: DraftedText
    arrival_s: float
    seated_s: float = 0.0  # when it took its seat
    finished_s: float = 0.0
    tokens: int = 0  # committed so far


@dataclass(frozen=True)
class SimulatedLoad:
    """The result of a simulation."""

    steps: tuple[SimulatedStep, ...]  # in order
    served: tuple[SimulatedRequest, ...]  # in order of arrival


def simulate(
    system: ServingSystem,
    profile: StepProfile,
    seats: int,
    arrivals_s: Iterable[float] = repeat(0.0),
) -> SimulatedLoad:
    """Serve the system's texts.

    arrivals_s: rising; all 0 keeps the number of concurrent requests constant.
    """
    if seats < 1 or not system.texts or not all(map(len, system.texts)):
        raise DllmBenchError(
            f"System {system.name!r} has {len(system.texts)} texts to serve with {seats} seats; "
            "give at least one seat, and texts of at least one token."
        )
    requests = list(map(SimulatedRequest, system.texts, arrivals_s))
    waiting, active, rule = deque(requests), list[SimulatedRequest](), system.rule()
    steps, clock_s = list[SimulatedStep](), 0.0
    while waiting or active:
        if not active:
            clock_s = max(clock_s, waiting[0].arrival_s)
        while waiting and len(active) < seats and waiting[0].arrival_s <= clock_s:
            waiting[0].seated_s = clock_s
            active.append(waiting.popleft())
        # draft, choose lengths, verify and commit for all seated requests
        drafts = [one.text[one.tokens] for one in active]
        lengths = rule([draft.probabilities for draft in drafts])
        verified, committed, start_s = len(drafts) + sum(lengths), 0, clock_s
        step_s = profile.step_s(verified) + system.draft_s(len(drafts))
        clock_s += step_s
        for one, draft, length in zip(active, drafts, lengths, strict=True):
            new = min(draft.accepted + 1, length + 1, len(one.text) - one.tokens)
            one.tokens, one.finished_s = one.tokens + new, clock_s
            committed += new
        steps.append(SimulatedStep(start_s, step_s, len(drafts), verified, committed))
        active = [one for one in active if one.tokens < len(one.text)]
    return SimulatedLoad(tuple(steps), tuple(requests))


@dataclass(frozen=True)
class FrontierPoint:
    """A system at a number of concurrent requests."""

    system: str
    requests: int
    tokens_per_s_user: float
    tokens_per_s_device: float
    verified_per_request: float  # tokens verified per request and step, the target's own included
    tokens_per_round: float  # tokens committed per request and step


def frontier(
    systems: Iterable[ServingSystem], profile: StepProfile, concurrency: Sequence[int]
) -> list[FrontierPoint]:
    """Return a point for every system at every number of concurrent requests: means over the steps
    in which all seats are taken. DllmBenchError if there are none."""
    points = []
    for system, seats in product(systems, concurrency):
        steps = [step for step in simulate(system, profile, seats).steps if step.requests == seats]
        if not steps:
            raise DllmBenchError(
                f"System {system.name!r} never had all {seats} seats taken: it has "
                f"{len(system.texts)} texts. Give more texts than seats, or fewer requests at a "
                "time."
            )
        committed, rounds = sum(step.committed for step in steps), seats * len(steps)
        device = committed / sum(step.step_s for step in steps)
        user, accepted = device / seats, committed / rounds
        verified = sum(step.verified for step in steps) / rounds
        points.append(FrontierPoint(system.name, seats, user, device, verified, accepted))
    return points


@dataclass(frozen=True)
class ServicePoint:
    """The users' view of a system at a rate of arrivals."""

    system: str
    requests_per_s: float
    attained: float  # share of requests served at the service level
    wait_s: float  # mean wait for a seat
    tokens_per_s_user: float  # median
    tokens_per_s_device: float  # over the time with at least one request


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
    points = []
    for system, rate in product(systems, rates):
        waits_s = np.random.default_rng(seed).exponential(1 / rate, len(system.texts))
        load = simulate(system, profile, seats, waits_s.cumsum().tolist())
        wait_s = fmean(one.seated_s - one.arrival_s for one in load.served)
        # for the user; waiting for a seat does not count
        speeds = [one.tokens / (one.finished_s - one.seated_s) for one in load.served]
        attained = sum(speed >= level for speed in speeds) / len(speeds)
        committed = sum(step.committed for step in load.steps)
        of_device = committed / sum(step.step_s for step in load.steps)
        points.append(ServicePoint(system.name, rate, attained, wait_s, median(speeds), of_device))
    return points


# --- length rules on plain probabilities: the same decisions as those of proposals ---------------


def length_rule(settings: Mapping[str, Any], profile: StepProfile) -> PlainLengthRule:
    """Return a new rule, by the name under `rule`: "none" is autoregressive decoding; "fixed"
    verifies at most `tokens` of every draft, all without that; "threshold" verifies the tokens
    before the first with a probability below `tau`; "hardware_aware" is DSpark's Algorithm 1 with
    early stop; "asynchronous" chooses step sizes two steps ahead and fills them with the most
    likely tokens.
    """
    rules: Mapping[str, PlainLengthRule] = {
        "none": lambda drafts: [0] * len(drafts),
        "fixed": lambda drafts: [len(draft[: settings.get("tokens")]) for draft in drafts],
        "threshold": lambda drafts: [likely_prefix(draft, settings["tau"]) for draft in drafts],
        "hardware_aware": lambda drafts: early_stop(drafts, profile),
        "asynchronous": TwoStepsAhead(profile),
    }
    return rules[settings["rule"]]


# --- the drafts along greedy texts, read from stored samples --------------------------------------

StoredText = tuple[Trace, Sequence[int], Sequence[int]]
"""One stored sample: trace, born (the forward that committed each token), ids."""


@dataclass(frozen=True)
class StoredDraft:
    """A draft at one position of a text."""

    logits: tuple[float, ...]  # from the confidence head; empty without one
    tokens: int  # length of the draft
    right: int  # first tokens of the draft that equal the text
    left: int  # tokens that the text still has


def drafts_of_text(
    trace: Trace, born: Sequence[int], ids: Sequence[int]
) -> tuple[StoredDraft, ...]:
    """Return the drafts of one text, in order."""
    drafts = []
    for index, row in enumerate(trace.forwards):
        if row.parents:
            raise DllmBenchError(
                "A load is simulated from drafts that are chains, but this run drafted trees; "
                "choose a run of another decoder.draft."
            )
        if row.kind == ForwardKind.VERIFY:
            follows = ids[bisect_left(born, index) :]
            right = common_prefix(row.drafted, follows)
            drafts.append(StoredDraft(row.survival, len(row.drafted), right, len(follows)))
    return tuple(drafts)


@dataclass(frozen=True)
class StoredDrafts:
    """The drafts of several texts, and the cost of drafting."""

    texts: tuple[tuple[StoredDraft, ...], ...]
    steps: float  # duration of a draft divided by that of the verifications in the same run
    width: int  # mean positions that a call of the drafter's network feeds, rounded up
    calls: float  # calls of the drafter's network per draft

    @classmethod
    def of(cls, samples: Iterable[StoredText]) -> StoredDrafts:
        """Read stored samples; texts that ended with their prefill have no draft, so they are left
        out.
        """
        kept = list(samples)
        texts = tuple(filter(None, (drafts_of_text(*sample) for sample in kept)))
        rows = [row for trace, _, _ in kept for row in trace.forwards]
        ms = {kind: sum(row.ms for row in rows if row.kind == kind) for kind in ForwardKind}
        drafts = (ForwardKind.DRAFT, ForwardKind.SELF_DRAFT)
        drafting_ms = sum(ms[kind] for kind in (*drafts, ForwardKind.HEAD))
        rounds = [row for row in rows if row.kind in drafts]
        calls = sum(row.calls for row in rounds)
        width = max(1, ceil(sum(row.fed for row in rounds) / (calls or 1)))
        steps = drafting_ms / (ms[ForwardKind.VERIFY] or 1)
        return cls(texts, steps, width, calls / (len(rounds) or 1))

    def halves(self) -> tuple[StoredDrafts, StoredDrafts]:
        """Return the first half of the texts, to fit on, and the second."""
        half = len(self.texts) // 2
        return replace(self, texts=self.texts[:half]), replace(self, texts=self.texts[half:])

    def observed(self) -> list[ObservedDraft]:
        """Return confidences and outcomes, up to the end of the text; what lies beyond it is
        unknown."""
        drafts = chain.from_iterable(self.texts)
        return [ObservedDraft(one.logits[: one.left], one.right) for one in drafts if one.logits]

    def served(self, temperatures: Temperatures | None = None) -> list[DraftedText]:
        """Return texts for the load simulation; without a confidence head every probability is 1.

        DllmBenchError if the run did not draft at every position.
        """
        for text in self.texts:
            if [one.left for one in text] != list(range(len(text), 0, -1)):
                raise DllmBenchError(
                    "A load is simulated from drafts at every position of a text, but this run "
                    "verified some of its drafts; run it with decoder/length=fixed "
                    "decoder.length.tokens=0."
                )
        probabilities = (temperatures or Temperatures()).probabilities

        def outcome(one: StoredDraft) -> DraftOutcome:
            return DraftOutcome(tuple(probabilities(one.logits) or [1.0] * one.tokens), one.right)

        return [[*map(outcome, text)] for text in self.texts]

    def drafting(self, profile: StepProfile, tokens: int | None = None) -> Callable[[int], float]:
        """Return the number of requests -> seconds of drafting for them in one step.

        tokens: draft tokens that are needed of each; None: whole drafts. An assumption of ours,
        since single requests were measured: for one request, as many one-token steps of the profile
        as in the run; for n requests, more by the factor by which a step of the target grows with
        n times the positions. A chain stops after the last token needed, a block is always drafted
        whole.
        """
        part = 1.0 if tokens is None else min(1.0, tokens / (self.calls or 1))
        one_s = part * self.steps * profile.step_s(1) / profile.step_s(self.width)
        return lambda requests: one_s * profile.step_s(requests * self.width)
