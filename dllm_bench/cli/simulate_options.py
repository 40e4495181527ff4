"""Options of `dllm-bench simulate`. Light to import: the parser is made for every command."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

TEXT = "many requests on one device, simulated from runs: tokens/s per user and per device"
PROFILE = "assets/profiles/tiny-qwen3-cpu.json"


def add_to(parser: ArgumentParser, positives: Callable[[str], tuple[int, ...]]) -> None:
    """Give the parser its options."""
    parser.epilog = (
        "Each RUN is of one drafter, greedy, and verifies nothing: decoder=dspark "
        "decoder/length=fixed decoder.length.tokens=0. Temperatures of a confidence head are "
        "fitted on the first half of its texts, the second half is served."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="hash of a run, or its beginning")
    parser.add_argument(
        "--profile",
        default=PROFILE,
        metavar="FILE",
        help=f"of `train sps` with the runs' model; default: {PROFILE}",
    )
    parser.add_argument(
        "--requests", type=positives, metavar="N,N,…", default="1,2,4,8,16,24", help="at a time"
    )
    parser.add_argument("--tau", type=float, default=0.5, help="of the threshold; default: 0.5")
    parser.add_argument("--temperatures", metavar="FILE", help="of `train temperatures`")
    parser.add_argument("--raw", action="store_true", help="take confidence heads at their word")
    parser.add_argument(
        "--arrivals", type=rates, metavar="R,R,…", help="requests per second, at random, instead"
    )
    parser.add_argument("--level", type=float, default=0, help="tokens/s that a user is to get")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the points as csv too")


def rates(text: str) -> tuple[float, ...]:
    """Numbers above zero with commas between."""
    found = tuple(float(part) for part in text.split(","))
    if min(found) <= 0:
        raise ValueError(text)
    return found
