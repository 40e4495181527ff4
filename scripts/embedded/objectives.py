"""Objectives of the embedded models: which tokens are fed, masked and scored in a training step.

`causal`: next token of the answer (autoregressive models, and the start of Dream). `masked`: masked
diffusion with weights 1/t (LLaDA, Eq. 3, answers only as in its SFT), on whole answers and on
windows with clean text to the left and masks to the right. `rising`: D2F, mask ratios that rise
from block to block. `blocks`: block diffusion (SDAR, LLaDA2), all blocks of a text at once.
`complementary`: the same with shifted logits and every noised row's complement (Fast-dLLM v2).
`edits` is `blocks` with tokens planted that the model guessed (LLaDA2.1), see `with_guesses`.
`feed_order` and `strides`: causal models that also predict at masks (WeDLM, I-DLM). Each returns an
`Example`; with `shift=1` row p - 1 predicts position p, as in Dream.

Shapes: B rows of a batch, L positions of a row, N scored positions, J blocks, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.embedded.data import Batch, join

NEVER = -1e4
WINDOWS = torch.tensor([1, 2, 4, 8, 16, 32])
WIDE_WINDOWS = torch.tensor([8, 16, 32])
BLOCK_KINDS = torch.tensor([0, 0, 1, 1, 2])  # masked at random, after a cut, content tokens first
NEXT_TOKEN = 0.5  # weight of a clean copy's next tokens, beside 1 of the masks


@dataclass(frozen=True)
class Vocabulary:
    """Ids that the objectives need."""

    mask_id: int
    eos_id: int
    hard_V: Tensor
    """Content tokens: those that carry a problem's content (numbers, names, operators)."""


@dataclass(frozen=True)
class Example:
    """Inputs and targets of one step."""

    inputs_BL: Tensor
    """In `blocks` a row holds two copies of the text, noised and clean."""
    rows_N: Tensor
    """Indices into the flattened (B * L) states that predict the targets."""
    targets_N: Tensor
    weights_N: Tensor
    """Weights of the cross-entropy; they already divide by the number of rows."""
    bias: Tensor | None = None
    """Additive attention mask; None: every position sees all others."""
    positions_L: Tensor | None = None
    """Rotary positions; None: 0, 1, 2, …"""


def _uniform(rng: torch.Generator, *shape: int) -> Tensor:
    """Draws of U(0, 1)."""
    return torch.rand(shape, generator=rng)


def _choose(rng: torch.Generator, values: Tensor, count: int) -> Tensor:
    """Draw `count` of the values, uniformly, with replacement."""
    return values[torch.randint(len(values), (count,), generator=rng)]


def _stratified(rng: torch.Generator, count: int) -> Tensor:
    """Return `count` draws of U(0, 1), one from each of `count` equal bins, in random order."""
    return (torch.randperm(count, generator=rng) + _uniform(rng, count)) / count


def grid(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (offset_BL, answer_BL): distance from the answer's start; if it is 0 or more."""
    length = batch.ids_BL.shape[1]
    offset_BL = torch.arange(length)[None] - batch.prompt_B[:, None]
    return offset_BL, offset_BL >= 0


def _finish(
    batch: Batch, inputs_BL: Tensor, weights_BL: Tensor, shift: int, bias: Tensor | None = None
) -> Example:
    """Return the example of positions with a weight above 0; weights are divided by the rows."""
    flat = weights_BL.reshape(-1).nonzero()[:, 0]
    targets, weights = batch.ids_BL.reshape(-1)[flat], weights_BL.reshape(-1)[flat]
    return Example(inputs_BL, flat - shift, targets, weights / len(inputs_BL), bias)


def causal(batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int) -> Example:
    """Next-token prediction of the answer and four EOS, and of the tokens that drills ask for."""
    bias = causal_mask(batch.ids_BL.shape[1])
    return _finish(batch, batch.ids_BL, _spoken(batch), shift, bias)


def _spoken(batch: Batch) -> Tensor:
    """Return weights of the answer and four EOS, and of the tokens that drills ask for; 1 a row."""
    offset_BL, answer_BL = grid(batch)
    span_B = batch.total_B - batch.prompt_B + 4
    scored_BL = answer_BL & (offset_BL < span_B[:, None]) & ~batch.drill_B[:, None]
    return _per_row_mean((scored_BL | batch.asked_BL).float())


def _per_row_mean(scored_BL: Tensor) -> Tensor:
    """Return weights that sum to 1 in every row with a scored position."""
    return scored_BL / scored_BL.sum(1, keepdim=True).clamp(min=1)


def masked(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int,
    shares: tuple[float, float, float], padding: float = 1.0,
) -> Example:  # fmt: skip
    """Bidirectional masked diffusion in three kinds of states; `shares` are their shares of rows.

    Whole answer: t ~ U(0, 1), weights 1 / (t * answer length). Window of w positions: clean text to
    its left, masks to its right, inside t ~ U(1/w, 1) and weights 1 / (t * w). Window whose content
    tokens are masked with a higher ratio than the rest: decoding by confidence visits such states.
    In lengths, each EOS after the first counts `padding` instead of 1.
    """
    count, length = batch.ids_BL.shape
    kind_B = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=rng)
    offset_BL, answer_BL = grid(batch)
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
    beyond_B = size_B - inside_BL.sum(1)  # positions of a window past the end of the row
    length_B = (counted_BL.sum(1) + padding * beyond_B).clamp(min=padding)
    weights_BL = noised_BL * counted_BL / (ratio_BL * length_B[:, None])
    hidden_BL = noised_BL | (offset_BL >= (start_B + size_B)[:, None])
    hidden_BL, weights_BL = _drill_states(batch, rng, hidden_BL & answer_BL, weights_BL)
    inputs_BL = batch.ids_BL.masked_fill(hidden_BL, vocabulary.mask_id)
    return _finish(batch, inputs_BL, weights_BL, shift)


def _counts(batch: Batch, padding: float) -> Tensor:
    """Weight of each position: 1, and `padding` after the first EOS."""
    position_L = torch.arange(batch.ids_BL.shape[1])
    return torch.where(position_L[None] > batch.total_B[:, None], padding, 1.0)


def _window_starts(batch: Batch, size_B: Tensor, rng: torch.Generator) -> Tensor:
    """Offsets within the answer and its first EOS; half of them are multiples of the size."""
    count = len(size_B)
    start_B = (_uniform(rng, count) * (batch.total_B - batch.prompt_B + 1)).long()
    aligned_B = start_B // size_B * size_B
    return torch.where(_uniform(rng, count) < 0.5, aligned_B, start_B)


def _ratios(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, kind_B: Tensor, size_B: Tensor
) -> Tensor:
    """Mask ratio of each position."""
    count = len(kind_B)
    even_B = torch.maximum(_stratified(rng, count), 1.0 / size_B)
    hard_B, easy_B = 1 - 0.7 * _uniform(rng, count) ** 2, 0.05 + 0.9 * _uniform(rng, count) ** 2
    hard_BL = torch.where(vocabulary.hard_V[batch.ids_BL], hard_B[:, None], easy_B[:, None])
    return torch.where((kind_B == 2)[:, None], hard_BL.clamp(min=0.2), even_B[:, None])


def _drill_states(
    batch: Batch, rng: torch.Generator, hidden_BL: Tensor, weights_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """States of drill rows: the tokens they ask for are masked with a random ratio; in 60 % of them
    everything after a random cut is masked too.
    """
    count, length = batch.ids_BL.shape
    cut_B = ((_uniform(rng, count) * length / 6).long() + 1) * 6
    cut_B = torch.where(_uniform(rng, count) < 0.6, cut_B, length)
    before_BL = torch.arange(length)[None] < cut_B[:, None]
    ratio_B1 = 0.3 + 0.7 * _uniform(rng, count, 1)
    asked_BL = batch.asked_BL & before_BL & (_uniform(rng, count, length) < ratio_B1)
    drill_B1 = batch.drill_B[:, None]
    hidden_BL = torch.where(drill_B1, asked_BL | ~before_BL, hidden_BL)
    return hidden_BL, torch.where(drill_B1, _per_row_mean(asked_BL.float()), weights_BL)


def rising(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, full_share: float = 0.25
) -> Example:
    """D2F: mask ratios rise from block to block; attention is block-causal (in `full_share` of the
    batches full).

    Every row has blocks of 8, 16 or 32. In half of the rows the ratios of the blocks are sorted;
    in the other half the first blocks are clean, one or two are partly masked, and the rest is all
    masked. Cross-entropy at masked positions.
    """
    count, length = batch.ids_BL.shape
    offset_BL, answer_BL = grid(batch)
    size_B1 = _choose(rng, WIDE_WINDOWS, count)[:, None]
    block_BL = torch.where(offset_BL < 0, -1, offset_BL // size_B1)  # -1: the prompt
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
    """Mask ratio (B, J) of every block."""
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
    """Block diffusion: a noised copy of every row, then a clean one, in blocks from position 0.

    A noised block sees itself and the clean blocks before it. Of the blocks 40 % are masked at
    random with t ~ U(1 / size, 1), 40 % after a cut, and 20 % with a higher ratio at content
    tokens. The loss is the mean over a block's masked positions, in which each EOS after the
    first counts `padding` instead of 1, then over the blocks up to the second EOS.
    """
    place_L = torch.arange(batch.ids_BL.shape[1])
    noised_BL, weights_BL = _noised_blocks(batch, vocabulary, rng, place_L, size, padding)
    return _twins(batch, vocabulary, noised_BL, weights_BL, size, shift)


def _noised_blocks(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, place_L: Tensor, size: int,
    padding: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Masked positions and their weights, in the blocks of `place_L`, the place on their grid."""
    count, length = batch.ids_BL.shape
    block_L = place_L // size
    number = int(block_L[-1]) + 1
    near_BL = _near(batch, place_L, size)
    kind_BL = _choose(rng, BLOCK_KINDS, count * number).view(count, number)[:, block_L]
    even_BL = (1 / size + (1 - 1 / size) * _uniform(rng, count, number))[:, block_L]
    cut_BL = torch.randint(size, (count, number), generator=rng)[:, block_L]
    after_BL = (place_L % size)[None] >= cut_BL
    hard_BL = torch.where(vocabulary.hard_V[batch.ids_BL], 0.5 + 0.5 * even_BL, 0.5 * even_BL)
    ratio_BL = torch.where(kind_BL == 2, hard_BL, even_BL)
    noised_BL = torch.where(kind_BL == 1, after_BL, _uniform(rng, count, length) < ratio_BL)
    noised_BL = noised_BL & near_BL
    weights_BL = _per_block_mean(noised_BL * _counts(batch, padding), block_L, padding)
    return _drill_states(batch, rng, noised_BL, weights_BL)


def _near(batch: Batch, place_L: Tensor, size: int) -> Tensor:
    """Positions of the answer in the blocks up to that of the second EOS."""
    last_B = batch.total_B + 1 + place_L[0]
    return grid(batch)[1] & (place_L[None] // size <= (last_B // size)[:, None])


def _per_block_mean(counted_BL: Tensor, block_L: Tensor, least: float) -> Tensor:
    """Return weights of the mean over counted positions of a block, then over a row's blocks."""
    counted_BJ = torch.zeros(len(counted_BL), int(block_L[-1]) + 1)
    counted_BJ.index_add_(1, block_L, counted_BL)
    return _per_row_mean(counted_BL / counted_BJ[:, block_L].clamp(min=least))


def _twins(
    batch: Batch, vocabulary: Vocabulary, noised_BL: Tensor, weights_BL: Tensor, size: int,
    shift: int,
) -> Example:  # fmt: skip
    """Return the example of rows that hold a noised copy and a clean one.

    With shifted logits a block's first position is predicted by the clean copy of the row before.
    """
    count, length = noised_BL.shape
    inputs_BL = batch.ids_BL.masked_fill(noised_BL, vocabulary.mask_id)
    flat = weights_BL.reshape(-1).nonzero()[:, 0]
    clean = length * ((flat % length % size == 0) & (shift > 0))
    rows_N = flat // length * 2 * length + flat % length - shift + clean
    targets_N, weights_N = batch.ids_BL.reshape(-1)[flat], weights_BL.reshape(-1)[flat] / count
    both_BL, twice_L = torch.cat([inputs_BL, batch.ids_BL], 1), torch.arange(length).repeat(2)
    return Example(both_BL, rows_N, targets_N, weights_N, twin_mask(length, size), twice_L)


def with_guesses(example: Example, guess_N: Tensor, rng: torch.Generator) -> Example:
    """Return the example with the guesses at some of its scored positions instead of masks.

    In each row of the batch a share of them, drawn from U(0, 1), is planted; for `shift` 0.
    """
    count, length = example.inputs_BL.shape
    share_N = _uniform(rng, count)[example.rows_N // length]
    planted_N = _uniform(rng, len(guess_N)) < share_N
    inputs = example.inputs_BL.flatten().clone()
    inputs[example.rows_N[planted_N]] = guess_N[planted_N]
    return replace(example, inputs_BL=inputs.view(count, length))


def complementary(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, size: int,
    padding: float = 1.0,
) -> Example:  # fmt: skip
    """Block diffusion with complementary masks and shifted logits (Fast-dLLM v2, 2509.26328).

    In 40 % of the blocks a share t ~ U(0, 1) of the positions is masked. The others are states of
    decoding in sub-blocks, which are ours: the text before a quarter of the block is clean, the
    share t of the quarter is masked, and so is all after it. There are twice as many rows as
    drawn: the second half masks what the first half leaves clean of these positions. A block's
    first position is never masked, and is scored as the token after a clean block. The loss is the
    mean over these and the chosen positions, as in `blocks`; what lies after a quarter is not
    scored.
    """
    count, length = batch.ids_BL.shape
    number, place_L = -(-length // size), torch.arange(length) % size
    block_L = torch.arange(length) // size
    near_BL = _near(batch, torch.arange(length), size)
    whole_BJ = _uniform(rng, count, number) < 0.4
    quarter_BJ = torch.randint(4, (count, number), generator=rng) * size // 4
    begin_BL = quarter_BJ.masked_fill(whole_BJ, 0)[:, block_L]
    end_BL = (quarter_BJ + size // 4).masked_fill(whole_BJ, size)[:, block_L]
    part_BL = near_BL & (place_L >= begin_BL) & (place_L < end_BL) & (place_L > 0)
    after_BL = near_BL & (place_L >= end_BL)
    chosen_BL = _uniform(rng, count, length) < _uniform(rng, count, number)[:, block_L]
    part_BL = torch.cat([part_BL & chosen_BL, part_BL & ~chosen_BL])
    batch = join([batch, batch])
    scored_BL = part_BL | (near_BL & (place_L == 0)).repeat(2, 1)
    weights_BL = _per_block_mean(scored_BL * _counts(batch, padding), block_L, padding)
    noised_BL, weights_BL = _drill_states(batch, rng, part_BL | after_BL.repeat(2, 1), weights_BL)
    return _twins(batch, vocabulary, noised_BL, weights_BL, size, shift)


def feed_order(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, size: int,
    padding: float = 1.0,
) -> Example:  # fmt: skip
    """Windows whose masks are fed last (WeDLM, 2512.22737), and drafts of a block (2607.05722).

    Windows of `size` begin at a place drawn for each batch. In half of the rows they are masked as
    in `blocks`, and a row of the noised copy sees those of its window that are fed before it: what
    is clean by position, then the masks. In the others a window's first token is clean, the rest
    are masks, and all see one another. Either sees the clean copy of the windows before. The clean
    copy is causal and predicts next tokens, whatever `shift`.
    """
    count, length = batch.ids_BL.shape
    place_L = torch.arange(length) + torch.randint(size, (1,), generator=rng)
    window_L = place_L // size
    noised_BL, weights_BL = _noised_blocks(batch, vocabulary, rng, place_L, size, padding)
    draft_B = (_uniform(rng, count) < 0.5) & ~batch.drill_B
    anchored_BL = place_L % size <= torch.arange(length) - batch.prompt_B[:, None] + 1
    drafts_BL = _near(batch, place_L, size) & anchored_BL & (place_L % size > 0)
    of_drafts_BL = _per_block_mean(drafts_BL * _counts(batch, padding), window_L, padding)
    noised_BL = torch.where(draft_B[:, None], drafts_BL, noised_BL)
    weights_BL = torch.where(draft_B[:, None], of_drafts_BL, weights_BL)
    fed_BL = torch.arange(length) + length * noised_BL
    seen_BLL = (fed_BL[:, None] <= fed_BL[:, :, None]) | draft_B[:, None, None]
    seen_BLL = seen_BLL & (window_L[:, None] == window_L)
    return _beside_clean(batch, vocabulary, noised_BL, weights_BL, shift, seen_BLL, window_L)


def strides(
    batch: Batch, vocabulary: Vocabulary, rng: torch.Generator, shift: int, size: int,
    padding: float = 1.0,
) -> Example:  # fmt: skip
    """Return runs of `size` masks under causal attention, with shifted logits (I-DLM, 2604.11035).

    The noised copy of an answer is masks alone, in runs that begin at a place drawn for each batch;
    a mask sees the clean copy before its run and the masks of the run before it, and predicts the
    position behind it. The clean copy is causal and predicts next tokens.
    """
    length = batch.ids_BL.shape[1]
    place_L = torch.arange(length) + torch.randint(size, (1,), generator=rng)
    offset_BL, answer_BL = grid(batch)
    told_BL = (offset_BL > 0) & (offset_BL <= (batch.total_B - batch.prompt_B + 1)[:, None])
    told_BL = (told_BL & ~batch.drill_B[:, None]) | batch.asked_BL
    weights_BL = _per_row_mean(told_BL * _counts(batch, padding))
    run_L = place_L // size
    seen_BLL = (run_L[:, None] == run_L) & (place_L <= place_L[:, None])
    return _beside_clean(batch, vocabulary, answer_BL, weights_BL, shift, seen_BLL[None], run_L)


def _beside_clean(
    batch: Batch, vocabulary: Vocabulary, noised_BL: Tensor, weights_BL: Tensor, shift: int,
    seen_BLL: Tensor, window_L: Tensor,
) -> Example:  # fmt: skip
    """Return the example of a noised copy and a causal clean one, which predicts next tokens.

    `seen_BLL`: what noised rows see of their own window; of the clean copy they see the windows
    before it.
    """
    count, length = noised_BL.shape
    inputs_BL = batch.ids_BL.masked_fill(noised_BL, vocabulary.mask_id)
    next_BL = NEXT_TOKEN * _spoken(batch)
    next_BL[:, 0] = 0
    masks, nexts = (w.reshape(-1).nonzero()[:, 0] for w in (weights_BL, next_BL))
    rows_N = torch.cat(
        [2 * masks - masks % length - shift, 2 * nexts - nexts % length + length - 1]
    )
    weights_N = torch.cat([weights_BL.reshape(-1)[masks], next_BL.reshape(-1)[nexts]]) / count
    targets_N = batch.ids_BL.reshape(-1)[torch.cat([masks, nexts])]
    before_BLL = (window_L[:, None] > window_L).expand_as(seen_BLL)
    causal_BLL = torch.ones(length, length, dtype=torch.bool).tril().expand_as(seen_BLL)
    bias = _bias_of_twins(seen_BLL, before_BLL, causal_BLL)[:, None]
    both_BL, twice_L = torch.cat([inputs_BL, batch.ids_BL], 1), torch.arange(length).repeat(2)
    return Example(both_BL, rows_N, targets_N, weights_N, bias, twice_L)


def twin_mask(length: int, size: int) -> Tensor:
    """Additive mask (2L, 2L) over [noised | clean]: noised text sees its own noised block and the
    clean blocks before it; clean text sees the clean blocks up to its own.
    """
    block_L = torch.arange(length) // size
    own_LL, before_LL = block_L[:, None] == block_L, block_L[:, None] > block_L
    return _bias_of_twins(own_LL, before_LL, own_LL | before_LL)


def _bias_of_twins(own: Tensor, before: Tensor, clean: Tensor) -> Tensor:
    """Additive mask (..., 2L, 2L) over [noised | clean]: noised text sees `own` of itself and
    `before` of the clean text, which sees `clean` of itself.
    """
    clean_rows = torch.cat([torch.zeros_like(own), clean], -1)
    seen = torch.cat([torch.cat([own, before], -1), clean_rows], -2)
    return torch.where(seen, 0.0, NEVER)


def causal_mask(length: int, size: int = 1) -> Tensor:
    """Additive mask (L, L): blocks of `size` from position 0 see themselves and earlier blocks."""
    block_L = torch.arange(length) // size
    return torch.where(block_L[:, None] >= block_L, 0.0, NEVER)
