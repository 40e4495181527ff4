"""The parts of `make perf` that run on any machine: splits, ratios, memory, growth, batches.

The cases of a part are measured in turn, round after round, so that other load on the machine
affects all of them alike; each number is the median over the rounds. Every function returns rows of
plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dllm_bench.api.compose import compose
from dllm_bench.api.random_model import random_model, random_request
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Budget, Confidence, Pipeline, Threshold
from dllm_bench.models.layers import module_layers
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.paths import options
from dllm_bench.store.inputs import benchmark_of
from scripts.perf import models
from scripts.perf.reference import Caching, PipelinedReference, Reference
from scripts.perf.split import PARTS, TimedModel, Watch, split

Row = dict[str, Any]
Case = Callable[[], Mapping[str, float]]  # makes one measurement and returns its numbers by name

VOCAB_DREAM, VOCAB_128K = 152_064, 128_000
ONE_EACH = 1.0  # no confidence is above this threshold: one token per forward
TAU, BLOCK = 0.9, 32
BATCH = 8
BATCHED = {  # decoder -> model
    "fast_dllm": "tiny-llada",
    "fast_dllm_dual": "tiny-llada",
    "d2f": "tiny-d2f-dream-instruct",
    "ar": "tiny-qwen3",
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 7
    new: int = 64  # new tokens; a decoder with a longer block gets as many as that
    large_steps: int = 8  # steps of a case with a large vocabulary
    longest: int = 1024  # most new tokens of the growth part
    items: int = 64  # requests of the batch part
    vocabularies: tuple[int, ...] = (128, 512, 4096, 32_768, VOCAB_DREAM)


QUICK = Size(rounds=2, large_steps=3, longest=256, items=24, vocabularies=(128, 4096, VOCAB_DREAM))


def in_turns(cases: Mapping[str, Case], rounds: int) -> dict[str, Row]:
    """Medians of every case's numbers; the first round is a warm-up."""
    measured: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        for name, case in cases.items():
            numbers = case()
            if index:
                measured[name].append(numbers)
    return {
        name: {key: round(median(row[key] for row in rows), 4) for key in rows[0]}
        for name, rows in measured.items()
    }


# --- a: the parts of a step ---------------------------------------------------------------------


def splits(size: Size) -> list[Row]:
    """Return every masked decoder on an embedded model; three with a large vocabulary, on layers of
    the embedded models' size and of the smallest published model with that vocabulary."""
    cases = {}
    for name in options("decoder"):
        decoder = models.decoder(name)
        if isinstance(decoder, MaskedDecoder):
            fitting, request = first_fitting(decoder, size.new)
            model = models.embedded(fitting).denoiser
            cases[f"{name} · {fitting}"] = _split_case(decoder, model, request)
    request = random_request(48, size.new, VOCAB_DREAM)
    for shape in (models.EMBEDDED, models.QWEN_05B):
        large = random_model(VOCAB_DREAM, shape)
        for name in ("fast_dllm", "d2f", "lopa"):
            decoder = models.decoder(name)
            assert isinstance(decoder, MaskedDecoder)
            short = replace(decoder, stop=Budget(size.large_steps))
            label = f"{name} · random, width {shape['width']} · {VOCAB_DREAM}"
            cases[label] = _split_case(short, large, request)
    rows = in_turns(cases, size.rounds)
    return [
        {"case": name, **row, "all but the forward, %": _share(row)} for name, row in rows.items()
    ]


def first_fitting(decoder: MaskedDecoder, new: int) -> tuple[str, Request]:
    """Return the first embedded model that this decoder can decode with, and a request."""
    reason: Exception | None = None
    for name in ("tiny-llada", "tiny-dream-instruct"):
        request = models.question(name, max(new, decoder.schedule.block or 0))
        try:
            decoder.generate(models.embedded(name).denoiser, request)
        except (DllmBenchError, ValueError) as error:
            reason = error
            continue
        return name, request
    raise DllmBenchError(
        f"No embedded model works with {decoder}: {reason} Add one to `first_fitting` in "
        "scripts/perf."
    )


def _split_case(decoder: MaskedDecoder, model: Denoiser, request: Request) -> Case:
    return lambda: split(decoder, model, request)[0]


def _share(row: Row) -> float:
    """Percentage of the step that is not the forward."""
    whole = sum(row[part] for part in PARTS)
    return round(100 * (1 - row["forward"] / whole), 1)


def speculative(size: Size) -> list[Row]:
    """Milliseconds per round of draft and verification, for drafters that are no networks."""
    request = models.question("tiny-qwen3", size.new)
    cases = {}
    for name in ("ar_speculative", "ngram_speculative", "random_speculative"):
        decoder = models.decoder(name)
        assert isinstance(decoder, SpeculativeDecoder)
        cases[name] = _rounds_case(decoder, request)
    return [{"case": name, **row} for name, row in in_turns(cases, size.rounds).items()]


def _rounds_case(decoder: SpeculativeDecoder, request: Request) -> Case:
    def case() -> Row:
        watch = Watch()
        timed: Any = TimedModel(models.embedded("tiny-qwen3").denoiser, watch)
        generation, whole_s = watch.clocked(decoder.generate, timed, request)
        forward_s, rounds = watch.spent_s["forward"], len(generation.trace)
        return {"forward": 1000 * forward_s / rounds, "rest": 1000 * (whole_s - forward_s) / rounds}

    return case


# --- b: compared with a plain loop --------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A method that both loops have: its blocks, lookahead branches and cache."""

    name: str
    k: int = 0
    caching: Caching = "none"
    pipelined: bool = False

    def ours(self, steps: int) -> MaskedDecoder:
        """Return the decoder of this package."""
        caches = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
        return MaskedDecoder(
            Confidence(),
            Threshold(TAU),
            Pipeline(BLOCK, 0.1, 0.95) if self.pipelined else Blocks(BLOCK),
            BlockCache() if self.pipelined else caches[self.caching],
            stop=Budget(steps),
            **({"explore": Lookahead(self.k)} if self.k else {}),
        )

    def plain(self, model: Denoiser) -> Reference:
        """Return the plain loop."""
        kind = PipelinedReference if self.pipelined else Reference
        return kind(model, BLOCK, TAU, self.k, self.caching)


THRESHOLD = Loop("threshold")
LOOPS = (
    THRESHOLD,
    Loop("7 lookahead branches", k=7),
    Loop("prefix cache", caching="prefix"),
    Loop("dual cache", caching="dual"),
    Loop("D2F", pipelined=True),
)


def ratios(size: Size) -> list[Row]:
    """Steps per second of both loops on one model, and whether their tokens are the same."""
    rows = []
    for shape, vocab, steps, loops in (
        (models.EMBEDDED, 512, size.new, LOOPS),
        (models.EMBEDDED, VOCAB_128K, size.large_steps, LOOPS),
        (models.WIDE, 4096, 3 * size.large_steps, [loop for loop in LOOPS if not loop.k]),
    ):
        model = random_model(vocab, shape)
        request = random_request(48, size.new, vocab)
        for loop in loops:
            case = {"loop": loop.name, "width": shape["width"], "vocabulary": vocab}
            rows.append({**case, **_ratio(model, request, loop, steps, size.rounds)})
    return rows


def published(model: TransformerDenoiser) -> TransformerDenoiser:
    """Return the model with the layers of transformers, which published samplers call."""
    other = copy(model)
    other.layers = module_layers(model.module)
    return other


def _ratio(
    model: TransformerDenoiser, request: Request, loop: Loop, steps: int, rounds: int
) -> Row:
    decoder, plain = loop.ours(steps), loop.plain(published(model))
    tokens: dict[str, list[int]] = {}

    def own() -> Row:
        generation, spent_s = Watch().clocked(decoder.generate, model, request)
        tokens["own"] = list(generation.ids)
        return {"rate": len(generation.trace) / spent_s}

    def other() -> Row:
        (tokens["plain"], made), spent_s = Watch().clocked(plain.generate, request, steps)
        return {"rate": made / spent_s}

    found = in_turns({"own": own, "plain": other}, rounds)
    both = found["own"]["rate"], found["plain"]["rate"]
    return {
        "steps/s": both[0],
        "plain steps/s": both[1],
        "ratio": round(both[0] / both[1], 2),
        "same tokens": tokens["own"] == tokens["plain"][: len(tokens["own"])],
    }


# --- c: memory ----------------------------------------------------------------------------------


def memory(size: Size) -> list[Row]:
    """Peak memory (MiB) of a few steps in addition to the model, ours and the plain loop's."""
    rows = []
    model = random_model(VOCAB_DREAM, models.EMBEDDED)
    request = random_request(48, size.new, VOCAB_DREAM)
    for k in (0, 7):
        loop = Loop("memory", k)
        plain, decoder = loop.plain(model), loop.ours(3)
        own = peak_mib(lambda decoder=decoder: decoder.generate(model, request))
        other = peak_mib(lambda plain=plain: plain.generate(request, 3))
        rows.append({"lookaheads": k, "own MiB": own, "plain MiB": other})
    return rows


def peak_mib(work: Callable[[], object]) -> float | None:
    """Peak resident memory of `work` less what was resident before; None except on Linux."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    work()
    reset.write_text("5")  # resets the high-water mark
    before = _kib(status, "VmRSS")
    work()
    return round((_kib(status, "VmHWM") - before) / 1024, 1)


def _kib(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


# --- d: growth ----------------------------------------------------------------------------------


def growth(size: Size) -> list[Row]:
    """Milliseconds per step without the forward, by tokens, branches, block and vocabulary."""
    blocks = Blocks(32, sees_future=False)
    plain = MaskedDecoder(Confidence(), Threshold(ONE_EACH, strict=True), blocks, BlockCache())
    steps = 32
    few = replace(plain, stop=Budget(steps))
    cases: dict[str, Case] = {}
    for new in (length for length in (64, 256, 1024) if length <= size.longest):
        cases[f"new tokens {new}"] = _growth_case(plain, 1, 512, new)
    for k in (0, 1, 3, 7, 15):
        cases[f"lookaheads {k}"] = _growth_case(
            replace(few, explore=Lookahead(k)), k + 1, 512, steps
        )
    for block in (8, 32, 128):
        cases[f"block {block}"] = _growth_case(replace(few, schedule=Blocks(block)), 1, 512, 128)
    for vocab in size.vocabularies:
        cases[f"vocabulary {vocab}"] = _growth_case(replace(plain, stop=Budget(8)), 1, vocab, 32)
    rows = in_turns(cases, size.rounds)
    return [{"case": name, **row} for name, row in rows.items()] + _flatness(plain, size)


def _growth_case(decoder: MaskedDecoder, branches: int, vocab: int, new: int) -> Case:
    width = getattr(decoder.schedule, "block", new) * 2  # a branch may open one more block
    model = models.Table(vocab, branches, width)
    request = random_request(16, new, vocab)

    def case() -> Row:
        parts, _ = split(decoder, model, request)
        return {"ms": sum(parts[part] for part in PARTS[1:])}

    return case


def _flatness(decoder: MaskedDecoder, size: Size) -> list[Row]:
    """Time per step in the last quarter of a long generation, relative to the first quarter."""
    model = models.embedded("tiny-llada").denoiser
    rows = []
    for new in (length for length in (256, 1024) if length <= size.longest):
        request = random_request(16, new, model.vocab_size)

        def case(request: Request = request, quarter: int = new // 4) -> Row:
            timed: Any = TimedModel(model, Watch())
            decoder.generate(timed, request)
            steps_ms = [1000 * (after - before) for before, after in pairwise(timed.started)]
            first, last = median(steps_ms[:quarter]), median(steps_ms[-quarter:])
            return {"ms": last, "over the first quarter": last / first}

        row = in_turns({"": case}, size.rounds)[""]
        rows.append({"case": f"embedded, block cache, last quarter of {new}", **row})
    return rows


# --- e: batches ---------------------------------------------------------------------------------


def items(model: str, count: int, new: int) -> list[Request]:
    """Return the first questions of minigsm."""
    benchmark = benchmark_of(
        compose(["benchmark=minigsm", f"benchmark.max_new_tokens={new}"])["benchmark"]
    )
    return list(benchmark.requests(models.embedded(model).encode))[:count]


def batches(size: Size) -> list[Row]:
    """Requests per second of each decoder, and whether the texts are the same."""
    return [_unbatched_and_batched(decoder, model, size) for decoder, model in BATCHED.items()]


def _unbatched_and_batched(name: str, model: str, size: Size) -> Row:
    decoder, denoiser = models.decoder(name), models.embedded(model).denoiser
    requests = items(model, size.items, size.new)
    texts: dict[int, dict[str, tuple[int, ...]]] = {}

    def case(batch: int) -> Row:
        stream = decoder.generate_stream(denoiser, requests, batch)
        found, spent_s = Watch().clocked(list[Generation], stream)
        texts[batch] = {generation.request_id: generation.ids for generation in found}
        return {"rate": len(requests) / spent_s}

    rates = in_turns({str(n): lambda n=n: case(n) for n in (1, BATCH)}, size.rounds)
    one, many = rates["1"]["rate"], rates[str(BATCH)]["rate"]
    return {
        "case": f"{name} · {model}",
        "requests/s": one,
        f"batch {BATCH}": many,
        "ratio": round(many / one, 2),
        "same texts": texts[1] == texts[BATCH],
    }
