"""Recipes of the embedded models: the settings that produced the shipped weights.

A recipe is a start (random weights, or another recipe's model), a layout, and phases; a phase is an
objective with steps, learning rate and shares of data. The same recipe and seed give the same data
and masks in the same order. Batches hold a fixed number of tokens. `recipes.yaml` has the recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dllm_bench.core.declared import made_from
from dllm_bench.paths import read_yaml

DRILL, RECALL = "drill", "recall"

Shares = Mapping[str, float]
"""Tasks and drills, each with its share of the rows."""


@dataclass(frozen=True)
class Phase:
    """A number of steps with one objective."""

    objective: str
    """A function of `objectives.py`."""
    steps: int
    decay_steps: int
    """The last steps, in which the learning rate falls to zero."""
    lr: float
    """Peak learning rate."""
    data: Shares
    lengths: Mapping[int, float]
    """Row lengths, each with its share of the batches."""
    states: tuple[float, float, float] = (0.35, 0.45, 0.20)
    """Shares of rows in `masked`: whole answers, windows, windows with content tokens first."""
    prefer_long: bool = True
    """Draw longer rows more often, so that batches hold less EOS."""
    block: int = 0
    """Block length in `blocks` and `complementary`."""
    padding: float = 1.0
    """Weight of each EOS after the first in `masked`, `blocks` and `complementary`; below 1 where
    answers are a small part of a row and would count little."""


@dataclass(frozen=True)
class Recipe:
    """How one embedded model is made."""

    name: str
    layout: str
    """Published layout, one of `network.LAYOUTS`."""
    phases: tuple[Phase, ...]
    start: str | None = None
    """Recipe whose weights it starts from; None: random weights."""
    chat: bool = False
    """Whether prompts are user turns."""
    lora_rank: int = 0
    """Rank of an adapter on the start; 0 trains all weights."""
    seed: int = 1
    pool_seed: int = 1
    """Seed of the generated problems."""
    batch_tokens: int = 3072
    pool_size: int = 60_000
    """Problems of each task."""

    @property
    def shift(self) -> int:
        """Return 1 where row p - 1 predicts position p (Dream, autoregressive models), else 0."""
        return 1 if self.layout in ("dream", "qwen3", "fast_dllm_v2") else 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks of all phases."""
        return tuple(name for name in self._drawn if name not in (DRILL, RECALL))

    @property
    def drills(self) -> tuple[str, ...]:
        """Return the drills of all phases."""
        return tuple(name for name in self._drawn if name in (DRILL, RECALL))

    @property
    def _drawn(self) -> dict[str, None]:
        """Tasks and drills in the order of their first phase."""
        return dict.fromkeys(name for phase in self.phases for name in phase.data)

    @property
    def free_wording(self) -> bool:
        """Return whether wording is drawn at random within an answer, so that only numbers are
        content."""
        return bool({"ministory", "minigsm_free", "minicode_free"} & set(self.tasks))

    @property
    def first_vocabulary(self) -> bool:
        """Return whether all tasks are minigsm or minicode, the tasks of the first vocabulary."""
        return set(self.tasks) <= {"minigsm", "minicode"}


RECIPES: Mapping[str, Recipe] = {
    name: made_from(Recipe, {"name": name, **settings})
    for name, settings in read_yaml(Path(__file__).with_suffix(".yaml"))["recipes"].items()
}
