"""Counts the forwards of the open block on the host, for caches that follow a clock of it."""

from __future__ import annotations

from dllm_bench.core.blocks import Window
from dllm_bench.core.state import DecodeState, MemoKey

BLOCK = MemoKey[int]("cache.block")  # position at which the first open block begins
ENTERED = MemoKey[int]("cache.entered")  # its first forward


def step_of_block(state: DecodeState, window: Window) -> int:
    """How many forwards the first open block had before this one."""
    if state.memo.get(BLOCK) != window.start:
        state.memo[BLOCK], state.memo[ENTERED] = window.start, state.forwards
    return state.forwards - state.memo[ENTERED]
