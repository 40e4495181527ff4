"""Dream's Sudoku and Countdown: prompts as published, on made-up files of its form.

What the checks find of right and broken answers is in `answers.yaml`, see test_answers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from dllm_bench.benchmarks.tasks import sources, text_scorers
from tests.benchmark_helpers import encode, lm_eval_benchmark

PUZZLE = "0020\n0034\n0400\n1000"
GRID = "4321\n2134\n3412\n1243"
NUMBERS, EQUATIONS = "29,16,42,23,74", "29-16=13,42-23=19"
COUNTDOWN = "3,4,5,35", "3+4=7,7*5=35"


def data(folder: Path) -> Path:
    """Ten rows of each file."""
    for name, row in (
        ("sudoku_4x4_10", {"input": PUZZLE, "output": GRID}),
        ("cd3_test", {"input": COUNTDOWN[0], "output": COUNTDOWN[1]}),
        ("cd4_test", {"input": NUMBERS, "output": EQUATIONS}),
    ):
        file = folder / "dream" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text((json.dumps(row) + "\n") * 10)
    return folder


def test_prompts_are_dream_s(tmp_path: Path) -> None:
    settings = {"data_dir": str(data(tmp_path))}
    sudoku = lm_eval_benchmark("sudoku_dream", "valid,none", split="n10", **settings)
    requests = sudoku.requests(encode)
    example = f"Input:\n{PUZZLE}\nOutput:\n{GRID}"
    assert len(requests) == 2
    rule, *parts = requests[0].prompt.split("\n\n")
    assert rule.startswith("Fill the positions where the values are 0 in a 4x4 grid")
    assert parts == [*[example] * 8, f"Input:\n{PUZZLE}\nOutput:\n "]
    for split, given, words in (
        ("cd3", COUNTDOWN, "Given 4 numbers, use +-*/ to operate over the first three numbers to "
         "achieve the last number."),
        ("cd4", (NUMBERS, EQUATIONS), "Given 5 numbers, use +-*/ to operate over the first four "
         "numbers to achieve the fifth number."),
    ):  # fmt: skip
        benchmark = lm_eval_benchmark("countdown_dream", "valid,none", split=split, **settings)
        rule, *parts = benchmark.requests(encode)[0].prompt.split("\n\n")
        assert rule == words
        shown = f"Input: {given[0]}\nOutput: {given[1]}"
        assert parts == [*[shown] * 8, f"Input: {given[0]}\nOutput: "]
    assert len(sources.rows("countdown_dream", "cd3", settings["data_dir"])) == 2


def test_expressions_are_worked_out_and_not_run() -> None:
    assert text_scorers.holds("3+4*5", "23")
    assert text_scorers.holds("7/2", "3.5")
    for expression in ("1+2**3", "1+2//1", "1+1 and exit()", "1+1" * 100, "1+f", "3"):
        assert not text_scorers.holds(expression, "9")
