"""Recipes of the embedded models: the numbers that produced the shipped weights.

A recipe is a start (random, or another recipe's model), a layout and phases; a phase is an
objective with a step count, a learning rate and data shares. "tiny-trunk" is autoregressive and
does not ship: Dream began from such weights too, and both diffusion models learn faster from it.
"tiny-qwen3" is the autoregressive target of the speculative decoders.
Same recipe and seed: same data and masks in the same order. Batches hold a fixed token number.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORT = ((64, 0.4), (96, 0.6))
LONG = ((64, 0.40), (88, 0.22), (112, 0.26), (144, 0.08), (192, 0.04))
FULL = ((48, 0.12), (64, 0.30), (88, 0.22), (112, 0.26), (144, 0.06), (192, 0.04))
"""(row length, share of batches); the generation region is the row less its prompt."""


@dataclass(frozen=True)
class Phase:
    """One objective: `steps` in all, the last `decay_steps` with the rate going to zero."""

    objective: str
    steps: int
    decay_steps: int
    lr: float
    data: tuple[float, float, float] = (0.48, 0.40, 0.12)
    """Row shares: minigsm, minicode, equation drill."""
    states: tuple[float, float, float] = (0.35, 0.45, 0.20)
    """Row shares of `masked`: whole answer, window, hard tokens first."""
    lengths: tuple[tuple[int, float], ...] = LONG
    prefer_long: bool = True
    """Draw the longer of the rows that fit more often (less EOS in a batch)."""


@dataclass(frozen=True)
class Recipe:
    """How one embedded model is made; `start` names the recipe whose weights it begins from."""

    name: str
    layout: str
    phases: tuple[Phase, ...]
    start: str | None = None
    chat: bool = False
    lora_rank: int = 0
    seed: int = 1
    pool_seed: int = 1
    batch_tokens: int = 6144
    pool_size: int = 200_000

    @property
    def shift(self) -> int:
        """Dream and autoregressive models predict position p from row p-1; LLaDA from row p."""
        return 0 if self.layout == "llada" else 1


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "tiny-trunk",
            "dream",
            (Phase("causal", 1100, 300, 3e-3, lengths=SHORT, prefer_long=False),),
        ),
        Recipe(
            "tiny-qwen3",
            "qwen3",
            (Phase("causal", 4000, 1600, 3e-3),),
            seed=5,
        ),
        Recipe(
            "tiny-llada",
            "llada",
            (
                Phase("masked", 822, 0, 2.5e-3),
                Phase("masked", 5600, 2200, 2.5e-3, lengths=FULL),
            ),
            start="tiny-trunk",
            seed=2,
        ),
        Recipe(
            "tiny-dream-base",
            "dream",
            (
                Phase("masked", 858, 0, 2.5e-3),
                Phase("masked", 3800, 1600, 2.5e-3, lengths=FULL),
            ),
            start="tiny-trunk",
            seed=3,
        ),
        Recipe(
            "tiny-dream-instruct",
            "dream",
            (Phase("masked", 1600, 1200, 1.5e-3),),
            start="tiny-dream-base",
            chat=True,
        ),
        Recipe(
            "tiny-d2f-dream-base",
            "dream",
            (Phase("rising", 1000, 700, 3e-3),),
            start="tiny-dream-base",
            lora_rank=16,
        ),
        Recipe(
            "tiny-d2f-dream-instruct",
            "dream",
            (Phase("rising", 1000, 700, 3e-3),),
            start="tiny-dream-instruct",
            chat=True,
            lora_rank=16,
        ),
    )
}
