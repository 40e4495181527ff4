"""DecodeState: commit is the only writer; revisions, insertions, traces as columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.state import CUT, MASKED, PROMPT, DecodeState
from dllm_bench.core.trace import Forward, ForwardKind, Trace

SPECIAL = SpecialTokens(mask=1, eos=2, eot=3)


def fresh() -> DecodeState:
    return DecodeState.start(Request("r", (7, 8), 3), SPECIAL)


def test_commit_stamps_and_never_overwrites() -> None:
    state = fresh()
    state.forwards = 4
    state.commit(torch.tensor([[True, False, True, False, False]]), torch.full((1, 5), 9))
    assert state.tokens_KL.tolist() == [[7, 8, 9, 1, 1]]
    state.forwards = 5
    state.commit(torch.ones(1, 5, dtype=torch.bool), torch.full((1, 5), 6))
    assert state.tokens_KL.tolist() == [[7, 8, 9, 6, 6]]
    assert state.born_KL.tolist() == [[PROMPT, PROMPT, 4, 5, 5]]


def revised() -> DecodeState:
    """Return the state of a decoder that revises: 4 and 5 committed by the first forward, then a
    mask."""
    state = fresh()
    state.changes_KL = torch.zeros_like(state.born_KL)
    state.commit(torch.tensor([[True, True, False]]), torch.tensor([[4, 5, 0]]), start=2)
    state.forwards = 1
    return state


def revise(state: DecodeState, write: list[bool], ids: list[int]) -> None:
    """Revise the whole canvas of each branch alike."""
    state.revise(*(torch.tensor([row] * state.branches) for row in (write, ids)))


def test_revising_masks_and_overwrites_committed_positions_only() -> None:
    state = revised()
    revise(state, [True] * 5, [SPECIAL.mask, 9, SPECIAL.mask, 9, SPECIAL.mask])
    assert state.tokens_KL.tolist() == [[7, 8, 1, 9, 1]], "prompt and masks stay"
    assert state.born_KL.tolist() == [[PROMPT, PROMPT, MASKED, 1, MASKED]]
    assert state.changes_KL is not None and state.remasked_KW is not None
    assert state.changes_KL.tolist() == [[0, 0, 1, 1, 0]]
    assert state.remasked_KW.sum(1).tolist() == [1]


def test_taking_back_what_the_forward_has_committed_is_no_change() -> None:
    state = revised()
    state.commit(torch.tensor([[True]]), torch.tensor([[6]]), start=4)
    revise(state, [False] * 4 + [True], [SPECIAL.mask] * 5)
    assert state.born_KL[0, 4] == MASKED
    assert state.changes_KL is not None and state.changes_KL.sum() == 0


def test_each_branch_carries_its_own_revisions() -> None:
    branches = revised().fork(2)
    other = branches.pick(torch.tensor(0))
    revise(other, [False, False, True, False, False], [SPECIAL.mask] * 5)
    kept = branches.pick(torch.tensor(1))
    assert kept.tokens_KL.tolist() == [[7, 8, 4, 5, 1]]
    assert kept.changes_KL is not None and kept.changes_KL.sum() == 0
    again = other.fork(2).pick(torch.tensor(1))
    assert again.changes_KL is not None and again.changes_KL.tolist() == [[0, 0, 1, 0, 0]]
    assert again.remasked_KW is not None and again.remasked_KW.sum(1).tolist() == [1]


def start(prompt: tuple[int, ...], **ids: int) -> DecodeState:
    return DecodeState.start(Request("r", prompt, 4), replace(SPECIAL, **ids))


PADDED = "begins with the padding token .*without padding"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fresh().fork(2).fork(2), "one branch"),
        (lambda: Request("r", (), 3), "empty prompt"),
        (lambda: Request("r", (1,), 0), "asks for 0 new tokens"),
        (lambda: start((7, 1, 2), pad=7, bos=6), PADDED),
        (lambda: start((1, 1, 2)), PADDED),
    ],
)
def test_what_no_state_can_begin_with_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((DllmBenchError, ValueError), match=words):
        call()
    start((7, 1, 2), pad=7, bos=7)  # bos may be the padding too


def test_what_is_inserted_moves_the_rest_and_room_that_is_left_over_is_cut() -> None:
    state = fresh()
    state.commit(torch.tensor([[True, True, True]]), torch.tensor([[4, 5, 6]]), start=2)
    assert int(state.insert(torch.tensor(3), torch.tensor(2), None, room=3)) == 7
    assert state.tokens_KL[0, :7].tolist() == [7, 8, 4, SPECIAL.mask, SPECIAL.mask, 5, 6]
    assert state.born_KL[0].tolist() == [PROMPT, PROMPT, 0, MASKED, MASKED, 0, 0, CUT]


def test_trace_columns_are_plain_and_hold_no_defaults() -> None:
    drafts: Any = {"drafted": (7, 8, 9), "survival": (0.5, -1.0, 2.0)}
    verified = Forward(ForwardKind.VERIFY, 1, 4, 20, 3.0, proposed=3, accepted=2, **drafts)
    trace = Trace([Forward(ForwardKind.HEAD, 1, 0, 0, 1.5), verified])
    columns = json.loads(json.dumps(trace.columns()))
    assert (columns, Trace.from_columns(columns)) == (trace.columns(), trace)
    assert Trace.from_columns(Trace().columns()) == Trace()
    names = "kind branches fed cached ms proposed accepted drafted survival"
    assert columns.keys() == {*names.split()}
    assert columns["drafted"] == [[], [7, 8, 9]]
    spelled_out = {**columns, "masks": [0, 0], "calls": [1, 1]}  # as every trace was stored before
    assert Trace.from_columns(spelled_out) == trace
