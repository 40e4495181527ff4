"""What a command imports: help and mistakes need no model library, a short text only the needed.

Times depend on the machine, imports do not; what is imported is what takes the time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dllm_bench.cli.main import COMMANDS, GROUPS

HEAVY = (
    "torch",
    "transformers",
    "huggingface_hub",
    "matplotlib",
    "pandas",
    "scipy",
    "datasets",
    "sklearn",
    "safetensors",
    "wandb",
    "submitit",
)
NOT_FOR_HELP = (*HEAVY, "hydra")
NOT_FOR_EMBEDDED = (  # a model that ships with the package is a short text's whole work
    "transformers.modeling_utils",
    "transformers.core_model_loading",
    "transformers.generation",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor",
    "accelerate",
    "sympy",
    "scipy",
    "pandas",
    "matplotlib",
    "datasets",
)
NO_HELP_OF_OURS = ("run", "lm-eval")  # composes its list of choices; prints lm-eval's own help
HELP = [[name] for name in COMMANDS if name not in (*GROUPS, *NO_HELP_OF_OURS)]
HELP += [[group, name] for group, (_, names) in GROUPS.items() for name in names]
MISTAKES = {
    "generate tiny-llada fastdllm hello": "'fast_dllm'",
    "generate tiny-lada fast_dllm hello": "'tiny-llada'",
    "generate tiny-llada fast_dllm hello decoder.select.tao=1": "select.tau",
    "generate tiny-llada fast_dllm hello seed=1": "no setting of a decoder",
    "run model=tiny-lada": "'tiny-llada'",
    "run decoder=fastdllm": "'fast_dllm'",
    "run benchmark=minigsn": "'minigsm'",
    "run decoder.select.tao=1": "select.tau",
    "table lopa/tabel4": "'lopa/table4'",
    "figure lopa/figur5": "'lopa/figure5'",
    "train drafter tiny-llada dflush": "'dflash'",
    "train drafter tiny-lada dflash": "'tiny-llada'",
    "train filter tiny-lada": "'tiny-llada'",
    "train sps tiny-lada": "'tiny-llada'",
    "train temperatures abc": "0 runs",
    "simulate abc": "0 runs",
    "doctor tiny-lada": "'tiny-llada'",
    "prefetch tiny-lada": "'tiny-llada'",
}
CODE = """
import sys
from dllm_bench.cli.main import main
try:
    code = main(sys.argv[2:])
except SystemExit as stopped:
    code = stopped.code
found = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
print(f"\\nexit code {code}, imported {found}")
"""


def imported(heavy: tuple[str, ...], words: list[str], cwd: Path) -> tuple[str, str]:
    """(the line with exit code and the heavy modules that a command imported, its stderr)."""
    command = [sys.executable, "-c", CODE, ",".join(heavy), *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_nothing_that_is_slow(words: list[str], tmp_path: Path) -> None:
    line, _ = imported(NOT_FOR_HELP, [*words, "--help"], tmp_path)
    assert line == "exit code 0, imported []"


@pytest.mark.parametrize("command", NO_HELP_OF_OURS)
def test_help_of_other_libraries_imports_no_model_library(command: str, tmp_path: Path) -> None:
    line, _ = imported(("torch", "transformers", "datasets"), [command, "--help"], tmp_path)
    assert line == "exit code 0, imported []"


@pytest.mark.parametrize("text", MISTAKES)
def test_a_wrong_name_is_told_before_torch_is_imported(text: str, tmp_path: Path) -> None:
    line, error = imported(("torch", "transformers", "matplotlib"), text.split(), tmp_path)
    assert line == "exit code 2, imported []"
    assert MISTAKES[text] in error


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream-base", "tiny-sdar"])
def test_a_text_of_an_embedded_model_imports_no_classes_of_transformers(
    model: str, tmp_path: Path
) -> None:
    words = ["generate", model, "vanilla", "Tom has 3 apples.", "--max-new-tokens", "32"]
    line, _ = imported(NOT_FOR_EMBEDDED, words, tmp_path)
    assert line == "exit code 0, imported []"
