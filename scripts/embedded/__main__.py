"""Train an embedded model from its recipe: `python -m scripts.embedded MODEL [--out DIR]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dllm_bench.core.errors import DllmBenchError
from scripts.embedded.recipes import RECIPES
from scripts.embedded.train import train

DESCRIPTION = """\
Train one of the small models that ship with the package, from its recipe in
scripts/embedded/recipes.yaml, and write a checkpoint folder in the published layout with tokenizer,
model card and training log. Training takes minutes to hours on one CPU core; it prints a line with
the time left every 200 steps and saves its state every two minutes. The same command resumes an
interrupted training. A model that begins from another one reads it from the folder next to DIR, or
from the package; a start that does not ship is trained first.
"""


def parser() -> argparse.ArgumentParser:
    """Parse the command line."""
    made = argparse.ArgumentParser(
        prog="python -m scripts.embedded",
        description=DESCRIPTION,
        epilog=f"models: {', '.join(RECIPES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", metavar="MODEL", choices=RECIPES, help="for example tiny-llada")
    made.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: results/training/MODEL)"
    )
    made.add_argument("--steps", type=int, metavar="N", help="at most N steps of each phase")
    made.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of torch (default: 1)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print where the model was written; 2 for a mistake of the user."""
    args = parser().parse_args(argv)
    out = args.out or Path("results") / "training" / args.model
    try:
        folder = train(args.model, out, steps=args.steps, threads=args.threads)
    except DllmBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
