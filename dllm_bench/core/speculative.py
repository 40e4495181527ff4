"""Contracts of the speculative half: who drafts, who verifies, how much, and by which chance.

Shapes: n proposed tokens, F positions the target fed last, L committed tokens, m tapped layers,
D hidden size, V vocabulary; one request at a time, leading axis 1 where a network wants one.
Pieces are frozen dataclasses without state; what drafting one request has to remember is a cache
that `Draft.new_cache` makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dllm_bench.core.contracts import Piece
from dllm_bench.core.denoiser import Denoiser, KVCache

GREEDY = 1e-5  # temperatures below take the most probable token
Uniforms = Callable[[int], Tensor]  # n -> (n,) float64 of [0, 1), on the model's device


class Target(Denoiser, Protocol):
    """An autoregressive model whose insides a drafter may borrow.

    num_layers, hidden_size: its transformer layers and the width D of their outputs, by which a
    drafter checks that it was trained for this model.
    """

    attention_form: str
    dtype: torch.dtype
    num_layers: int
    hidden_size: int

    def embed(self, ids: Tensor) -> Tensor:
        """Rows (..., D) of the embedding table."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of normalised hidden states."""


@dataclass(frozen=True)
class Sampler:
    """Laws and draws of one temperature; equal uniform numbers give equal tokens.

    A draw is the first token whose cumulative probability, summed in float64, exceeds u.
    """

    temperature: float
    uniforms: Uniforms

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature < GREEDY

    def law(self, logits_NV: Tensor) -> Tensor:
        """Probabilities (n, V) in float32; all on the best token where greedy."""
        if self.greedy:
            return one_hot(logits_NV.argmax(-1), logits_NV.shape[-1])
        return (logits_NV.float() / self.temperature).softmax(-1)

    def draw(self, law_NV: Tensor) -> Tensor:
        """One token (n,) of each law; n uniform numbers, or none where greedy."""
        if self.greedy:
            return law_NV.argmax(-1)
        cumulative_NV = law_NV.double().cumsum(-1)
        u_N1 = self.uniforms(len(law_NV))[:, None] * cumulative_NV[:, -1:]
        drawn_N1 = torch.searchsorted(cumulative_NV, u_N1, right=True)
        return drawn_N1[:, 0].clamp_(max=law_NV.shape[-1] - 1)

    def sample(self, logits_NV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens (n,) and the laws (n, V) they were drawn from, None where greedy."""
        if self.greedy:
            return logits_NV.argmax(-1), None
        law_NV = self.law(logits_NV)
        return self.draw(law_NV), law_NV


def one_hot(tokens_N: Tensor, vocabulary: int) -> Tensor:
    """Laws (n, V) that leave no choice."""
    return torch.nn.functional.one_hot(tokens_N, vocabulary).float()


def at(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` for a 0-d index on the device, without a host copy."""
    return values.index_select(0, index.reshape(1))[0]


@dataclass(frozen=True)
class Context:
    """What a drafter may look at.

    tokens_L: all committed tokens, the anchor last; the target has not fed the anchor yet.
    features_1FC: outputs of the tapped layers (C = m D) at the F positions before the anchor that
    the target fed last, None without such layers; kv: the drafter's own cache; head_begins: to be
    called where a sequential head takes over from the drafter's network, to time them separately.
    """

    tokens_L: Tensor
    features_1FC: Tensor | None
    target: Target
    kv: KVCache | None
    head_begins: Callable[[], None] = lambda: None

    @property
    def anchor(self) -> int:
        """Position of the newest committed token; both caches hold what lies before it."""
        return len(self.tokens_L) - 1


@dataclass(frozen=True)
class Proposal:
    """Draft tokens (n,) after a context and the laws (n, V) they were drawn from, None if greedy.

    survival_N: logit of the probability that a token is accepted if all before it are, None
    without a head that says so. n = 0 is legal: the target then decides one token alone.
    calls, fed, cached: network calls of the drafter, the positions they fed, and those the first
    one read from its cache.
    """

    tokens_N: Tensor
    law_NV: Tensor | None = None
    survival_N: Tensor | None = None
    calls: int = 0
    fed: int = 0
    cached: int = 0

    def __len__(self) -> int:
        return len(self.tokens_N)

    def first(self, n: int) -> Proposal:
        """The proposal cut to its first n tokens."""
        law, survival = self.law_NV, self.survival_N
        return replace(
            self,
            tokens_N=self.tokens_N[:n],
            law_NV=None if law is None else law[:n],
            survival_N=None if survival is None else survival[:n],
        )


@dataclass(frozen=True)
class VerifyResult:
    """How many draft tokens are accepted (0-d) and the target's own next token (0-d)."""

    count: Tensor
    bonus: Tensor


HeadState = Tensor | None  # what a head carries from slot to slot


class BlockNetwork(Protocol):
    """The network of DFlash and DSpark on the device of its target: a block of slots at once."""

    def new_cache(self, length: int) -> KVCache:
        """An empty cache of context keys and values."""

    def block(self, context: Context, slots: int) -> tuple[Tensor, Tensor]:
        """Hidden states (n, D) and logits (n, V) of the slots that predict."""

    def transition(
        self, token: Tensor, hidden_D: Tensor, state: HeadState
    ) -> tuple[Tensor, HeadState]:
        """What the token before a slot adds to its logits (V,), and the head's next state."""

    def survival(self, token: Tensor, hidden_D: Tensor) -> Tensor:
        """Logit (0-d) of the probability that a slot's token is accepted if all before it are."""


class BlockDrafter(Protocol):
    """A trained block drafter: what its config says, and its network where it is needed.

    The first `silent` of its `slots` predict nothing. sequential, survives: whether it has a head
    of transitions and one of confidences.
    """

    slots: int
    silent: int
    feature_layers: tuple[int, ...]
    sequential: bool
    survives: bool

    def on(self, target: Target) -> BlockNetwork:
        """The network, beside the target; a sentence where the two do not fit."""


class ChainNetwork(Protocol):
    """The network of EAGLE-3 on the device of its target: one token a call."""

    def new_cache(self, length: int) -> KVCache:
        """An empty cache, one entry per committed token but the first."""

    def extend(self, context: Context) -> tuple[Tensor, Tensor]:
        """Feed what was committed since: hidden state (1, 1, D), logits (1, V) of what follows."""

    def step(self, token: Tensor, hidden_11D: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Feed one drafted token with the hidden state before it; the same for the next."""


class ChainDrafter(Protocol):
    """A trained chain drafter: what its config says, and its network where it is needed."""

    steps: int
    feature_layers: tuple[int, ...]

    def on(self, target: Target) -> ChainNetwork:
        """The network, beside the target; a sentence where the two do not fit."""


class ModelDrafter(Protocol):
    """A smaller autoregressive model over the same vocabulary."""

    def on(self, target: Target) -> Denoiser:
        """The model, beside the target; a sentence where the two do not fit."""


class Draft(Piece, ABC):
    """context -> proposal."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens a proposal has."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs are read; -1 is the embedding."""
        return ()

    def new_cache(self, target: Target, length: int) -> KVCache | None:
        """An empty cache for one request on a canvas of `length` positions; None: not needed."""
        return None

    @abstractmethod
    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        """Draft after the committed tokens; afterwards the cache holds nothing beyond them."""


class Verify(Piece, ABC):
    """proposal -> accepted prefix and next token, without changing the target's output law."""

    reads_probabilities: ClassVar[
        bool
    ]  # whether it uses the law of a draft; drafts are greedy if not

    @abstractmethod
    def __call__(self, proposal: Proposal, logits_NV: Tensor, sampler: Sampler) -> VerifyResult:
        """logits (n + 1, V) of the target: row i judges draft token i, row n what comes after."""


LengthRule = Callable[[Sequence[Proposal]], list[int]]  # one length in 0..n per proposal


class VerifyLength(Piece, ABC):
    """How many draft tokens of each request are worth verifying.

    To keep the output law, whether a token is verified may depend on what is drafted before it and
    on earlier rounds, never on itself or on what follows.
    """

    def begin(self) -> LengthRule:
        """The rule of one batch from its first round to its last; one that remembers is new."""
        return self

    @abstractmethod
    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        """The lengths of a round that knows of no other."""
