"""What is imported: help and mistakes need no model library, a short text only the needed.

Times depend on the machine, imports do not; what is imported is what takes the time.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dllm_bench.cli.main import COMMANDS
from dllm_bench.launch.slurm import PackedJob
from dllm_bench.paths import read_yaml
from scripts.install import IMPORTED

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch transformers huggingface_hub matplotlib pandas scipy datasets sklearn "
    "safetensors wandb submitit"
).split()
NOT_FOR_HELP = (*HEAVY, "hydra", "numpy", "requests", "lm_eval.api.model")
NOT_FOR_EMBEDDED = (  # a model that ships with the package is a short text's whole work
    "transformers.modeling_utils transformers.core_model_loading transformers.generation "
    "torch.distributed.tensor torch._dynamo torch._inductor accelerate sympy scipy "
    "matplotlib datasets"
).split()
HELP = [[], *([name] for name in COMMANDS), ["lm-eval", "run"]]  # the last: lm-eval's own
HELP += [[group, kind] for group, one in COMMANDS.items() for kind in one.get("kinds", ())]
MISTAKES = read_yaml(Path(__file__).with_name("lines.yaml"))["before torch"]
CODE = """
import json, sys
from dllm_bench.cli.main import main
heavy, known = set(sys.argv[1].split(",")), set()
for words in json.loads(sys.argv[2]):
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    found = (heavy & set(sys.modules)) - known
    known |= found
    sys.stdout.flush()
    print(f"\\n{' '.join(words)}: exit code {code}, imported {sorted(found)}", flush=True)
    print(f"{' '.join(words)}", file=sys.stderr, flush=True)
"""


def imported(heavy: Sequence[str], commands: list[list[str]], cwd: Path) -> tuple[str, str]:
    """(stdout, stderr) of a process that runs commands and prints, after each, its exit code and
    which of the heavy modules it was the first to import."""
    command = [sys.executable, "-c", CODE, ",".join(heavy), json.dumps(commands)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def endings(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if ": exit code " in line]


TEXTS = [["generate", f"tiny-{name}", "vanilla", "Tom has"] for name in ("llada", "dream-base")]


@pytest.mark.parametrize(
    ("slow", "commands"),
    [
        pytest.param(NOT_FOR_HELP, [[*one, "--help"] for one in HELP], id="help"),
        pytest.param(  # rich: bars of runs
            ("rich",), [[one, "--help"] for one in ("table", "figure", "claims")], id="of runs"
        ),
        pytest.param(NOT_FOR_EMBEDDED, TEXTS, id="texts", marks=pytest.mark.exhaustive),
    ],
)
def test_help_and_short_texts_import_nothing_that_is_slow(slow, commands, tmp_path) -> None:
    stdout, _ = imported(slow, commands, tmp_path)
    assert endings(stdout) == [f"{' '.join(one)}: exit code 0, imported []" for one in commands]


def test_a_wrong_name_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    commands = [text.split() for text in MISTAKES]
    stdout, stderr = imported(("torch", "transformers", "matplotlib"), commands, tmp_path)
    assert endings(stdout) == [f"{text}: exit code 2, imported []" for text in MISTAKES]
    for text, named in MISTAKES.items():
        error, stderr = stderr.split(f"{text}\n", 1)
        assert named in error, text
        assert "nearest of" not in error or len(error) < 350, "a few of many names"


SEALED = """
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from dllm_bench.cli.table import fill
from dllm_bench.metrics.accuracy import mean_score
from dllm_bench.store.store import Store
assert fill(Namespace(run=True, submit=False), [], Store(Path("runs"))) == []
assert mean_score([0.0, 1.0]) is not None
"""
COMPLETION = """
from dllm_bench.cli import completion
for line in ("run", "generate", "table", "train drafter"):
    completion.parser_of(line.split())
list(completion.setting_words("decoder.", {"decoder": "lopa"}))
"""
PAGE = """
from dataclasses import replace
from dllm_bench.api.compose import compose
from dllm_bench.site.texts import TextSource
from dllm_bench.store import inputs
from dllm_bench.store.spec import RunSpec
from tests.site.builders import lookaheads
config = compose(["model=tiny-llada", "benchmark=minigsm"])
benchmark = inputs.benchmark_of(config["benchmark"])
name = benchmark.items[0]["id"]
data = {"dataset": benchmark.dataset_hash()}
spec = RunSpec(config["model"], {}, config["benchmark"], {}, inputs=data)
samples = {name: replace(lookaheads(name), text="#### 7", prompt="Why?")}
texts = TextSource(compose)
answer = texts.answers(spec, samples)[name]
assert (texts.prompts(spec, samples)[name], answer.extracted) == ("Why?", "7")
assert answer.gold.partition("#### ")[2].isdecimal()
assert texts.decode(spec)(range(40))
"""
JOB = f"""
import pickle
pickle.loads({pickle.dumps(PackedJob(b"a pickled run"))!r})
"""
RENDERING = "import dllm_bench.tables.render, dllm_bench.tables.plan"
AT_ONCE = {
    "a table whose runs are all stored": (SEALED, "torch scipy.stats"),
    "completion": (COMPLETION, "torch hydra omegaconf pandas matplotlib"),
    "rendering": (RENDERING, "torch hydra omegaconf scipy transformers pandas wandb"),
    "loggers of runs": ("import dllm_bench.runs.loggers", "wandb"),
    "what a page shows of a run": (PAGE, "torch transformers lm_eval"),
    "a job of SLURM, which answers no signal before it is read": (JOB, "torch"),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_what_answers_at_once_imports_nothing_that_is_slow(what, tmp_path) -> None:
    code, slow = AT_ONCE[what]
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    found = f"print(set(sys.modules) & set({slow.split()}))"
    command = [sys.executable, "-c", f"{start}\n{code}\n{found}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr


def test_commands_of_the_makefile_write_bytecode() -> None:
    """Without it, each process of each run compiles torch again."""
    show = "--eval=show: ; @echo [$$PYTHONDONTWRITEBYTECODE]"
    command = ["make", "--no-print-directory", "-C", str(ROOT), show, "show"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.drill
def test_the_install_compiles_what_a_text_imports(tmp_path: Path) -> None:
    def modules(source: str) -> set[str]:
        command = [sys.executable, "-c", f"{source}\nimport sys; print(*sys.modules)"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return set(done.stdout.splitlines()[-1].split())

    text = "['generate', 'tiny-llada', 'fast_dllm', 'Tom has 3 apples.']"
    needed = modules(f"from dllm_bench.cli.main import main; main({text})")
    libraries = {name for name in needed if name.startswith(("torch.", "transformers."))}
    assert len(libraries) > 500
    assert len(libraries - modules(f"import {', '.join(IMPORTED)}")) < len(libraries) / 50
