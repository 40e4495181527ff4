"""Final answers of mathematical texts: found, brought to one form, compared.

`normalised` is appendix D of Lewkowycz et al. (2022, Minerva), `stripped` the string equality of
Hendrycks et al. (2021, MATH); both are blind to mathematics and kept because published scores were
made with them. `verified` asks math-verify (sympy). What a LaTeX text means is math-verify's
business alone.
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
    """Appendix D's form of a final answer; unit words inside of LaTeX commands stay."""
    text = UNIT_WORD.sub("", answer.split("=")[-1])
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


def stripped(answer: str) -> str:
    """MATH's form of an answer: no layout, units or spaces; fractions and roots in braces."""
    text = answer.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text)
    text = re.sub(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$", "", text)
    text = text.partition("\\text{ ")[0].replace("\\%", "")
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def number(text: str) -> float | None:
    """The value of a plain number with thousands commas, a currency sign or percent."""
    try:
        return float(re.sub(r"[,$%\\\s]", "", text))
    except ValueError:
        return None


def same(one: str, other: str) -> bool:
    """Equal in MATH's form, in Minerva's, or as plain numbers."""
    if stripped(one) == stripped(other) or normalised(one) == normalised(other):
        return True
    values = number(one), number(other)
    return None not in values and values[0] == values[1]


def verified(gold: str, text: str) -> bool:
    """Whether math-verify reads the same answer from both texts."""
    from math_verify import parse, verify

    limit_s = VERIFY_S if threading.current_thread() is threading.main_thread() else None
    read = [parse(part, parsing_timeout=limit_s) for part in (gold, text)]
    return bool(verify(*read, timeout_seconds=limit_s))


def equivalent(gold: str, answer: str) -> bool:
    """Whether two final answers, already normalised, are the same string or the same value."""
    return gold == answer or (bool(answer) and verified(f"${gold}$", f"${answer}$"))
