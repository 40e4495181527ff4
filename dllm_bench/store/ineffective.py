"""Settings of a run that had no effect, each with the share of the samples it left unchanged.

A setting that does nothing often explains a surprising number (a chat template on a model without
chat turns, a lookahead whose branches never win). Only the stored samples are looked at, and only
the settings listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dllm_bench.core.decoder import Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.registry import instantiate
from dllm_bench.store.groups import BenchmarkGroup, setting_in
from dllm_bench.store.inputs import PIECES
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec

HasNoEffect = Callable[[SampleRecord], bool]
CHAT, MULTITURN = "chat", "chat_multiturn"


def settings_without_effect(spec: RunSpec, samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Setting -> share of the samples it had no effect on; settings with a share of 0 left out."""
    benchmark, decoder = spec.benchmark, spec.decoder
    checks = {**_of_prompt(benchmark), **_of_end(benchmark), **_of_decoder(decoder)}
    checks |= _of_seed(spec)
    shares = {name: sum(map(check, samples)) / len(samples) for name, check in checks.items()}
    return {name: share for name, share in shares.items() if share > 0}


def _of_seed(spec: RunSpec) -> dict[str, HasNoEffect]:
    """Another seed than the default, if no decoder of the run draws anything by it.

    Nothing is known of what pieces from outside draw, or of a server's decoder.
    """
    decoders = list(filter(None, (spec.decoder, spec.baseline)))
    if not spec.seed or PIECES in spec.inputs:
        return {}
    with suppress(DllmBenchError):
        if not any(_draws(plain) for plain in decoders):
            return {"seed": lambda sample: True}
    return {}


def _draws(plain: Mapping[str, Any]) -> bool:
    """Whether the decoder that plain data describes draws by the request's seed."""
    own = {key: value for key, value in plain.items() if key != "name"}
    return bool(instantiate(own, "decoder").summary().uses_seed)


def _of_prompt(benchmark: BenchmarkGroup) -> dict[str, HasNoEffect]:
    """A chat template without chat turns, or one turn per example without examples."""
    template, chat = benchmark.template, benchmark.chat
    without_turns = template.startswith(CHAT) and not chat
    without_shots = template == MULTITURN and chat and not benchmark.shots
    return {"benchmark.template": lambda sample: True} if without_turns or without_shots else {}


def _of_end(benchmark: BenchmarkGroup) -> dict[str, HasNoEffect]:
    """Stop strings that cut nothing, and `escape_until` if there is nothing to escape."""
    stop, hard, escapes = benchmark.stop, benchmark.hard_stop, benchmark.escape_until
    checks: dict[str, HasNoEffect] = {}
    if escapes and not stop:
        checks["benchmark.escape_until"] = lambda sample: True
    if hard or (stop and not escapes):
        checks["benchmark.stop"] = lambda sample: "stop" not in sample.cut
    return checks


def _of_decoder(decoder: Mapping[str, Any]) -> dict[str, HasNoEffect]:
    """Branches that never win, a cache that is never read, an end token that never occurs, a
    reviser that changes nothing.
    """
    checks: dict[str, HasNoEffect] = {}
    slots = ("explore", "cache", "stop", "revise")
    explore, cache, stop, revise = (_piece_of(decoder, slot) for slot in slots)
    if explore is not None and Condition.ONE_BRANCH not in explore.gives:
        copies = 2 if setting_in(decoder, "guidance") else 1
        checks["decoder.explore"] = lambda sample: _base_always_wins(sample, copies)
    if cache is not None and Condition.NO_CACHE not in cache.gives:
        checks["decoder.cache"] = _reads_nothing
    if stop is not None and Condition.STOPS_ON_END in stop.gives:  # rules that combine others vary
        checks["decoder.stop"] = lambda sample: "eos" not in sample.cut
    if revise is not None and Condition.NO_CHANGES not in revise.gives:
        checks["decoder.revise"] = lambda sample: not any(sample.trace.get("changes", ()))
    return checks


def _piece_of(decoder: Mapping[str, Any], slot: str) -> Any:
    """The piece in a slot; None without one, if its plug-in is not installed, or if it is of
    another slot.
    """
    with suppress(DllmBenchError):
        return instantiate(decoder.get(slot), slot)
    return None


def _reads_nothing(sample: SampleRecord) -> bool:
    """Whether no forward read from the cache: no position, and no byte where those are stored."""
    forwards = Trace.from_columns(sample.trace).forwards
    return not any(forward.cached or forward.read_bytes for forward in forwards)


def _base_always_wins(sample: SampleRecord, copies: int) -> bool:
    """copies: of each branch, in a forward; 2 under guidance."""
    forwards = Trace.from_columns(sample.trace).forwards
    return all(forward.winner == forward.branches // copies - 1 for forward in forwards)
