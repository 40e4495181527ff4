"""The arguments of lm-eval's own command line, without its models, which take longer to import."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from lm_eval._cli import HarnessCLI


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the parsed arguments; `func` runs what they ask for. Exits on --help and on
    mistakes."""
    argv = sys.argv
    sys.argv = ["dllm-bench lm-eval", *arguments]
    try:
        return HarnessCLI().parse_args()
    finally:
        sys.argv = argv
