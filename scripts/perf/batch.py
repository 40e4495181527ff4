"""Requests per second, batched and unbatched, on items of minigsm.

The same decoder decodes the same requests both ways, and the texts are compared. Left out is what a
run does besides decoding: encoding, disk, display.
"""

from __future__ import annotations

from dllm_bench.api.compose import compose
from dllm_bench.core.request import Generation, Request
from dllm_bench.store.inputs import benchmark_of
from scripts.perf import models
from scripts.perf.measures import Row, Size, in_turns
from scripts.perf.split import Watch

BATCH = 8
CASES = {  # decoder -> model
    "fast_dllm": "tiny-llada",
    "fast_dllm_dual": "tiny-llada",
    "d2f": "tiny-d2f-dream-instruct",
    "ar": "tiny-qwen3",
}


def items(model: str, count: int, new: int) -> list[Request]:
    """Return the first questions of minigsm."""
    benchmark = benchmark_of(
        compose(["benchmark=minigsm", f"benchmark.max_new_tokens={new}"])["benchmark"]
    )
    return list(benchmark.requests(models.embedded(model).encode))[:count]


def batches(size: Size) -> list[Row]:
    """Requests per second of each decoder, and whether the texts are the same."""
    return [_compared(decoder, model, size) for decoder, model in CASES.items()]


def _compared(name: str, model: str, size: Size) -> Row:
    decoder, denoiser = models.decoder(name), models.embedded(model).denoiser
    requests = items(model, size.items, size.new)
    texts: dict[int, dict[str, tuple[int, ...]]] = {}

    def case(batch: int) -> Row:
        watch = Watch()
        started = watch.now()
        found: list[Generation] = list(decoder.generate_stream(denoiser, requests, batch))
        texts[batch] = {generation.request_id: generation.ids for generation in found}
        return {"rate": len(requests) / (watch.now() - started)}

    rates = in_turns({str(n): lambda n=n: case(n) for n in (1, BATCH)}, size.rounds)
    one, many = rates["1"]["rate"], rates[str(BATCH)]["rate"]
    return {
        "case": f"{name} · {model}",
        "requests/s": one,
        f"batch {BATCH}": many,
        "ratio": round(many / one, 2),
        "same texts": texts[1] == texts[BATCH],
    }
