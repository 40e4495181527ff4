"""`dllm-bench train`: drafters, filters and adapters; step times and temperatures are measured.

A second call with the same options continues an interrupted one. torch takes seconds to import, so
the modules that train are imported only after the names on the command line were checked.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import compose, open_store, print_lines, print_written, training_folder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import require_known
from dllm_bench.store import inputs
from dllm_bench.store.files import write_json
from dllm_bench.store.groups import Hardware
from dllm_bench.training import DRAFTER_KINDS

if TYPE_CHECKING:
    from dllm_bench.training.drafters import DrafterJob


def given_fields(arguments: Namespace, job: Any) -> dict[str, Any]:
    """Return those fields of a job for which options were given."""
    names, options = {field.name for field in fields(job)}, vars(arguments).items()
    given = {name: value for name, value in options if name in names and value is not None}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def train_filter(arguments: Namespace) -> int:
    """Train a filter on a model's own traces, or only collect these."""
    if arguments.flan and (arguments.prompts or arguments.benchmarks):
        raise DllmBenchError("--flan gives all prompts; leave out --prompts and --benchmark.")
    config = compose([f"model={arguments.model}"])
    from dllm_bench.training import filters

    job = filters.FilterJob(**given_fields(arguments, filters.FilterJob))
    model, folder = inputs.model_here(config), training_folder(arguments)
    if arguments.collect_only:
        source, _ = filters.traces_of(job, model, folder / "traces")
        return print_lines([f"written: {source.file(folder / 'traces')}"])
    if arguments.source:
        out = filters.convert(arguments.source, model, folder / "filters", arguments.out)
    else:
        out = arguments.out or folder / "filters" / job.name(model.name)
        filters.train(job, model, out, folder / "traces")
    block = "" if arguments.source else f" decoder.schedule.block={job.block}"
    use = f"model={arguments.model} decoder=learn2pd{block} {filters.SOURCE}={out}"
    return print_written(out, use)


def train_drafter(arguments: Namespace) -> int:
    """Train a drafter for its target model, on the target's own texts."""
    require_known("kind of drafter", arguments.drafter, DRAFTER_KINDS)
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.models.load import load_model
    from dllm_bench.training import drafters

    job, model = drafter_job(arguments), inputs.model_here(config)
    if arguments.texts_only and job.texts == "gold":
        raise DllmBenchError("--texts gold has no texts for --texts-only; leave out one of both.")
    folder = training_folder(arguments) / "drafters"
    name = f"{model.name}-{arguments.drafter}-layers{job.layers}"
    out, spec = arguments.out or folder / name, inputs.model_spec(model)
    loaded = load_model(spec)
    target = drafters.target_key(inputs.weights_hash(model), loaded.metadata.dtype)
    file = folder / drafters.texts_file(job, target)
    texts = drafters.texts_of(job, loaded, spec.chat, file)
    if arguments.texts_only:
        return print_lines([f"written: {file}"])
    named, rows = (arguments.model, *arguments.settings), folder / f"rows-{target}"
    drafters.DrafterTraining.start(job, loaded, texts, rows, named).run(out)
    use = f"decoder={job.decoder} decoder.draft.drafter.source={out}"
    return print_written(out, f"model={shlex.join(named)} {use}")


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


def train_adapter(arguments: Namespace) -> int:
    """Train a LoRA adapter that makes a model one of block diffusion."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.models.load import load_model
    from dllm_bench.training import adapters

    job = adapters.AdapterJob(**given_fields(arguments, adapters.AdapterJob))
    model = inputs.model_here(config)
    folder = training_folder(arguments) / "adapters"
    out = arguments.out or folder / f"{model.name}-block{job.block}"
    spec = adapters.as_block_diffusion(inputs.model_spec(model), job)
    loaded = load_model(spec)
    own = [word for word in arguments.settings if word.lstrip("+~").startswith("model.")]
    named, texts = (arguments.model, *own), adapters.texts_of(job, loaded, spec.chat)
    adapters.AdapterTraining.start(job, loaded, texts, *named).run(out)
    return print_written(
        out,
        f"model={shlex.join(named)} model.lora={out} model.attention_form=block_causal "
        f"model.block={job.block} decoder=block_diffusion decoder.schedule.block={job.block}",
    )


def measure_sps(arguments: Namespace) -> int:
    """Measure, print and store a model's steps per second for several numbers of tokens."""
    config = compose([f"model={arguments.model}", *arguments.settings])
    from dllm_bench.training import scheduler

    job = scheduler.ProfileJob(arguments.batches, arguments.context, arguments.repeats)
    measured = scheduler.profile_model(job, config)
    own = arguments.model.rstrip("/").rpartition("/")[2]
    name = f"{own}-{Hardware(measured['hardware']).name}.json"
    out = arguments.out or training_folder(arguments) / "sps" / name
    write_json(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    print_lines(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    return print_written(out, f"decoder/length=hardware_aware decoder.length.profile.source={out}")


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
    return print_written(out, f"decoder.length.temperatures.source={out}")
