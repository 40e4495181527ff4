"""The commands beside `run`: table · status · show · compare · rescore · lm-eval · doctor ·
prefetch · train.

Each takes the parsed arguments and `compose` (overrides -> plain configuration), finds what is
stored and prints what the layer below says about it. Without Hydra; heavy imports inside.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.request import DllmBenchError

if TYPE_CHECKING:
    from dllm_bench.runs.spec import RunSpec
    from dllm_bench.runs.store import Store

Plain = dict[str, Any]
Compose = Callable[[Sequence[str]], Plain]
Action = Callable[[Namespace, Compose], int]
EMBEDDED = "embedded"


def paths_of(args: Namespace, compose: Compose) -> Plain:
    """The configured paths, with `--results` in first place."""
    paths = dict(compose([])["paths"])
    return {**paths, **({"results": args.results} if args.results else {})}


def store_of(args: Namespace, compose: Compose) -> Store:
    """The store below the results directory."""
    from dllm_bench.runs.store import Store

    return Store(Path(paths_of(args, compose)["results"]) / "runs")


def echo(lines: Iterable[str]) -> int:
    """Print lines; success."""
    for line in lines:
        print(line)
    return 0


def table(args: Namespace, compose: Compose) -> int:
    """A paper's table: run what is missing if asked to, render, say what is still missing."""
    from dllm_bench.report import terminal
    from dllm_bench.tables.build import build
    from dllm_bench.tables.plan import open_runs, plan
    from dllm_bench.tables.render import write
    from dllm_bench.tables.spec import load_profile, load_table

    paper, profile, store = (
        load_table(args.table),
        load_profile(args.profile),
        store_of(args, compose),
    )
    folder = "tables"
    if args.limit is not None:  # a quick look, which must not replace the table itself
        profile = replace(profile, set=(*profile.set, f"limit={args.limit}"))
        folder = f"tables-limit-{args.limit}"
    planned = plan(paper, profile, compose, store)
    waiting = [run.spec for run in open_runs(planned) if run.spec]
    failed = fill(args, waiting, store)
    if waiting and args.run:
        planned = plan(paper, profile, compose, store)
    built = build(paper, profile, planned)
    written = write(built, store.root.parent / folder)
    echo(terminal.table(built))
    echo(f"written: {path}" for path in written)
    for sentence in failed:
        print(f"dllm-bench: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def fill(args: Namespace, specs: Sequence[RunSpec], store: Store) -> list[str]:
    """Run or submit what a table misses, as asked; sentences of what failed."""
    from dllm_bench.runs import launch

    if args.submit:
        jobs = launch.submit(specs, store=store, folder=store.root.parent / ".launch")
        echo([f"submitted {len(jobs)} runs as one array; `dllm-bench status` shows them"])
    if not args.run:
        return []
    outcomes = launch.run_all(specs, store=store, jobs=args.jobs or default_jobs(args.profile))
    return [f"{outcome.spec.folder}: {outcome.error}" for outcome in outcomes if outcome.error]


def default_jobs(profile: str) -> int:
    """Two embedded runs beside each other where there are two cores, else one at a time."""
    return min(2, os.cpu_count() or 1) if profile == EMBEDDED else 1


def status(args: Namespace, compose: Compose) -> int:
    """The board of runs and tables."""
    from dllm_bench.report import terminal

    store = store_of(args, compose)
    return echo(terminal.board(store, store.root.parent / "tables"))


def show(args: Namespace, compose: Compose) -> int:
    """One run, or how one of its samples was filled."""
    from dllm_bench.report import filling, paint, terminal
    from dllm_bench.runs.store import read_record, read_samples

    entry = store_of(args, compose).find(args.run)
    if args.sample is None:
        if args.json or args.canvas:
            raise DllmBenchError(
                "--json and --canvas show one sample, none was named; add --sample ID."
            )
        record = read_record(entry.path)
        return echo(terminal.summary(record) if record else terminal.unfinished(entry))
    sample = terminal.pick_sample(read_samples(entry.path), args.sample, args.run)
    model = compose([f"model={entry.spec.model['name']}"])["model"]
    view = filling.view(sample, terminal.decoder_of(model), entry.spec.decoder)
    return echo([view.to_json()] if args.json else paint.lines(view, paint.terminal(), args.canvas))


def compare(args: Namespace, compose: Compose) -> int:
    """Two sealed runs, pairwise on the samples both have."""
    from dllm_bench.report import terminal

    store = store_of(args, compose)
    one, other = (terminal.sealed(store.find(name)) for name in (args.a, args.b))
    return echo(terminal.comparison(one, other))


def rescore(args: Namespace, compose: Compose) -> int:
    """Grade the stored texts of a run again."""
    import yaml

    from dllm_bench.runs import rescore as runs

    entry = store_of(args, compose).find(args.run)
    pairs = [text.partition("=") for text in args.settings]
    plain = runs.settings(entry, {name: yaml.safe_load(value) for name, _, value in pairs})
    if args.evalplus:
        args.evalplus.write_text("".join(runs.evalplus_lines(entry, plain)), encoding="utf-8")
        return echo([f"written: {args.evalplus}"])
    return echo(runs.report(runs.rescore(entry, plain)))


def lm_eval(arguments: Sequence[str], compose: Compose) -> int:
    """lm-eval's own command line, with this project's models and decoders behind it."""
    from dllm_bench.benchmarks.lm_eval import command_line
    from dllm_bench.runs.adapter import generator

    def build(settings: Mapping[str, Any]) -> Callable[..., str]:
        return generator(compose([f"{name}={value}" for name, value in settings.items()]))

    command_line(arguments, build)
    return 0


def doctor(args: Namespace, compose: Compose) -> int:
    """What this machine can run; exit 1 when something needed is absent."""
    from dllm_bench.report import doctor as report

    config = compose([f"model={args.model}"] if args.model else [])
    lines = list(report.lines(config, model_asked=bool(args.model)))
    for mark, topic, text in lines:
        print(f"{mark}  {topic:24}{text}")
    return 1 if any(mark == report.NEED for mark, _, _ in lines) else 0


def prefetch(args: Namespace, compose: Compose) -> int:
    """Download models for machines without network, or verify what was downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from dllm_bench.models import prefetch as fetching
    from dllm_bench.runs.inputs import model_spec

    cache = (args.to or Path(HF_HUB_CACHE)).expanduser().absolute()
    if args.verify:
        found = list(fetching.verify(cache))
        echo(f"{'no' if bad else 'ok'}  {source}  {'; '.join(bad)}" for source, bad in found)
        return 1 if any(bad for _, bad in found) else 0
    if not args.models:
        raise DllmBenchError("prefetch needs the names of models, as in model=NAME, or --verify.")
    specs = [model_spec(compose([f"model={name}"])["model"]) for name in args.models]
    for source, folder in fetching.prefetch(specs, cache):
        print(f"{source}: {folder or 'not on the hub, nothing to fetch'}")
    return echo([f"manifest: {cache / fetching.MANIFEST}; copy it with the folder it lies in"])


def train_embedded(args: Namespace, compose: Compose) -> int:
    """Train an embedded model from its recipe."""
    from dllm_bench.training.embedded import train
    from dllm_bench.training.recipes import RECIPES

    if args.model not in RECIPES:
        raise DllmBenchError(
            f"No recipe makes {args.model!r}; choose one of: {', '.join(RECIPES)}."
        )
    results = Path(paths_of(args, compose)["results"])
    folder = train(args.model, args.out or results / "training" / args.model, steps=args.steps)
    return echo([f"written: {folder}"])


def train_filter(args: Namespace, compose: Compose) -> int:
    """Train a filter for Learn2PD decoding on a model's own traces."""
    from dataclasses import fields

    from dllm_bench.runs import inputs
    from dllm_bench.training import filter as training

    given = {f.name: getattr(args, f.name) for f in fields(training.FilterJob) if f.name in args}
    job = training.FilterJob(**given)
    job = replace(job, benchmarks=tuple(args.benchmark)) if args.benchmark else job
    config = compose([f"model={args.model}"])
    model = inputs.resolve_model(config["model"], inputs.resolve_hardware(config["hardware"]))
    folder = Path(paths_of(args, compose)["results"]) / "training"
    if args.collect_only:
        return echo([f"written: {training.collect(job, model, folder / 'traces')}"])
    out = args.out or folder / "filters" / job.name(args.model)
    training.train(job, model, out, folder / "traces")
    return echo([f"written: {out}", f"use it: decoder=learn2pd {training.SOURCE}={out}"])


def train_drafter(args: Namespace, compose: Compose) -> int:
    """Train a drafter beside its target, on the target's own texts."""
    from dllm_bench.models.loading import load
    from dllm_bench.runs import inputs
    from dllm_bench.training import drafter as training
    from dllm_bench.training.drafter_options import job_of

    job, config = job_of(args), compose([f"model={args.model}", *args.settings])
    model = inputs.resolve_model(config["model"], inputs.resolve_hardware(config["hardware"]))
    folder = Path(paths_of(args, compose)["results"]) / "training" / "drafters"
    out = args.out or folder / f"{args.model}-{args.drafter}-layers{job.layers}"
    spec = inputs.model_spec(model)
    loaded = load(spec)
    file = folder / training.texts_file(job, inputs.weights_hash(model))
    training.train(job, loaded, training.texts_of(job, loaded, spec.chat, file), out)
    use = f"decoder.draft.drafter.source={out}"
    return echo([f"written: {out}", f"use it: decoder={job.decoder} {use}"])


def train_sps(args: Namespace, compose: Compose) -> int:
    """Measure a model's steps per second against tokens in the step."""
    from dllm_bench.training import step_profile

    job = step_profile.ProfileJob(args.batches, args.context, args.repeats)
    config = compose([f"model={args.model}", *args.settings])
    measured = step_profile.run(job, config)
    folder = Path(paths_of(args, compose)["results"]) / "training" / "sps"
    out = args.out or folder / f"{args.model}-{measured['hardware']['name']}.json"
    step_profile.write(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    echo(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    use = f"decoder/length=hardware_aware decoder.length.profile.source={out}"
    return echo([f"written: {out}", f"use it: {use}"])
