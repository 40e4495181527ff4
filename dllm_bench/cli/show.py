"""`dllm-bench show`: the numbers of one run, or the order in which one sample was decoded."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping

from dllm_bench.cli import show_sample
from dllm_bench.cli.common import add_results_option, compose, open_store, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.run import progress
from dllm_bench.site.decoding_order import decoding_order
from dllm_bench.site.format import commit
from dllm_bench.site.texts import token_decoder
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.store import RunEntry, read_record, read_samples


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `show`."""
    add_results_option(parser)
    parser.add_argument("run", help="hash of a run, or its beginning (see status)")
    parser.add_argument("--sample", metavar="ID", help="show how this sample was decoded")
    parser.add_argument("--canvas", action="store_true", help="also the canvas after every forward")
    parser.add_argument(
        "--json", action="store_true", help="the sample's forwards and tokens as JSON"
    )


def run(arguments: Namespace) -> int:
    """Print the numbers of a run or the decoding order of one of its samples."""
    entry = open_store(arguments).find(arguments.run)
    if arguments.sample is None:
        if arguments.json or arguments.canvas:
            raise DllmBenchError(
                "--json and --canvas show one sample, but none was named; add --sample ID."
            )
        record = read_record(entry.path)
        return print_lines(summary_lines(record) if record else unfinished_lines(entry))
    sample = named_sample(read_samples(entry.path), arguments.sample, arguments.run)
    if sample.served and not arguments.json:  # a server does not report its decoding order
        return print_lines([sample.text])
    model = {} if sample.served else compose([f"model={entry.spec.model['name']}"])["model"]
    decode = str if sample.served else token_decoder(model)
    order = decoding_order(sample, decode, entry.spec.decoder)
    if arguments.json:
        return print_lines([order.to_json()])
    return print_lines(show_sample.lines(order, show_sample.terminal(), arguments.canvas))


def summary_lines(record: RunRecord) -> Iterator[str]:
    """What a sealed run measured, and on which machine and commit."""
    environment = record.environment
    yield from progress.summary(record)
    yield f"machine: {record.devices}, {environment.get('threads')} threads"
    yield f"commit: {commit(environment)}"
    yield f"run: {record.identity_hash}"


def unfinished_lines(entry: RunEntry) -> Iterator[str]:
    """How far a run got that is not sealed."""
    total = entry.total if entry.total is not None else "?"
    yield f"{entry.spec.short} is {entry.state}: {entry.done} of {total} done"
    if entry.error:
        yield entry.error
    yield "The command that started it continues it."


def named_sample(samples: Mapping[str, SampleRecord], name: str, run: str) -> SampleRecord:
    """The sample called `name`; the error gives examples of names."""
    if name not in samples:
        known = ", ".join(list(samples)[:3]) or "none"
        raise DllmBenchError(
            f"Run {run} has no stored sample {name!r} among {len(samples)}; the first are: {known}."
        )
    return samples[name]
