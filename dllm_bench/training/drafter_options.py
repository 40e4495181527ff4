"""Options of `dllm-bench train drafter`, and the job they ask for.

An option that is not given keeps what its kind of drafter has. Light to import: the parser is made
for every command.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import no_such

if TYPE_CHECKING:
    from dllm_bench.training.drafters import DrafterJob

TEXT = "a drafter beside its target: DFlash, DSpark, EAGLE-3 (a second call goes on)"
COUNTS = {
    "layers": "layers of the drafter",
    "slots": "positions of a block, anchor included, or steps of EAGLE-3",
    "rank": "rank of DSpark's head of transitions (the paper: 256)",
    "prompts": "prompts of the train splits",
    "max_new_tokens": "tokens of an answer at most",
    "rows": "rows of a step",
    "anchors": "blocks of a row at most (the paper: 512)",
    "steps": "steps of the optimiser",
}


def add_to(parser: ArgumentParser, positive: Callable[[str], int]) -> None:
    """Give the parser its options."""
    parser.add_argument("model", metavar="MODEL", help="the target, as in `dllm-bench run model=…`")
    parser.add_argument("drafter", metavar="KIND", help="dflash, dspark-markov, eagle3, …")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: RESULTS/training/drafters"
    )
    for name, meaning in COUNTS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive, metavar="N", help=meaning)
    parser.add_argument("--lr", type=rate, metavar="RATE", help="peak rate (the paper: 6e-4)")
    parser.add_argument(
        "--shares",
        nargs=2,
        type=float,
        metavar=("CE", "L1"),
        help="of the loss's two terms (DFlash: 1 0; DSpark: 0.1 0.9)",
    )
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the target's answers; 0: greedy"
    )
    parser.add_argument("--texts", choices=("target", "gold"), help="whose answers are learned")


def rate(text: str) -> float:
    """A number above zero."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number above zero")
    return number


def job_of(args: Namespace) -> DrafterJob:
    """The kind's job with the options that were given."""
    from dllm_bench.training.drafters import KINDS

    if args.drafter not in KINDS:
        raise DllmBenchError(no_such("kind of drafter", args.drafter, list(KINDS)))
    job = KINDS[args.drafter]
    names = {f.name for f in fields(job)} & set(vars(args))
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "shares" in given:
        ce, l1 = given["shares"]
        given["shares"] = replace(job.shares, ce=ce, l1=l1)
    return replace(job, **given)
