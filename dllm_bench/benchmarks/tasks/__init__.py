"""The lm-eval tasks: a yaml file each, with the items, prompts and graders they name."""

from pathlib import Path

from dllm_bench.paths import read_yaml

TEXTS = read_yaml(Path(__file__).parents[1] / "task_texts.yaml")
"""Wording of published prompts, by task. lm-eval would take a yaml in this folder for a task."""
