"""Modelled time of a request with each cache, by the length of its prompt, on a device not here.

    .venv/bin/python -m scripts.perf.caches [--prompts 64,256,1024] [--new 256] [--captured]
    .venv/bin/python -m scripts.perf.caches --cpu 6     CPU seconds of the table's own decoders

The rows are those of the table decoders/caches. What a cache feeds and reads in a forward depends
on lengths, blocks and steps and hardly on the weights, so that a small model with random weights is
decoded, two tokens in each forward, and every forward is priced as a round of Dream-7B's shape
(`model.modelled_ms`: bytes, operations, launches). A row of logits is needed for the open block
only. Elastic-Cache is left out: how many layers it computes depends on the weights. Not priced:
gathering and scattering K/V of single positions, and what a cache computes to choose them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

import dllm_bench as db
from dllm_bench.api.generation import composed_decoder
from dllm_bench.api.random_model import random_model, random_request
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.row_caches import ElasticCache
from dllm_bench.tables.load import load_table
from dllm_bench.training.prompts import train_prompts
from scripts.perf.model import DREAM_ROUND, H200, PROBE, DeviceConstants, Round, modelled_ms

TABLE, MODEL, TASK, NEW = "decoders/caches", "tiny-llada-long", "ministory", 224
SETTINGS = ("decoder.", "decoder/")
BLOCK, PER_FORWARD, VOCAB, LAYERS = 32, 2, 64, 2


def decoders(*settings: str) -> dict[str, MaskedDecoder]:
    """Label of a row of the table -> its decoder, with further settings."""
    table = load_table(TABLE)
    (values,) = table.facets.values()
    return {value.label: decoder([*table.run, *value.run, *settings]) for value in values}


def decoder(query: Sequence[str]) -> MaskedDecoder:
    """Return the decoder of a run query."""
    (name,) = (part.partition("=")[2] for part in query if part.startswith("decoder="))
    found = composed_decoder(name, [part for part in query if part.startswith(SETTINGS)])
    assert isinstance(found, MaskedDecoder)
    return found


def request_ms(forwards: Sequence[Forward], device: DeviceConstants) -> float:
    """Modelled milliseconds of a request."""
    return sum(modelled_ms(as_round(one), device)["round ms"] for one in forwards)


def as_round(one: Forward) -> Round:
    """Return a forward of Dream-7B's shape that computes as many rows, and sees as many positions.

    Where layers choose rows, the first of the small model's two computes all that is fed, and the
    second as many as each further layer would.
    """
    layers = DREAM_ROUND.shape["layers"]
    further = one.fed if one.rows is None else LAYERS * one.rows - one.fed
    rows = round((one.fed + (layers - 1) * further) / layers)
    cached = one.cached + one.fed - rows
    return replace(DREAM_ROUND, prefix=cached, window=rows, logits=min(one.fed, BLOCK))


def modelled(prompts: Sequence[int], new: int, device: DeviceConstants) -> None:
    """Print modelled milliseconds by cache and length of the prompt, two tokens in each forward."""
    steps = f"decoder.select.steps={BLOCK // PER_FORWARD}"
    model = random_model(VOCAB, {**PROBE, "layers": LAYERS})
    print(f"ms per request of {new} new tokens; prompt: {prompts}")
    for label, one in decoders("decoder/select=topk", steps, "decoder/stop=filled").items():
        if isinstance(one.cache, ElasticCache):
            continue
        requests = [random_request(length, new, VOCAB) for length in prompts]
        times = [request_ms(one.generate(model, each).trace.forwards, device) for each in requests]
        print(f"{label:24}" + "".join(f"{ms:10.0f}" for ms in times))


def measured(samples: int) -> None:
    """Print CPU seconds a sample of the table's model and task, caches interleaved."""
    model, rows = db.load_model(MODEL), decoders()
    spent: dict[str, list[float]] = {label: [] for label in rows}
    for prompt in train_prompts([TASK], samples, seed=5):
        for label, one in rows.items():
            before = time.process_time()
            db.generate(model, [prompt], one, max_new_tokens=NEW)
            spent[label].append(time.process_time() - before)
    uncached = sum(next(iter(spent.values())))
    print(f"CPU seconds a sample, {samples} prompts of {TASK}; as a share of the first row's")
    for label, seconds in spent.items():
        print(f"{label:24}{sum(seconds) / samples:8.2f}{sum(seconds) / uncached:8.2f}")


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.perf.caches")
    parser.add_argument("--prompts", default="64,256,1024,2048", help="lengths, with commas")
    parser.add_argument("--new", type=int, default=256, help="new tokens, a multiple of 32")
    help_text = "as if forwards were CUDA graphs: launches cost nothing"
    parser.add_argument("--captured", action="store_true", help=help_text)
    parser.add_argument("--cpu", type=int, metavar="N", help="measure N samples here instead")
    options = parser.parse_args()
    if options.cpu:
        torch.set_num_threads(1)
        measured(options.cpu)
        return
    device = replace(H200, gap_s=0.0, launch_s=0.0) if options.captured else H200
    modelled([int(text) for text in options.prompts.split(",")], options.new, device)


if __name__ == "__main__":
    main()
