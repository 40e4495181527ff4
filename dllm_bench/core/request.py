"""Input and output of decoding: `SpecialTokens`, `Request`, `Generation`.

Ids of special tokens come from a checkpoint's config or tokenizer; the package contains none.
Templates and stop strings are handled by the benchmark and the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace

EndTokens = Literal["eos", "eot", "ends"]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a checkpoint's special tokens; None where it has no such token."""

    mask: int  # the token at every masked position
    eos: int  # ends a text
    pad: int | None = None
    bos: int | None = None
    eot: int | None = None  # ends a chat turn

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text, `eos` first."""
        return tuple(dict.fromkeys(end for end in (self.eos, self.eot) if end is not None))

    def named(self, which: EndTokens) -> list[int]:
        """Return the ids of the end tokens named by `which`: eos, eot (empty if the checkpoint has
        none) or both."""
        return list({"eos": self.ends[:1], "eot": self.ends[1:], "ends": self.ends}[which])


class Option(NamedTuple):
    """A continuation to score by its likelihood."""

    prompt_ids: tuple[int, ...]  # the context before it
    ids: tuple[int, ...]  # its own tokens


class Likelihood(NamedTuple):
    """A decoder's estimate for an option."""

    nats: float  # natural logarithm of its probability, or a lower bound of that
    error: float  # standard error of `nats` over draws; 0 where nothing was drawn
    greedy: bool  # whether greedy decoding gives exactly this option, if that was computed


@dataclass(frozen=True)
class Request:
    """A text to generate, or options to score."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()  # strings that end the text
    prompt: str = ""  # text the ids were encoded from
    seed: int = 0  # seed of the request's random numbers
    reference: tuple[int, ...] | None = None  # new tokens that are known beforehand (oracle)
    pinned: tuple[tuple[int, int], ...] = ()  # (new position, token id) fixed from the start
    options: tuple[Option, ...] = ()  # options to score; if any, nothing is generated

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise DllmBenchError(
                f"Request {self.id!r} has an empty prompt; give at least one token (BOS will do)."
            )
        if self.max_new_tokens < 1:
            raise DllmBenchError(
                f"Request {self.id!r} asks for {self.max_new_tokens} new tokens; ask for 1 or more."
            )


def filling(request: Request, special: SpecialTokens) -> Request:
    """Return a request that fills the masks of its own prompt and generates nothing else.

    New positions begin at the first mask; the prompt's tokens from there on are pinned.
    """
    ids = request.prompt_ids
    first = ids.index(special.mask)
    if not first:
        raise DllmBenchError(
            f"The prompt {request.prompt[:60]!r} begins with a mask to fill, but decoding needs a "
            "token before it; begin the prompt with a text."
        )
    given = tuple((at, token) for at, token in enumerate(ids[first:]) if token != special.mask)
    return replace(request, prompt_ids=ids[:first], max_new_tokens=len(ids) - first, pinned=given)


def first_end(ids: Sequence[int], special: SpecialTokens) -> int | None:
    """Return the index of the first token that ends a text; None if there is none."""
    return next((i for i, token in enumerate(ids) if token in special.ends), None)


def cut_reasons(ids: Sequence[int], max_new_tokens: int, special: SpecialTokens) -> dict[str, int]:
    """Return {reason: index in `ids` at which the text ends}: always "length", and "eos" if a token
    ends the text.
    """
    end = first_end(ids, special)
    return {"length": min(len(ids), max_new_tokens), **({} if end is None else {"eos": end})}


@dataclass(frozen=True)
class Generation:
    """The tokens of one request, before any cut."""

    request_id: str
    ids: tuple[int, ...]  # all tokens after the prompt, including those after the first end token
    born: tuple[int, ...]  # index of the forward that committed each of `ids`
    cut: dict[str, int]  # reason ("eos", "stop", "length") -> index in `ids` where the text ends
    trace: Trace = field(default_factory=Trace)
    text: str = ""  # filled by the runner
    renewal_rounds: int | None = None  # number of `RenewalRounds`, to count as published loops do
    likelihoods: tuple[Likelihood, ...] = ()  # one per option; `ids` are the best one's

    @property
    def end(self) -> int:
        """Index in `ids` at which the text ends: the first cut."""
        return min(self.cut.values(), default=len(self.ids))
