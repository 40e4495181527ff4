"""Benchmarks in EvalPlus form: a function to complete, graded on base and on extra inputs.

`minicode` (made here), `humaneval_plus` and `mbpp_plus` (original files, or EvalPlus's own
download without a data directory). Programs run only in `sandbox`, compared there with the
reference solution (`child/check_function.py`); EvalPlus itself is used for MBPP+ inputs and for
sanitising, and only the benchmarks that need these need it. `plus` counts a program that is right
on base and extra inputs, as EvalPlus reports it. `samples` writes what `evalplus.evaluate` reads.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.embedded import minicode
from dllm_bench.benchmarks.items import (
    PLAIN,
    Item,
    LazyRequests,
    active_stops,
    answered_items,
    choose_items,
    content_hash,
    cut_at_stop,
    data_file,
    downloads_allowed,
    read_jsonl,
    require_cache_or_server,
    require_known,
)
from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import register

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Encode, SampleScore, Turns
    from dllm_bench.core.request import Request

MINICODE_SIZE = 1000
STAGES = ("base", "plus")
CALL_LIMITS = {"min_time_s": 1.0, "time_factor": 4.0, "reference_s": 30.0}
"""A call may take max(1 s, 4 x the reference's), the numbers of EvalPlus 0.3.1, in CPU seconds."""
SMALL = sandbox.Limits()
LARGE = sandbox.Limits(cpu_s=240, wall_s=480.0, memory_mb=4096, packages=True)
"""Reference and program together: those of Mbpp/599 take 30 to 40 s each on a slow machine."""
HUMANEVAL_RULES = {"find_zero": "root"}
MBPP_RULES = {
    **dict.fromkeys(
        ("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly",
         "larg_nnum", "intersection_array", "find_dissimilar", "Diff"), "same_set"),
    **dict.fromkeys(("check_str", "text_match_three", "text_starta_endb"), "found"),
    "are_equivalent": "anything",
    "sum_div": "equal_or_zero",
    "surface_Area": "pyramid_surface",
    "digit_distance_nums": "digit_distance",
}  # fmt: skip
"""entry point -> rule of check_function, where equality is not the rule."""


@dataclass(frozen=True)
class ProblemSet:
    """Where the problems of a name come from and how they are graded.

    file: path in a data directory; download: module and function of EvalPlus that give a file.
    """

    splits: tuple[str, ...] = ("test",)
    file: str = ""
    download: tuple[str, str] = ("", "")
    rules: Mapping[str, str] | None = None
    limits: sandbox.Limits = LARGE
    needs_evalplus: bool = False


SETS: Mapping[str, ProblemSet] = {
    "minicode": ProblemSet(("test", "train"), limits=SMALL),
    "humaneval_plus": ProblemSet(
        file="humanevalplus/HumanEvalPlus.jsonl",
        download=("evalplus.data.humaneval", "_ready_human_eval_plus_path"),
        rules=HUMANEVAL_RULES,
    ),
    "mbpp_plus": ProblemSet(
        file="mbppplus/MbppPlus.jsonl",
        download=("evalplus.data.mbpp", "_ready_mbpp_plus_path"),
        rules=MBPP_RULES,
        needs_evalplus=True,
    ),
}


CHAT, DIFFUCODER = "chat", "diffucoder"
FORMS = (PLAIN, CHAT, DIFFUCODER)
DIFFUCODER_PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Please complete the following problem:\n```\n{prompt}\n```\n<|im_end|>\n"
    "<|im_start|>assistant\nHere is the code to solve this problem:\n```python\n"
)
"""The fixed ChatML text DiffuCoder is asked with; the answer begins inside of the fence."""
Program = Callable[[str, str, str], str]
"""(prompt, answer, entry point) -> program."""


def _assembled(prompt: str, answer: str, entry_point: str) -> str:
    return code_answers.assemble(prompt, answer)


def _sanitized(prompt: str, answer: str, entry_point: str) -> str:
    return sanitized(code_answers.assemble(prompt, answer), entry_point)


def _diffucoder(prompt: str, answer: str, entry_point: str) -> str:
    return sanitized(code_answers.diffucoder(prompt, answer), entry_point)


def _lopa(prompt: str, answer: str, entry_point: str) -> str:
    return code_answers.lopa_sanitized(code_answers.lopa_code(prompt, answer), entry_point)


POSTPROCESS: Mapping[str, Program] = {
    "assembled": _assembled,
    "evalplus": _sanitized,
    "diffucoder": _diffucoder,
    "lopa": _lopa,
}
"""Published ways from an answer to a program; evalplus and diffucoder end in evalplus.sanitize."""


@register("benchmark.evalplus")
@dataclass(frozen=True, eq=False)
class EvalPlusBenchmark:
    """One problem set with its prompt form.

    template: "plain" (the prompt is continued), "chat" (one user turn: `instruction`, then the
    prompt, fenced if there is an instruction) or "diffucoder" (a fixed text); chat: whether the
    model takes turns, if not a chat form is "plain". postprocess: a name of POSTPROCESS. shots: 0,
    these sets have no examples. primary: "plus" or "base". repeats: how often each is asked.
    """

    name: str
    dataset: str
    max_new_tokens: int
    shots: int = 0
    template: str = PLAIN
    chat: bool = True
    instruction: str = ""
    stop: Sequence[str] = ()
    hard_stop: Sequence[str] = ()
    escape_until: bool = False
    postprocess: str = "assembled"
    split: str = "test"
    limit: int | None = None
    repeats: int = 1
    primary: str = "plus"
    data_dir: str | None = None
    allow_code_execution: bool = False

    def check(self) -> None:
        """Raise for what would fail later: names, data, EvalPlus, consent. Loads nothing."""
        require_known("EvalPlus problem set", self.dataset, SETS)
        require_known(f"template of {self.name!r}", self.template, FORMS)
        require_known(f"postprocess of {self.name!r}", self.postprocess, POSTPROCESS)
        require_known(f"primary metric of {self.name!r}", self.primary, STAGES)
        source = SETS[self.dataset]
        require_known(f"split of {self.name!r}", self.split, source.splits)
        self._check_data(source)
        if self._needs_evalplus and importlib.util.find_spec("evalplus") is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} needs the package evalplus, which is not installed; "
                "install it with pip install 'dllm-bench[code]'."
            )
        if self.shots:
            raise DllmBenchError(
                f"Benchmark {self.name!r} was asked for {self.shots} few-shot examples and has "
                "none; set benchmark.shots=0."
            )
        sandbox.require_consent(self.allow_code_execution, self.name)

    def _check_data(self, source: ProblemSet) -> None:
        if source.file and self.data_dir is not None:
            data_file(self.data_dir, source.file, self.name)
        elif source.file:
            cache_dir = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
            require_cache_or_server(self.name, "github.com", cache_dir / "evalplus", source.file)

    @property
    def drawn(self) -> bool:
        """Whether code of the package makes the problems, so that nothing is read for them."""
        return not SETS[self.dataset].file

    @property
    def _needs_evalplus(self) -> bool:
        source = SETS[self.dataset]
        downloads = bool(source.file) and self.data_dir is None
        sanitizes = self.postprocess in ("evalplus", DIFFUCODER)
        return sanitizes or source.needs_evalplus or downloads

    @cached_property
    def items(self) -> list[Item]:
        """The chosen problems with an `id`, inputs still as JSON has them."""
        problems = _problems(self.dataset, self.split, self.data_dir)
        return choose_items(problems, self.limit, self.repeats)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return active_stops(self.stop, self.hard_stop, self.escape_until)

    @property
    def _form(self) -> str:
        return PLAIN if self.template == CHAT and not self.chat else self.template

    def requests(self, encode: Encode) -> Sequence[Request]:
        """One request per problem, in the fixed order."""
        return LazyRequests(self.items, self._prompt, encode, self.max_new_tokens, self.stops)

    def _prompt(self, problem: Item) -> str | Turns:
        text = _stripped(problem)
        if self._form == PLAIN:
            return text
        if self._form == DIFFUCODER:
            return DIFFUCODER_PROMPT.format(prompt=text.rstrip("\n"))
        if self.instruction:
            text = f"{self.instruction}\n```python\n{text}```\n"
        return [{"role": "user", "content": text}]

    def dataset_hash(self) -> str:
        """sha256 over problems, prompt form and stop strings."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        form = [self._form, self.instruction if self._form == CHAT else "", list(self.stops)]
        return content_hash({"items": self.items, "form": form})

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Run every answer against its problem's inputs; needs consent, no model."""
        sandbox.require_consent(self.allow_code_execution, self.name)
        problems = answered_items(texts, self.items, self.name)
        scores = sandbox.map_in_threads(lambda p: self._grade(p, texts[p["id"]]), problems)
        return {p["id"]: score for p, score in zip(problems, scores, strict=True)}

    def program(self, problem: Item, text: str) -> str:
        """The program an answer makes."""
        answer = cut_at_stop(text, self.stops)
        return POSTPROCESS[self.postprocess](_stripped(problem), answer, problem["entry_point"])

    def samples(self, texts: Mapping[str, str]) -> Iterator[str]:
        """Lines of a samples file as `evalplus.evaluate` reads it; it wants all problems."""
        for problem in answered_items(texts, self.items, self.name):
            program = self.program(problem, texts[problem["id"]])
            yield json.dumps({"task_id": problem["task_id"], "solution": program}) + "\n"

    def _grade(self, problem: Item, text: str) -> SampleScore:
        from dllm_bench.core.benchmark import SampleScore

        if not text.strip():
            return SampleScore(0.0, "empty", dict.fromkeys(STAGES, 0.0))
        source = SETS[self.dataset]
        payload = {
            **CALL_LIMITS,
            "solution": self.program(problem, text).encode(errors="replace"),
            "reference": problem["prompt"] + problem["canonical_solution"],
            "entry_point": problem["entry_point"],
            "stages": marshal.dumps(self._inputs(problem)),
            "rule": (source.rules or {}).get(problem["entry_point"], "equal"),
            "atol": problem["atol"],
        }
        outcome = sandbox.execute(sandbox.harness("check_function"), payload, source.limits)
        return _sample_score(problem["id"], outcome, self.primary)

    def _inputs(self, problem: Item) -> dict[str, list[Any]]:
        """stage -> argument lists, with the tuples, sets and complex numbers JSON cannot hold."""
        inputs = {stage: list(problem[f"{stage}_input"]) for stage in STAGES}
        if self.dataset != "mbpp_plus":
            return inputs
        from evalplus.data.mbpp import mbpp_deserialize_inputs

        return {s: mbpp_deserialize_inputs(problem["task_id"], rows) for s, rows in inputs.items()}


def _sample_score(item_id: str, outcome: sandbox.Outcome, primary: str) -> SampleScore:
    from dllm_bench.core.benchmark import SampleScore

    stages = {words[0]: words[1] for words in outcome.reports}
    if "reference" not in stages:
        raise DllmBenchError(
            f"The reference solution of {item_id!r} did not run in the sandbox "
            f"({outcome.verdict}: {outcome.detail}); raise its limits or mend the problem."
        )
    passed = [stages.get(stage) == "passed" for stage in STAGES]
    metrics = {"base": float(passed[0]), "plus": float(all(passed))}
    reasons = [stages[s] for s in ("load", *STAGES) if stages.get(s, "passed") != "passed"]
    reason = reasons[0] if reasons else outcome.verdict
    verdict = {"passed": "correct", "failed": "wrong"}.get(reason, reason)
    if metrics[primary]:
        verdict = "correct"
    return SampleScore(metrics[primary], verdict, metrics)


@cache
def _problems(dataset: str, split: str, data_dir: str | None) -> list[Item]:
    """All problems of a split."""
    source = SETS[dataset]
    if not source.file:
        return [{"id": p.task_id, **asdict(p)} for p in minicode.generate(split, MINICODE_SIZE)]
    if data_dir is None:
        file = _download(dataset, *source.download)
    else:
        file = data_file(data_dir, source.file, dataset)
    rows = read_jsonl(file)
    return [{"id": f"{dataset}/{split}/{row['task_id'].split('/')[-1]}", **row} for row in rows]


def _download(dataset: str, module: str, function: str) -> Path:
    """EvalPlus's cached file of a data set, fetched by it if absent and a server may be asked."""
    try:
        made: Any = importlib.import_module(module)
        fetch = made.make_cache
        made.make_cache = fetch if downloads_allowed() else _only_kept
        try:
            return Path(getattr(made, function)())
        finally:
            made.make_cache = fetch
    except (OSError, ImportError) as error:
        raise DllmBenchError(
            f"Benchmark {dataset!r} has no data directory and EvalPlus could not fetch it "
            f"({type(error).__name__}: {error}); name a directory that holds "
            f"{SETS[dataset].file} with paths.data=DIR."
        ) from error


def _only_kept(url: str, file: str) -> None:
    """In place of EvalPlus's download."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} is not there, and {url} was not asked")


def _stripped(problem: Item) -> str:
    """The prompt as it is asked: without outer white space, ending in a newline."""
    return str(problem["prompt"]).strip() + "\n"


def sanitized(program: str, entry_point: str) -> str:
    """EvalPlus's own sanitising of the first lines; its search is quadratic in their number."""
    from evalplus.sanitize import sanitize

    return sanitize("\n".join(program.split("\n")[: code_answers.MAX_LINES]), entry_point)
