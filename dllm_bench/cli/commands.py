"""The commands beside `run`: table · figure · report · status · show · compare · rescore ·
lm-eval · simulate · doctor · prefetch · train.

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

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import check_results_directory
from dllm_bench.tables import options as table_options
from dllm_bench.tables.options import EMBEDDED

if TYPE_CHECKING:
    from dllm_bench.store.store import Store
    from dllm_bench.tables.plan import PlannedCell, PlannedRun
    from dllm_bench.tables.spec import PaperTable, Profile

Plain = dict[str, Any]
Compose = Callable[[Sequence[str]], Plain]
Action = Callable[[Namespace, Compose], int]


def paths_of(args: Namespace, compose: Compose) -> Plain:
    """The configured paths, with `--results` in first place."""
    from dllm_bench.store.settings import default_paths

    paths = default_paths() or dict(compose([])["paths"])
    return {**paths, **({"results": args.results} if args.results else {})}


def store_of(args: Namespace, compose: Compose) -> Store:
    """The store below the results directory."""
    from dllm_bench.store.store import Store

    results = paths_of(args, compose)["results"]
    check_results_directory(results)
    return Store(Path(results) / "runs")


def echo(lines: Iterable[str]) -> int:
    """Print lines; success."""
    for line in lines:
        print(line)
    return 0


def table(args: Namespace, compose: Compose) -> int:
    """Tables of the papers: run what is missing if asked to, render, say what is still missing."""
    from dllm_bench.cli import views as terminal
    from dllm_bench.store.files import explain_write_errors
    from dllm_bench.tables.build import build
    from dllm_bench.tables.cost import measured_runs
    from dllm_bench.tables.load import load_table
    from dllm_bench.tables.options import chosen
    from dllm_bench.tables.render import write

    store = store_of(args, compose)
    papers = [load_table(name) for name in chosen("table", args.table)]
    plans, failed = filled(args, compose, papers, store)
    kin = measured_runs(store)
    tables = [build(*plan, kin) for plan in plans]
    folder = store.root.parent / folder_of("tables", args)
    with explain_write_errors(folder):
        written = [path for built in tables for path in write(built, folder)]
    if len(tables) > 1:
        return echo(terminal.listing(tables, folder)) or complain(failed)
    echo(terminal.table(tables[0]))
    echo(f"written: {path}" for path in written)
    return complain(failed)


def figure(args: Namespace, compose: Compose) -> int:
    """Figures of the papers: run what is missing if asked to, draw, say what is still missing."""
    from dllm_bench.figures import evolutions
    from dllm_bench.figures.points import build_figure
    from dllm_bench.figures.spec import load_figure
    from dllm_bench.figures.write import headline, lines, write
    from dllm_bench.store.files import explain_write_errors
    from dllm_bench.tables.options import chosen

    store = store_of(args, compose)
    figures = [load_figure(name) for name in chosen("figure", args.figure)]
    plans, failed = filled(args, compose, [figure.table for figure in figures], store)
    for one, (_, profile, planned) in zip(figures, plans, strict=True):
        missing = list(evolutions.lacking(one, planned, store))
        failed += evolutions.make(missing, store) if args.run else []
        built = build_figure(one, profile, planned, store)
        with explain_write_errors(store.root.parent / folder_of("figures", args)):
            written = write(built, store.root.parent / folder_of("figures", args))
        echo(lines(built) if len(figures) == 1 else [headline(built)])
        echo(f"written: {path}" for path in written)
    return complain(failed)


def filled(
    args: Namespace, compose: Compose, papers: Sequence[PaperTable], store: Store
) -> tuple[list[tuple[PaperTable, Profile, list[PlannedCell]]], list[str]]:
    """Each table with its profile and plan, after running or submitting what is missing, if asked
    to; sentences of what failed.
    """
    from dllm_bench.store.settings import SettingsCache
    from dllm_bench.tables.load import load_profile
    from dllm_bench.tables.plan import Runs, distinct_runs, plan

    table_options.check(args)
    profile = load_profile(args.profile)
    if args.limit is not None:  # a quick look, which must not replace the whole
        fewer = (*profile.set, f"limit={args.limit}")
        profile = replace(profile, set=fewer, limit=args.limit)
    settings = SettingsCache(store.root.parent, compose)

    def plans() -> list[list[PlannedCell]]:
        given, shared = (settings.compose, store, args.submit, settings.resolve), Runs()
        asks = args.run or args.submit
        return [plan(paper, profile, *given, shared, asks) for paper in papers]

    planned = plans()
    settings.save()
    runs = distinct_runs(cell for cells in planned for cell in cells)
    failed = fill(args, runs, store)
    if args.submit or (args.run and any(run.open for run in runs)):
        planned = plans()
    return [(paper, profile, cells) for paper, cells in zip(papers, planned, strict=True)], failed


def folder_of(kind: str, args: Namespace) -> str:
    """Where tables or figures go: a quick look has a folder of its own."""
    return kind if args.limit is None else f"{kind}-limit-{args.limit}"


def complain(failed: Sequence[str]) -> int:
    """Say what failed; the exit code."""
    for sentence in failed:
        print(f"dllm-bench: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def fill(args: Namespace, runs: Sequence[PlannedRun], store: Store) -> list[str]:
    """Run or submit what a table misses, as asked; sentences of what failed."""
    if not (args.run or args.submit):
        return []
    from dllm_bench.launch import slurm
    from dllm_bench.launch.run_many import run_all
    from dllm_bench.run.progress import ManyRunsProgress
    from dllm_bench.tables.submit import send

    if args.submit:
        echo(send(runs, store, args.slurm))
        asked = {run.spec.identity_hash for run in runs if run.open and run.spec}
        return slurm.wait_for_jobs(store, ManyRunsProgress(0), asked) if args.wait else []
    specs = [run.spec for run in runs if run.open and run.spec]
    outcomes = run_all(specs, store=store, jobs=args.jobs or default_jobs(args.profile))
    return [f"{outcome.spec.folder}: {outcome.error}" for outcome in outcomes if outcome.error]


def default_jobs(profile: str) -> int:
    """Two embedded runs beside each other where there are two cores, else one at a time."""
    return min(2, os.cpu_count() or 1) if profile == EMBEDDED else 1


def report(args: Namespace, compose: Compose) -> int:
    """A static site of what is stored."""
    from dllm_bench.cli import report_options as options

    return echo(options.make(args, compose, store_of(args, compose)))


def status(args: Namespace, compose: Compose) -> int:
    """The board of runs, tables and figures."""
    from dllm_bench.cli import views as terminal
    from dllm_bench.launch import slurm

    store = store_of(args, compose)
    echo(terminal.board(store, store.root.parent / "tables"))
    echo(slurm.job_lines(store))
    return echo(terminal.figure_lines(store.root.parent / "figures"))


def show(args: Namespace, compose: Compose) -> int:
    """One run, or how one of its samples was filled."""
    from dllm_bench.cli import paint
    from dllm_bench.cli import views as terminal
    from dllm_bench.site import filling
    from dllm_bench.store.store import read_record, read_samples

    entry = store_of(args, compose).find(args.run)
    if args.sample is None:
        if args.json or args.canvas:
            raise DllmBenchError(
                "--json and --canvas show one sample, none was named; add --sample ID."
            )
        record = read_record(entry.path)
        return echo(terminal.summary(record) if record else terminal.unfinished(entry))
    sample = terminal.pick_sample(read_samples(entry.path), args.sample, args.run)
    if sample.served and not args.json:  # its filling is not known
        return echo([sample.text])
    model = {} if sample.served else compose([f"model={entry.spec.model['name']}"])["model"]
    decode = str if sample.served else terminal.decoder_of(model)
    view = filling.view(sample, decode, entry.spec.decoder)
    return echo([view.to_json()] if args.json else paint.lines(view, paint.terminal(), args.canvas))


def compare(args: Namespace, compose: Compose) -> int:
    """Two sealed runs, pairwise on the samples both have."""
    from dllm_bench.cli import views as terminal

    store = store_of(args, compose)
    one, other = (terminal.sealed(store.find(name)) for name in (args.a, args.b))
    return echo(terminal.comparison(one, other))


def rescore(args: Namespace, compose: Compose) -> int:
    """Grade the stored texts of a run again."""
    from dllm_bench.run import rescore as runs
    from dllm_bench.store.files import explain_write_errors

    entry = store_of(args, compose).find(args.run)
    plain = runs.settings(entry, runs.changes(args.settings))
    if args.evalplus:
        found = "".join(runs.evalplus_lines(entry, plain))
        with explain_write_errors(args.evalplus):
            args.evalplus.write_text(found, encoding="utf-8")
        return echo([f"written: {args.evalplus}"])
    return echo(runs.report(runs.rescore(entry, plain)))


def lm_eval(arguments: Sequence[str], compose: Compose) -> int:
    """lm-eval's own command line, with this project's models and decoders behind it."""
    from dllm_bench.benchmarks.lm_eval import command_line
    from dllm_bench.run.lm_eval_generator import generator

    def build(settings: Mapping[str, Any]) -> Callable[..., str]:
        return generator(compose([f"{name}={value}" for name, value in settings.items()]))

    command_line(arguments, build)
    return 0


def simulate(args: Namespace, compose: Compose) -> int:
    """Stored drafts under the load of many requests."""
    from dllm_bench.cli import simulate as load
    from dllm_bench.store.files import explain_write_errors

    store = store_of(args, compose)
    points = load.simulated(args, [store.find(name) for name in args.runs])
    if args.out:
        with explain_write_errors(args.out):
            args.out.write_text(load.as_csv(points), encoding="utf-8")
    return echo(load.lines(points))


def doctor(args: Namespace, compose: Compose) -> int:
    """What this machine can run; exit 1 when something needed is absent."""
    from dllm_bench.cli import doctor as report

    config = compose([f"model={args.model}"] if args.model else [])
    config = {**config, "paths": paths_of(args, compose)}
    lines = list(report.lines(config, model_asked=bool(args.model)))
    for mark, topic, text in lines:
        print(f"{mark}  {topic:24}{text}")
    return 1 if any(mark == report.NEED for mark, _, _ in lines) else 0


def prefetch(args: Namespace, compose: Compose) -> int:
    """Download models for machines without network, or verify what was downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from dllm_bench.models import sources as fetching
    from dllm_bench.store.inputs import model_spec

    cache = (args.to or Path(HF_HUB_CACHE)).expanduser().absolute()
    if args.verify:
        found = list(fetching.verify_manifest(cache))
        echo(f"{'no' if bad else 'ok'}  {source}  {'; '.join(bad)}" for source, bad in found)
        return 1 if any(bad for _, bad in found) else 0
    if not args.models:
        raise DllmBenchError("prefetch needs the names of models, as in model=NAME, or --verify.")
    specs = [model_spec(compose([f"model={name}"])["model"]) for name in args.models]
    for source, folder in fetching.prefetch(specs, cache):
        print(f"{source}: {folder or 'not on the hub, nothing to fetch'}")
    manifest = cache / fetching.MANIFEST
    told = f"manifest: {manifest}; copy it with the folder it lies in"
    return echo([told] if manifest.is_file() else [])


def train_filter(args: Namespace, compose: Compose) -> int:
    """Train a filter for Learn2PD decoding on a model's own traces."""
    from dataclasses import fields

    from dllm_bench.store import inputs
    from dllm_bench.training import filters as training

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
    from dllm_bench.models.load import load_model
    from dllm_bench.store import inputs
    from dllm_bench.training import drafters as training
    from dllm_bench.training.drafter_options import job_of

    job, config = job_of(args), compose([f"model={args.model}", *args.settings])
    model = inputs.resolve_model(config["model"], inputs.resolve_hardware(config["hardware"]))
    folder = Path(paths_of(args, compose)["results"]) / "training" / "drafters"
    out = args.out or folder / f"{args.model}-{args.drafter}-layers{job.layers}"
    spec = inputs.model_spec(model)
    loaded = load_model(spec)
    file = folder / training.texts_file(job, inputs.weights_hash(model))
    training.train(job, loaded, training.texts_of(job, loaded, spec.chat, file), out)
    use = f"decoder.draft.drafter.source={out}"
    return echo([f"written: {out}", f"use it: decoder={job.decoder} {use}"])


def train_temperatures(args: Namespace, compose: Compose) -> int:
    """Fit the temperatures of a confidence head on stored runs."""
    from dllm_bench.store.files import write_json
    from dllm_bench.training import temperatures

    store = store_of(args, compose)
    entries = [store.find(name) for name in args.runs]
    fitted, spec = temperatures.fit(entries), entries[0].spec
    folder = store.root.parent / "training" / "temperatures"
    out = args.out or folder / f"{spec.model['name']}-{spec.label}.json"
    write_json(out, fitted)
    echo(temperatures.lines(fitted))
    return echo([f"written: {out}", f"use it: decoder.length.temperatures.source={out}"])


def train_sps(args: Namespace, compose: Compose) -> int:
    """Measure a model's steps per second against tokens in the step."""
    from dllm_bench.store.files import write_json
    from dllm_bench.training import step_profiles

    job = step_profiles.ProfileJob(args.batches, args.context, args.repeats)
    config = compose([f"model={args.model}", *args.settings])
    measured = step_profiles.run(job, config)
    folder = Path(paths_of(args, compose)["results"]) / "training" / "sps"
    out = args.out or folder / f"{args.model}-{measured['hardware']['name']}.json"
    write_json(out, measured)
    pairs = zip(measured["tokens"], measured["steps_per_s"], strict=True)
    echo(f"{tokens:6} tokens  {rate:10.1f} steps/s" for tokens, rate in pairs)
    use = f"decoder/length=hardware_aware decoder.length.profile.source={out}"
    return echo([f"written: {out}", f"use it: {use}"])
