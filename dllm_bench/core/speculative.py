"""Contracts of speculative decoding: drafts, verification, and how many draft tokens to verify.

Shapes: D draft tokens, R = D + 1 rows of logits, L committed tokens, H hidden size, V vocabulary;
F positions that the target fed last, C = H times the number of feature layers. Requests are drafted
one at a time; a leading axis of 1 serves as the batch axis of networks. Pieces are frozen
dataclasses without state; the state of drafting a request is in the cache made by
`Draft.new_cache`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dllm_bench.core.decoder import Piece
from dllm_bench.core.denoiser import AddedRows, Denoiser, KVCache
from dllm_bench.core.trace import ForwardKind

GREEDY = 1e-5
"""Below this temperature the most probable token is taken."""
Uniforms = Callable[[int], Tensor]
"""n -> n random numbers in [0, 1), (n,) float64, on the model's device."""


class Target(Denoiser, Protocol):
    """An autoregressive model whose embedding table and head a drafter may use."""

    attention_form: str
    """Form of attention; "causal" for a model that can verify drafts."""
    dtype: torch.dtype
    num_layers: int
    """Number of transformer layers; a drafter uses it to check that it was trained for this
    model."""
    hidden_size: int
    """H, the width of a layer's output; checked like `num_layers`."""

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of normalised hidden states (..., H)."""

    def head_rows(self, ids_N: Tensor) -> Tensor:
        """Return the weights (N, H) of the head for these tokens."""


@dataclass(frozen=True)
class Sampler:
    """Probabilities and samples at one temperature; equal random numbers give equal tokens.

    The token drawn for a uniform number u is the first one whose cumulative probability, summed in
    float64, exceeds u.
    """

    temperature: float
    """Divides the logits; below `GREEDY` the most probable token is taken."""
    uniforms: Uniforms
    """Source of random numbers; not called if greedy."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY

    def probabilities(self, logits_DV: Tensor) -> Tensor:
        """Return probabilities (D, V) in float32; if greedy, 1 for the best token."""
        if self.greedy:
            return one_hot(logits_DV.argmax(-1), logits_DV.shape[-1])
        return (logits_DV.float() / self.temperature).softmax(-1)

    def draw(self, probabilities_DV: Tensor) -> Tensor:
        """Return one token from each row, (D,); uses D random numbers, none if greedy."""
        if self.greedy:
            return probabilities_DV.argmax(-1)
        cumulative_DV = probabilities_DV.double().cumsum(-1)
        u_D1 = self.uniforms(len(probabilities_DV))[:, None] * cumulative_DV[:, -1:]
        drawn_D1 = torch.searchsorted(cumulative_DV, u_D1, right=True)
        return drawn_D1[:, 0].clamp_(max=probabilities_DV.shape[-1] - 1)

    def sample(self, logits_DV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (D,) and the probabilities (D, V) they were drawn from, None if greedy."""
        if self.greedy:
            return logits_DV.argmax(-1), None
        probabilities_DV = self.probabilities(logits_DV)
        return self.draw(probabilities_DV), probabilities_DV

    @staticmethod
    def joined(distributions: Sequence[Tensor | None]) -> Tensor | None:
        """Return the probabilities (D, V) of tokens that were sampled one by one; None if
        greedy."""
        known = [one for one in distributions if one is not None]
        return torch.cat(known) if known else None


def one_hot(tokens_D: Tensor, vocabulary: int) -> Tensor:
    """Return probabilities (D, V), float32, that are 1 for the given tokens."""
    return torch.nn.functional.one_hot(tokens_D, vocabulary).float()


def row_at(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]` for a 0-d index on the device, without a copy to the host."""
    return values.index_select(0, index.reshape(1))[0]


@dataclass(frozen=True)
class Context:
    """The inputs of a drafter."""

    tokens_L: Tensor
    """All committed tokens, int64. The last is the anchor: the target has not fed it yet."""
    features_1FC: Tensor | None
    """Outputs of the feature layers at the last F positions that the target fed, which precede the
    anchor; None without feature layers."""
    target: Target
    kv: KVCache | None
    """The drafter's own cache; None if it needs none."""
    head_begins: Callable[[], None] = lambda: None
    """Called when the sequential head starts after the drafter's network, so that the two are timed
    separately."""
    host_L: Tensor | None = None
    """`tokens_L` on the host; None if the tensor is on the host already."""
    left: int | None = None
    """Tokens that the request still lacks; None: not known."""
    target_kv: KVCache | None = None
    """The target's cache, for a drafter that is the target itself: it may be read, and nothing may
    be kept in it."""
    ahead_DV: Tensor | None = None
    """Logits of the rows that the target fed last after those that predicted the committed tokens;
    None before the first round and after one whose draft was a tree or was cut."""

    @property
    def anchor(self) -> int:
        """Position of the newest committed token; both caches hold the positions before it."""
        return len(self.tokens_L) - 1


@dataclass(frozen=True)
class Proposal:
    """The draft tokens after a context. There may be none; the target then adds one token."""

    tokens_D: Tensor
    """Draft tokens, int64."""
    probabilities_DV: Tensor | None = None
    """The distributions they were drawn from; None if greedy."""
    survival_D: Tensor | None = None
    """Logit of the probability that a token is accepted if all before it are; None without a
    confidence head."""
    parents_D: Tensor | None = None
    """For a tree: the parent of each token, an earlier draft token counted from 1, or 0 for the
    anchor. Siblings are different tokens. None: a chain, in which each token follows the one before
    it."""
    calls: int = 0
    """Calls of the drafter's network."""
    kind: ForwardKind = ForwardKind.DRAFT
    """`SELF_DRAFT` if that network is the target's."""
    fed: int = 0
    """Positions these calls fed."""
    cached: int = 0
    """Positions the first call read from the drafter's cache."""

    def __len__(self) -> int:
        return len(self.tokens_D)

    def first(self, n: int) -> Proposal:
        """Return the proposal cut to its first n tokens."""
        of_tokens = ("tokens_D", "probabilities_DV", "survival_D", "parents_D")
        known: dict[str, Any] = {name: getattr(self, name) for name in of_tokens}
        return replace(self, **{k: v[:n] for k, v in known.items() if v is not None})

    @cached_property
    def path_DR(self) -> Tensor:
        """For a tree: which of anchor and draft tokens are on the path to each token, including
        itself; bool (D, D + 1).
        """
        assert self.parents_D is not None
        before_R = torch.nn.functional.pad(self.parents_D, (1, 0))  # the anchor precedes itself
        path_RR = torch.eye(len(before_R), dtype=torch.bool, device=before_R.device)
        for doublings in range(len(self).bit_length()):  # of the length of known paths
            if doublings:
                before_R = before_R[before_R]
            path_RR = path_RR | path_RR[before_R]
        return path_RR[1:]

    def rows_after(self, anchor: int) -> AddedRows | None:
        """Return the added rows of a tree, in which each token attends to its path; None for a
        chain, which is fed as part of the canvas.
        """
        if self.parents_D is None:
            return None
        return AddedRows(self.tokens_D, anchor - 1 + self.path_DR.sum(-1), self.path_DR)


@dataclass(frozen=True)
class VerifyResult:
    """Decision of a verification, int64 on the device."""

    own_X: Tensor
    """The target's own tokens: after the anchor and after each draft token (R,), or only after the
    accepted ones (1,)."""
    count_1: Tensor | None = None
    """Number of accepted draft tokens, the first ones. None: those are accepted that the target
    draws itself, which the host finds (`drawn_path`)."""


def drawn_path(
    own: Sequence[int], drafted: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """Return the indices of the draft tokens that the target draws itself, each after the one
    before it, and the token it draws after them.

    own: what it draws after the anchor and after each verified token, the first ones of the draft.
    """
    row, places = 0, list[int]()
    for place, child in enumerate(islice(zip(parents, drafted, strict=True), len(own) - 1)):
        if child == (row, own[row]):
            row = place + 1
            places.append(place)
    return places, own[row]


HeadState = Tensor | None
"""State that a sequential head carries from slot to slot."""


class Draft(Piece, ABC):
    """Makes a proposal from a context."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Maximum number of tokens of a proposal."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs are read; -1 is the embedding."""
        return ()

    def new_cache(self, target: Target, length: int) -> KVCache | None:
        """Return an empty cache for one request of up to `length` positions; None if none is
        needed."""
        return None

    @abstractmethod
    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        """Draft after the committed tokens; afterwards the cache holds only committed tokens."""

    def cut(self, proposals: Sequence[Proposal], target: Target) -> Sequence[Proposal]:
        """Return the proposals of a round without tokens that need not be verified."""
        return proposals


class FixedDraft(Draft):
    """A draft of at most a fixed number of tokens."""

    tokens: int

    @property
    def longest(self) -> int:
        return self.tokens


class Verify(Piece, ABC):
    """Accepts a prefix of a proposal and chooses the next token; keeps the target's output
    distribution."""

    reads_probabilities: ClassVar[bool]
    """Whether it uses the distributions of a draft; if not, drafts are greedy."""

    @abstractmethod
    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        """Verify a proposal: row i of the target's logits judges draft token i; the last row gives
        the token after all of them."""


LengthRule = Callable[[Sequence[Proposal]], list[int]]
"""The proposals of a round, one per request -> number of tokens of each to verify."""


class VerifyLength(Piece, ABC):
    """Decides how many draft tokens of each request to verify.

    To keep the output distribution, whether a token is verified may depend on the tokens drafted
    before it and on earlier rounds, never on the token itself or on what follows it.
    """

    def begin(self) -> LengthRule:
        """Return the rule for one batch, from its first round to its last; a new object if it
        remembers rounds."""
        return self

    @abstractmethod
    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        """Return the lengths of one round, each 0 to len(proposal), independent of other rounds."""
