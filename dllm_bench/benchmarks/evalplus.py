"""Benchmarks in EvalPlus form: a function to complete, graded on base and on extra inputs.

The sets are `minicode` and `minicode_free` (of this project), `humaneval_plus` and `mbpp_plus`
(original files, or EvalPlus's own download if there is no data directory). Programs run only in the
sandbox, which compares them with the reference solution (`sandbox/child/check.py`).
EvalPlus itself is used for the inputs of MBPP+ and for sanitising, and only benchmarks that need
these import it. The metric `plus` counts a program that is right on base and extra inputs, as
EvalPlus reports it. `samples` writes the file that `evalplus.evaluate` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks import code_answers, items, sandbox
from dllm_bench.benchmarks.bounded import UnreadableAnswerError, call_bounded, unreadable
from dllm_bench.benchmarks.embedded import SPLITS, FrozenTask
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome
from dllm_bench.benchmarks.tasks import TEXTS
from dllm_bench.core import benchmark
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.registry import register, require_known

STAGES = ("base", "plus")
CALL_LIMITS = {"min_time_s": 1.0, "time_factor": 4.0}
"""A call may take max(1 s, 4 x the reference's time), the numbers of EvalPlus 0.3.1, in seconds of
an idle machine."""
SMALL = Limits()
LARGE = Limits(cpu_s=240, wall_s=480.0, memory_mb=4096, packages=True)
"""For reference and program in one child: those of Mbpp/599 take 30 to 40 s each on a slow
machine."""


@dataclass(frozen=True)
class ProblemSet:
    """Where the problems of a name come from and how they are graded."""

    splits: tuple[str, ...] = ("test",)
    file: str = ""
    """Path in a data directory; empty for generated problems."""
    download: Sequence[str] = ()
    """Module and function of EvalPlus that give the path of a downloaded file."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Entry point -> rule of check.py, where the rule is not equality."""
    limits: Limits = LARGE
    needs_evalplus: bool = False
    """Whether reading the inputs takes EvalPlus."""


GENERATED = {name: FrozenTask(name) for name in ("minicode", "minicode_free")}
"""Sets of this project."""
PROBLEM_SETS: Mapping[str, ProblemSet] = {
    **{task: ProblemSet(SPLITS, limits=SMALL) for task in GENERATED},
    **{
        name: ProblemSet(**entry)
        for name, entry in read_yaml(Path(__file__).with_name("evalplus_sets.yaml")).items()
    },
}
FIELDS = dict.fromkeys(("task_id", "prompt", "entry_point", "canonical_solution"), "text")
FIELDS |= {"base_input": "list", "plus_input": "list", "atol": "number"}
"""What prompts and grades read of a problem -> its kind, see `items.KINDS`."""
CHAT, DIFFUCODER, INSTRUCT = "chat", "diffucoder", "instruct"
TEMPLATES = (items.PLAIN, CHAT, DIFFUCODER, INSTRUCT)
WORDING = TEXTS["evalplus"]


def evalplus_sanitize(program: str, entry_point: str) -> str:
    """Sanitise as EvalPlus does, MAX_LINES lines at most, because its time is quadratic in their
    number."""
    from evalplus.sanitize import sanitize

    return sanitize("\n".join(program.split("\n")[: code_answers.MAX_LINES]), entry_point)


POSTPROCESS: Mapping[str, tuple[Callable[[str, str], str], Callable[[str, str], str] | None]] = {
    "assembled": (code_answers.assemble_program, None),
    "evalplus": (code_answers.assemble_program, evalplus_sanitize),
    "diffucoder": (code_answers.diffucoder_program, evalplus_sanitize),
    "lopa": (code_answers.lopa_program, code_answers.lopa_sanitize),
}
"""Published ways from an answer to a program: (prompt, answer) -> program, then what, if anything,
sanitises it by its entry point."""


def made_program(answer: str, postprocess: str, prompt: str, entry_point: str) -> str:
    """Return the program that one of `POSTPROCESS` makes of an answer; called by a helper."""
    assemble, sanitize = POSTPROCESS[postprocess]
    program = assemble(prompt, answer)
    return sanitize(program, entry_point) if sanitize else program


@register("benchmark.evalplus")
@dataclass(frozen=True, eq=False, kw_only=True)
class EvalPlusBenchmark(items.BenchmarkSettings, items.ItemsBenchmark):
    """One problem set with its prompt form. `primary` is "plus" or "base"; there are no shots.

    template: "plain" (the model continues the prompt), "chat" (one user turn: `instruction`, then
    the prompt, in a fence if there is an instruction), "diffucoder" (a fixed text) or "instruct" (a
    user turn, then the beginning of the answer with an open fence).
    """

    dataset: str
    """A name of PROBLEM_SETS."""
    instruction: str = ""
    postprocess: str = "assembled"
    """A name of POSTPROCESS."""
    primary: str = "plus"
    limit: int | None = None
    """Number of problems; None for all of the split."""

    def check(self) -> None:
        """Raise DllmBenchError for unknown names, absent data or EvalPlus, or missing consent."""
        require_known("EvalPlus problem set", self.dataset, PROBLEM_SETS)
        require_known(f"template of {self.name!r}:", self.template, TEMPLATES)
        require_known(f"postprocess of {self.name!r}:", self.postprocess, POSTPROCESS)
        require_known(f"primary metric of {self.name!r}:", self.primary, STAGES)
        source = PROBLEM_SETS[self.dataset]
        require_known(f"split of {self.name!r}:", self.split, source.splits)
        sandbox.require_consent(self.allow_code_execution, self.name)
        downloads = bool(source.file) and self.data_dir is None
        if downloads:
            cache_dir = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
            items.require_cache_or_server(
                self.name, "github.com", cache_dir / "evalplus", source.file
            )
        elif source.file:
            items.data_file(str(self.data_dir), source.file, self.name)
        sanitizes = self.postprocess in ("evalplus", DIFFUCODER)
        needed = sanitizes or source.needs_evalplus or downloads
        if needed and importlib.util.find_spec("evalplus") is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} needs the package evalplus, which is not installed; "
                "install it with pip install 'dllm-bench[code]'."
            )
        if self.shots:
            raise DllmBenchError(
                f"Benchmark {self.name!r} was asked for {self.shots} few-shot examples and has "
                "none; set benchmark.shots=0."
            )

    @property
    def item_set(self) -> FrozenTask | None:
        return GENERATED.get(self.dataset)

    @property
    def runs_code(self) -> bool:
        """Always: only running a program shows whether it is right."""
        return True

    def all_items(self) -> Sequence[items.Item]:
        """Return all problems; inputs are as in the JSON file."""
        return _problems(self.dataset, self.split, self.data_dir)

    @property
    def _template(self) -> str:
        """The template this model can take."""
        return items.PLAIN if self.template == CHAT and not self.chat else self.template

    def prompt(self, item: items.Item) -> str | benchmark.Turns:
        text = _prompt_text(item)
        if self._template == items.PLAIN:
            return text
        if self._template == DIFFUCODER:
            return WORDING["diffucoder"].format(prompt=text.rstrip("\n"))
        if self._template == INSTRUCT:
            asked, begun = asked_for(text), WORDING["begun"]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": begun}]
            return turns if self.chat else f"{asked}\n{begun}"
        if self.instruction:
            text = f"{self.instruction}\n```python\n{text}```\n"
        return [{"role": "user", "content": text}]

    def form(self) -> dict[str, object]:
        instruction = self.instruction if self._template == CHAT else ""
        return {"form": [self._template, instruction, list(self.stops)]}

    def score(self, texts: Mapping[str, str]) -> dict[str, benchmark.SampleScore]:
        """Run every answer against its problem's inputs; needs consent, no model."""
        sandbox.require_consent(self.allow_code_execution, self.name)
        problems = self.answered(texts)
        scores = sandbox.map_in_threads(lambda p: self._grade(p, texts[p["id"]]), problems)
        return {p["id"]: score for p, score in zip(problems, scores, strict=True)}

    def answers(self, texts: Mapping[str, str]) -> dict[str, benchmark.GradedAnswer]:
        """Return the reference solution, and the program made of the text; nothing is run."""
        return {
            problem["id"]: benchmark.GradedAnswer(
                problem["canonical_solution"], self._program_or_none(problem, texts[problem["id"]])
            )
            for problem in self.answered(texts)
        }

    def program(self, problem: items.Item, text: str) -> str:
        """Return the program that `postprocess` makes of an answer; UnreadableAnswerError if it
        fails."""
        asked = self.postprocess, _prompt_text(problem), problem["entry_point"]
        return str(call_bounded(made_program, items.cut_at_stop(text, self.stops), *asked))

    def _program_or_none(self, problem: items.Item, text: str) -> str:
        """Return the program, empty for an answer that cannot be read."""
        try:
            return self.program(problem, text)
        except UnreadableAnswerError:
            return ""

    def samples(self, texts: Mapping[str, str]) -> Iterator[str]:
        """Yield lines of a samples file for `evalplus.evaluate`, which requires all problems."""
        for problem in self.answered(texts):
            program = self._program_or_none(problem, texts[problem["id"]])
            yield json.dumps({"task_id": problem["task_id"], "solution": program}) + "\n"

    def _grade(self, problem: items.Item, text: str) -> benchmark.SampleScore:
        if not items.cut_at_stop(text, self.stops).strip():
            return benchmark.SampleScore(0.0, "empty", dict.fromkeys(STAGES, 0.0))
        try:
            program = self.program(problem, text)
        except UnreadableAnswerError as error:
            return unreadable(error, STAGES)
        source, name = PROBLEM_SETS[self.dataset], problem["entry_point"]
        asked = {
            **CALL_LIMITS,
            "reference": problem["prompt"] + problem["canonical_solution"],
            "entry_point": name,
            "rule": source.rules.get(name, "equal"),
            "atol": problem["atol"],
        }
        examiner = sandbox.compare_calls(self._inputs(problem), asked)
        return _sample_score(sandbox.examine(program, examiner, source.limits), self.primary)

    def _inputs(self, problem: items.Item) -> dict[str, list[Any]]:
        """Return stage -> argument lists, with the tuples, sets and complex numbers JSON cannot
        hold."""
        inputs = {stage: list(problem[f"{stage}_input"]) for stage in STAGES}
        if self.dataset != "mbpp_plus":
            return inputs
        from evalplus.data.mbpp import mbpp_deserialize_inputs

        return {s: mbpp_deserialize_inputs(problem["task_id"], rows) for s, rows in inputs.items()}


def _sample_score(outcome: ProgramOutcome, primary: str) -> benchmark.SampleScore:
    if outcome.verdict == benchmark.JUDGE_ERROR:
        return benchmark.judge_error(outcome.detail)
    stages = {words[0]: words[1] for words in outcome.reports}
    passed = [stages.get(stage) == "passed" for stage in STAGES]
    metrics = {"base": float(passed[0]), "plus": float(all(passed))}
    verdict = {"passed": "correct", "failed": "wrong"}.get(outcome.verdict, outcome.verdict)
    if metrics[primary]:
        verdict = "correct"
    return benchmark.SampleScore(metrics[primary], verdict, metrics)


@cache
def _problems(dataset: str, split: str, data_dir: str | None) -> list[items.Item]:
    """Return all problems of a split."""
    source = PROBLEM_SETS[dataset]
    require_known(f"split of {dataset!r}:", split, source.splits)
    if not source.file:
        return [{**item, "task_id": item["id"]} for item in GENERATED[dataset].items(split)]
    if data_dir is None:
        file = _download(dataset, *source.download)
    else:
        file = items.data_file(data_dir, source.file, dataset)
    rows = items.read_jsonl(file)
    items.require_fields(file, rows, FIELDS)
    return [{"id": f"{dataset}/{split}/{row['task_id'].split('/')[-1]}", **row} for row in rows]


def _download(dataset: str, module: str, function: str) -> Path:
    """Return EvalPlus's cached file of a data set; EvalPlus downloads it if absent and if it
    may."""
    try:
        theirs: Any = importlib.import_module(module)
        fetch = theirs.make_cache
        theirs.make_cache = fetch if items.downloads_allowed() else _cached_only
        try:
            return Path(getattr(theirs, function)())
        finally:
            theirs.make_cache = fetch
    except (OSError, ImportError) as error:
        raise DllmBenchError(
            f"Benchmark {dataset!r} has no data directory and EvalPlus could not provide it "
            f"({type(error).__name__}: {error}); name a directory that holds "
            f"{PROBLEM_SETS[dataset].file} with paths.data=DIR."
        ) from error


def _cached_only(url: str, file: str) -> None:
    """Refuse a download: takes the place of EvalPlus's own where nothing may be downloaded."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} does not exist and {url} was not downloaded")


def asked_for(prompt: str) -> str:
    """Return a problem of MBPP+ in words: the text of its docstring, then the assertion it ends
    with."""
    words, _, assertion = prompt.strip().strip('"').strip().partition("\nassert ")
    return f"{words} {WORDING['assertion']}assert {assertion}" if assertion else words


def _prompt_text(problem: items.Item) -> str:
    """Return the prompt that is sent: without outer white space, ending in a newline."""
    return str(problem["prompt"]).strip() + "\n"
