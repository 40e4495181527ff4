"""Which positions come first, whatever their scores: DUS, PC-Sampler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Amount, Positive, PositiveAmount, Size, fits
from dllm_bench.core.decoder import Condition, Conditions, holding
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.core.transfer import constant, to_device
from dllm_bench.decoding.numerics import read_logits
from dllm_bench.methods.common import COUNTS_STEPS, column, step_in_block
from dllm_bench.paths import place_of
from dllm_bench.registry import register

# --- DUS ------------------------------------------------------------------------------------------


@register("select.dilated")
@dataclass(frozen=True)
class Dilated(Select):
    """Dilated unmasking schedule (DUS, arXiv 2506.19037): positions by a fixed pattern, no scores.

    Commits the positions of one level after the other. A block is committed in levels, one per
    forward; the positions of a level are far from each other. "dilated": multiples of a stride that
    is divided by `base` from level to level; "binary": the middle, that of each half, and so on.
    A last level that is smaller than the previous one is merged into it. With `least`, the released
    code immediately masks candidates below that probability again (in all levels but the last) and
    never returns to them; here they are committed after the last level, in one forward.
    """

    kind: Literal["dilated", "binary"] = "dilated"
    base: Positive = 2  # divisor of the stride; 1: one level
    skip: Size = 1  # the first stride is the block's length divided by base ** skip
    least: Amount | None = None  # candidates below this probability stay masked; None: none do
    block: Size | None = None  # length of the repeated pattern; None: the open block
    needs = COUNTS_STEPS

    @property
    def gives(self) -> Conditions:
        """Forwards without a commit, if a whole level has to wait."""
        return holding({Condition.IDLES: self.least is not None})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step, _ = step_in_block(state, window)
        size, open_KW = self.block or window.block, window.eligible_KW
        place_W = constant(range(window.width), open_KW.device) % window.block
        level_P, levels = pattern(size, self.kind, self.base, self.skip, open_KW.device)
        own_W = level_P[place_W % size]
        due_KW = (place_W // size * levels + own_W == column(step)).expand_as(open_KW)
        if self.least is not None:
            due_KW = due_KW & ((scores.probability_KW >= self.least) | (own_W == levels - 1))
        return due_KW | (column(step) >= -(-window.block // size) * levels)


@cache
def pattern(size: int, kind: str, base: int, skip: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the level of each position of a block, int64 (P,), and the number of levels."""
    levels = midpoints(size) if kind == "binary" else multiples(size, base, skip)
    if len(levels) > 1 and len(levels[-1]) < len(levels[-2]):
        levels[-2:] = [levels[-2] + levels[-1]]
    level_P = torch.zeros(size, dtype=torch.long)
    for number, places in enumerate(levels):
        level_P[places] = number
    return to_device(level_P, device), len(levels)


def multiples(size: int, base: int, skip: int) -> list[list[int]]:
    """Return multiples of shorter and shorter strides, each position once."""
    levels, left, stride = [], list(range(size)), size // base**skip
    while stride >= 1 and base > 1 and left:
        levels.append([place for place in left if place % stride == 0])
        left = [place for place in left if place % stride]
        stride //= base
    return [level for level in [*levels, left] if level]


def midpoints(size: int) -> list[list[int]]:
    """Return the middle of the block, of its halves, of their halves, and so on."""
    levels, spans = [], [(0, size)]
    while spans:
        levels.append([(first + last - 1) // 2 for first, last in spans])
        halves = zip(spans, levels[-1], strict=True)
        cut = [part for (a, b), mid in halves for part in ((a, mid), (mid + 1, b))]
        spans = [(first, last) for first, last in cut if first < last]
    return levels


# --- PC-Sampler -----------------------------------------------------------------------------------

EPS = 1e-9  # inside the logarithm (PC-Sampler, released code)


@register("counts.file")
@dataclass(frozen=True)
class TokenCounts:
    """Counts of each token of a vocabulary in a corpus."""

    source: str = field(compare=False)
    """A json file in the form released by PC-Sampler's authors: `num_token` and `p_baseline_dict`,
    which maps token ids to counts. `assets/…` names a file of the package."""
    sha256: str = ""
    """Hash of the file: filled in if empty, otherwise compared with the file."""

    def __post_init__(self) -> None:
        read_counts(self.source)
        sha256 = hashlib.sha256(place_of(self.source).read_bytes()).hexdigest()
        if self.sha256 not in ("", sha256):
            raise DllmBenchError(
                f"Token counts {self.source!r} should have sha256 {self.sha256[:10]}…, the file "
                f"has {sha256[:10]}…; give the file with that hash, or leave sha256 out."
            )
        object.__setattr__(self, "sha256", sha256)


def read_counts(source: str) -> tuple[float, Mapping[int, float]]:
    """Return the number of tokens of a corpus, and the count of each token id, from a file."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        stored = json.loads(place_of(source).read_bytes())
        total, counts = stored["num_token"], stored["p_baseline_dict"]
        counts = {int(token): count for token, count in counts.items()}
        if total > 0 <= min(counts, default=0) and fits([total, *counts.values()], list[Amount]):
            return total, counts
    raise DllmBenchError(
        f"There are no token counts {source!r}; name a json file with num_token (above 0) and "
        "p_baseline_dict (token id: count)."
    )


@lru_cache(maxsize=4)  # token counts are equal if their hashes are
def log_frequency(counts: TokenCounts, size: int, device: torch.device) -> Tensor:
    """Return ln(f + 1e-9) of every token of a vocabulary of `size`, float32 (V,)."""
    total, found = read_counts(counts.source)
    frequency_V = torch.full((size,), 1 / total)
    for token, count in found.items():
        if token < size:
            frequency_V[token] = count / total
    return to_device((frequency_V + EPS).log(), device)


@register("score.calibrated")
@dataclass(frozen=True)
class Calibrated(Score):
    """PC-Sampler's score (arXiv 2508.13021): prefers early positions and tokens that are rare in a
    corpus.

    Ranks by position and by the surprise of the candidate. The surprise is -p ln(f + 1e-9) for a
    candidate of probability p and corpus frequency f, cut at `cap`. "exponential" multiplies it by
    exp(-decay n) for the n-th position of its block. "linear" scales the values of a block to [0,
    1] and computes (1 - decay) times the value plus `decay` times the share of the block from this
    position on. The linear form is that of the released code, in which a committed position enters
    with the frequency of its own token. Tokens that do not occur in the corpus count as seen once.
    Everything is float32.
    """

    counts: TokenCounts
    decay: Amount = 0.25  # lambda; 0: the position has no effect
    cap: PositiveAmount = 10.0  # alpha, the largest surprise; positions that reach it tie
    position: Literal["exponential", "linear"] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position == "linear" and self.decay > 1:
            raise DllmBenchError(f"Calibrated has a linear decay {self.decay}; give at most 1.")

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        candidates = read_logits(logits_KWV)
        ids_KW, probability_KW = candidates.ids_KW, candidates.probability_KW
        standing_KW = torch.where(window.of(state.masked_KL), ids_KW, window.of(state.tokens_KL))
        log_V = log_frequency(self.counts, logits_KWV.shape[-1], logits_KWV.device)
        surprise_KW = (-probability_KW * log_V[standing_KW]).clamp(max=self.cap)
        return Scores(ids_KW, probability_KW, self._placed(surprise_KW, window))

    def _placed(self, surprise_KW: Tensor, window: Window) -> Tensor:
        """Combine surprise and position in the block, (K, W)."""
        index_W = constant(range(window.width), surprise_KW.device)
        place_W, short = index_W % window.block, -window.width % window.block
        if self.position == "exponential":
            return torch.exp(-self.decay * place_W) * surprise_KW
        low_KN1 = window.blocks(surprise_KW, torch.inf).amin(2, keepdim=True)
        range_KN1 = window.blocks(surprise_KW, -torch.inf).amax(2, keepdim=True) - low_KN1
        scaled_KNP = (window.blocks(surprise_KW) - low_KN1) / range_KN1.clamp(min=EPS)
        size = window.block - (short and short * (index_W >= window.width + short - window.block))
        return (1 - self.decay) * window.flat(scaled_KNP) + self.decay * ((size - place_W) / size)
