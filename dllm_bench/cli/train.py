"""`dllm-bench train`: drafters, filters and adapters; step times and temperatures are measured.

A second call with the same options continues an interrupted one. torch takes seconds to import, so
the modules that train are imported only after the names on the command line were checked.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import (
    add_name_argument,
    add_out_option,
    add_results_option,
    add_runs_argument,
    add_settings_argument,
    compose,
    open_store,
    positive_float,
    positive_int,
    positive_ints,
    print_lines,
    training_folder,
)
from dllm_bench.registry import require_known
from dllm_bench.store import inputs
from dllm_bench.store.files import write_json
from dllm_bench.store.groups import Hardware
from dllm_bench.training import DRAFTER_BENCHMARKS, DRAFTER_KINDS, FILTER_BENCHMARKS
from dllm_bench.training.prompts import TASKS

if TYPE_CHECKING:
    from dllm_bench.training.drafters import DrafterJob

PROMPTS_OF = "take prompts from this benchmark's train split; may be repeated; default: "
SIZES_OF_STEPS = "1,2,4,8,16,32,64,128,256"


# --- options and models that several kinds share -------------------------------------------------


def add_model(parser: ArgumentParser, text: str = "as in `dllm-bench run model=…`") -> None:
    """Add `--results` and MODEL."""
    add_results_option(parser)
    add_name_argument(parser, "model", text)


def add_out(parser: ArgumentParser, default: str, metavar: str = "DIR") -> None:
    """Add `--out`, whose default is a place below the results directory."""
    add_out_option(parser, f"default: RESULTS/training/{default}", metavar)


def add_counts(parser: ArgumentParser, texts: Mapping[str, str]) -> None:
    """Add an option for each whole number: field of the job -> help."""
    for name, text in texts.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive_int, metavar="N", help=text)


def add_benchmarks(parser: ArgumentParser, text: str) -> None:
    """Add `--benchmark`."""
    given: dict[str, Any] = {"action": "append", "choices": tuple(TASKS), "help": text}
    parser.add_argument("--benchmark", dest="benchmarks", **given)


def given_fields(arguments: Namespace, job: Any) -> dict[str, Any]:
    """Return those fields of a job for which options were given."""
    names = {field.name for field in fields(job)} & set(vars(arguments))
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


# --- filter --------------------------------------------------------------------------------------


def add_filter_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train filter`."""
    add_model(parser)
    add_out(parser, "filters")
    add_counts(
        parser,
        {
            "block": "positions of a block; default: 32",
            "gen_length": "new tokens per prompt (the paper: 256); default: 64",
            "layers": "linear layers; default: 2",
            "epochs": "passes over all rows; default: 5000",
            "prompts": "prompts drawn from the train splits; default: 400",
        },
    )
    parser.add_argument("--lr", type=positive_float, metavar="RATE", help="default: 1e-3")
    parser.add_argument("--seed", type=int, metavar="N", help="default: 0")
    parser.add_argument(
        "--labels",
        choices=("masked", "all"),
        help="positions that enter the loss; all: as in the authors' code",
    )
    add_benchmarks(parser, PROMPTS_OF + ", ".join(FILTER_BENCHMARKS))
    parser.add_argument(
        "--flan", type=Path, metavar="DIR", help="take prompts from jsonl rows (task, inputs)"
    )
    parser.add_argument(
        "--all-blocks", action="store_true", help="also keep the blocks after the end of the text"
    )
    text = "convert these released weights (torch's state dict) in place of training"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE.pth", help=text)
    parser.add_argument(
        "--collect-only", action="store_true", help="only collect traces (a second call continues)"
    )


def train_filter(arguments: Namespace) -> int:
    """Train a filter on a model's own traces, or only collect these."""
    config = compose([f"model={arguments.model}"])
    from dllm_bench.models.filters import FilterMetadata, convert_filter
    from dllm_bench.training import filters

    job = filters.FilterJob(**given_fields(arguments, filters.FilterJob))
    model, folder = inputs.model_here(config), training_folder(arguments)
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


# --- drafter -------------------------------------------------------------------------------------


def add_drafter_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train drafter`; by default, the kind of drafter sets their values."""
    add_model(parser, "the target, as in `dllm-bench run model=…`")
    parser.add_argument("drafter", metavar="KIND", help="dflash, dspark-markov, eagle3, …")
    add_settings_argument(parser)
    add_out(parser, "drafters")
    add_counts(
        parser,
        {
            "layers": "layers of the drafter",
            "slots": "positions of a block, anchor included, or steps of EAGLE-3",
            "rank": "rank of DSpark's transition head (the paper: 256)",
            "prompts": "prompts from the train splits",
            "max_new_tokens": "tokens of an answer at most",
            "rows": "rows of a step",
            "anchors": "blocks of a row at most (the paper: 512)",
            "steps": "steps of the optimiser",
            "draft_vocab": "most frequent tokens of the answers, which alone are drafted; "
            "default: all",
        },
    )
    text = "peak learning rate (the paper: 6e-4)"
    parser.add_argument("--lr", type=positive_float, metavar="RATE", help=text)
    parser.add_argument(
        "--shares",
        nargs=2,
        type=float,
        metavar=("CE", "L1"),
        help="weights of the two terms of the loss (DFlash: 1 0; DSpark: 0.1 0.9)",
    )
    text = "keep the target's outputs on the disk, up to this size (needs --draft-vocab)"
    parser.add_argument("--store-gib", type=positive_float, metavar="GIB", help=text)
    parser.add_argument("--seed", type=int, metavar="N")
    text = "seed of prompts and answers, where several trainings share them (default: --seed)"
    parser.add_argument("--text-seed", type=int, metavar="N", help=text)
    add_benchmarks(parser, PROMPTS_OF + ", ".join(DRAFTER_BENCHMARKS))
    text = "take prompts from jsonl rows (task, inputs), in turn with the benchmarks named"
    parser.add_argument("--flan", type=Path, metavar="DIR", help=text)
    text = "only collect answers (a second call continues)"
    parser.add_argument("--texts-only", action="store_true", help=text)
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the target's answers; 0: greedy"
    )
    parser.add_argument(
        "--texts", choices=("target", "gold"), help="train on the target's answers or on references"
    )


def train_drafter(arguments: Namespace) -> int:
    """Train a drafter for its target model, on the target's own texts."""
    require_known("kind of drafter", arguments.drafter, DRAFTER_KINDS)
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.models.load import load_model
    from dllm_bench.training import drafters

    job, model = drafter_job(arguments), inputs.model_here(config)
    folder = training_folder(arguments) / "drafters"
    name = f"{model.name}-{arguments.drafter}-layers{job.layers}"
    out, spec = arguments.out or folder / name, inputs.model_spec(model)
    loaded = load_model(spec)
    weights = inputs.weights_hash(model)
    file = folder / drafters.texts_file(job, weights)
    texts = drafters.texts_of(job, loaded, spec.chat, file)
    if arguments.texts_only:
        return print_lines([f"written: {file}"])
    rows = folder / f"rows-{weights[:10]}"
    drafters.DrafterTraining.start(job, loaded, texts, rows).run(out)
    use = f"decoder={job.decoder} decoder.draft.drafter.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])


def drafter_job(arguments: Namespace) -> DrafterJob:
    """Make the job for the kind of drafter, with the options that were given."""
    from dllm_bench.training.drafters import KINDS

    job = KINDS[arguments.drafter]
    given = given_fields(arguments, job)
    if "flan" in given:
        given.setdefault("benchmarks", ())
    if "shares" in given:
        ce, l1 = given["shares"]
        given["shares"] = replace(job.shares, ce=ce, l1=l1)
    return replace(job, **given)


# --- adapter -------------------------------------------------------------------------------------


def add_adapter_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train adapter`."""
    add_model(parser)
    add_settings_argument(parser)
    add_out(parser, "adapters")
    add_counts(
        parser,
        {
            "block": "positions of a block (default: 4)",
            "rank": "rank of the adapter (default: 16)",
            "prompts": "prompts from the train splits",
            "rows": "texts of a step",
            "steps": "steps of the optimiser",
        },
    )
    parser.add_argument("--lr", type=positive_float, metavar="RATE", help="peak learning rate")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--start", metavar="DIR", help="begin with the weights of this adapter")
    add_benchmarks(parser, "learn this task's train split; may be repeated; default: sentences")
    text = "learn the answers that `train drafter … --texts-only` wrote instead; may be repeated"
    parser.add_argument("--texts", action="append", metavar="FILE", help=text)


def train_adapter(arguments: Namespace) -> int:
    """Train a LoRA adapter that makes a model one of block diffusion."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.models.load import load_model
    from dllm_bench.training import adapters

    job = adapters.AdapterJob(**given_fields(arguments, adapters.AdapterJob))
    model = inputs.model_here(config)
    folder = training_folder(arguments) / "adapters"
    out = arguments.out or folder / f"{model.name}-block{job.block}"
    spec = inputs.model_spec(model)
    loaded = load_model(spec)
    texts = adapters.texts_of(job, loaded, spec.chat)
    adapters.AdapterTraining.start(job, loaded, texts).run(out)
    use = (
        f"use it: model={arguments.model} model.lora={out} model.attention_form=block_causal "
        f"model.block={job.block} decoder=block_diffusion decoder.schedule.block={job.block}"
    )
    return print_lines([f"written: {out}", use])


# --- step times and temperatures -----------------------------------------------------------------


def add_sps_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train sps`."""
    add_model(parser, "an autoregressive model, as in `dllm-bench run model=…`")
    add_settings_argument(parser)
    parser.add_argument("--batches", type=positive_ints, metavar="N,N,…", default=SIZES_OF_STEPS)
    parser.add_argument(
        "--context", type=positive_int, metavar="N", default=256, help="tokens before the step"
    )
    parser.add_argument(
        "--repeats", type=positive_int, metavar="N", default=20, help="timed steps of each size"
    )
    add_out(parser, "sps/…", "FILE")


def measure_sps(arguments: Namespace) -> int:
    """Measure, print and store a model's steps per second for several numbers of tokens."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.training import scheduler

    job = scheduler.ProfileJob(arguments.batches, arguments.context, arguments.repeats)
    measured = scheduler.profile_model(job, config)
    folder = training_folder(arguments) / "sps"
    out = arguments.out or folder / f"{arguments.model}-{Hardware(measured['hardware']).name}.json"
    write_json(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    print_lines(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    use = f"decoder/length=hardware_aware decoder.length.profile.source={out}"
    return print_lines([f"written: {out}", f"use it: {use}"])


def add_temperatures_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train temperatures`."""
    add_runs_argument(parser, ", of drafters with a confidence head")
    add_out(parser, "temperatures/…", "FILE")


def fit_temperatures(arguments: Namespace) -> int:
    """Fit, print and store the temperatures of a confidence head on stored runs."""
    store = open_store(arguments)
    entries = [store.find(name) for name in arguments.runs]
    from dllm_bench.training import scheduler

    fitted, spec = scheduler.fit_temperatures(entries), entries[0].spec
    folder = store.root.parent / "training" / "temperatures"
    out = arguments.out or folder / f"{spec.model.name}-{spec.label}.json"
    write_json(out, fitted)
    print_lines(scheduler.temperature_lines(fitted))
    use = f"use it: decoder.length.temperatures.source={out}"
    return print_lines([f"written: {out}", use])
