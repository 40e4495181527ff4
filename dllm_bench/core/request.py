"""What is asked and what came out: `SpecialTokens`, `Request`, `Generation`.

Plain values without behaviour beyond their own consistency. Token ids of special tokens are read
from a checkpoint's config or tokenizer, never written down here. Text handling (templates,
stop strings) belongs to the benchmark and the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace

EndTokens = Literal["eos", "eot", "ends"]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens of one checkpoint; `None` where the checkpoint has no such token.

    `mask` is the id of a not yet decoded position, `eos` ends a text, `eot` ends a chat turn.
    """

    mask: int
    eos: int
    pad: int | None = None
    bos: int | None = None
    eot: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text, `eos` first."""
        extra = (self.eot,) if self.eot is not None and self.eot != self.eos else ()
        return (self.eos, *extra)

    def named(self, which: EndTokens) -> list[int]:
        """Ids of the end tokens meant: `eos`, `eot` (none where there is none) or all `ends`."""
        meant = {"eos": self.ends[:1], "eot": self.ends[1:], "ends": self.ends}
        return list(meant[which])


@dataclass(frozen=True)
class Request:
    """One generation to make: `prompt_ids` (P,) and up to `max_new_tokens` new tokens.

    `prompt` is the text the ids were encoded from; `stop` are strings that end the text; `seed`
    begins the request's random numbers; `reference` are new tokens known beforehand (oracle).
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    prompt: str = ""
    seed: int = 0
    reference: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise DllmBenchError(
                f"Request {self.id!r} has an empty prompt; give at least one token (BOS will do)."
            )
        if self.max_new_tokens < 1:
            raise DllmBenchError(
                f"Request {self.id!r} asks for {self.max_new_tokens} new tokens; ask for 1 or more."
            )


def first_end(ids: Sequence[int], special: SpecialTokens) -> int | None:
    """Index of the first token that ends a text, None without one."""
    return next((i for i, token in enumerate(ids) if token in special.ends), None)


def cut_reasons(ids: Sequence[int], max_new_tokens: int, special: SpecialTokens) -> dict[str, int]:
    """Reason -> index in `ids` where the text ends for it: always "length", and "eos" for the first
    token that ends a text.
    """
    end = first_end(ids, special)
    return {"length": min(len(ids), max_new_tokens), **({} if end is None else {"eos": end})}


@dataclass(frozen=True)
class Generation:
    """The tokens of one request, before any cut.

    `ids` (G,) are all decoded positions after the prompt, whatever follows the first EOS included;
    `born` (G,) the forward at which each was committed. `cut` maps a reason ("eos", "stop",
    "length") to the index in `ids` where the text ends for that reason; `text` is filled by the
    runner.
    """

    request_id: str
    ids: tuple[int, ...]
    born: tuple[int, ...]
    cut: dict[str, int]
    trace: Trace = field(default_factory=Trace)
    text: str = ""

    @property
    def emitted(self) -> int:
        """Number of tokens before the first reason to stop."""
        return min(self.cut.values(), default=len(self.ids))
