"""`dllm-bench train sps`: measure a model's steps per second for several numbers of tokens."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dllm_bench.cli.common import (
    add_name_argument,
    add_results_option,
    compose,
    positive_int,
    positive_ints,
    print_lines,
    training_folder,
)
from dllm_bench.store.files import write_json
from dllm_bench.store.groups import Hardware

BATCHES = "1,2,4,8,16,32,64,128,256"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train sps`."""
    add_results_option(parser)
    add_name_argument(parser, "model", "an autoregressive model, as in model=MODEL")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument("--batches", type=positive_ints, metavar="N,N,…", default=BATCHES)
    parser.add_argument(
        "--context", type=positive_int, metavar="N", default=256, help="tokens before the step"
    )
    parser.add_argument(
        "--repeats", type=positive_int, metavar="N", default=20, help="timed steps of each size"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RESULTS/training/sps/…")


def run(arguments: Namespace) -> int:
    """Measure, print and store the steps per second."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.training import step_profiles  # torch takes seconds to import

    job = step_profiles.ProfileJob(arguments.batches, arguments.context, arguments.repeats)
    measured = step_profiles.run(job, config)
    folder = training_folder(arguments) / "sps"
    out = arguments.out or folder / f"{arguments.model}-{Hardware(measured['hardware']).name}.json"
    write_json(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    print_lines(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    use = f"decoder/length=hardware_aware decoder.length.profile.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])
