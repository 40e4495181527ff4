"""Recipes of the embedded models: the settings that produced the shipped weights.

A recipe is a start (random weights, or another recipe's model), a layout, and phases; a phase is an
objective with steps, learning rate and shares of data. The same recipe and seed give the same data
and masks in the same order. Batches hold a fixed number of tokens.

"tiny-trunk" is autoregressive and does not ship: Dream started from such weights too, and both
diffusion models learn faster from it. "tiny-qwen3" is the autoregressive target of the speculative
decoders. Models of all five tasks start from "tiny-trunk-five" or "tiny-trunk-qwen3", which learned
autoregressively to look things up in a text: masked diffusion alone takes too long for that.
Mixtures of experts start from dense models. Two more do not ship, which know the tasks of fixed
wording: "tiny-qwen3-fixed", the start of "tiny-qwen3" and of block diffusion, and
"tiny-llada2-fixed", the start of "tiny-llada2" and "tiny-llada21".
"""

from __future__ import annotations

from dataclasses import dataclass

DRILL, RECALL = "drill", "recall"

SHORT = ((64, 0.4), (96, 0.6))
LONG = ((64, 0.40), (88, 0.22), (112, 0.26), (144, 0.08), (192, 0.04))
BLOCKWISE = ((72, 0.6), (104, 0.4))
WHOLE = ((96, 0.7), (128, 0.3))
CANVAS = ((72, 0.52), (104, 0.32), (144, 0.10), (192, 0.06))
FULL = ((48, 0.12), (64, 0.30), (88, 0.22), (112, 0.26), (144, 0.06), (192, 0.04))
STORIES = ((224, 0.5), (304, 0.5))
FREE_ROWS = ((112, 0.5), (160, 0.5))
"""Row lengths, each with its share of the batches; the answer may fill the row after its prompt."""
STORY_STATES = (0.45, 0.15, 0.40)
"""Shares of states, see `Phase.states`; of `ministory`, where wording is most of an answer."""

Shares = tuple[tuple[str, float], ...]
FIRST: Shares = (("minigsm", 0.48), ("minicode", 0.40), (DRILL, 0.12))
ALL: Shares = (
    ("minigsm", 0.16), ("minicode", 0.16), ("minimath", 0.22), ("miniread", 0.20),
    ("minirule", 0.20), (DRILL, 0.03), (RECALL, 0.03),
)  # fmt: skip
READING: Shares = (
    ("minigsm", 0.05), ("minicode", 0.05), ("minimath", 0.10), ("miniread", 0.40),
    ("minirule", 0.25), (RECALL, 0.15),
)  # fmt: skip
WEAK: Shares = (
    ("minigsm", 0.15), ("minicode", 0.20), ("minimath", 0.30), ("miniread", 0.10),
    ("minirule", 0.20), (RECALL, 0.05),
)  # fmt: skip
SUMS: Shares = (
    ("minigsm", 0.35), ("minicode", 0.12), ("minimath", 0.28), ("miniread", 0.10),
    ("minirule", 0.15),
)  # fmt: skip
GSM: Shares = (("minigsm", 0.62), ("minicode", 0.26), (DRILL, 0.12))
CODE: Shares = (("minicode", 1.0),)
LINES = ((48, 0.6), (64, 0.4))
"""Row lengths of `miniparallel`; squares fit the longer rows."""
NO_SQUARES = ((40, 1.0),)
PARALLEL: Shares = (("miniparallel", 1.0),)
STORY: Shares = (("ministory", 0.95), (DRILL, 0.05))
FREE: Shares = (("minigsm_free", 0.9), (DRILL, 0.1))
FREE_CODE: Shares = (("minicode_free", 0.9), (DRILL, 0.1))
FREE_BOTH: Shares = (("minigsm_free", 0.5), ("minicode_free", 0.42), (DRILL, 0.08))
FREE_THREE: Shares = (
    ("minigsm_free", 0.38), ("minicode_free", 0.32), ("minirule_range", 0.25), (DRILL, 0.05),
)  # fmt: skip
FIXED_AND_FREE: Shares = (
    ("minigsm_free", 0.25), ("minicode_free", 0.20), ("minirule_range", 0.13), ("minimath", 0.14),
    ("minicode", 0.08), ("miniread", 0.10), ("minirule", 0.08), (DRILL, 0.02),
)  # fmt: skip
OPEN: Shares = (
    ("minigsm_free", 0.28), ("minicode_free", 0.22), ("ministory", 0.26), ("minimath", 0.20),
    (DRILL, 0.04),
)  # fmt: skip
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
    data: Shares = FIRST
    states: tuple[float, float, float] = (0.35, 0.45, 0.20)
    """Shares of rows in `masked`: whole answers, windows, windows with content tokens first."""
    lengths: tuple[tuple[int, float], ...] = LONG
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
        return dict.fromkeys(name for phase in self.phases for name, _ in phase.data)

    @property
    def free_wording(self) -> bool:
        """Return whether wording is drawn at random within an answer, so that only numbers are
        content."""
        return bool({"ministory", "minigsm_free", "minicode_free"} & set(self.tasks))

    @property
    def first_vocabulary(self) -> bool:
        """Return whether all tasks are minigsm or minicode, the tasks of the first vocabulary."""
        return set(self.tasks) <= {"minigsm", "minicode"}


def _fine_tuned(name: str, data: Shares, start: str, seed: int, chat: bool = False) -> Recipe:
    """Return a Dream for texts of free wording, from one of fixed wording."""
    phase = Phase("masked", 2400, 1600, 2e-3, data, STORY_STATES, FREE_ROWS, padding=0.1)
    return Recipe(name, "dream", (phase,), start, chat, seed=seed)


def _d2f_adapter(name: str, data: Shares, start: str, seed: int, chat: bool = False) -> Recipe:
    """Return a D2F adapter on such a Dream."""
    phase = Phase("rising", 6000, 4200, 3e-3, data, lengths=FREE_ROWS)
    return Recipe(name, "dream", (phase,), start, chat, lora_rank=32, seed=seed)


def _free_llada(name: str, seed: int) -> Recipe:
    """Return a LLaDA for texts of free wording and a choice, from the one of fixed wording."""
    phases = (
        Phase("masked", 4000, 2600, 2e-3, FREE_BOTH, STORY_STATES, FREE_ROWS, padding=0.1),
        Phase("masked", 1000, 700, 1.5e-3, FREE_THREE, STORY_STATES, FREE_ROWS, padding=0.1),
    )
    return Recipe(name, "llada", phases, start="tiny-llada", seed=seed)


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "tiny-trunk",
            "dream",
            (Phase("causal", 1100, 300, 3e-3, lengths=SHORT, prefer_long=False),),
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-qwen3-fixed",
            "qwen3",
            (Phase("causal", 4000, 1600, 3e-3),),
            seed=5,
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-trunk-five",
            "dream",
            (Phase("causal", 3000, 1500, 2.5e-3, READING, lengths=BLOCKWISE),),
            start="tiny-dream-base",
            seed=11,
        ),
        Recipe(
            "tiny-trunk-qwen3",
            "qwen3",
            (Phase("causal", 3000, 1500, 2.5e-3, READING, lengths=BLOCKWISE),),
            start="tiny-qwen3-fixed",
            seed=18,
        ),
        Recipe(
            "tiny-llada",
            "llada",
            (
                Phase("masked", 4000, 2000, 2e-3, ALL, lengths=CANVAS, padding=0.1),
                Phase("masked", 2200, 1500, 1.5e-3, WEAK, lengths=CANVAS, padding=0.1),
            ),
            start="tiny-trunk-five",
            seed=12,
        ),
        Recipe(
            "tiny-llada-moe",
            "llada_moe",
            (Phase("masked", 1500, 1000, 2e-3, WEAK, lengths=CANVAS, padding=0.1),),
            start="tiny-llada",
            seed=13,
        ),
        Recipe(
            "tiny-sdar",
            "sdar",
            (Phase("blocks", 3200, 1600, 2.5e-3, ALL, lengths=BLOCKWISE, block=4),),
            start="tiny-trunk-qwen3",
            seed=14,
            batch_tokens=2048,
        ),
        Recipe(
            "tiny-llada2",
            "llada2",
            (
                Phase(
                    "blocks",
                    1800,
                    1100,
                    2e-3,
                    FIXED_AND_FREE,
                    lengths=FREE_ROWS,
                    block=32,
                    padding=0.1,
                ),
            ),
            start="tiny-llada2-fixed",
            seed=56,
        ),
        Recipe(
            "tiny-llada2-fixed",
            "llada2",
            (
                Phase("blocks", 2000, 1200, 2.5e-3, WEAK, lengths=BLOCKWISE, block=32, padding=0.1),
                Phase("blocks", 2400, 1600, 2e-3, SUMS, lengths=BLOCKWISE, block=32, padding=0.1),
                Phase("blocks", 2400, 1600, 2e-3, SUMS, lengths=BLOCKWISE, block=32, padding=0.1),
            ),
            start="tiny-sdar",
            seed=15,
            batch_tokens=2048,
        ),
        Recipe(
            "tiny-llada21",
            "llada2",
            (Phase("edits", 400, 200, 1.5e-3, SUMS, lengths=BLOCKWISE, block=32, padding=0.1),),
            start="tiny-llada2-fixed",
            seed=24,
            batch_tokens=2048,
        ),
        Recipe(
            "tiny-fast-dllm-v2",
            "fast_dllm_v2",
            (
                Phase("complementary", 480, 280, 2.5e-3, GSM, lengths=WHOLE, block=32, padding=0.1),
                Phase("complementary", 320, 260, 2e-3, GSM, lengths=WHOLE, block=32, padding=0.1),
            ),
            start="tiny-qwen3-fixed",
            seed=24,
            batch_tokens=1024,
        ),
        Recipe(
            "tiny-diffucoder",
            "dream",
            (Phase("masked", 1600, 1200, 1.5e-3, CODE),),
            start="tiny-dream-base",
            chat=True,
            seed=16,
            batch_tokens=6144,
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
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-dream-instruct",
            "dream",
            (Phase("masked", 1600, 1200, 1.5e-3),),
            start="tiny-dream-base",
            chat=True,
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-llada-long",
            "llada",
            (Phase("masked", 1300, 900, 2e-3, STORY, STORY_STATES, STORIES, padding=0.1),),
            start="tiny-llada",
            seed=21,
        ),
        Recipe(
            "tiny-llada-parallel",
            "llada",
            (Phase("masked", 1000, 700, 2e-3, PARALLEL, (0.70, 0.15, 0.15), LINES, padding=0.1),),
            start="tiny-llada",
            seed=25,
            batch_tokens=2048,
        ),
        Recipe(
            "tiny-diffusion-gemma",
            "diffusion_gemma",
            (Phase("canvas", 1400, 1000, 4e-3, PARALLEL, lengths=NO_SQUARES, padding=0.1),),
            seed=71,
            batch_tokens=1600,
        ),
        Recipe(
            "tiny-dream-long",
            "dream",
            (Phase("masked", 1600, 1000, 2e-3, STORY, STORY_STATES, STORIES, padding=0.1),),
            start="tiny-dream-base",
            seed=23,
        ),
        Recipe(
            "tiny-d2f-dream-long",
            "dream",
            (Phase("rising", 350, 250, 3e-3, STORY, lengths=STORIES),),
            start="tiny-dream-long",
            lora_rank=16,
            seed=22,
        ),
        _fine_tuned("tiny-dream-base-free", FREE, "tiny-dream-base", 31),
        _fine_tuned("tiny-dream-instruct-free", FREE, "tiny-dream-instruct", 32, chat=True),
        _d2f_adapter("tiny-d2f-dream-base-free", FREE, "tiny-dream-base-free", 33),
        _d2f_adapter(
            "tiny-d2f-dream-instruct-free", FREE, "tiny-dream-instruct-free", 34, chat=True
        ),
        _d2f_adapter("tiny-d2f-dream-base-free-2", FREE, "tiny-dream-base-free", 35),
        _fine_tuned("tiny-dream-base-code", FREE_CODE, "tiny-dream-base", 41),
        _fine_tuned("tiny-dream-instruct-code", FREE_CODE, "tiny-dream-instruct", 42, chat=True),
        _d2f_adapter("tiny-d2f-dream-base-code", FREE_CODE, "tiny-dream-base-code", 43),
        _d2f_adapter(
            "tiny-d2f-dream-instruct-code", FREE_CODE, "tiny-dream-instruct-code", 44, chat=True
        ),
        _free_llada("tiny-llada-free", 51),
        _free_llada("tiny-llada-free-2", 55),
        _free_llada("tiny-llada-free-3", 58),
        Recipe(
            "tiny-llada-moe-free",
            "llada_moe",
            (
                Phase(
                    "masked", 2600, 1700, 2e-3, FIXED_AND_FREE, STORY_STATES, FREE_ROWS, padding=0.1
                ),
            ),
            start="tiny-llada-free",
            seed=13,
        ),
        Recipe(
            "tiny-qwen3",
            "qwen3",
            (Phase("causal", 3000, 1800, 2.5e-3, OPEN, lengths=STORIES),),
            start="tiny-qwen3-fixed",
            seed=53,
            batch_tokens=4096,
        ),
        Recipe(
            "tiny-wedlm",
            "wedlm",
            (
                Phase("feed_order", 680, 300, 2e-3, FREE, lengths=FREE_ROWS, block=16, padding=0.1),
                Phase(
                    "feed_order", 2400, 1200, 2e-3, FREE, lengths=FREE_ROWS, block=16, padding=0.1
                ),
            ),
            start="tiny-qwen3",
            seed=61,
            batch_tokens=1536,
        ),
        Recipe(
            "tiny-idlm",
            "qwen3",
            (Phase("strides", 447, 0, 2e-3, FREE, lengths=FREE_ROWS, block=3, padding=0.1),),
            start="tiny-qwen3",
            seed=62,
            batch_tokens=1536,
        ),
        Recipe(
            "tiny-d2f-dream-base",
            "dream",
            (Phase("rising", 1000, 700, 3e-3),),
            start="tiny-dream-base",
            lora_rank=16,
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-d2f-dream-instruct",
            "dream",
            (Phase("rising", 1000, 700, 3e-3),),
            start="tiny-dream-instruct",
            chat=True,
            lora_rank=16,
            batch_tokens=6144,
            pool_size=200_000,
        ),
        Recipe(
            "tiny-d2f-diffucoder",
            "dream",
            (Phase("rising", 1000, 700, 3e-3, CODE),),
            start="tiny-diffucoder",
            chat=True,
            lora_rank=16,
            seed=17,
            batch_tokens=6144,
        ),
    )
}
