"""Texts of the load simulation from a real drafter: what it drafts at every position of a text.

The draft-verify loop runs with lengths of 0: the target decides every token alone, and the drafter
is asked at each. Greedy only, where the text is fixed and a draft depends on the tokens before it:
then the simulated rounds are the loop's own, whatever rule is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dllm_bench.core.request import DllmBenchError, Request
from dllm_bench.core.speculative import Proposal, Target, VerifyLength
from dllm_bench.decoding.length.hardware_aware import chances
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.serving.simulation import Drafted


@dataclass(frozen=True)
class Recorder(VerifyLength):
    """Verifies nothing and keeps every proposal; for one text."""

    seen: list[Proposal] = field(default_factory=list, compare=False)

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        self.seen.extend(proposals)
        return [0] * len(proposals)


def record(decoder: SpeculativeDecoder, model: Target, request: Request) -> list[Drafted]:
    """One entry per token after the prefill's; without a confidence head every chance is 1."""
    if decoder.temperature > 0:
        raise DllmBenchError(
            f"Drafts are recorded along one text, the decoder samples at temperature "
            f"{decoder.temperature}; set temperature=0."
        )
    recorder = Recorder()
    generation = replace(decoder, length=recorder).generate(model, request)
    rest = generation.ids[1 : generation.cut["length"]]
    return [drafted(found, rest[p:]) for p, found in enumerate(recorder.seen[: len(rest)])]


def drafted(proposal: Proposal, follows: Sequence[int]) -> Drafted:
    """The draft against the tokens that follow in the text."""
    tokens = proposal.tokens_N.tolist()
    right = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, follows, strict=False))
    estimated = proposal.survival_N is not None
    rates = chances(proposal) if estimated else [1.0] * len(tokens)
    return Drafted(tuple(rates), len(list(right)))
