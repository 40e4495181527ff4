"""`dllm-bench show` and `prompt`: show the metrics of one run, the order in which one sample was
decoded, or the prompt of an item as the model receives it, with its special tokens.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence

from dllm_bench.cli import show_sample
from dllm_bench.cli.common import (
    Command,
    add_name_argument,
    add_run_argument,
    add_settings_argument,
    compose,
    open_store,
    print_lines,
)
from dllm_bench.core.benchmark import GradedAnswer
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show_painted
from dllm_bench.runs import progress
from dllm_bench.site.decoding_order import decoding_order
from dllm_bench.site.format import align, commit, printable
from dllm_bench.site.texts import TextSource, requests_of, token_decoder
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import resolve_model
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, flat_settings
from dllm_bench.store.store import RunEntry, read_record, read_samples
from dllm_bench.tables.frame import is_loaded

WIDTH = 72  # characters shown of an extracted answer


def add_show_arguments(parser: ArgumentParser) -> None:
    """Add the options of `show`."""
    add_run_argument(parser)
    parser.add_argument(
        "--sample", metavar="ID", help="show how this sample was decoded; 0: the first, and so on"
    )
    parser.add_argument("--canvas", action="store_true", help="show the canvas of every forward")
    parser.add_argument(
        "--json", action="store_true", help="print the sample's forwards and tokens as JSON"
    )


def show_run(arguments: Namespace) -> int:
    """Print the metrics of a run or the decoding order of one of its samples."""
    entry = open_store(arguments).find(arguments.run)
    if arguments.sample is None:
        if arguments.json or arguments.canvas:
            raise DllmBenchError(
                "--json and --canvas show one sample, but none was named; add --sample ID."
            )
        record = read_record(entry.path)
        return print_lines(summary_lines(record) if record else unfinished_lines(entry))
    samples, record = read_samples(entry.path), read_record(entry.path)
    order = record.columns["id"] if record else list(samples)
    sample = named_sample(samples, order, arguments.sample, arguments.run)
    texts = TextSource(compose)
    decode = str if sample.served else texts.decode(entry.spec)
    decoding = decoding_order(sample, decode, entry.spec.decoder)
    if arguments.json:
        return print_lines([decoding.to_json()])
    print_lines(grading_lines(entry, sample, texts))
    if sample.served:  # a server does not report its decoding order
        return print_lines(["", sample.text])
    console = show_sample.terminal()
    show_painted(show_sample.drawing(decoding, console, arguments.canvas), console)
    return 0


def grading_lines(entry: RunEntry, sample: SampleRecord, texts: TextSource) -> Iterator[str]:
    """Yield prompt, right answer, what was read of the text, and verdict of a sample."""
    one, record = {sample.id: sample}, read_record(entry.path)
    prompt = texts.prompts(entry.spec, one).get(sample.id)
    unknown = "not known: benchmark or tokenizer is missing on this machine, or has changed"
    yield from ("prompt:", *(prompt or unknown).split("\n"), "")
    grade = record.grades.get(sample.id) if record else None
    if answer := texts.answers(entry.spec, one).get(sample.id):
        yield from named_text("right answer", answer.gold)
        yield from named_text("read from the text", answer.extracted)
        yield from every_grading(answer, grade.metrics if grade else {})
    if grade:
        yield f"verdict: {grade.verdict} ({grade.value})"
    yield ""


def every_grading(answer: GradedAnswer, stored: Mapping[str, float]) -> Iterator[str]:
    """Yield each way of grading the text: its name, its value and what it read, if there are
    several.

    stored: values in the run's record. Programs are only executed for graders in it.
    """
    values, found = {**answer.metrics, **stored}, answer.readings
    read = {name: found.get(name.rpartition(",")[2]) for name in values}
    rows = [(name, values[name], text) for name, text in read.items() if text is not None]
    if len(rows) > 1:
        yield "all gradings:"
        shown = [(f"  {name}", f"{value:g}", one_line(text)) for name, value, text in rows]
        yield from align(shown)


def one_line(text: str) -> str:
    """Return a text in one line, cut to `WIDTH`."""
    line = " ⏎ ".join(printable(part) for part in text.split("\n"))
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def named_text(name: str, text: str) -> Iterator[str]:
    """Yield a text after its name; below it if it has several lines."""
    first, *rest = text.split("\n")
    yield from (f"{name}:", first, *rest) if rest else (f"{name}: {first}",)


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield what a sealed run measured, and on which machine and commit."""
    environment = record.environment
    yield from progress.summary(record)
    yield f"machine: {record.devices}, {environment.get('threads')} threads"
    for number, one in enumerate(record.environments, 1):
        load = f"{one.get('load')} on {one.get('cores')} cores"
        remark = ", which disturbs timings" if is_loaded(one) else ""
        yield f"load when session {number} began: {load}{remark}"
    yield f"commit: {commit(environment)}"
    yield f"run: {record.identity_hash}"
    yield "settings:"
    yield from align([("", *setting) for setting in flat_settings(record.spec).items()])


def unfinished_lines(entry: RunEntry) -> Iterator[str]:
    """Yield the progress of a run that is not sealed."""
    total = entry.total if entry.total is not None else "?"
    yield f"{entry.spec.short} is {entry.state}: {entry.done} of {total} done"
    if entry.error:
        yield entry.error
    yield "The command that started it continues it."


def named_sample(
    samples: Mapping[str, SampleRecord], order: Sequence[str], name: str, run: str
) -> SampleRecord:
    """Return the sample called `name`, or the one at index `name` of `order`; an error lists some
    names.

    order: sample ids in the benchmark's order, in which the report and W&B's table count them. The
    stored lines of a batched run, or of several processes, are in another order.
    """
    place = int(name) if name.isdecimal() else len(order)
    chosen = order[place] if name not in samples and place < len(order) else name
    if chosen in samples:
        return samples[chosen]
    known = ", ".join(list(samples)[:3]) or "none"
    raise DllmBenchError(
        f"Run {run} has no stored sample {name!r} among {len(samples)}; the first are: {known}. A "
        "number counts samples from 0."
    )


def add_prompt_arguments(parser: ArgumentParser) -> None:
    """Add the options of `prompt`."""
    add_name_argument(parser, "benchmark", "a name of conf/benchmark")
    text = "as in `run`: model=NAME (its chat template and tokenizer are used), benchmark.shots=4"
    add_settings_argument(parser, text)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="item, from 0 (default)")


def show_prompt(arguments: Namespace) -> int:
    """Print the prompt, its length in tokens, the number of new tokens and the stop strings."""
    place = arguments.sample
    config = compose([f"benchmark={arguments.benchmark}", *arguments.settings])
    model, hardware = resolve_model(config.model, Hardware({})), Hardware({})
    spec = RunSpec(model, {}, config.benchmark, hardware, limit=place + 1)
    requests = requests_of(spec)
    if not 0 <= place < len(requests):
        raise DllmBenchError(
            f"--sample {place} was asked of benchmark {arguments.benchmark!r}, which has "
            f"{len(requests)} items; count from 0."
        )
    request = requests[place]
    return print_lines(
        [
            *token_decoder(spec.model)(request.prompt_ids).split("\n"),
            "",
            f"{request.id}: {len(request.prompt_ids)} tokens, "
            f"{request.max_new_tokens} new ones, stops at {list(request.stop)}",
        ]
    )


KINDS = {
    "show": Command(add_show_arguments, show_run),
    "prompt": Command(add_prompt_arguments, show_prompt),
}
