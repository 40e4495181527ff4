"""Filters and graders of the HumanEval and MBPP tasks: answer -> program, program -> metrics.

A filter is one way to read an answer: `completion` takes the text as it is, `extracted` takes a
fenced block and drops an end that does not parse, `indented` also restores a lost first indent,
`lopa` and `opencompass` are the published ones. Programs run in the sandbox only. The caller checks
for consent: our benchmark, or lm-eval with `confirm_run_unsafe_code`. The item's own solution runs
first; it decides how much time a program gets, and whether the tests can run in a process of their
own. If a test needs objects of the program, its expressions run in the program's process and their
values are compared in the other. Expected values are never in the program's process.
"""

from __future__ import annotations

import ast
import builtins
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from dllm_bench.benchmarks import code_answers, sandbox
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome
from dllm_bench.benchmarks.tasks import Doc, per_answer
from dllm_bench.core.benchmark import JUDGE_ERROR

LIMITS = Limits(cpu_s=5, wall_s=30.0, memory_mb=4096, packages=True)
"""A program gets 5 CPU seconds; HumanEval's own harness allows 3 s of wall time."""
TIME_FACTOR = 4
"""A program gets at least this many times the reference's CPU time, as in EvalPlus 0.3.1."""
CRASHES = ("crashed", "memory", "refused")


humaneval_completion = per_answer(lambda text, doc: str(doc["prompt"]) + text)
"""Grade HumanEval: prompt + answer."""
humaneval_instruct = per_answer(lambda text, doc: str(doc["prompt"]) + text.split("```")[0])
"""Grade HumanEval as lm-eval's humaneval_instruct: prompt + answer up to a fence."""
humaneval_opencompass = per_answer(
    lambda text, doc: str(doc["prompt"]) + code_answers.opencompass_code(text)
)
"""Grade HumanEval as OpenCompass: prompt + first fenced block."""


def extracted_program(text: str, doc: Doc) -> str:
    """Grade HumanEval: prompt + code of the answer, without an end that does not parse."""
    whole = code_answers.assemble_program(doc["prompt"], text)
    return code_answers.trim_unparsable_end(whole, keep=doc["prompt"].count("\n"))


humaneval_extracted = per_answer(extracted_program)


@per_answer
def humaneval_indented(text: str, doc: Doc) -> str:
    """Grade HumanEval as `extracted`, after restoring a lost indent of the first line.

    A tokenizer may drop the spaces a text begins with; then the body's first line stands at the
    margin and those after it do not.
    """
    return extracted_program(code_answers.with_first_indent(text, doc["entry_point"]), doc)


@per_answer
def humaneval_lopa(text: str, doc: Doc) -> str:
    """Grade HumanEval as LoPA: prompt + fenced code, sanitised."""
    whole = code_answers.lopa_program(doc["prompt"], text)
    return code_answers.lopa_sanitize(whole, doc["entry_point"])


@per_answer
def mbpp_extracted(text: str, doc: Doc) -> str:
    """Grade MBPP: code of the answer, without an end that does not parse."""
    return code_answers.trim_unparsable_end(code_answers.extract_code(text))


mbpp_instruct = per_answer(lambda text, doc: code_answers.reopened_block(text))
"""Grade MBPP as lm-eval's mbpp_instruct: the first block of the answer after a fence.

The fence is put before the answer although the prompt ends in it: the word that an answer begins
with is taken for the name of a language.
"""
mbpp_continued = per_answer(lambda text, doc: text.split("```")[0])
"""Grade MBPP: the answer up to the fence that closes the prompt's."""


def grade_humaneval(doc: Doc, results: list[str]) -> dict[str, float]:
    """Grade as right if the item's own `check` returns."""
    tests = f"\n{doc['test']}\ncheck({doc['entry_point']})\n"
    reference = doc["prompt"] + doc["canonical_solution"]
    return verdict_metrics(verdict_of(results[0], Tests(tests, reference, (doc["entry_point"],))))


def grade_mbpp(doc: Doc, results: list[str]) -> dict[str, float]:
    """Grade as right if all assertions hold; the set-up code may use what the answer defines."""
    tests = "\n".join(["", doc["test_setup_code"], *doc["test_list"], ""])
    return verdict_metrics(verdict_of(results[0], Tests(tests, doc["code"])))


def verdict_metrics(verdict: str) -> dict[str, float]:
    """Return the metrics of a code task for a verdict of the sandbox; NaN without one."""
    return {
        "pass@1": math.nan if verdict == JUDGE_ERROR else float(verdict == "passed"),
        "timeout": float(verdict == "timeout"),
        "crashed": float(verdict in CRASHES),
    }


@dataclass(frozen=True)
class Tests:
    """Statements that hold for a right program."""

    text: str
    """The statements, which stand after a program."""
    reference: str
    """The item's own solution."""
    tested: tuple[str, ...] = ()
    """Functions under test; () for all names of the reference that the tests use."""

    @cached_property
    def names(self) -> frozenset[str]:
        """What the tests use and neither they nor Python define."""
        nodes = list(ast.walk(code_answers.parse_quietly(self.text)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        imported = [node for node in nodes if isinstance(node, ast.alias)]
        stored |= {(alias.asname or alias.name).split(".")[0] for alias in imported}
        known = (stored | set(dir(builtins))) - self.defined
        return frozenset({node.id for node in names} - known)

    @cached_property
    def defined(self) -> set[str]:
        """Functions and classes of the reference."""
        tree = code_answers.parse_quietly(self.reference)
        kinds = (ast.FunctionDef, ast.ClassDef)
        return {node.name for node in tree.body if isinstance(node, kinds)}

    @cached_property
    def pieces(self) -> list[tuple[str, tuple[Any, ...]]]:
        """(source, ()) for a statement, (expression, (value,)) for `assert EXPRESSION == VALUE`.

        Empty if an assertion has another form or there is none: then its outcome cannot be kept
        apart from the program.
        """
        pieces: list[tuple[str, tuple[Any, ...]]] = []
        for node in code_answers.parse_quietly(self.text).body:
            match node:
                case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                    try:
                        pieces.append((ast.unparse(left), (ast.literal_eval(right),)))
                    except ValueError:
                        return []
                case _ if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
                    return []
                case _:
                    pieces.append((ast.unparse(node), ()))
        return pieces if any(expected for _, expected in pieces) else []

    @cached_property
    def examiner(self) -> sandbox.Examiner:
        """The tests in a process of their own."""
        payload = {
            "tests": self.text,
            "reference": self.reference,
            "names": sorted(self.names),
            "tested": self.tested or sorted(self.names & self.defined),
        }
        return sandbox.Examiner("check", payload)

    def run(self, program: str, cpu_s: int, apart: bool) -> ProgramOutcome:
        """Run the tests on a program: in a process of their own, or their expressions in its own.

        Tests that can run in neither way give no verdict.
        """
        limits = replace(LIMITS, cpu_s=cpu_s, wall_s=max(LIMITS.wall_s, 2.0 * cpu_s))
        if apart:
            return sandbox.examine(program, self.examiner, limits)
        if not self.pieces:
            return ProgramOutcome(
                JUDGE_ERROR, "", 0.0, "the tests cannot be kept apart from the program"
            )
        return sandbox.examine(program, sandbox.Examiner("check", {"pieces": self.pieces}), limits)


@lru_cache(maxsize=4096)
def calibrate(tests: Tests) -> tuple[int, bool]:
    """Return (CPU seconds for a program, whether the tests can run in a process of their own).

    They can unless the reference fails them that way: its arguments or results are no values, or an
    argument is changed. Then their pieces run in the program's. The reference's CPU time counts
    where it is long.
    """
    for apart in (True, False):
        outcome = tests.run(tests.reference, 6 * LIMITS.cpu_s, apart)
        if outcome.verdict != "failed":  # a time-out says nothing about the tests
            break
    return max(LIMITS.cpu_s, math.ceil(TIME_FACTOR * outcome.cpu_s)), apart


def verdict_of(program: str, tests: Tests) -> str:
    """Return the sandbox's verdict, which remembers those that judging again would repeat."""
    if not (code_answers.parses(tests.text) and code_answers.parses(tests.reference)):
        return JUDGE_ERROR
    return tests.run(program, *calibrate(tests)).verdict
