"""How answers are graded: each published way, on texts for which the ways differ.

The expected values were worked out by hand from the published rules; `test_prompts` compares with
the installed packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks import code_answers, evalplus
from dllm_bench.benchmarks.tasks import korbench, livecodebench, math_answers, text_scorers
from dllm_bench.paths import read_yaml

ANSWERS: dict[str, Any] = read_yaml(Path(__file__).with_name("answers.yaml"))


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [(r, *case) for r, cases in ANSWERS["read"].items() for case in cases],
)
def test_what_is_read_of_a_text(read: str, text: str, found: Any) -> None:
    module, _, name = read.partition(".")
    assert getattr(globals()[module], name)(text) == found


@pytest.mark.parametrize(("one", "other", "same"), ANSWERS["equal"])
def test_opencompass_s_equality(one: str, other: str, same: bool) -> None:
    assert math_answers.same(one, other) is same and math_answers.same(other, one) is same


def test_math_verify_sees_what_strings_do_not() -> None:
    assert math_answers.verified("$\\boxed{\\frac{\\sqrt 3}{2}}$", "so $\\boxed{\\sqrt{3}/2}$")
    assert not math_answers.same("\\frac{\\sqrt 3}{2}", "\\sqrt{3}/2")
    assert not math_answers.verified("$\\boxed{2}$", "$\\boxed{3}$")


@pytest.mark.parametrize("text", ["ANSWER: **A**", "ANSWER: (A)", "ANSWER: $\\boxed{A}$"])
def test_marks_around_a_letter(text: str) -> None:
    doc = {"answer": 0}
    ((bare,),) = text_scorers.without_marks([[text]], [doc])
    assert text_scorers.mmlu_letter(doc, [text]) == {"accuracy": 0.0}
    assert text_scorers.mmlu_letter(doc, [bare]) == {"accuracy": 1.0}


@pytest.mark.parametrize(("text", "restored"), ANSWERS["first_indent"])
def test_a_lost_first_indent(text: str, restored: bool) -> None:
    assert code_answers.with_first_indent(text, "f") == ("    " if restored else "") + text


@pytest.mark.parametrize(("text", "minerva", "boxed"), ANSWERS["mathematics"])
def test_readings_of_mathematics(text, minerva, boxed) -> None:
    item = {"solution": "We get $\\boxed{\\frac{1}{2}}$."}
    assert [*text_scorers.math_minerva(item, [text]).values()] == minerva
    assert [*text_scorers.math_boxed(item, [text]).values()] == boxed


@pytest.mark.parametrize(
    ("grader", "text", "value"),
    [(name, *case) for name, graded in ANSWERS["graded"].items() for case in graded["texts"]],
)
def test_right_answers_of_graders(grader: str, text: str, value: int) -> None:
    graded = ANSWERS["graded"][grader]
    assert getattr(text_scorers, grader)(graded["item"], [text])[graded["metric"]] == value


@pytest.mark.parametrize(("answers", "text", "exact", "f1", "lenient"), ANSWERS["squad"])
def test_readings_of_squad(answers, text, exact, f1, lenient) -> None:
    doc = {"answers": answers, "plausible": [] if answers else ["1066"]}
    strict = text_scorers.squad_v2(doc, [text])
    assert (strict["exact"], strict["f1"]) == (exact, pytest.approx(f1))
    assert text_scorers.squad_v2_lenient(doc, [text])["score"] == lenient


@pytest.mark.parametrize(
    ("category", "rule", "index", "gold", "right", "wrong"), ANSWERS["korbench"]
)
def test_korbench_s_matchers(category, rule, index, gold, right, wrong) -> None:
    item = {"category": category, "rule_id": rule, "index": str(index), "answer": gold}
    scores = [korbench.score(item, [text]) for text in (right, wrong, "")]
    assert scores == [{"accuracy": 1}, {"accuracy": 0}, {"accuracy": 0}]


@pytest.mark.parametrize(("prompt", "answer", "program"), ANSWERS["assembled"])
def test_programs_from_answers(prompt: str, answer: str, program: str) -> None:
    assert code_answers.assemble_program(prompt, answer) == program


def test_an_end_that_does_not_parse_is_dropped() -> None:
    start = "def f():\n    return 1\n\n"
    assert code_answers.trim_unparsable_end(start + "That is it.") == start
    assert code_answers.trim_unparsable_end("def f(:") == "def f(:"
    long = "def f():\n" + "    x = 1\n" * 2 * code_answers.MAX_LINES + "    return x"
    assert code_answers.trim_unparsable_end(long) == long + "\n"


TWO = "First:\n```python\na = 1\n```\nthen\n```\nb = 2\n```\n"


def test_fenced_blocks() -> None:
    assert code_answers.livecodebench_code(TWO, last=False) == "a = 1"
    assert code_answers.livecodebench_code(TWO, last=True) == "b = 2"
    assert code_answers.livecodebench_code("```python\na = 1", last=True) == ""
    assert code_answers.opencompass_code(TWO) == "a = 1\n"
    assert code_answers.opencompass_code("    return 1\n") == "    return 1\n"


@pytest.mark.parametrize(("postprocess", "line"), [("diffucoder", 1), ("lopa", 2)])
def test_each_way_to_a_program_reads_its_own_fence(postprocess: str, line: int) -> None:
    answer = "    return 1\n```\nor\n```python\n    return 2\n```\n"
    program = evalplus.made_program(answer, postprocess, "def f():\n", "f")
    assert [n for n in (1, 2) if f"return {n}" in program] == [line]


PROMPT = 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Doc."""\n'


def test_lopa_s_way_to_a_program() -> None:
    """The fenced code follows the prompt; names that are not reached, and prose, are dropped."""
    answer = (
        "Sure!\n```python\ndef g(x):\n    print(x)\n\ndef f(x):\n    return helper(x) + C\nC = 3\n"
        "def h(x):\n    return 0\n"
    )
    program = code_answers.lopa_program(PROMPT, answer + "```\nDone, def g is not used.")
    assert program == PROMPT + "\n" + answer.split("```python\n")[1]
    kept = code_answers.lopa_sanitize(program, "f")
    space: dict[str, Any] = {}
    exec(kept, space)
    assert space["f"](4) == 7
    assert {"helper", "C", "math", "g", "h"} & set(space) == {"helper", "C", "math"}
    assert code_answers.lopa_program(PROMPT, "    return 2\n") == PROMPT + "\n    return 2\n"


def test_the_longest_span_that_parses() -> None:
    lines = ["words of", "a model", "x = 1", "", "y = 2", "and more words"]
    assert code_answers.longest_parsing_span(lines) == "x = 1\n\ny = 2"
    assert code_answers.longest_parsing_span(["no code ("]) == ""
    assert code_answers.lopa_sanitize("not ( code", "f") == ""
    many = ["x = 1"] * (code_answers.MAX_LINES + 5)
    assert code_answers.lopa_sanitize("\n".join(many), "f").count("\n") < code_answers.MAX_LINES


@pytest.mark.parametrize(("printed", "wanted", "same"), ANSWERS["printed"])
def test_printed_lines_are_compared(printed: str, wanted: str, same: bool) -> None:
    assert livecodebench.same_output(printed, wanted) is same


def test_livecodebench_asks_for_the_starter_code_or_for_standard_input() -> None:
    answer = "```\n\n### Answer: (use the provided format with backticks)\n\n"
    for given, code, task in (
        ("class Solution:", "class Solution:", "You will use the following starter code to write"),
        ("", "# YOUR CODE HERE", "Read the inputs from stdin solve the problem and write"),
    ):
        asked = livecodebench.prompt({"question": "Q", "starter_code": given})
        assert asked.startswith(f"### Question:\nQ\n\n### Format: {task}")
        assert asked.endswith(f"\n```python\n{code}\n{answer}")


CASES = '[["1 2", "3"], ["5 6", "11"]]'
CALLS = '[["[1, 2]\\n2", "[2, 4]"], ["[]\\n1", "[]"]]'
METHOD = "class Solution:\n    def scale(self, xs: List[int], n):\n        "


@pytest.mark.parametrize(
    ("function", "verdict", "code"),
    [
        (function, verdict, code.replace("{scale}", METHOD))
        for function, verdicts in ANSWERS["livecodebench"].items()
        for verdict, codes in verdicts.items()
        for code in codes
    ],
)
def test_verdicts_of_livecodebench(function: str, verdict: str, code: str) -> None:
    tests = CALLS if function else CASES
    found = livecodebench.score({"function": function, "tests": tests}, [code])
    assert found["pass@1"] == (verdict == "passed")
    assert found["crashed"] == (verdict in ("crashed", "memory"))


def test_an_endless_method_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "TEST_S", 1)
    code = METHOD + "\n        while True: pass"
    found = livecodebench.score({"function": "scale", "tests": CALLS}, [code])
    assert found == {"pass@1": 0, "timeout": 1, "crashed": 0}
