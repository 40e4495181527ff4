"""minimath: nested arithmetic with a boxed answer, in the form of MATH.

A problem is an expression of 2 to 4 operations in brackets whose values stay within 0..99, on any
two numbers (in minigsm the second operand is small). The answer works from the inside out and ends
in ``\\boxed{ N}``; the space before N is there because a number and the space before it are one
token. Which of two brackets is solved first and the order of operands are drawn, so one problem has
several right answers. The content that decides the split is the expression.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask, text_problem
from scripts.embedded.tasks import from_draw
from scripts.embedded.tasks.minigsm import MAX_VALUE, apply_op

MIN_OPS, MAX_OPS = 2, 4
QUESTIONS = ("Compute {0}.", "Find {0}.", "What is {0}?")
CLOSINGS = ("So the answer is {0}.", "The answer is {0}.")
RIGHT_FIRST_RATE, SWAP_RATE = 0.3, 0.2
"""How often the right bracket is solved first, and how often operands change places."""


@dataclass(frozen=True)
class ExpressionNode:
    """One operation of an expression; an operand is a number or another operation."""

    op: str
    """One of `+`, `-` and `*`."""
    left: ExpressionNode | int
    right: ExpressionNode | int
    value: int
    """What the operation gives."""


def draw(rng: random.Random) -> GeneratedProblem:
    """Return one problem of either split."""
    tree = draw_tree(rng, rng.randint(MIN_OPS, MAX_OPS))
    question = rng.choice(QUESTIONS).format(expression(tree))
    closing = rng.choice(CLOSINGS).format(f"\\boxed{{ {tree.value}}}")
    solution = " ".join([*worked(rng, tree), closing])
    prompt = f"Problem:\n{question}\n\nSolution:"
    return text_problem(expression(tree), prompt, solution, {"solution": solution})


TASK = GeneratedTask("minimath", from_draw(draw))


def draw_tree(rng: random.Random, n_ops: int) -> ExpressionNode:
    """Return an expression of `n_ops` operations whose values all stay within 0..MAX_VALUE."""
    while True:
        tree = _grow(rng, n_ops, "")
        if isinstance(tree, ExpressionNode):
            return tree


def _grow(rng: random.Random, n_ops: int, parent: str) -> ExpressionNode | int | None:
    """Return an expression; a number if `n_ops` is 0; None if a value is out of range."""
    if n_ops == 0:
        return rng.randint(2, 9) if parent == "*" else rng.randint(1, 60)
    op, left_ops = rng.choices("+-*", (4, 4, 2))[0], rng.randrange(n_ops)
    left, right = _grow(rng, left_ops, op), _grow(rng, n_ops - 1 - left_ops, op)
    if left is None or right is None:
        return None
    value = apply_op(op, value_of(left), value_of(right))
    return ExpressionNode(op, left, right, value) if 0 <= value <= MAX_VALUE else None


def value_of(tree: ExpressionNode | int) -> int:
    """Return the value of an expression."""
    return tree if isinstance(tree, int) else tree.value


def expression(tree: ExpressionNode | int, inner: bool = False) -> str:
    """Return the expression as text, with brackets around every inner operation."""
    if isinstance(tree, int):
        return str(tree)
    text = f"{expression(tree.left, True)} {tree.op} {expression(tree.right, True)}"
    return f"( {text} )" if inner else text


def worked(rng: random.Random, tree: ExpressionNode | int) -> list[str]:
    """Return the equations of an expression, each after those whose results it uses."""
    if isinstance(tree, int):
        return []
    parts = [worked(rng, tree.left), worked(rng, tree.right)]
    if rng.random() < RIGHT_FIRST_RATE:
        parts.reverse()
    left, right = value_of(tree.left), value_of(tree.right)
    if tree.op != "-" and rng.random() < SWAP_RATE:
        left, right = right, left
    return [*parts[0], *parts[1], f"{left} {tree.op} {right} = {tree.value}."]
