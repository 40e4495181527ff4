"""Shared by speculative decoders: drafts without training, measurement files, a length threshold.

Drafts of no, of random and of the least probable tokens are controls: the text (or, when sampling,
its distribution) must remain the target's own although almost nothing is accepted.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from dllm_bench.core.declared import Positive, Probability, fits
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, FixedDraft, Proposal, Sampler, Target, VerifyLength
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant, to_host
from dllm_bench.models.drafters import SmallModelDrafter
from dllm_bench.models.text import library_errors_named
from dllm_bench.paths import place_of
from dllm_bench.registry import register


@register("draft.model")
@dataclass(frozen=True)
class ModelDraft(FixedDraft):
    """Tokens drafted one by one by the model in `drafter`.

    A smaller autoregressive model drafts, token by token (Leviathan et al. 2023).

    It is the control that every trained drafter has to beat: it drafts with the quality of a whole
    model, at a cost that grows with every token. From the target it reads only the committed
    tokens.
    """

    drafter: SmallModelDrafter
    tokens: Positive
    """Draft tokens per round."""

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return one_by_one(self.drafter.on(context.target), context, self.tokens, sampler.sample)


Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Logits (1, V) -> a token (1,), and the probabilities it was drawn from, if it was."""


def one_by_one(model: Denoiser, context: Context, count: int, choose: Choose) -> Proposal:
    """Draft `count` tokens, each from a forward of `model`."""
    text_L, kv, drawn = context.tokens_L, context.kv, []
    assert kv is not None
    cached = kv.length
    for _ in range(count):
        feed, rows = (kv.length, len(text_L)), (len(text_L), len(text_L) + 1)
        plan = ForwardPlan(ForwardKind.DRAFT, feed, rows, feed, "block_causal", 1)
        logits_1V = model.forward(text_L[None], plan, kv)[0]
        kv.keep(plan, constant(0, text_L.device))
        drawn.append(choose(logits_1V))
        text_L = drawn[-1][0].expand(len(text_L) + 1)  # the cache holds what is before it
    kv.crop(context.anchor)
    tokens, distributions = zip(*drawn, strict=True)
    fed, joined = len(text_L) - 1 - cached, Sampler.joined(distributions)
    return Proposal(torch.cat(tokens), joined, calls=count, fed=fed, cached=cached)


@register("draft.ngram")
@dataclass(frozen=True)
class NGramDraft(FixedDraft):
    """Proposes the tokens that followed an earlier occurrence of the last tokens; none if there is
    none.

    Prompt lookup (Saxena 2023): propose what followed an earlier occurrence of the last tokens.

    It uses the longest n-gram at the end of the text that occurs earlier in it, at its latest
    earlier occurrence. Without network or cache, it is the control that shows the gain from
    repetition alone.
    """

    tokens: Positive
    """Most draft tokens per round."""
    longest_match: Positive
    """Longest n-gram that is looked up."""

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        tokens_L = context.tokens_L
        host_L = tokens_L if context.host_L is None else context.host_L
        for match in range(min(self.longest_match, len(tokens_L) - 1), 0, -1):
            same = (host_L[:-1].unfold(0, match, 1) == host_L[-match:]).all(-1)
            if len(starts := same.nonzero()):
                after = int(starts[-1]) + match
                return Proposal(tokens_L[after : after + self.tokens])
        return Proposal(tokens_L[:0])


@register("draft.none")
@dataclass(frozen=True)
class NoDraft(FixedDraft):
    """Proposes nothing: plain autoregressive decoding, with the same loop, cache and sampling.

    The baseline of every speed-up.
    """

    tokens = 0

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return Proposal(context.tokens_L[:0])


@register("draft.random")
@dataclass(frozen=True)
class RandomDraft(FixedDraft):
    """Tokens drawn uniformly from the vocabulary, at any temperature, by the request's seed."""

    tokens: Positive
    """Draft tokens per round."""
    gives = frozenset({Condition.DRAWS})

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        vocabulary, device = context.target.vocab_size, context.tokens_L.device
        tokens_D = (sampler.uniforms(self.tokens) * vocabulary).long()
        probabilities_DV = torch.full((self.tokens, vocabulary), 1 / vocabulary, device=device)
        return Proposal(tokens_D, probabilities_DV)


@register("draft.adversarial")
@dataclass(frozen=True)
class AdversarialDraft(FixedDraft):
    """Proposes the tokens that the target finds least probable: a draft that is wrong on purpose.

    It costs one forward of the target per token, and no token is accepted.
    """

    tokens: Positive
    """Draft tokens per round."""

    def new_cache(self, target: Target, length: int) -> KVCache:
        return target.new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return one_by_one(
            context.target, context, self.tokens, lambda logits_1V: (logits_1V.argmin(-1), None)
        )


# --- measurements that length rules read, in plain Python, as the load simulation needs them ------

Parsed = TypeVar("Parsed")


def read_measurement(
    source: str, parse: Callable[[Any], Parsed], what: str, command: str
) -> Parsed:
    """Return the json file at `source`, converted by `parse`; DllmBenchError if there is no valid
    file.

    `command` writes such files, and some ship below `assets/`. Only the content is part of a run's
    identity, never the path.
    """
    todo = f"make one with `dllm-bench {command}` and name the file it writes"
    with library_errors_named(f"{source!r} holds no {what}", todo):
        return parse(json.loads(place_of(source).read_text(encoding="utf-8")))


def numbers_of(plain: Any, key: str, kind: type = float) -> tuple[Any, ...]:
    """Return the numbers of a json file under a key; TypeError if they are no list of them."""
    if not fits(plain[key], tuple[kind, ...]):  # type: ignore[valid-type]  # a type at run time
        raise TypeError(key)
    return tuple(map(kind, plain[key]))


@register("length.step_profile")
@dataclass(frozen=True)
class StepProfile:
    """Measured speed of a machine and model: steps per second by the tokens fed in a step.

    DSpark's SPS(B) (section 3.2.2), which `dllm-bench train sps` measures.
    Seconds are interpolated linearly between measured sizes. No step is larger than the largest
    measured size.
    """

    tokens: tuple[int, ...]
    """Measured step sizes, rising from 1."""
    steps_per_s: tuple[float, ...]
    """Speed at each of these sizes, above 0."""

    def __post_init__(self) -> None:
        rising = self.tokens[:1] == (1,) and all(a < b for a, b in pairwise(self.tokens))
        each = len(self.tokens) == len(self.steps_per_s)
        if not (rising and each and all(0 < speed < math.inf for speed in self.steps_per_s)):
            raise DllmBenchError(
                f"A step profile has sizes {list(self.tokens)} with steps per second "
                f"{list(self.steps_per_s)}; give rising sizes from 1, each with a speed above 0."
            )

    @property
    def largest(self) -> int:
        """Tokens of the largest measured step."""
        return self.tokens[-1]

    def step_s(self, tokens: int) -> float:
        """Return seconds of a step that feeds `tokens` tokens; DllmBenchError if that was not
        measured."""
        if not 1 <= tokens <= self.largest:
            raise DllmBenchError(
                f"A step of {tokens} tokens is needed, and the step profile covers 1 to "
                f"{self.largest}; measure larger steps with "
                "`dllm-bench train sps MODEL --batches …`."
            )
        right = bisect_left(self.tokens, tokens)
        if self.tokens[right] == tokens:
            return 1 / self.steps_per_s[right]
        (t0, t1), (r0, r1) = self.tokens[right - 1 : right + 1], self.steps_per_s[right - 1 :][:2]
        part = (tokens - t0) / (t1 - t0)
        return (1 - part) / r0 + part / r1

    def rate(self, tokens: int) -> float:
        """Return the steps per second."""
        return 1 / self.step_s(tokens)


@register("length.read_step_profile")
def read_step_profile(source: str) -> StepProfile:
    """Return the profile in a file written by `dllm-bench train sps`; assets/… names a shipped
    one."""

    def parse(plain: Any) -> StepProfile:
        return StepProfile(numbers_of(plain, "tokens", int), numbers_of(plain, "steps_per_s"))

    return _of_step_profile(source, parse)


def _of_step_profile(source: str, parse: Callable[[Any], Parsed]) -> Parsed:
    return read_measurement(source, parse, "step profile", "train sps MODEL")


def check_step_profile(source: str, model: str) -> None:
    """Refuse a profile that was measured with a model other than `model`; one written by hand may
    name none."""

    def name_of(plain: Any) -> str:
        measured_with = plain.get("model", {"name": model})
        return str(measured_with["name"])

    if (measured := _of_step_profile(source, name_of)) != model:
        raise DllmBenchError(
            f"Step profile {source!r} was measured with {measured}, but the model is "
            f"{model}; measure one with `dllm-bench train sps {model}` and name its file."
        )


def device_of_step_profile(source: str) -> str:
    """Return the name of the device that a step profile was measured on."""
    return _of_step_profile(source, lambda plain: str(plain["machine"]["device"]))


@register("length.temperatures")
@dataclass(frozen=True)
class Temperatures:
    """Calibration of a confidence head: each position's logit is divided by its temperature.

    Sequential Temperature Scaling of DSpark (section 3.2.1); `dllm-bench train temperatures` fits
    them. Without temperatures the head's output is used as it is. Logits stored with a run stay
    unscaled.
    """

    values: tuple[float, ...] = ()
    """One temperature per position, above 0; positions beyond the last have 1."""

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in self.values):
            raise DllmBenchError(
                f"The temperatures of a confidence head are {list(self.values)}; give numbers "
                "above 0."
            )

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """Return the probability that each token is accepted if all before it are."""
        pairs = zip(logits, [*self.values, *[1.0] * len(logits)], strict=False)
        # 1 / (1 + exp(-x)), without its overflow
        return [(1 + math.tanh(logit / scale / 2)) / 2 for logit, scale in pairs]


def acceptance_probabilities(
    proposals: Sequence[Proposal], temperatures: Temperatures
) -> list[list[float]]:
    """Return `Temperatures.probabilities` of proposals with survival estimates, after one copy to
    the host for all."""
    logits = [one.survival_D.double() for one in proposals if one.survival_D is not None]
    assert len(logits) == len(proposals)  # each proposal has survival estimates
    return list(map(temperatures.probabilities, to_host(logits)))


@register("length.read_temperatures")
def read_temperatures(source: str | None) -> Temperatures:
    """Return the temperatures in a file written by `dllm-bench train temperatures`; for None, no
    temperatures."""
    if source is None:
        return Temperatures()

    def parse(plain: Any) -> Temperatures:
        return Temperatures(numbers_of(plain, "temperatures"))

    return read_measurement(source, parse, "temperatures", "train temperatures RUN")


@register("length.threshold")
@dataclass(frozen=True)
class SurvivalThreshold(VerifyLength):
    """Cut each draft before the first token whose acceptance probability is below tau.

    DSpark's static threshold: verify up to the first token that is unlikely to be accepted.

    DeepSpec compares the confidence at each position with one threshold. It does not multiply the
    confidences to the probability that the whole prefix survives, and it ignores the load of the
    machine. A confidence depends only on earlier draft tokens, so the output distribution is kept.
    """

    tau: Probability
    """Threshold in [0, 1]; 0 verifies everything."""
    temperatures: Temperatures = field(default_factory=Temperatures)
    """Calibration of the confidence head."""

    needs = needing({"draft": Condition.SURVIVAL_ESTIMATES})

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        each = acceptance_probabilities(proposals, self.temperatures)
        return [likely_prefix(probabilities, self.tau) for probabilities in each]


def likely_prefix(probabilities: Sequence[float], tau: float) -> int:
    """Return the number of tokens before the first one whose probability is below tau."""
    return len(list(takewhile(lambda probability: probability >= tau, probabilities)))
