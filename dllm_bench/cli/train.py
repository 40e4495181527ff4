"""`dllm-bench train`: train a filter or a drafter, measure step times, fit temperatures.

Each kind of training has its options, its function below, and the module of `training/` it calls.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dllm_bench.cli.common import (
    add_results_option,
    compose,
    configured_paths,
    open_store,
    positive_float,
    positive_int,
    positive_ints,
    print_lines,
)
from dllm_bench.core.choices import unknown_name
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.load import load_model
from dllm_bench.store import inputs
from dllm_bench.store.files import write_json
from dllm_bench.training import drafters, filters, step_profiles, temperatures

TrainingCommand = Callable[[Namespace], int]
FILTER_COUNTS = {  # option -> (default, help)
    "--block": (32, "positions of a block"),
    "--gen-length": (64, "new tokens per prompt (the paper: 256)"),
    "--layers": (2, "linear layers"),
    "--epochs": (5000, "passes over all rows"),
    "--prompts": (400, "prompts drawn from the train splits"),
}
DRAFTER_COUNTS = {  # field of the job -> help
    "layers": "layers of the drafter",
    "slots": "positions of a block, anchor included, or steps of EAGLE-3",
    "rank": "rank of DSpark's transition head (the paper: 256)",
    "prompts": "prompts from the train splits",
    "max_new_tokens": "tokens of an answer at most",
    "rows": "rows of a step",
    "anchors": "blocks of a row at most (the paper: 512)",
    "steps": "steps of the optimiser",
}
BATCHES = "1,2,4,8,16,32,64,128,256"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the kinds of training, each with its options."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    text = "a filter for Learn2PD decoding"
    add_filter_options(add_kind(kinds, "filter", train_filter, text))
    text = "steps per second by tokens in the step, for the verification scheduler"
    add_step_options(add_kind(kinds, "sps", measure_steps, text))
    text = "temperatures of a confidence head, fitted on the samples of sealed runs"
    add_temperature_options(add_kind(kinds, "temperatures", fit_temperatures, text))
    text = "a drafter for a target model: DFlash, DSpark, EAGLE-3 (a second call continues)"
    add_drafter_options(add_kind(kinds, "drafter", train_drafter, text))


def add_kind(kinds: Any, name: str, command: TrainingCommand, text: str) -> ArgumentParser:
    """Add the parser of one kind of training."""
    parser: ArgumentParser = kinds.add_parser(name, help=text, description=text)
    add_results_option(parser)
    parser.set_defaults(training=command)
    return parser


def run(arguments: Namespace) -> int:
    """Run the chosen kind of training."""
    command: TrainingCommand = arguments.training
    return command(arguments)


def training_folder(arguments: Namespace) -> Path:
    """Where training results go unless --out names another place."""
    return Path(configured_paths(arguments)["results"]) / "training"


# --- filters -------------------------------------------------------------------------------------


def add_filter_options(parser: ArgumentParser) -> None:
    """Add the options of `train filter`."""
    parser.add_argument("model", metavar="MODEL", help="a model as in `dllm-bench run model=…`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RESULTS/training/filters")
    for name, (default, text) in FILTER_COUNTS.items():
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
        choices=("minigsm", "minicode", "minimath"),
        help="take prompts from this benchmark's train split; may be repeated; default: all",
    )
    parser.add_argument(
        "--flan", type=Path, metavar="DIR", help="take prompts from jsonl rows (task, inputs)"
    )
    parser.add_argument(
        "--all-blocks", action="store_true", help="also keep the blocks after the end of the text"
    )
    parser.add_argument(
        "--collect-only",
        action="store_true",
        help="only collect traces (a second call continues)",
    )


def train_filter(arguments: Namespace) -> int:
    """Train a filter for Learn2PD decoding on a model's own traces."""
    names = [field.name for field in fields(filters.FilterJob) if field.name in arguments]
    job = filters.FilterJob(**{name: getattr(arguments, name) for name in names})
    job = replace(job, benchmarks=tuple(arguments.benchmark)) if arguments.benchmark else job
    config = compose([f"model={arguments.model}"])
    model = inputs.resolve_model(config["model"], inputs.resolve_hardware(config["hardware"]))
    folder = training_folder(arguments)
    if arguments.collect_only:
        return print_lines([f"written: {filters.collect(job, model, folder / 'traces')}"])
    out = arguments.out or folder / "filters" / job.name(arguments.model)
    filters.train(job, model, out, folder / "traces")
    return print_lines([f"written: {out}", f"use it: decoder=learn2pd {filters.SOURCE}={out}"])


# --- drafters ------------------------------------------------------------------------------------


def add_drafter_options(parser: ArgumentParser) -> None:
    """Add the options of `train drafter`; by default, the kind of drafter sets their values."""
    parser.add_argument("model", metavar="MODEL", help="the target, as in `dllm-bench run model=…`")
    parser.add_argument("drafter", metavar="KIND", help="dflash, dspark-markov, eagle3, …")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: RESULTS/training/drafters"
    )
    for name, text in DRAFTER_COUNTS.items():
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
        "--temperature", type=float, metavar="T", help="of the target's answers; 0: greedy"
    )
    parser.add_argument(
        "--texts", choices=("target", "gold"), help="train on the target's answers or on references"
    )


def train_drafter(arguments: Namespace) -> int:
    """Train a drafter for its target, on the target's own texts."""
    job = drafter_job(arguments)
    config = compose([f"model={arguments.model}", *arguments.settings])
    model = inputs.resolve_model(config["model"], inputs.resolve_hardware(config["hardware"]))
    folder = training_folder(arguments) / "drafters"
    name = f"{arguments.model}-{arguments.drafter}-layers{job.layers}"
    out = arguments.out or folder / name
    spec = inputs.model_spec(model)
    loaded = load_model(spec)
    file = folder / drafters.texts_file(job, inputs.weights_hash(model))
    drafters.train(job, loaded, drafters.texts_of(job, loaded, spec.chat, file), out)
    use = f"decoder={job.decoder} decoder.draft.drafter.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])


def drafter_job(arguments: Namespace) -> drafters.DrafterJob:
    """The job of the kind of drafter, with the options that were given."""
    if arguments.drafter not in drafters.KINDS:
        known = list(drafters.KINDS)
        raise DllmBenchError(unknown_name("kind of drafter", arguments.drafter, known))
    job = drafters.KINDS[arguments.drafter]
    names = {field.name for field in fields(job)} & set(vars(arguments))
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if "shares" in given:
        ce, l1 = given["shares"]
        given["shares"] = replace(job.shares, ce=ce, l1=l1)
    return replace(job, **given)


# --- temperatures and step times -----------------------------------------------------------------


def add_temperature_options(parser: ArgumentParser) -> None:
    """Add the options of `train temperatures`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="hash of a run of a drafter with a confidence head"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RESULTS/training/temperatures/…"
    )


def fit_temperatures(arguments: Namespace) -> int:
    """Fit the temperatures of a confidence head on stored runs."""
    store = open_store(arguments)
    entries = [store.find(name) for name in arguments.runs]
    fitted, spec = temperatures.fit(entries), entries[0].spec
    folder = store.root.parent / "training" / "temperatures"
    out = arguments.out or folder / f"{spec.model['name']}-{spec.label}.json"
    write_json(out, fitted)
    print_lines(temperatures.lines(fitted))
    use = f"use it: decoder.length.temperatures.source={out}"
    return print_lines([f"written: {out}", use])


def add_step_options(parser: ArgumentParser) -> None:
    """Add the options of `train sps`."""
    parser.add_argument("model", metavar="MODEL", help="an autoregressive model, as in model=MODEL")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument("--batches", type=positive_ints, metavar="N,N,…", default=BATCHES)
    parser.add_argument(
        "--context", type=positive_int, metavar="N", default=256, help="tokens before the step"
    )
    parser.add_argument(
        "--repeats", type=positive_int, metavar="N", default=20, help="timed steps of each size"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RESULTS/training/sps/…")


def measure_steps(arguments: Namespace) -> int:
    """Measure a model's steps per second for several numbers of tokens in the step."""
    job = step_profiles.ProfileJob(arguments.batches, arguments.context, arguments.repeats)
    config = compose([f"model={arguments.model}", *arguments.settings])
    measured = step_profiles.run(job, config)
    folder = training_folder(arguments) / "sps"
    out = arguments.out or folder / f"{arguments.model}-{measured['hardware']['name']}.json"
    write_json(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    print_lines(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    use = f"decoder/length=hardware_aware decoder.length.profile.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])
