"""Laws of blocks: what the host concludes of a canvas is what stands there.

A round tells the host the masks of its window's blocks alone. Here every round of many decoders is
compared with a count over the whole canvas: before the window, in it, behind it, in every branch,
in canvases that are cut, with blocks that overlap the prompt or are cut short.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from torch import Tensor

from dllm_bench.core.blocks import HELD, LAST, LEFT, BlockGrid, BlockProgress
from dllm_bench.core.contracts import Explore, Round, Schedule, Select, Stop, StopFlags
from dllm_bench.core.decoder import Conditions
from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.decoding.defaults import Filled, Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, Pipeline, Threshold
from dllm_bench.methods.fast_dllm import SubBlockGrid, SubBlocks
from dllm_bench.methods.lengths import AdaBlock, Daedal
from tests.helpers import VOCAB
from tests.pieces import Table
from tests.tiers import covering

REQUEST = Request("blocks", tuple(range(3, 14)), 32)


@dataclass
class Canvas:
    """The canvas of the round that is opened, and the branches already asked about."""

    born_KL: Tensor | None = None
    asked: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Shows(Stop):
    """Does what `inner` does and shows the canvas of every round; cuts it at `length`."""

    inner: Stop
    canvas: Canvas = field(compare=False)
    length: int | None = None

    def ended(self, branches: DecodeState) -> StopFlags:
        self.canvas.born_KL, self.canvas.asked = branches.born_KL.clone(), 0
        self.canvas.rounds += 1
        return self.inner.ended(branches)

    def on_commit(self, round: Round) -> None:
        if self.length is not None and round.state.forwards >= 1:
            round.cut(round.state.tokens_KL.new_tensor(self.length))


@dataclass(frozen=True)
class Counts(Schedule):
    """Does what `inner` does and counts again what it is told."""

    inner: Schedule
    canvas: Canvas = field(compare=False)

    @property
    def block(self) -> int | None:  # type: ignore[override]
        return self.inner.block

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        return self.inner.grid(prompt_len, new)

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return self.inner.must_progress(branch, n)

    @property
    def gives(self) -> Conditions:  # type: ignore[override]
        return self.inner.gives

    def opened(self, branch: BlockProgress) -> int:
        assert self.canvas.born_KL is not None
        born_L, grid = self.canvas.born_KL[self.canvas.asked], branch.grid
        self.canvas.asked += 1
        spans = [born_L[grid.start(n) : grid.start(n + 1)] for n in range(grid.blocks)]
        left = [int((span == MASKED).sum()) for span in spans]
        starts = [max(grid.start(n), grid.prompt_len) for n in range(grid.blocks)]
        new = [born_L[start : grid.start(n + 1)] for n, start in enumerate(starts)]
        assert [branch.masks_left(n) for n in range(grid.blocks)] == left
        assert [branch.begun(n) for n in range(grid.blocks)] == [
            bool((span != MASKED).any()) for span in new
        ]
        assert branch.finished == next((n for n, masks in enumerate(left) if masks), grid.blocks)
        opened = self.inner.opened(branch)
        assert branch.opened <= opened or opened >= grid.blocks
        assert branch.open_masks(opened) == sum(left[:opened])
        assert HELD not in branch.stays or (opened == 0 and not branch.all_finished(opened))
        return opened


@pytest.mark.parametrize(
    ("stays", "finished", "done"),
    [
        ((), 2, False),  # the third has masks
        ((HELD,), 2, False),
        ((LEFT,), 3, True),
        ((HELD, 0, 0), 0, False),
        ((0, LAST, LEFT), 1, False),
        ((HELD, LEFT), 1, False),
        ((0, 0, LEFT), 3, True),
    ],
)
def test_each_open_block_may_be_held(stays: tuple[int, ...], finished: int, done: bool) -> None:
    """Of three open blocks, the first two without masks; the values are those of the last ones."""
    progress = BlockProgress(BlockGrid(0, 8, 0, 32), 0, (0, 0, 5), 3, stays=stays)
    assert (progress.finished, progress.all_finished(3)) == (finished, done)


SCHEDULES = (
    Blocks(8),
    Blocks(None),
    Blocks(1, False),
    Blocks(8, False, absolute=True),
    Blocks(8, False, absolute=True, whole=True),
    Pipeline(8, 0.3, 0.6),
)
SELECTS = (Threshold(0.4), Threshold(1.0, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize(
    "length", covering(2, [None, 11 + 19, 11]), ids=["whole", "cut", "all cut"]
)
def test_the_host_knows_the_canvas(
    schedule: Schedule, explore: Explore, length: int | None
) -> None:
    stops = (Filled(), Eos("block"), Eos("token"))
    for stop, select in product(stops, SELECTS):
        check(schedule, explore, select, stop, length)


@pytest.mark.parametrize("length", [None, 11 + 19, 11], ids=["whole", "cut", "all cut"])
def test_the_host_knows_blocks_that_end_at_delimiters(length: int | None) -> None:
    schedule = AdaBlock(8, delimiters=tuple(range(0, VOCAB, 3)), tau=0.1)
    for stop, select in product((Filled(), Eos("block"), Eos("token")), SELECTS):
        check(schedule, Greedy(), select, stop, length)


def test_the_host_knows_a_canvas_that_grows() -> None:
    for low, stop, select in product((0.5, 1.1), (Filled(), Eos("block"), Eos("token")), SELECTS):
        check(Daedal(8, 4, 5, 0.2, 0.9, low, 5), Greedy(), select, stop, None)


@pytest.mark.parametrize("length", [None, 11 + 19, 11], ids=["whole", "cut", "all cut"])
@pytest.mark.parametrize("small", [1, 4, 8])
def test_the_host_knows_sub_blocks(small: int, length: int | None) -> None:
    for whole, stop in product((True, False), (Filled(), Eos("block"), Eos("token"))):
        for select in SELECTS:
            check(SubBlocks(8, small, whole), Greedy(), select, stop, length)


def test_a_grid_of_sub_blocks_holds_every_position_once() -> None:
    for small, length in product((1, 2, 8), range(1, 26)):
        grid = SubBlockGrid(0, 8, 5, length, small=small)
        edges = [grid.start(n) for n in range(grid.blocks + 1)]
        ends = {n for n in range(length) if n % 8 in (0, 1) or n % small == 0}
        assert edges == sorted(edges) and set(edges) == ends | {length}
        assert sum(grid.new_positions(n) for n in range(grid.blocks)) == max(length - 5, 0)


def test_a_block_with_an_end_token_is_decoded_to_its_end() -> None:
    """All its sub-blocks, and not the next block's first position."""
    decoder = MaskedDecoder(
        Confidence(), Threshold(1.0, strict=True), SubBlocks(8, 4), NoCache(), stop=Eos("block")
    )
    prompt, end, ended = len(REQUEST.prompt_ids), Table().special.eos, 0
    for seed in range(6):
        ids = decoder.generate(Table(seed), REQUEST).ids
        if end in ids:
            assert prompt + len(ids) == (prompt + ids.index(end)) // 8 * 8 + 8
            ended += (
                prompt + len(ids) < decoder.schedule.grid(prompt, REQUEST.max_new_tokens).length
            )
    assert ended


def test_blocks_without_a_delimiter_have_the_length_that_is_set() -> None:
    for cache, block in product(
        (NoCache(), PrefixCache(), DualCache(), BlockCache("full")), (4, 8)
    ):
        decoder = MaskedDecoder(Confidence(), Threshold(0.4), Blocks(block, short=True), cache)
        never = replace(decoder, schedule=AdaBlock(block, delimiters=(VOCAB,), tau=1.0))
        plain, adaptive = (one.generate(Table(), REQUEST) for one in (decoder, never))
        assert plain.ids == adaptive.ids and plain.born == adaptive.born


def check(
    schedule: Schedule, explore: Explore, select: Select, stop: Stop, length: int | None
) -> None:
    """Decode with both watching; what is decoded is what is decoded unwatched."""
    canvas = Canvas()
    watched = MaskedDecoder(
        Confidence(),
        select,
        Counts(schedule, canvas),
        NoCache(),
        explore=explore,
        stop=Shows(stop, canvas, length),
    )
    generation = watched.generate(Table(), REQUEST)
    assert canvas.rounds == len(generation.trace) + 1
    alone = replace(watched, schedule=schedule).generate(Table(), REQUEST)
    assert alone.ids == generation.ids and alone.born == generation.born


def test_a_grid_holds_every_position_once() -> None:
    for origin, block, length, ends in product((0, 5), (1, 4, 7), (6, 12, 13), ((), (7, 11))):
        if ends and length < max(ends):
            continue
        grid = BlockGrid(origin, block, 5, length, ends)
        edges = [grid.start(n) for n in range(grid.blocks + 1)]
        assert edges[0] == origin and edges[-1] == length and edges == sorted(set(edges))
        assert sum(grid.new_positions(n) for n in range(grid.blocks)) == length - 5
