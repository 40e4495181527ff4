"""minimath: nested arithmetic with a boxed answer, as MATH asks for one, made from a seed.

A problem is an expression of 2..4 operations in brackets whose values stay in 0..99, on any two
numbers (minigsm's second operand is small). The answer works from the inside out and ends in
``\\boxed{ N}``, a space before N, since numbers are one token with theirs. Which of two brackets
comes first and the order of operands are drawn, so one problem has several right answers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import generated as mini
from dllm_bench.benchmarks.embedded.minigsm import MAX_VALUE, apply_op

MIN_OPS, MAX_OPS = 2, 4
ASKED = ("Compute {0}.", "Find {0}.", "What is {0}?")
CLOSINGS = ("So the answer is {0}.", "The answer is {0}.")
RIGHT_FIRST_RATE, SWAP_RATE = 0.3, 0.2


@dataclass(frozen=True)
class Node:
    """One operation on two numbers or operations."""

    op: str
    left: Node | int
    right: Node | int
    value: int


def draw(rng: random.Random) -> mini.Problem:
    """One problem of either split."""
    tree = draw_tree(rng, rng.randint(MIN_OPS, MAX_OPS))
    asked = rng.choice(ASKED).format(expression(tree))
    closing = rng.choice(CLOSINGS).format(f"\\boxed{{ {tree.value}}}")
    solution = " ".join([*worked(rng, tree), closing])
    prompt = f"Problem:\n{asked}\n\nSolution:"
    return mini.Problem(expression(tree), prompt, solution, {"solution": solution})


def draw_tree(rng: random.Random, n_ops: int) -> Node:
    """An expression of `n_ops` operations whose values all stay in 0..MAX_VALUE."""
    while True:
        tree = _grow(rng, n_ops, "")
        if isinstance(tree, Node):
            return tree


def _grow(rng: random.Random, n_ops: int, parent: str) -> Node | int | None:
    """An expression, a number where no operation is left, None where a value is out of range."""
    if n_ops == 0:
        return rng.randint(2, 9) if parent == "*" else rng.randint(1, 60)
    op, left_ops = rng.choices("+-*", (4, 4, 2))[0], rng.randrange(n_ops)
    left, right = _grow(rng, left_ops, op), _grow(rng, n_ops - 1 - left_ops, op)
    if left is None or right is None:
        return None
    value = apply_op(op, value_of(left), value_of(right))
    return Node(op, left, right, value) if 0 <= value <= MAX_VALUE else None


def value_of(tree: Node | int) -> int:
    """What an expression comes to."""
    return tree if isinstance(tree, int) else tree.value


def expression(tree: Node | int, inner: bool = False) -> str:
    """The expression as text, every inner operation in brackets."""
    if isinstance(tree, int):
        return str(tree)
    text = f"{expression(tree.left, True)} {tree.op} {expression(tree.right, True)}"
    return f"( {text} )" if inner else text


def worked(rng: random.Random, tree: Node | int) -> list[str]:
    """The equations of an expression, inner ones before those that need them."""
    if isinstance(tree, int):
        return []
    parts = [worked(rng, tree.left), worked(rng, tree.right)]
    if rng.random() < RIGHT_FIRST_RATE:
        parts.reverse()
    left, right = value_of(tree.left), value_of(tree.right)
    if tree.op != "-" and rng.random() < SWAP_RATE:
        left, right = right, left
    return [*parts[0], *parts[1], f"{left} {tree.op} {right} = {tree.value}."]
