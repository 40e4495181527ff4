"""`dllm-bench train filter`: train a filter for Learn2PD decoding on a model's own traces."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import fields, replace
from pathlib import Path

from dllm_bench.cli.common import (
    add_name_argument,
    add_results_option,
    compose,
    positive_float,
    positive_int,
    print_lines,
    training_folder,
)
from dllm_bench.store import inputs
from dllm_bench.training.kinds import FILTER_BENCHMARKS
from dllm_bench.training.prompts import TASKS

COUNTS = {  # option -> (default, help)
    "--block": (32, "positions of a block"),
    "--gen-length": (64, "new tokens per prompt (the paper: 256)"),
    "--layers": (2, "linear layers"),
    "--epochs": (5000, "passes over all rows"),
    "--prompts": (400, "prompts drawn from the train splits"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train filter`."""
    add_results_option(parser)
    add_name_argument(parser, "model", "a model as in `dllm-bench run model=…`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RESULTS/training/filters")
    for name, (default, text) in COUNTS.items():
        text = f"{text}; default: {default}"
        parser.add_argument(name, type=positive_int, metavar="N", default=default, help=text)
    parser.add_argument(
        "--lr", type=positive_float, default=1e-3, metavar="RATE", help="default: 1e-3"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--labels",
        choices=("masked", "all"),
        default="masked",
        help="positions that enter the loss; all: as in the authors' code",
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        choices=tuple(TASKS),
        help="take prompts from this benchmark's train split; may be repeated; default: "
        + ", ".join(FILTER_BENCHMARKS),
    )
    parser.add_argument(
        "--flan", type=Path, metavar="DIR", help="take prompts from jsonl rows (task, inputs)"
    )
    parser.add_argument(
        "--all-blocks", action="store_true", help="also keep the blocks after the end of the text"
    )
    text = "convert these released weights (torch's state dict) in place of training"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE.pth", help=text)
    parser.add_argument(
        "--collect-only",
        action="store_true",
        help="only collect traces (a second call continues)",
    )


def run(arguments: Namespace) -> int:
    """Train the filter, or only collect the traces it is trained on."""
    config = compose([f"model={arguments.model}"])
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.models.filters import FilterMetadata, convert_filter
    from dllm_bench.training import filters

    names = [field.name for field in fields(filters.FilterJob) if field.name in arguments]
    job = filters.FilterJob(**{name: getattr(arguments, name) for name in names})
    job = replace(job, benchmarks=tuple(arguments.benchmark)) if arguments.benchmark else job
    model = inputs.resolve_model(config.model, inputs.resolve_hardware(config.hardware))
    folder = training_folder(arguments)
    if arguments.collect_only:
        return print_lines([f"written: {filters.collect(job, model, folder / 'traces')}"])
    out = arguments.out or folder / "filters" / job.name(model.name)
    if arguments.source:
        hashes = inputs.model_hashes(model)
        weights, tokenizer = hashes["weights"], hashes.get("tokenizer", "")
        facts = FilterMetadata(model=model.name, weights=weights, tokenizer=tokenizer)
        convert_filter(arguments.source, out, facts)
    else:
        filters.train(job, model, out, folder / "traces")
    return print_lines([f"written: {out}", f"use it: decoder=learn2pd {filters.SOURCE}={out}"])
