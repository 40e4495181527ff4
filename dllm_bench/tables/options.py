"""Options that `dllm-bench table` and `dllm-bench figure` share, and the list of what there is.

Light to import: the parser is made for every command. What the options do is in `commands`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir, no_such

EMBEDDED = "embedded"
EXAMPLES = {"table": "lopa/table4", "figure": "dspark/figure2"}


def names(kind: str) -> list[str]:
    """All tables or figures there are, as `<paper>/<name>`."""
    paths = (conf_dir() / kind).glob("*/*.yaml")
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def chosen(kind: str, name: str) -> list[str]:
    """The one called `name`, or all of a paper, or all there are."""
    known = names(kind)
    found = [one for one in known if name in (one, one.partition("/")[0], "all")]
    if not found:
        raise DllmBenchError(no_such(kind, name, known, "; or a paper, or all"))
    return found


def check(args: Namespace) -> None:
    """Refuse what contradicts itself, or would be left undone without a word."""
    if args.run and args.submit:
        raise DllmBenchError("--run decodes here and --submit sends to SLURM; give one of them.")
    for flag in ("wait", "slurm"):
        if getattr(args, flag) and not args.submit:
            raise DllmBenchError(f"--{flag} goes with --submit, which was not given; add it.")
    if args.jobs and not args.run:
        raise DllmBenchError("--jobs goes with --run, which was not given; add it.")


def add_to(parser: ArgumentParser, kind: str, positive: Callable[[str], int]) -> None:
    """Give the parser of `table` or `figure` its options."""
    metavar, example = f"PAPER/{kind.upper()}", EXAMPLES[kind]
    paper = example.partition("/")[0]
    text = f"for example {example}; {paper}: every {kind} of the paper; all: every {kind}"
    parser.add_argument(kind, metavar=metavar, help=text)
    parser.add_argument("--profile", default=EMBEDDED, help="embedded (default) or paper")
    parser.add_argument("--run", action="store_true", help="run what is missing, here")
    parser.add_argument("--submit", action="store_true", help="send what is missing to SLURM")
    parser.add_argument(
        "--wait", action="store_true", help="with --submit: until all jobs are over"
    )
    text = "with --submit: over conf/hydra/launcher/slurm.yaml, as in partition=gpu; repeatable"
    parser.add_argument("--slurm", action="append", default=[], metavar="NAME=VALUE", help=text)
    parser.add_argument("--jobs", type=positive, metavar="N", help="runs beside each other")
    parser.add_argument("--limit", type=positive, metavar="N", help="N items per run, a quick look")
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = "\n".join([f"{kind}s:", *(f"  {name}" for name in names(kind))])
