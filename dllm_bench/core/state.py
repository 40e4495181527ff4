"""`DecodeState`: the decoding state of one request, for K candidate branches at once.

Masked positions hold the mask id, or a token that a reviser shows to the model there. The canvas
may be cut, and grows only by `insert`, for a schedule that declares this. Tokens are written by
`commit`, at masked positions, and by `revise`, at committed ones; nothing else writes them. `fork`
and `pick` carry tokens and `memo` alike, so what a method remembers (credits, step counts) follows
its branch and ends with its request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.trace import GIVEN
from dllm_bench.core.transfer import constant, selected, to_device

CPU = torch.device("cpu")
MASKED = -1  # value of `born` at a position that is still masked
PROMPT = GIVEN  # value of `born` at a position that is not decoded: prompt, pinned or inserted
CUT = -3  # value of `born` at a position beyond the end of a canvas that was cut

Remembered = TypeVar("Remembered", Tensor, int)


@dataclass(frozen=True)
class MemoKey(Generic[Remembered]):
    """Key of a value in `DecodeState.memo`, of type Tensor or int.

    A piece declares its keys in its own module, and no other piece reads them.
    """

    name: str


class Memo(dict[MemoKey[Any], Any]):
    """Values that the pieces remember from one forward of a request to the next.

    Tensors have the leading dimension K, and nobody writes into them: branches may share them.
    Integers are on the host and common to all branches.
    """

    def tensors(self) -> dict[MemoKey[Tensor], Tensor]:
        """Return the values that differ by branch."""
        return {key: v for key, v in self.items() if isinstance(v, Tensor)}

    def numbers(self) -> dict[MemoKey[int], int]:
        """Return the values common to all branches."""
        return {key: v for key, v in self.items() if not isinstance(v, Tensor)}

    def take(self, index: Tensor) -> Memo:
        """Return the memo of the branches `index` (int64), in that order; copies of a single branch
        share its values."""
        taken, count = Memo(self.numbers()), len(index)
        for key, v in self.tensors().items():
            single = len(v) == 1
            taken[key] = v.expand(count, *v.shape[1:]) if single else v.index_select(0, index)
        return taken


@dataclass
class DecodeState:
    """Tokens and bookkeeping of one request."""

    canvas_2KL: Tensor  # `tokens_KL` and `born_KL`, int64: one tensor, so that branches are copied
    # at once
    prompt_len: int
    special: SpecialTokens
    forwards: int = 0  # forwards made so far
    memo: Memo = field(default_factory=Memo)
    seed: int = 0  # seed of the request's random numbers
    wanted: int = 0  # positions of the canvas without rounding up to whole blocks; a canvas
    # that grows never exceeds this
    ends_given: bool = False  # whether the canvas may contain end tokens that were not decoded
    changes_KL: Tensor | None = None  # number of revisions of a committed position, int32; None if
    # the decoder does not revise
    remasked_KW: Tensor | None = None  # whether the last revision masked a position again, bool
    reference_KL: Tensor | None = None  # `Request.reference` on the canvas, mask ids beyond its end
    may_choose_mask: bool = True  # whether a candidate may be the mask token, which is no commit
    tokens_KL: Tensor = field(init=False)  # token ids
    born_KL: Tensor = field(init=False)  # forward that committed a position; or `MASKED`, `PROMPT`,
    # `CUT`
    _flags: dict[str, Tensor] = field(init=False, repr=False)  # see `once`

    def __post_init__(self) -> None:
        self._use(self.canvas_2KL)

    @classmethod
    def start(
        cls, request: Request, special: SpecialTokens, device: torch.device = CPU, length: int = 0
    ) -> DecodeState:
        """Return one branch: the prompt followed by masks, `length` positions in all.

        Without `length` there are as many masks as the request has new tokens.
        """
        check_prompt(request, special)
        prompt = len(request.prompt_ids)
        wanted = prompt + request.max_new_tokens
        masks = (length or wanted) - prompt
        tokens_L = [*request.prompt_ids, *[special.mask] * masks]
        born_L = [PROMPT] * prompt + [MASKED] * masks
        for index, token in request.pinned:
            check_pinned(request, index, masks)
            tokens_L[prompt + index], born_L[prompt + index] = token, PROMPT
        canvas_21L = to_device([[tokens_L], [born_L]], device)
        state = cls(canvas_21L, prompt, special, seed=request.seed, wanted=wanted)
        state.ends_given = any(token in special.ends for _, token in request.pinned)
        if request.reference is not None:
            reference = request.reference[:masks]
            tokens_L[prompt : prompt + len(reference)] = reference
            state.reference_KL = to_device([tokens_L], device)
        return state

    @property
    def branches(self) -> int:
        """K."""
        return self.tokens_KL.shape[0]

    @property
    def length(self) -> int:
        """L, prompt included."""
        return self.tokens_KL.shape[1]

    @property
    def masked_KL(self) -> Tensor:
        """Bool, true at masked positions."""
        return self.once("masked", lambda: self.born_KL == MASKED)

    @property
    def committed_KL(self) -> Tensor:
        """Bool, true at positions that a forward committed."""
        return self.once("committed", lambda: self.born_KL >= 0)

    @property
    def earlier_KL(self) -> Tensor:
        """Bool, true at positions that were committed before this forward."""
        name = f"committed before {self.forwards}"
        return self.once(name, lambda: self.committed_KL & (self.born_KL < self.forwards))

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` gives, computed once until positions are written."""
        if name not in self._flags:
            self._flags[name] = compute()
        return self._flags[name]

    def recall(self, key: MemoKey[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the remembered value of each position, (K, L); zeros if there is none yet."""
        known_KL = self.memo.get(key)
        return torch.zeros_like(self.tokens_KL, dtype=dtype) if known_KL is None else known_KL

    def commit(self, where_KW: Tensor, ids_KW: Tensor, start: int = 0) -> None:
        """Write `ids` where `where` is true, and the current forward's index into `born_KL`.

        Both tensors cover the W positions from `start` on. Writing in place is safe because
        branches never share memory. Committed positions stay as they are. A decoder that allows the
        mask token may choose its id; that position stays masked.
        """
        self.fill(where_KW & self.masked_KL[:, start : start + where_KW.shape[1]], ids_KW, start)

    def fill(self, where_KW: Tensor, ids_KW: Tensor, start: int = 0) -> None:
        """Do what `commit` does, at positions that are known to be masked.

        If `where` has fewer branches than the state, only the first ones are filled.
        """
        span = slice(len(where_KW)), slice(start, start + where_KW.shape[1])
        tokens_KW, born_KW = self.tokens_KL[span], self.born_KL[span]
        if self.may_choose_mask:
            where_KW = where_KW & (ids_KW != self.special.mask)
        torch.where(where_KW, ids_KW, tokens_KW, out=tokens_KW)
        born_KW.masked_fill_(where_KW, self.forwards)
        self._flags = {}

    def revise(
        self,
        write_KW: Tensor,
        ids_KW: Tensor | None,
        show_KW: Tensor | None = None,
        start: int = 0,
        *,
        counts: bool = True,
        may_mask: bool = True,
    ) -> None:
        """Write `ids` over committed positions; the mask id masks a position again.

        The tensors cover the W positions from `start` on. Prompt positions do not change, nor do
        masked positions outside `show`. Masked positions in `show` get `ids` as their input token
        and still count as masked; if `write` is also true, they are committed. Masking a position
        that the current forward committed is not counted as a change.

        ids_KW: None masks all of them again. counts: whether anything reads `changes_KL`.
        may_mask: whether `ids` may hold the mask id.
        """
        assert self.changes_KL is not None
        span = slice(start, start + write_KW.shape[1])
        tokens_KW, born_KW = self.tokens_KL[:, span], self.born_KL[:, span]
        where_KW = write_KW & self.committed_KL[:, span]
        if counts:
            changes_KW = self.changes_KL[:, span]
            changes_KW += where_KW & (born_KW < self.forwards)
        self._flags, self.remasked_KW = {}, None
        if ids_KW is None:
            self.remasked_KW = where_KW
            tokens_KW.masked_fill_(where_KW, self.special.mask)
            born_KW.masked_fill_(where_KW, MASKED)
            return
        torch.where(where_KW, ids_KW, tokens_KW, out=tokens_KW)
        born_KW.masked_fill_(where_KW, self.forwards)
        if may_mask:
            self.remasked_KW = where_KW & (ids_KW == self.special.mask)
            born_KW.masked_fill_(self.remasked_KW, MASKED)
        if show_KW is not None:
            show_KW = show_KW & (born_KW == MASKED)
            torch.where(show_KW, ids_KW, tokens_KW, out=tokens_KW)
            born_KW.masked_fill_(show_KW & write_KW, self.forwards)

    def cut(self, length: Tensor) -> None:
        """Discard all positions from `length` (0-d int64) on, without a copy to the host.

        They no longer count as masked; `truncate` removes them once the host knows `length`.
        """
        self.born_KL.masked_fill_(constant(range(self.length), self.born_KL.device) >= length, CUT)
        self._flags = {}

    def truncate(self, length: int) -> None:
        """Shorten the canvas to `length` positions."""
        if length == self.length:
            return
        self._use(self.canvas_2KL[:, :, :length])
        if self.changes_KL is not None:
            self.changes_KL = self.changes_KL[:, :length]

    def _use(self, canvas_2KL: Tensor) -> None:
        """Use this canvas, of which `tokens_KL` and `born_KL` are views."""
        self.canvas_2KL, self._flags = canvas_2KL, {}
        self.tokens_KL, self.born_KL = canvas_2KL

    def insert(self, at: Tensor, count: Tensor, ends: Tensor | None, room: int) -> Tensor:
        """Insert `count` positions before `at` (0-d int64), without a copy to the host.

        They are masks, or end tokens if `ends` (0-d bool). Positions from `at` on move to the
        right. The tensors become `room` positions longer: positions that do not fit are lost, and
        unused ones count as cut (`cut`). Memo values do not move, so pieces that need
        `FIXED_CANVAS` are refused. Returns the length without the cut positions (0-d int64).
        """
        position_L = constant(range(self.length + room), self.born_KL.device)
        behind_L = position_L >= at + count
        new_L = (position_L >= at) & ~behind_L
        before_L = (position_L - behind_L * count).clamp(max=self.length - 1)
        length = ((self.born_KL[-1] != CUT).sum() + count).clamp(max=len(position_L))
        self._use(self.canvas_2KL.index_select(2, before_L))
        self.tokens_KL.masked_fill_(new_L, self.special.mask)
        self.born_KL.masked_fill_(new_L, MASKED)
        if ends is not None:
            new_L &= ends
            self.tokens_KL.masked_fill_(new_L, self.special.eos)
            self.born_KL.masked_fill_(new_L, PROMPT)
        self.born_KL.masked_fill_(position_L >= length, CUT)
        self.ends_given = True
        return length

    def take(self, index: Tensor) -> DecodeState:
        """Return the branches `index` (int64), in that order, memo included."""
        others = selected(self, ("changes_KL", "remasked_KW", "reference_KL"), index)
        canvas_2KL, memo = self.canvas_2KL.index_select(1, index), self.memo.take(index)
        return replace(self, canvas_2KL=canvas_2KL, memo=memo, **others)

    def fork(self, k: int) -> DecodeState:
        """Return a state of K = k copies of this single branch, memo included."""
        if self.branches != 1:
            raise ValueError(f"fork needs a state of one branch, found {self.branches}")
        return self.take(constant(0, self.tokens_KL.device).expand(k))

    def pick(self, j: Tensor) -> DecodeState:
        """Return branch `j` (0-d or 1-element int64 tensor, not copied to the host), memo
        included."""
        return self.take(j.reshape(1))


def check_prompt(request: Request, special: SpecialTokens) -> None:
    """Refuse prompts padded on the left, because requests of a batch keep their own lengths."""
    padding = {special.mask, special.pad} - {None, special.bos}
    if request.prompt_ids[0] in padding:
        raise DllmBenchError(
            f"Request {request.id!r} begins with the padding token {request.prompt_ids[0]}, but "
            "nothing is padded here; give the prompt without padding."
        )


def check_no_masks(prompt_ids: Sequence[int], special: SpecialTokens, prompt: str) -> None:
    """Refuse mask tokens in the prompt of a benchmark: such prompts are answered, not filled."""
    count = list(prompt_ids).count(special.mask)
    if count:
        raise DllmBenchError(
            f"The prompt {prompt[:60]!r} has {count} mask tokens to fill, and a benchmark's "
            "prompts are answered, not filled; write the gap as another character, or fill it with "
            "`dllm-bench generate`."
        )


def check_pinned(request: Request, place: int, positions: int) -> None:
    """Refuse a pinned token outside of the generation; `positions`: new positions of the canvas."""
    new = min(request.max_new_tokens, positions)
    if not 0 <= place < new:
        raise DllmBenchError(
            f"Request {request.id!r} pins a token at new position {place} and has {new} new "
            "tokens; pin one of these."
        )
