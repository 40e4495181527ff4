"""`dllm-bench train drafter`: train a drafter for its target model, on the target's own texts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_bench.cli.common import (
    add_name_argument,
    add_results_option,
    compose,
    positive_float,
    positive_int,
    print_lines,
    training_folder,
)
from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.store import inputs
from dllm_bench.training.kinds import DRAFTER_BENCHMARKS, DRAFTER_KINDS
from dllm_bench.training.prompts import TASKS

if TYPE_CHECKING:
    from dllm_bench.training.drafters import DrafterJob

COUNTS = {  # field of the job -> help
    "layers": "layers of the drafter",
    "slots": "positions of a block, anchor included, or steps of EAGLE-3",
    "rank": "rank of DSpark's transition head (the paper: 256)",
    "prompts": "prompts from the train splits",
    "max_new_tokens": "tokens of an answer at most",
    "rows": "rows of a step",
    "anchors": "blocks of a row at most (the paper: 512)",
    "steps": "steps of the optimiser",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train drafter`; by default, the kind of drafter sets their values."""
    add_results_option(parser)
    add_name_argument(parser, "model", "the target, as in `dllm-bench run model=…`")
    parser.add_argument("drafter", metavar="KIND", help="dflash, dspark-markov, eagle3, …")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: RESULTS/training/drafters"
    )
    for name, text in COUNTS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive_int, metavar="N", help=text)
    parser.add_argument(
        "--lr", type=positive_float, metavar="RATE", help="peak learning rate (the paper: 6e-4)"
    )
    parser.add_argument(
        "--shares",
        nargs=2,
        type=float,
        metavar=("CE", "L1"),
        help="weights of the two terms of the loss (DFlash: 1 0; DSpark: 0.1 0.9)",
    )
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument(
        "--benchmark",
        dest="benchmarks",
        action="append",
        choices=tuple(TASKS),
        help="take prompts from this benchmark's train split; may be repeated; default: "
        + ", ".join(DRAFTER_BENCHMARKS),
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the target's answers; 0: greedy"
    )
    parser.add_argument(
        "--texts", choices=("target", "gold"), help="train on the target's answers or on references"
    )


def run(arguments: Namespace) -> int:
    """Train the drafter; a second call continues an interrupted one."""
    if arguments.drafter not in DRAFTER_KINDS:
        raise DllmBenchError(unknown_name("kind of drafter", arguments.drafter, DRAFTER_KINDS))
    config = compose([f"model={arguments.model}", *arguments.settings])
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.models.load import load_model
    from dllm_bench.training import drafters

    job = drafter_job(arguments)
    model = inputs.resolve_model(config.model, inputs.resolve_hardware(config.hardware))
    folder = training_folder(arguments) / "drafters"
    name = f"{model.name}-{arguments.drafter}-layers{job.layers}"
    out = arguments.out or folder / name
    spec = inputs.model_spec(model)
    loaded = load_model(spec)
    file = folder / drafters.texts_file(job, inputs.weights_hash(model))
    drafters.train(job, loaded, drafters.texts_of(job, loaded, spec.chat, file), out)
    use = f"decoder={job.decoder} decoder.draft.drafter.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])


def drafter_job(arguments: Namespace) -> DrafterJob:
    """The job of the kind of drafter, with the options that were given."""
    from dllm_bench.training.drafters import KINDS

    job = KINDS[arguments.drafter]
    names = {field.name for field in fields(job)} & set(vars(arguments))
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if "benchmarks" in given:
        given["benchmarks"] = tuple(given["benchmarks"])
    if "shares" in given:
        ce, l1 = given["shares"]
        given["shares"] = replace(job.shares, ce=ce, l1=l1)
    return replace(job, **given)
