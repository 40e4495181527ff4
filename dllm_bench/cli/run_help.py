"""The help of `dllm-bench run`: its flags, settings and choices, without importing Hydra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dllm_bench.cli.common import print_lines
from dllm_bench.paths import GROUPS, options

MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
ESTIMATE = "--estimate"
HELP = """\
usage: dllm-bench run [-m] [--cfg job] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Run one decoder on one benchmark with one model. A finished run is not repeated, an interrupted one
continues where it stopped.

  dllm-bench run model=tiny-llada benchmark=minigsm decoder=fast_dllm limit=50
  dllm-bench run -m decoder=fast_dllm,credit decoder.select.tau=0.7,0.9      every combination
  dllm-bench run decoder=fast_dllm decoder.select.tau=0.7
  dllm-bench run decoder=dspark decoder@baseline=ar_speculative
                                    decode each request with both: speed-up, equal texts or not
  dllm-bench run +experiment=first_run                       settings of conf/experiment, or yours
  dllm-bench run --cfg job decoder=lopa                      print the settings, run nothing
  dllm-bench run --estimate model=llada-instruct             time, forwards and memory, run nothing
  dllm-bench run benchmark=minicode --retry-errors           grade again what could not be graded
  dllm-bench run benchmark=minicode --max-judge-errors 3     seal if at most 3 cannot be graded

settings: seed, limit, batch (requests in one forward), measure_kl (the error of a cache), and
everything `--cfg job` prints
choices:
"""


def run(arguments: Sequence[str]) -> int:
    """Print the help; other arguments are ignored."""
    return print_lines([HELP + "\n".join(choices_lines())])


def choices_lines() -> Iterator[str]:
    """Yield one line per configuration group."""
    for group in GROUPS:
        yield f"  {group + '=':17}{' · '.join(options(group))}"
    yield f"  {'+experiment=':17}{' · '.join(options('experiment'))}"
