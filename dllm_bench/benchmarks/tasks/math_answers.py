"""Final answers of mathematical texts: found, brought to one form, compared.

`normalised` is appendix D of Lewkowycz et al. (2022, Minerva), `same` the equality OpenCompass made
of it and of that of Hendrycks et al. (2021, MATH); both are blind to mathematics and kept because
published scores were made with them. `verified` asks math-verify (sympy). What a LaTeX text means
is math-verify's business alone.
"""

from __future__ import annotations

import re
import threading

UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters",
    "meals", "edges", "students", "childrentickets", "multiples",
)  # fmt: skip
DROPPED = (
    "\\ldots", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
"""The three word lists of appendix D."""
UNIT = re.compile("|".join(sorted(UNITS, key=len, reverse=True)))
UNIT_WORD = re.compile(rf"(?<!\\)\b({UNIT.pattern})\b")
COMMAND = re.compile(r"(\\[a-zA-Z]+)")
FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")
LOOSELY_DROPPED = re.compile(
    r"\^\{\\circ\}|\^\\circ|\\?\$|\\text|x\\in|\\?%|\\cdot|and|\\mathbf|\\mbox\{.*?\}"
)
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")
VERIFY_S = 5  # math-verify's own default for parsing and for comparing


def boxed(text: str) -> str | None:
    """What the last \\boxed or \\fbox holds; None without a closed one."""
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
    """What Minerva's closing sentence names; the text's end stands for a missing close."""
    found = FINAL.search(text + "I hope it is correct.")
    return found[1].strip() if found else "[invalidanswer]"


def normalised(answer: str) -> str:
    """Appendix D's form of a final answer: what follows the last equals sign, plain."""
    return plain(answer.split("=")[-1])


def plain(answer: str) -> str:
    """The rest of appendix D: no units, layout, dollars or thousands commas; unit words inside of
    LaTeX commands stay."""
    text = UNIT_WORD.sub("", answer)
    for before, after in REPLACED:
        text = text.replace(before, after)
    text = "".join(
        part if part.startswith("\\") else UNIT.sub("", part) for part in COMMAND.split(text)
    )
    for expression in DROPPED:
        text = text.replace(expression, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}", text)
    text = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def loose(answer: str) -> str:
    """OpenCompass's second form of an answer: without layout, spaces, full stops at the end, what
    stands in a last \\text, degrees, percent, currency, `\\cdot`, a short name before the only
    equals sign, and zeros behind the point; fractions and roots in braces."""
    text = re.sub(r"\\[! ]", "", answer.strip().replace("\n", "").rstrip("."))
    text = re.sub(r"[td]frac", "frac", re.sub(r"\\{2,4}", r"\\", text))
    text = re.sub(r"\\left|\\right", "", text)
    text = re.sub(r"\\text\{.*?\}$", "", text).strip() or text
    text = LOOSELY_DROPPED.sub("", text).replace("infinity", "\\infty")
    text = text if "\\infty" in text else text.replace("inf", "\\infty")
    text = text if "i" in text else text.replace("j", "i")
    text = re.sub(r"(\d)\.0+(?!\d)", r"\1", text)
    text = _unnamed(re.sub(r"(^|[ {])\.", r"\g<1>0.", text))
    return _slashed(_fractions(re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", text)))


def _unnamed(text: str) -> str:
    """Without a short name before the only equals sign."""
    left, equals, right = text.partition("=")
    return right if equals and "=" not in right and len(left) <= 2 else text


def _fractions(text: str) -> str:
    """No spaces, fractions in braces."""
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text.replace(" ", ""))
    return re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)


def _slashed(text: str) -> str:
    """A slash between two numbers as a fraction."""
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def same(one: str, other: str) -> bool:
    """OpenCompass's equality (MATHEvaluator, version 2): in its form, made plain or not."""
    forms = (loose, lambda text: plain(loose(text)), plain)
    return any(form(one) == form(other) for form in forms)


def verified(gold: str, text: str) -> bool:
    """Whether math-verify reads the same answer from both texts."""
    from math_verify import parse, verify

    limit_s = VERIFY_S if threading.current_thread() is threading.main_thread() else None
    read = [parse(part, parsing_timeout=limit_s) for part in (gold, text)]
    return bool(verify(*read, timeout_seconds=limit_s))


def equivalent(gold: str, answer: str) -> bool:
    """Whether two final answers, already normalised, are the same string or the same value."""
    return gold == answer or (bool(answer) and verified(f"${gold}$", f"${answer}$"))
