"""`dllm-bench train adapter`: a LoRA adapter that makes a model one of block diffusion."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
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
from dllm_bench.training.prompts import TASKS

COUNTS = {  # field of the job -> help
    "block": "positions of a block (default: 4)",
    "rank": "rank of the adapter (default: 16)",
    "prompts": "prompts from the train splits",
    "rows": "texts of a step",
    "steps": "steps of the optimiser",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train adapter`."""
    add_results_option(parser)
    add_name_argument(parser, "model", "as in `dllm-bench run model=…`")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: RESULTS/training/adapters"
    )
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name}", type=positive_int, metavar="N", help=text)
    parser.add_argument("--lr", type=positive_float, metavar="RATE", help="peak learning rate")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--start", metavar="DIR", help="begin with the weights of this adapter")
    parser.add_argument(
        "--benchmark",
        dest="benchmarks",
        action="append",
        choices=tuple(TASKS),
        help="learn this task's train split; may be repeated; default: sentences",
    )


def run(arguments: Namespace) -> int:
    """Train the adapter; a second call continues an interrupted one."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.models.load import load_model
    from dllm_bench.training import adapters

    names = (*COUNTS, "lr", "seed", "start", "benchmarks")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if "benchmarks" in given:
        given["benchmarks"] = tuple(given["benchmarks"])
    job = adapters.AdapterJob(**given)
    model = inputs.resolve_model(config.model, inputs.resolve_hardware(config.hardware))
    folder = training_folder(arguments) / "adapters"
    out = arguments.out or folder / f"{model.name}-block{job.block}"
    spec = inputs.model_spec(model)
    loaded = load_model(spec)
    adapters.train(job, loaded, adapters.texts_of(job, loaded, spec.chat), out)
    use = (
        f"use it: model={arguments.model} model.lora={out} model.attention_form=block_causal "
        f"model.block={job.block} decoder=block_diffusion decoder.schedule.block={job.block}"
    )
    return print_lines([f"written: {out}", use])
