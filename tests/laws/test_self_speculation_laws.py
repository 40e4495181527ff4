"""Laws of targets that draft for themselves: at masks behind a draft, or in a block of masks.

That their text is the target's own is in `test_speculative_laws` and `test_output_law`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import AddedRows, ForwardPlan
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.speculative import Draft
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.causal_masks import BidirectionalDraft, StridedDraft
from dllm_bench.metrics.sample_stats import count_sample
from tests.helpers import VOCAB, Watched, tiny_denoiser
from tests.speculative import Chain

MASK, NEW = 3, 21
SPECIAL = SpecialTokens(mask=MASK, eos=VOCAB)


def counting(at_mask: int) -> Chain:
    """Return a target that repeats its last token, which is 1, and says `at_mask` after a mask."""
    table_VV = torch.eye(4)
    table_VV[MASK] = torch.nn.functional.one_hot(torch.tensor(at_mask), 4)
    return Chain(SPECIAL, table_VV)


def decode(model: Any, draft: Draft) -> Generation:
    return SpeculativeDecoder(draft).generate(model, Request("self", (2, 1), NEW))


def committed(generation: Generation) -> list[int]:
    """Return tokens of each forward."""
    return [generation.born.count(index) for index in range(len(generation.trace))]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_masks_that_are_right_commit_a_whole_stride_a_round(tokens: int) -> None:
    """The prompt's forward and the first round, which has no draft, commit one token each."""
    found = decode(counting(at_mask=1), StridedDraft(tokens))
    assert set(found.ids) == {1}
    assert committed(found)[:2] == [1, 1]
    assert set(committed(found)[2:]) == {tokens + 1}
    assert {row.fed for row in found.trace.forwards[2:]} == {2 * tokens + 1}


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_after_a_rejection_a_round_has_masks_alone(tokens: int) -> None:
    found = decode(counting(at_mask=2), StridedDraft(tokens))
    assert set(found.ids) == {1}
    assert committed(found) == [1] * NEW, "no round costs more than plain decoding"
    assert [row.fed for row in found.trace.forwards[1:5]] == [tokens + 1, 2 * tokens + 1] * 2


def test_a_stride_never_takes_more_forwards_than_tokens() -> None:
    model = tiny_denoiser("qwen3", 3)
    for tokens in (1, 3):
        found = decode(model, StridedDraft(tokens))
        assert len(found.trace) <= NEW
        assert max(committed(found)) <= tokens + 1


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_block_that_is_right_is_committed_with_the_targets_own_token(tokens: int) -> None:
    model = counting(at_mask=1)
    found = decode(model, BidirectionalDraft(tokens))
    assert set(found.ids) == {1}
    kinds = [row.kind for row in found.trace.forwards]
    assert kinds[:3] == [ForwardKind.PREFILL, ForwardKind.SELF_DRAFT, ForwardKind.VERIFY]
    assert set(committed(found)[2::2]) == {tokens + 1}
    counts = count_sample(found, model.special)
    assert counts["forwards"] == len(kinds), "a draft of the model's own counts as a forward"


@pytest.mark.parametrize("shifted", [False, True])
def test_a_block_sees_itself_and_the_causal_text_before_it(shifted: bool) -> None:
    """Drafts are those of one forward over the whole text, under a mask of that form."""
    model, tokens = tiny_denoiser("nemotron_diffusion", 3), 4
    model.attention_form, model.shifted = "causal", True  # as configured for this mode
    watched: Any = Watched(model)
    for name in ("attention_form", "dtype", "num_layers", "hidden_size"):
        setattr(watched, name, getattr(model, name))
    draft = BidirectionalDraft(tokens, shifted)
    found = SpeculativeDecoder(draft).generate(watched, Request("self", (5, 9, 2, 7), NEW))
    rows = [row for row in found.trace.forwards if row.kind == ForwardKind.VERIFY]
    feeds = [plan.feed for plan in watched.plans if plan.kind == ForwardKind.SELF_DRAFT]
    assert len(rows) == len(feeds) > 3
    text = [5, 9, 2, 7, *found.ids]
    for row, (anchor, _) in zip(rows, feeds, strict=True):
        wanted_DV = whole_forward(model, text[: anchor + 1], tokens, shifted)
        assert row.drafted == tuple(wanted_DV.argmax(-1).tolist())


def whole_forward(model: Any, text: list[int], tokens: int, shifted: bool) -> Tensor:
    """Return logits of the slots (D, V), nothing cached."""
    length = len(text) + tokens
    place_F = torch.arange(length)
    block_F = place_F >= len(text) - 1
    sees_FF = (place_F <= place_F[:, None]) | block_F & block_F[:, None]
    nothing_E = torch.empty(0, dtype=torch.long)
    first = len(text) + (not shifted)
    plan = ForwardPlan(
        ForwardKind.SELF_DRAFT,
        feed=(0, length),
        rows=(first, first + tokens),
        store=(0, 0),
        added=AddedRows(nothing_E, nothing_E, sees_FF),
    )
    canvas_1L = torch.tensor([text + [model.special.mask] * tokens])
    return model.forward(canvas_1L, plan, model.new_cache(length))[0]
