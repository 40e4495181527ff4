"""Options of what `dllm-bench train` measures rather than learns: `sps` and `temperatures`.

Light to import: the parser is made for every command.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

SPS = "steps per second by tokens in the step, for the verification scheduler"
SIZES = "1,2,4,8,16,32,64,128,256"
TEMPERATURES = "temperatures of a confidence head, fitted on what sealed runs stored"


def add_sps(
    parser: ArgumentParser,
    positive: Callable[[str], int],
    positives: Callable[[str], tuple[int, ...]],
) -> None:
    """The options of `train sps`."""
    parser.add_argument("model", metavar="MODEL", help="an autoregressive model, as in model=MODEL")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as in `run`")
    parser.add_argument("--batches", type=positives, metavar="N,N,…", default=SIZES)
    parser.add_argument("--context", type=positive, metavar="N", default=256, help="tokens before")
    parser.add_argument(
        "--repeats", type=positive, metavar="N", default=20, help="timed steps each"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RESULTS/training/sps/…")


def add_temperatures(parser: ArgumentParser) -> None:
    """The options of `train temperatures`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="hash of a run of a drafter with a confidence head"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RESULTS/training/temperatures/…"
    )
