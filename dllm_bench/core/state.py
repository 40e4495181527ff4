"""`DecodeState`: where a request stands, for K candidate branches at once.

Shapes: K branches, L canvas positions (prompt + room for new tokens). What is not decoded holds the
mask id; the canvas may be cut shorter, it never grows. `commit` is the only writer of tokens;
`fork` and `pick` carry tokens and `memo` together, so a method's memory (credits, open blocks)
follows its branch and never outlives its request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, SpecialTokens

MASKED = -1  # value of `born` at a position that is not decoded yet
PROMPT = -2  # value of `born` at a prompt position
CUT = -3  # value of `born` at a position beyond the end of a canvas that was cut
REFERENCE = "reference"  # memo: new tokens known beforehand, (K, L)


@dataclass
class DecodeState:
    """Tokens and bookkeeping of one request.

    tokens_KL: int64 token ids; born_KL: int32 forward index at which a position was committed
    (`MASKED`, `PROMPT`, `CUT` otherwise); forwards: model calls made so far; memo: per-piece
    tensors, every one with leading dimension K; seed: where the request's random numbers begin.
    """

    tokens_KL: Tensor
    born_KL: Tensor
    prompt_len: int
    special: SpecialTokens
    forwards: int = 0
    memo: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def start(
        cls,
        request: Request,
        special: SpecialTokens,
        device: torch.device | str = "cpu",
        length: int | None = None,
    ) -> DecodeState:
        """One branch: the prompt followed by masks, `length` positions in all.

        None: as many masks as the request has new tokens.
        """
        check_prompt(request, special)
        prompt = torch.tensor(request.prompt_ids, dtype=torch.long, device=device)
        length = length or len(prompt) + request.max_new_tokens
        tokens_KL = torch.full((1, length), special.mask, dtype=torch.long, device=device)
        born_KL = torch.full((1, length), MASKED, dtype=torch.int32, device=device)
        tokens_KL[0, : len(prompt)] = prompt
        born_KL[0, : len(prompt)] = PROMPT
        state = cls(tokens_KL, born_KL, len(prompt), special, seed=request.seed)
        if request.reference is not None:
            known_KL = tokens_KL.clone()
            reference = torch.tensor(request.reference, device=device)[: length - len(prompt)]
            known_KL[0, len(prompt) : len(prompt) + len(reference)] = reference
            state.memo[REFERENCE] = known_KL
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
        """True at positions that are still to be decoded."""
        return self.born_KL == MASKED

    def commit(self, where_KW: Tensor, ids_KW: Tensor, start: int = 0) -> None:
        """Write `ids` where `where` is true and stamp them with the current forward counter.

        Both are about the W positions from `start` on. Written in place, which nobody else sees:
        branches never share memory. Positions already decoded are left alone (no decoder here
        remasks); a mask id written by a decoder that does not forbid it leaves the position masked.
        """
        span = slice(start, start + where_KW.shape[1])
        tokens_KW, born_KW = self.tokens_KL[:, span], self.born_KL[:, span]
        where_KW = where_KW & (born_KW == MASKED) & (ids_KW != self.special.mask)
        torch.where(where_KW, ids_KW, tokens_KW, out=tokens_KW)
        born_KW.masked_fill_(where_KW, self.forwards)

    def cut(self, length: Tensor) -> None:
        """Give up all positions from `length` (0-d int64) on, without a host copy.

        They count as decoded from now on; `truncate` takes them away once the host knows `length`.
        """
        position_L = torch.arange(self.length, device=self.born_KL.device)
        self.born_KL = self.born_KL.masked_fill(position_L >= length, CUT)

    def truncate(self, length: int) -> None:
        """Shorten the canvas to `length` positions (end-of-text prediction)."""
        if length == self.length:
            return
        self.tokens_KL = self.tokens_KL[:, :length]
        self.born_KL = self.born_KL[:, :length]

    def take(self, index: Tensor) -> DecodeState:
        """The branches `index` (int64), in that order, memo included."""
        memo = {name: value.index_select(0, index) for name, value in self.memo.items()}
        return replace(
            self,
            tokens_KL=self.tokens_KL.index_select(0, index),
            born_KL=self.born_KL.index_select(0, index),
            memo=memo,
        )

    def fork(self, k: int) -> DecodeState:
        """K = k copies of a single-branch state, memo included."""
        if self.branches != 1:
            raise ValueError(f"fork needs a state of one branch, found {self.branches}")
        return self.take(torch.zeros(k, dtype=torch.long, device=self.tokens_KL.device))

    def pick(self, j: Tensor) -> DecodeState:
        """Branch `j` (0-d or 1-element int64 tensor, no host copy), memo included."""
        return self.take(j.reshape(1))


def check_prompt(request: Request, special: SpecialTokens) -> None:
    """Refuse prompts padded on the left: requests differ in length here, nothing is padded."""
    padding = {special.mask, special.pad} - {None, special.bos}
    if request.prompt_ids[0] in padding:
        raise DllmBenchError(
            f"Request {request.id!r} begins with the padding token {request.prompt_ids[0]}; "
            "requests have their own lengths here, hand over the prompt without padding."
        )
