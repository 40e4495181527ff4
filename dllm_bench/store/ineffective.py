"""Settings of a run that had no effect: each with the share of samples it left as they were.

A setting that does nothing is a frequent reason for a number that surprises (a chat template on a
model without turns, a lookahead whose branches never win). Facts of the stored samples only; a
setting not listed here was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.core.trace import Trace

if TYPE_CHECKING:
    from dllm_bench.store.record import SampleRecord
    from dllm_bench.store.spec import RunSpec

Idle = Callable[["SampleRecord"], bool]
CHAT, MULTITURN = "chat", "chat_multiturn"


def unused(spec: RunSpec, samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Setting -> share of samples it had no effect on, where that is any."""
    asked = {**_of_prompt(spec.benchmark), **_of_end(spec.benchmark), **_of_decoder(spec.decoder)}
    shares = {name: sum(map(idle, samples)) / len(samples) for name, idle in asked.items()}
    return {name: share for name, share in shares.items() if share > 0}


def _of_prompt(benchmark: Mapping[str, Any]) -> dict[str, Idle]:
    template, chat = str(benchmark.get("template", "")), bool(benchmark.get("chat", True))
    without_turns = template.startswith(CHAT) and not chat
    without_shots = template == MULTITURN and chat and not benchmark.get("shots")
    return {"benchmark.template": lambda sample: True} if without_turns or without_shots else {}


def _of_end(benchmark: Mapping[str, Any]) -> dict[str, Idle]:
    """Stop strings that cut nothing, `escape_until` where there is nothing to escape."""
    stop, hard = benchmark.get("stop") or (), benchmark.get("hard_stop") or ()
    escapes = bool(benchmark.get("escape_until"))
    found: dict[str, Idle] = {}
    if escapes and not stop:
        found["benchmark.escape_until"] = lambda sample: True
    if hard or (stop and not escapes):
        found["benchmark.stop"] = lambda sample: "stop" not in sample.cut
    return found


def _of_decoder(decoder: Mapping[str, Any]) -> dict[str, Idle]:
    """Branches that never win, a cache never read, an end of text never found."""
    found: dict[str, Idle] = {}
    if _named(decoder, "explore") not in ("", "explore.greedy"):
        found["decoder.explore"] = _base_always_wins
    if _named(decoder, "cache") not in ("", "cache.none"):
        found["decoder.cache"] = lambda sample: not any(sample.trace["cached"])
    if _named(decoder, "stop") == "stop.eos":
        found["decoder.stop"] = lambda sample: "eos" not in sample.cut
    return found


def _named(decoder: Mapping[str, Any], slot: str) -> str:
    piece = decoder.get(slot)
    return str(piece.get("_target_", "")) if isinstance(piece, Mapping) else ""


def _base_always_wins(sample: SampleRecord) -> bool:
    forwards = Trace.from_columns(sample.trace).forwards
    return all(forward.winner == forward.branches - 1 for forward in forwards)
