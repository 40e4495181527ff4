"""How answers are graded: each published way, on texts for which the ways differ.

The expected values were worked out by hand from the published rules; `test_originals` compares with
the installed packages.
"""

from __future__ import annotations

from typing import Any

import pytest

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.tasks import korbench, livecodebench, math_answers, text_scorers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{x}", "x"),
        ("\\boxed 7$ and so on", "7"),
        ("\\boxed{open", None),
        ("no box", None),
    ],
)
def test_the_last_box_counts(text: str, answer: str | None) -> None:
    assert math_answers.boxed(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("\\frac12", "\\frac{1}{2}", True),
        ("\\frac1{72}", "\\tfrac{1}{72}", True),
        ("0.5", "\\frac{1}{2}", False),  # MATH's own form has this one by hand, version 2 has not
        ("3/4", "\\frac{3}{4}", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("x = 5", "5", True),
        ("90^\\circ", "90", True),
        ("1,000", "1000", True),
        ("$18.00", "18", True),
        ("18.05", "18.5", False),
        ("\\$1,250.50", "1250.5", False),
        ("18\\text{eggs}", "18", True),
        ("18 \\text{eggs a day}", "18", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\text{Evelyn}", "", False),
        ("(3, 4).", "(3,4)", True),
        ("50\\%", "50", True),
        (".25", "0.25", True),
        ("-\\frac{2}{3}", "\\frac{2}{3}", False),
        ("5x - 7y + 4 = 0", "0", False),  # only a short name stands before its value
        ("2x + 3 = y", "y", False),
        ("x\\in [-2,7]", "[-2,7]", True),
        ("(-\\infty, 2)", "(-inf,2)", True),
        ("3 \\cdot 4j", "34i", True),  # as published
        ("\\sqrt3", "\\sqrt{3}", True),
        ("\\sqrt13", "\\sqrt{13}", True),
        ("(2,1)", "(1,2)", False),
        ("", "0", False),
    ],
)
def test_opencompass_s_equality(one: str, other: str, same: bool) -> None:
    assert math_answers.same(one, other) is same
    assert math_answers.same(other, one) is same


def test_math_verify_sees_what_strings_do_not() -> None:
    assert math_answers.verified("$\\boxed{\\frac{\\sqrt 3}{2}}$", "so $\\boxed{\\sqrt{3}/2}$")
    assert not math_answers.same("\\frac{\\sqrt 3}{2}", "\\sqrt{3}/2")
    assert not math_answers.verified("$\\boxed{2}$", "$\\boxed{3}$")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 63", "63"),
        ("#### $63.00", "63"),
        ("#### 63.", "63"),
        ("so 7 + 56.\n#### $1,250.50 a year, or 3", "1250.5"),
        ("It costs $63.00.", "63"),
        ("5 + 58 = 63 dollars", "63"),
        ("#### -$4", "-4"),
        ("#### .5", "0.5"),
        ("#### 1200", "1200"),
        ("#### none of the 7", "7"),
        ("#### many", text_scorers.NOTHING),
        ("", text_scorers.NOTHING),
    ],
)
def test_an_answer_by_value(text: str, number: str) -> None:
    assert text_scorers.written_number(text) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("D. text", "D"),
        (" (B) because", "B"),
        ("**A**", "A"),
        ("C", "C"),
        ("A: the first", "A"),
        ("A man", text_scorers.NOTHING),
        ("Because A", text_scorers.NOTHING),
        ("E.", text_scorers.NOTHING),
    ],
)
def test_the_letter_an_answer_begins_with(text: str, letter: str) -> None:
    assert text_scorers.leading_letter(text) == letter


@pytest.mark.parametrize("text", ["ANSWER: **A**", "ANSWER: (A)", "ANSWER: $\\boxed{A}$"])
def test_marks_around_a_letter(text: str) -> None:
    doc = {"answer": 0}
    ((bare,),) = text_scorers.without_marks([[text]], [doc])
    assert text_scorers.mmlu_letter(doc, [text]) == {"accuracy": 0.0}
    assert text_scorers.mmlu_letter(doc, [bare]) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("text", "restored"),
    [
        ("return x", True),
        ("y = x\n    return y", True),
        ("for a in x:\n        y += a\n    return y\n\nprint(f(1))", True),
        ("    return x", False),
        ("def f(x):\n    return x", False),
        ("```python\nreturn x\n```", False),
        ("The answer is x.", False),
        ("", False),
    ],
)
def test_a_lost_first_indent(text: str, restored: bool) -> None:
    assert code_answers.with_first_indent(text, "f") == ("    " if restored else "") + text


SOLUTION = {"solution": "We get $\\boxed{\\frac{1}{2}}$."}
CLOSING = "Final Answer: The final answer is ${}$. I hope it is correct."


@pytest.mark.parametrize(
    ("text", "minerva", "boxed"),
    [
        (CLOSING.format("\\frac12"), (1, 1), (1, 1)),
        ("thus \\boxed{1/2}", (0, 1), (1, 1)),
        ("The final answer is $0.5$. Or not.", (0, 1), (0, 1)),  # sentences end at any full stop
        ("The final answer is $1/2$. Or not.", (0, 1), (1, 1)),
        ("It is a half.", (0, 0), (0, 0)),
        ("", (0, 0), (0, 0)),
    ],
)
def test_readings_of_mathematics(
    text: str, minerva: tuple[int, int], boxed: tuple[int, int]
) -> None:
    assert tuple(text_scorers.math_minerva(SOLUTION, [text]).values()) == minerva
    assert tuple(text_scorers.math_boxed(SOLUTION, [text]).values()) == boxed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{18}", 1),
        ("\\boxed{\\$18.00}", 1),
        ("\\boxed{{18}}", 1),
        ("\\boxed{18\\text{ eggs}}.", 1),
        ("First \\boxed{18}, no, \\boxed{19}.", 0),
        ("\\boxed{total = 18}", 0),
        ("\\boxed{-18}", 0),
        ("The answer is 18. \\boxed{}", 1),
        ("The answer is 18.", 1),
        ("#### 18", 0),
    ],
)
def test_gsm8k_in_a_box(text: str, value: int) -> None:
    doc = {"answer": "3 * 6 = 18\n#### 18"}
    assert text_scorers.gsm8k_boxed(doc, [text])["accuracy"] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("ANSWER: C", 1), ("answer :c, not D", 1), ("Answer: D. ANSWER: C", 0), ("C", 0), ("", 0)],
)
def test_the_first_answer_letter_counts(text: str, value: int) -> None:
    assert text_scorers.mmlu_letter({"answer": 2}, [text])["accuracy"] == value


ANSWERABLE = {"answers": ["the Seine", "Seine river"], "plausible": []}
UNANSWERABLE = {"answers": [], "plausible": ["1066"]}


@pytest.mark.parametrize(
    ("doc", "text", "exact", "f1", "lenient"),
    [
        (ANSWERABLE, "Seine", 1, 1, 1),
        (ANSWERABLE, "The Seine.", 1, 1, 1),
        (ANSWERABLE, "The answer is Seine, a river", 0, 2 / 3, 1),
        (ANSWERABLE, "Seine river banks", 0, 0.8, 0),
        (ANSWERABLE, "unanswerable", 0, 0, 0),
        (UNANSWERABLE, "Unanswerable.", 1, 1, 0),
        (UNANSWERABLE, "impossible to answer", 0, 0, 1),
        (UNANSWERABLE, "1066", 0, 0, 1),
        (UNANSWERABLE, "1067", 0, 0, 0),
        (UNANSWERABLE, " \n", 0, 0, 0),
    ],
)
def test_readings_of_squad(
    doc: dict[str, Any], text: str, exact: float, f1: float, lenient: float
) -> None:
    strict = text_scorers.squad_v2(doc, [text])
    assert strict["exact"] == exact
    assert strict["f1"] == pytest.approx(f1)
    assert text_scorers.squad_v2_lenient(doc, [text])["score"] == lenient


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Answer: the earls of York", 1),  # contains an accepted answer
        ("answer : earl", 1),  # is contained in one
        ("Both agree.\nAnswer: kings", 0),
        ("Answer:", 0),
        ("", 0),
    ],
)
def test_lenient_drop(text: str, value: int) -> None:
    doc = {"answers": [["earls"], ["dukes", "barons"]]}
    assert text_scorers.drop_lenient(doc, [text])["accuracy"] == value


def korbench_item(category: str, rule: str, answer: str, index: int = 1) -> dict[str, Any]:
    return {"category": category, "rule_id": rule, "index": str(index), "answer": answer}


@pytest.mark.parametrize(
    ("category", "rule", "index", "gold", "right", "wrong"),
    [
        ("cipher", "1", 1, "[[ABC]]", 'So [[ "A B C" ]] it is', "[[ABD]]"),
        ("cipher", "1", 1, "[[ABC]]", "$\\boxed{ABC}$", "ABC"),
        ("counterfactual", "1", 1, "[[C]]", "[C]", "[[A]] then [[C]]"),
        ("logic", "1", 1, "[[p1&p2]]", "[[p1 & p2.]]", "[[p1||p2]]"),
        ("logic", "5", 1, "[[A];[B];[C];[D]]", "[[A];[C];[B];[D]]", "[[D];[B];[C];[A]]"),
        ("operation", "1", 1, "[[24]]", "[[ 24 ]]", "[[42]]"),
        ("operation", "2", 20, "[[3or5]]", "[[5 or 3]]", "[[5]]"),
        ("operation", "8", 73, "[[2\\sqrt{11}]]", "[[\\sqrt{44}]]", "[[\\sqrt{11}]]"),
        ("operation", "18", 171, "[[{1,2}]]", "[[{2, 1}]]", "[[{1,3}]]"),
        ("operation", "18", 178, "[[{x∣x≤0 or x≥1}]]", "[[x≥1 or x≤0]]", "[[x≥1]]"),
        ("operation", "23", 221, "[[((1,2),(9,64))]]", "[[((1, 2), (9, 64))]]", "[[(2,1,9,64)]]"),
        ("puzzle", "1", 1, "[[nine ten]]", "[[NINE-ten]]", "[[ten nine]]"),
        ("puzzle", "2", 11, "[[t,tal]]", "[[tal]]", "[[t,tal]]"),
        ("puzzle", "3", 21, "[[pea ape]]", "[[ape, Pea]]", "[[ape]]"),
        ("puzzle", "4", 31, "[[appel pepla]]", "[[pepla]]", "[[apple]]"),
        ("puzzle", "5", 41, "[[S=9,E=5]]", "[[E=5, S=9]]", "[[E=9,S=5]]"),
        ("puzzle", "9", 81, "[[6+2*3-2=10]]", "[[6 + 2 × 3 − 2 = 10]]", "[[6+2*3-3=10]]"),
        ("puzzle", "9", 81, "[[6+2*3-2=10]]", "[[5+2*4-3=10]]", "[[6*2+3-5=10]]"),
        ("puzzle", "10", 91, "[[(9+5-2)×2]]", "[[2*(5+9-2)=24]]", "[[9+5*2-2]]"),
        ("puzzle", "18", 171, "[[1 ↑,2 ↓]]", "[[1↑ 2↓]]", "[[1↓ 2↑]]"),
        ("puzzle", "6", 51, "[[4 A,B]]", "[[4 A B]]", "[[4 B A]]"),
    ],
)
def test_korbench_s_matchers(
    category: str, rule: str, index: int, gold: str, right: str, wrong: str
) -> None:
    item = korbench_item(category, rule, gold, index)
    assert korbench.score(item, [right]) == {"accuracy": 1}
    assert korbench.score(item, [wrong]) == {"accuracy": 0}
    assert korbench.score(item, [""]) == {"accuracy": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3+4)-1", 13), ("-6/4", -1.5), ("__import__('os')", None), ("2**9", None), ("1/0", None)],
)
def test_arithmetic_is_never_run(text: str, value: float | None) -> None:
    assert korbench.arithmetic(text) == value


TWO = "First:\n```python\na = 1\n```\nthen\n```\nb = 2\n```\n"


def test_fenced_blocks() -> None:
    assert code_answers.livecodebench_code(TWO, last=False) == "a = 1"
    assert code_answers.livecodebench_code(TWO, last=True) == "b = 2"
    assert code_answers.livecodebench_code("```python\na = 1", last=True) == ""
    assert code_answers.opencompass_code(TWO) == "a = 1\n"
    assert code_answers.opencompass_code("    return 1\n") == "    return 1\n"
    assert (
        code_answers.diffucoder_program("def f():\n", "    return 1\n```\nx")
        == "def f():\n    return 1\n"
    )


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
    assert {"helper", "C", "math"} <= set(space)
    assert not {"g", "h"} & set(space)
    assert code_answers.lopa_program(PROMPT, "    return 2\n") == PROMPT + "\n    return 2\n"


def test_the_longest_span_that_parses() -> None:
    lines = ["words of", "a model", "x = 1", "", "y = 2", "and more words"]
    assert code_answers.longest_parsing_span(lines) == "x = 1\n\ny = 2"
    assert code_answers.longest_parsing_span(["no code ("]) == ""
    assert code_answers.lopa_sanitize("not ( code", "f") == ""
    many = ["x = 1"] * (code_answers.MAX_LINES + 5)
    assert code_answers.lopa_sanitize("\n".join(many), "f").count("\n") < code_answers.MAX_LINES


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \n2", "1\n2\n", True),
        ("1.0 2", "1 2.00", True),
        ("yes", "YES", False),
        ("1\n\n2", "1\n2", False),
        ("1", "1\n2", False),
        ("sNaN", "1", False),
        ("NaN", "NaN 1", False),
        ("1e999999999", "1", False),
    ],
)
def test_printed_lines_are_compared(printed: str, wanted: str, same: bool) -> None:
    assert livecodebench.same_output(printed, wanted) is same


def test_livecodebench_asks_for_the_starter_code_or_for_standard_input() -> None:
    with_code = livecodebench.prompt({"question": "Q", "starter_code": "class Solution:"})
    assert with_code == (
        "### Question:\nQ\n\n### Format: You will use the following starter code to write the "
        "solution to the problem and enclose your code within delimiters.\n"
        "```python\nclass Solution:\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    without = livecodebench.prompt({"question": "Q", "starter_code": ""})
    assert "### Format: Read the inputs from stdin solve the problem and write" in without
    assert "```python\n# YOUR CODE HERE\n```" in without


CASES = '[["1 2", "3"], ["5 6", "11"]]'
CALLS = '[["[1, 2]\\n2", "[2, 4]"], ["[]\\n1", "[]"]]'
METHOD = "class Solution:\n    def scale(self, xs: List[int], n):\n        "


@pytest.mark.parametrize(
    ("code", "function", "verdict"),
    [
        ("print(sum(map(int, input().split())))", "", "passed"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nexit()", "", "passed"),
        ("print(3)", "", "failed"),
        ("1/0", "", "failed"),
        ("", "", "failed"),
        ("import ctypes; ctypes.string_at(0)", "", "crashed"),
        (METHOD + "return tuple(n * x for x in xs)", "scale", "passed"),
        (METHOD + "return xs", "scale", "failed"),
        (METHOD + "raise ValueError", "scale", "failed"),
        (METHOD + "return bytearray(8 << 30)", "scale", "memory"),
        ("class Nothing: pass", "scale", "failed"),
    ],
)
def test_verdicts_of_livecodebench(code: str, function: str, verdict: str) -> None:
    tests = CALLS if function else CASES
    found = livecodebench.score({"function": function, "tests": tests}, [code])
    assert found["pass@1"] == (verdict == "passed")
    assert found["crashed"] == (verdict in ("crashed", "memory"))


def test_an_endless_method_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "TEST_S", 1)
    code = METHOD + "\n        while True: pass"
    found = livecodebench.score({"function": "scale", "tests": CALLS}, [code])
    assert found == {"pass@1": 0, "timeout": 1, "crashed": 0}
