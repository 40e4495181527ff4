"""Find the final answer of a mathematical text, bring it to a normal form, compare it.

`normalised` is appendix D of Lewkowycz et al. (2022, Minerva). `same` is OpenCompass's equality,
made of it and of that of Hendrycks et al. (2021, MATH). Both only compare strings, and are here
because published scores were made with them. `verified` calls math-verify (sympy), the only one
that parses LaTeX.
"""

from __future__ import annotations

import ast
import operator
import re
import threading
from collections.abc import Callable, Mapping

from dllm_bench.benchmarks.bounded import call_bounded
from dllm_bench.benchmarks.tasks import TEXTS

MINERVA = TEXTS["minerva"]
UNIT = re.compile("|".join(sorted(MINERVA["units"], key=len, reverse=True)))
UNIT_WORD = re.compile(rf"(?<!\\)\b({UNIT.pattern})\b")
COMMAND = re.compile(r"(\\[a-zA-Z]+)")
FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")
LOOSELY_DROPPED = re.compile(
    r"\^\{\\circ\}|\^\\circ|\\?\$|\\text|x\\in|\\?%|\\cdot|and|\\mathbf|\\mbox\{.*?\}"
)
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")
OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
"""What an expression of a puzzle may hold, by the class of the syntax tree."""
VERIFY_S = 5
"""Time limit of math-verify, its own default for parsing and for comparing."""


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed or \\fbox; None if there is none, or if it is not
    closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed")
    if rest[:1] == " ":
        return rest[1:].split("$")[0]
    depth = 0
    for i, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and depth == 0:
            return rest[rest.find("{") + 1 : i]
    return None


def final_answer(text: str) -> str:
    """Return the answer that Minerva's closing sentence names; the sentence may be cut off at its
    end."""
    sentence = FINAL.search(text + "I hope it is correct.")
    return sentence[1].strip() if sentence else "[invalidanswer]"


def normalised(answer: str) -> str:
    """Return the normal form of a final answer (Appendix D): what follows the last equals sign,
    plain."""
    return plain(answer.split("=")[-1])


def plain(answer: str) -> str:
    """Remove units, layout, dollar signs and commas between thousands: the rest of appendix D.

    Unit words inside LaTeX commands stay.
    """
    text = UNIT_WORD.sub("", answer)
    for before, after in MINERVA["replaced"]:
        text = text.replace(before, after)
    text = "".join(
        part if part.startswith("\\") else UNIT.sub("", part) for part in COMMAND.split(text)
    )
    for expression in MINERVA["dropped"]:
        text = text.replace(expression, "")
    text = _replace(r".*?\$(.*?)\$.*", r"$\1$", text, rest=r".+")
    for command in ("text", "textbf", "overline"):
        start = rf"\\{command}\{{"
        text = _replace(rf"{start}(.*?)\}}", r"\1", text, rest=f"{start}.*")
    text = _replace(r"\\boxed\{(.*)\}", r"\1", text, rest=r"\\boxed\{.*")
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = _replace(r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}", text, rest=r"sqrt\[[^\]]*")
    text = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def _replace(pattern: str, replacement: str, text: str, rest: str) -> str:
    """Replace as re.sub does, in linear time.

    rest: matches where `pattern` fails, as far as no later start can succeed; it stays as it is.
    """
    return re.sub(
        f"{pattern}|{rest}",
        lambda found: found.expand(replacement) if found.lastindex else found[0],
        text,
    )


def loose(answer: str) -> str:
    """Return OpenCompass's second normal form of an answer.

    It drops layout, spaces, full stops at the end, the content of a \\text at the end, degrees,
    percent, currency, `\\cdot`, a short name before the only equals sign, and zeros after the
    decimal point; fractions and roots get braces.
    """
    text = re.sub(r"\\[! ]", "", answer.strip().replace("\n", "").rstrip("."))
    text = re.sub(r"[td]frac", "frac", re.sub(r"\\{2,4}", r"\\", text))
    text = re.sub(r"\\left|\\right", "", text)
    text = _replace(r"(\\text\{.*?\}$)", "", text, rest=r"\\text\{.*").strip() or text
    text = LOOSELY_DROPPED.sub("", text).replace("infinity", "\\infty")
    text = text if "\\infty" in text else text.replace("inf", "\\infty")
    text = text if "i" in text else text.replace("j", "i")
    text = re.sub(r"(\d)\.0+(?!\d)", r"\1", text)
    text = _unnamed(re.sub(r"(^|[ {])\.", r"\g<1>0.", text))
    text = _fractions(re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", text))
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)  # two whole numbers


def _unnamed(text: str) -> str:
    """Return the text without a name of up to two characters before its only equals sign."""
    left, equals, right = text.partition("=")
    return right if equals and "=" not in right and len(left) <= 2 else text


def _fractions(text: str) -> str:
    """Return the text without spaces, with braces around the parts of fractions."""
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text.replace(" ", ""))
    return re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)


def same(one: str, other: str) -> bool:
    """Return whether two answers are equal in any of three normal forms (OpenCompass's
    MATHEvaluator, version 2)."""
    forms = (loose, lambda text: plain(loose(text)), plain)
    return any(form(one) == form(other) for form in forms)


def verified(text: str, gold: str) -> bool:
    """Return whether math-verify finds the same answer in both texts.

    Its time limit uses signals, which work in the main thread only, so another thread leaves the
    call to a process.
    """
    if threading.current_thread() is not threading.main_thread():
        return bool(call_bounded(verified, text, gold))
    from math_verify import parse, verify

    read = [parse(part, parsing_timeout=VERIFY_S) for part in (gold, text)]
    return bool(verify(*read, timeout_seconds=VERIFY_S))


def equivalent(gold: str, answer: str) -> bool:
    """Return whether two final answers, already normalised, are the same string or the same
    value."""
    return gold == answer or (bool(answer) and verified(f"${answer}$", f"${gold}$"))


def arithmetic(node: ast.AST, whole: bool = False) -> float:
    """Return the value of an expression of numbers and + - * /; ValueError for anything else.

    whole: also for fractions and signs.
    """
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Constant(value=float() as value) if not whole:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not whole:
            return -arithmetic(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](arithmetic(left, whole), arithmetic(right, whole))
    raise ValueError(ast.dump(node))
