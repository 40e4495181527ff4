"""Training states of the embedded models: what is fed, what is masked, what is scored.

`causal`: next token on the answer (the autoregressive start of Dream). `masked`: masked diffusion,
weights 1/t (LLaDA, eq. 3, answer-only as in its SFT), on whole answers and on windows with a clean
left and a masked right side. `rising`: D2F states, mask ratios that rise from block to block.
`blocks`: block diffusion (SDAR, LLaDA2), all blocks of a text at once.
Each returns an `Example`; the shift of Dream (row p-1 predicts p) is `shift=1`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.embedded.data import Batch

NEVER = -1e4
WINDOWS = torch.tensor([1, 2, 4, 8, 16, 32])
WIDE_WINDOWS = torch.tensor([8, 16, 32])
BLOCK_KINDS = torch.tensor([0, 0, 1, 1, 2])  # masked at random, behind a cut, content first


@dataclass(frozen=True)
class Vocabulary:
    """Special ids and the mask of tokens that carry a problem's content (numbers, names, ops)."""

    mask_id: int
    eos_id: int
    hard_V: Tensor


@dataclass(frozen=True)
class Example:
    """Inputs of one step. `rows_N` index the flattened [B * L] states that predict `targets_N`."""

    inputs_BL: Tensor
    rows_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    bias: Tensor | None = None
    positions_L: Tensor | None = None
    """None: 0, 1, 2, ...; `rows_N` then index the first [B * L] of `inputs_BL`."""


def _uniform(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=rng)


def _choose(rng: torch.Generator, values: Tensor, count: int) -> Tensor:
    return values[torch.randint(len(values), (count,), generator=rng)]


def _stratified(rng: torch.Generator, count: int) -> Tensor:
    """`count` draws of U(0, 1), one from each of `count` equal bins, in random order."""
    return (torch.randperm(count, generator=rng) + _uniform(rng, count)) / count


def _grid(batch: Batch) -> tuple[Tensor, Tensor]:
    """(offset_BL from the start of the answer, answer_BL)."""
    length = batch.ids_BL.shape[1]
    offset_BL = torch.arange(length)[None] - batch.prompt_B[:, None]
    return offset_BL, offset_BL >= 0


def _finish(
    batch: Batch, inputs_BL: Tensor, weights_BL: Tensor, shift: int, bias: Tensor | None = None
) -> Example:
    """Collect the scored positions (weight > 0); weights are divided by the number of rows."""
    flat = weights_BL.reshape(-1).nonzero()[:, 0]
    targets, weights = batch.ids_BL.reshape(-1)[flat], weights_BL.reshape(-1)[flat]
    return Example(inputs_BL, flat - shift, targets, weights / len(inputs_BL), bias)


def causal(batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int) -> Example:
    """Next-token prediction of the answer and four EOS; of what drill rows ask for."""
    offset_BL, answer_BL = _grid(batch)
    span_B = batch.total_B - batch.prompt_B + 4
    scored_BL = answer_BL & (offset_BL < span_B[:, None]) & ~batch.drill_B[:, None]
    scored_BL = (scored_BL | batch.asked_BL).float()
    bias = causal_mask(batch.ids_BL.shape[1])
    return _finish(batch, batch.ids_BL, _per_row_mean(scored_BL), shift, bias)


def _per_row_mean(scored_BL: Tensor) -> Tensor:
    return scored_BL / scored_BL.sum(1, keepdim=True).clamp(min=1)


def masked(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int,
    shares: tuple[float, float, float], padding: float = 1.0,
) -> Example:  # fmt: skip
    """Bidirectional masked diffusion; `shares` of rows: whole answer, windows, hard tokens first.

    Whole answer: t ~ U(0, 1), loss 1 / (t * answer length). Window of w: left clean, right all
    masked, t ~ U(1/w, 1) inside, loss 1 / (t * w). "Hard tokens first" masks the content tokens
    of a window with a higher ratio than the rest: the states that confident-first decoding visits.
    Lengths count an EOS after the first `padding` times.
    """
    count, length = batch.ids_BL.shape
    kind_B = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=rng)
    offset_BL, answer_BL = _grid(batch)
    wide_B = torch.where(
        kind_B == 2, _choose(rng, WIDE_WINDOWS, count), _choose(rng, WINDOWS, count)
    )
    start_B = _window_starts(batch, wide_B, rng)
    whole_B = kind_B == 0
    size_B = torch.where(whole_B, length - batch.prompt_B, wide_B)
    start_B = torch.where(whole_B, 0, start_B)
    inside_BL = (offset_BL >= start_B[:, None]) & (offset_BL < (start_B + size_B)[:, None])
    ratio_BL = _ratios(batch, vocabulary, rng, kind_B, size_B)
    noised_BL = inside_BL & (_uniform(rng, count, length) < ratio_BL)
    none_B1 = ~noised_BL.any(1, keepdim=True)
    noised_BL, ratio_BL = noised_BL | (none_B1 & inside_BL), ratio_BL.masked_fill(none_B1, 1.0)
    counted_BL = inside_BL * _counts(batch, padding)
    beyond_B = size_B - inside_BL.sum(1)  # of a window that leaves the row
    length_B = (counted_BL.sum(1) + padding * beyond_B).clamp(min=padding)
    weights_BL = noised_BL * counted_BL / (ratio_BL * length_B[:, None])
    hidden_BL = noised_BL | (offset_BL >= (start_B + size_B)[:, None])
    hidden_BL, weights_BL = _drill_states(batch, rng, hidden_BL & answer_BL, weights_BL)
    inputs_BL = batch.ids_BL.masked_fill(hidden_BL, vocabulary.mask_id)
    return _finish(batch, inputs_BL, weights_BL, shift)


def _counts(batch: Batch, padding: float) -> Tensor:
    """How much a position counts: 1, after the first EOS `padding`."""
    position_L = torch.arange(batch.ids_BL.shape[1])
    return torch.where(position_L[None] > batch.total_B[:, None], padding, 1.0)


def _window_starts(batch: Batch, size_B: Tensor, rng: torch.Generator) -> Tensor:
    """Offsets within the answer and its first EOS; half of them on the block grid."""
    count = len(size_B)
    start_B = (_uniform(rng, count) * (batch.total_B - batch.prompt_B + 1)).long()
    aligned_B = start_B // size_B * size_B
    return torch.where(_uniform(rng, count) < 0.5, aligned_B, start_B)


def _ratios(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, kind_B: Tensor, size_B: Tensor
) -> Tensor:
    count = len(kind_B)
    even_B = torch.maximum(_stratified(rng, count), 1.0 / size_B)
    hard_B, easy_B = 1 - 0.7 * _uniform(rng, count) ** 2, 0.05 + 0.9 * _uniform(rng, count) ** 2
    hard_BL = torch.where(vocabulary.hard_V[batch.ids_BL], hard_B[:, None], easy_B[:, None])
    return torch.where((kind_B == 2)[:, None], hard_BL.clamp(min=0.2), even_B[:, None])


def _drill_states(
    batch: Batch, rng: torch.Generator, hidden_BL: Tensor, weights_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Drill rows: what they ask for hidden with a random ratio; in 60 % all after a cut too."""
    count, length = batch.ids_BL.shape
    cut_B = ((_uniform(rng, count) * length / 6).long() + 1) * 6
    cut_B = torch.where(_uniform(rng, count) < 0.6, cut_B, length)
    before_BL = torch.arange(length)[None] < cut_B[:, None]
    ratio_B1 = 0.3 + 0.7 * _uniform(rng, count, 1)
    asked_BL = batch.asked_BL & before_BL & (_uniform(rng, count, length) < ratio_B1)
    drill_B1 = batch.drill_B[:, None]
    hidden_BL = torch.where(drill_B1, asked_BL | ~before_BL, hidden_BL)
    return hidden_BL, torch.where(drill_B1, _per_row_mean(asked_BL.float()), weights_BL)


def _block_of(offset_BL: Tensor, size_B1: Tensor) -> Tensor:
    """Block index of each position; -1 for the prompt."""
    return torch.where(offset_BL < 0, -1, offset_BL // size_B1)


def rising(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, full_share: float = 0.25
) -> Example:
    """D2F states under the block-causal mask (in `full_share` of batches: full attention).

    Block sizes 8, 16, 32 by row. Half of the rows: ratios sorted upwards over blocks; half:
    clean, one or two blocks in work, the rest all masked. Cross-entropy on masked positions.
    """
    count, length = batch.ids_BL.shape
    offset_BL, answer_BL = _grid(batch)
    size_B1 = _choose(rng, WIDE_WINDOWS, count)[:, None]
    block_BL = _block_of(offset_BL, size_B1)
    used_B = (batch.total_B - batch.prompt_B) // size_B1[:, 0] + 1
    ratio_BJ = _rising_ratios(rng, count, length // 8 + 1, used_B)
    ratio_BL = ratio_BJ.gather(1, block_BL.clamp(min=0))
    noised_BL = answer_BL & (_uniform(rng, count, length) < ratio_BL)
    near_BL = block_BL <= used_B[:, None]
    weights_BL = _per_row_mean((noised_BL & near_BL).float())
    noised_BL, weights_BL = _drill_states(batch, rng, noised_BL, weights_BL)
    inputs_BL = batch.ids_BL.masked_fill(noised_BL, vocabulary.mask_id)
    seen_BLL = block_BL[:, None] <= block_BL[:, :, None]
    full = _uniform(rng, 1).item() < full_share
    bias = torch.where(seen_BLL | full, 0.0, NEVER)[:, None]
    return _finish(batch, inputs_BL, weights_BL, shift, bias)


def _rising_ratios(rng: torch.Generator, count: int, blocks: int, used_B: Tensor) -> Tensor:
    """Mask ratio of every block, [B, blocks]."""
    index_J = torch.arange(blocks)[None]
    beyond_BJ = index_J >= used_B[:, None] + 1
    sorted_BJ = _uniform(rng, count, blocks).masked_fill(beyond_BJ, 1.0).sort(1).values
    first_B1 = (_uniform(rng, count) * used_B).long()[:, None]
    stage_BJ = index_J - first_B1
    working = torch.where(
        stage_BJ == 0, _uniform(rng, count, 1), 0.5 + 0.5 * _uniform(rng, count, 1)
    )
    semi_BJ = torch.where(stage_BJ < 0, 0.0, torch.where(stage_BJ < 2, working, 1.0))
    return torch.where(_uniform(rng, count, 1) < 0.5, sorted_BJ, semi_BJ)


def blocks(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, size: int,
    padding: float = 1.0,
) -> Example:  # fmt: skip
    """Block diffusion: a noised copy of every row beside the clean one, blocks from position 0.

    A noised block sees itself and the clean blocks before it. Of the blocks 40 % are masked at
    random with t ~ U(1 / size, 1), 40 % behind a cut, 20 % in their content tokens first. The
    loss is the mean over a block's masked positions, in which an EOS after the first counts
    `padding` times, then over the blocks up to the second EOS.
    """
    count, length = batch.ids_BL.shape
    answer_BL = _grid(batch)[1]
    number = -(-length // size)
    block_L = torch.arange(length) // size
    near_BL = answer_BL & (block_L[None] <= ((batch.total_B + 1) // size)[:, None])
    kind_BL = _choose(rng, BLOCK_KINDS, count * number).view(count, number)[:, block_L]
    even_BL = (1 / size + (1 - 1 / size) * _uniform(rng, count, number))[:, block_L]
    cut_BL = torch.randint(size, (count, number), generator=rng)[:, block_L]
    behind_BL = (torch.arange(length) % size)[None] >= cut_BL
    hard_BL = torch.where(vocabulary.hard_V[batch.ids_BL], 0.5 + 0.5 * even_BL, 0.5 * even_BL)
    ratio_BL = torch.where(kind_BL == 2, hard_BL, even_BL)
    noised_BL = torch.where(kind_BL == 1, behind_BL, _uniform(rng, count, length) < ratio_BL)
    noised_BL = noised_BL & near_BL
    counted_BL = noised_BL * _counts(batch, padding)
    counted_BJ = torch.zeros(count, number).index_add_(1, block_L, counted_BL)
    weights_BL = _per_row_mean(counted_BL / counted_BJ[:, block_L].clamp(min=padding))
    noised_BL, weights_BL = _drill_states(batch, rng, noised_BL, weights_BL)
    inputs_BL = batch.ids_BL.masked_fill(noised_BL, vocabulary.mask_id)
    flat = weights_BL.reshape(-1).nonzero()[:, 0]
    rows_N = flat // length * 2 * length + flat % length - shift
    targets_N, weights_N = batch.ids_BL.reshape(-1)[flat], weights_BL.reshape(-1)[flat] / count
    both_BL, twice_L = torch.cat([inputs_BL, batch.ids_BL], 1), torch.arange(length).repeat(2)
    return Example(both_BL, rows_N, targets_N, weights_N, twin_mask(length, size), twice_L)


def twin_mask(length: int, size: int) -> Tensor:
    """Additive [2L, 2L] over [noised | clean]: own noised block, clean blocks before; clean text
    sees clean blocks up to its own."""
    block_L = torch.arange(length) // size
    own_LL, before_LL = block_L[:, None] == block_L, block_L[:, None] > block_L
    noised_rows = torch.cat([own_LL, before_LL], dim=1)
    clean_rows = torch.cat([torch.zeros_like(own_LL), own_LL | before_LL], dim=1)
    return torch.where(torch.cat([noised_rows, clean_rows]), 0.0, NEVER)


def causal_mask(length: int, size: int = 1) -> Tensor:
    """Additive [L, L]: blocks of `size` from position 0 see themselves and those before."""
    block_L = torch.arange(length) // size
    return torch.where(block_L[:, None] >= block_L, 0.0, NEVER)
