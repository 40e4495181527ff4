"""Drafts of trained drafters: DFlash, DFlash 2, DDTree, DSpark, EAGLE-3."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, Conditions, holding, needing
from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import first_end
from dllm_bench.core.speculative import (
    Context,
    Draft,
    LengthRule,
    Proposal,
    Sampler,
    Target,
    VerifyLength,
)
from dllm_bench.core.transfer import constant, to_device, to_host
from dllm_bench.decoding.numerics import at_least_float32, statistics
from dllm_bench.methods.drafting import StepProfile, Temperatures, acceptance_probabilities
from dllm_bench.models.drafters import TrainedBlockDrafter, TrainedChainDrafter
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

if TYPE_CHECKING:
    from dllm_bench.models.drafter_networks import BlockDraftNetwork  # imports transformers

# --- DFlash and DFlash 2 --------------------------------------------------------------------------


class SlotBlock(NamedTuple):
    """Output of a drafter's network for the N slots of a block that predict a token."""

    network: BlockDraftNetwork
    context: Context
    hidden_NH: Tensor
    logits_NV: Tensor


@register("draft.dflash")
@dataclass(frozen=True)
class DFlash(Draft):
    """DFlash (arXiv 2602.06036): a block-diffusion drafter proposes a whole block in one forward.

    A block of draft tokens, drawn independently of each other. The slots of a block are the anchor
    and the masks after it; features of the target's layers are injected as keys and values. Every
    token is drawn from the distribution of its own slot, independently of the other tokens. Both
    published variants are covered: the drafter's `silent` says whether the anchor's slot also
    predicts a token (DeepSpec) or not (z-lab). A block of silent slots only (z-lab's block size 1,
    its baseline) drafts nothing and skips the drafter.
    """

    drafter: TrainedBlockDrafter
    slots: int | None = None
    """Slots per block, at most as many as in training; None: as many as in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = max(self.drafter.config.silent, 1)
        if self.slots is not None and not least <= self.slots <= self.drafter.config.slots:
            raise DllmBenchError(
                f"{type(self).__name__} has slots={self.slots}, but its drafter was trained with "
                f"{self.drafter.config.slots}; choose {least} to {self.drafter.config.slots}."
            )

    @property
    def longest(self) -> int:
        return self._slots - self.drafter.config.silent

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.config.feature_layers if self.longest else ()

    @property
    def _slots(self) -> int:
        return self.slots or self.drafter.config.slots

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def slots_in(self, context: Context) -> int:
        """Return the number of slots of the next block."""
        return self._slots

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        slots = self.slots_in(context)
        if slots == self.drafter.config.silent:
            return Proposal(context.tokens_L[:0])
        network = self.drafter.on(context.target)
        assert context.kv is not None
        cached = context.kv.length
        block = SlotBlock(network, context, *network.block(context, slots, self._first(slots)))
        fed = context.anchor - cached + slots
        return replace(self._draw(block, sampler), calls=1, fed=fed, cached=cached)

    def _first(self, slots: int) -> int | None:
        """Return the first slot of a block to draw from; None: the first that predicts."""
        return None

    def _draw(self, block: SlotBlock, sampler: Sampler) -> Proposal:
        """Draw all slots at once; this is too short to be timed as a separate head."""
        return Proposal(*sampler.sample(block.logits_NV))


@register("draft.dflash2")
@dataclass(frozen=True)
class DFlash2(DFlash):
    """DFlash 2 (z-lab/dflash@07ebd93, dflash/model.py; announced as "DFlash 2: Keep Drafting
    Parallel", no paper) adds convolutions over the slots, and a path search over their best
    candidates.

    A block of draft tokens, each chosen among its slot's candidates by the token before it.

    The candidates of a slot are its K most probable tokens. A path selector adds a term to their
    logits that depends on the token chosen before them; sampled tokens are drawn from the softmax
    of the sums at the decoder's temperature. The last block is cut to the tokens that the request
    still lacks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.config.candidates:
            raise DllmBenchError(
                "DFlash 2 needs a drafter with a path selector, and this one has none; choose "
                "another drafter, decoder/draft=dflash or decoder/draft=dspark."
            )

    def slots_in(self, context: Context) -> int:
        return self._slots if context.left is None else min(self._slots, context.left + 1)

    def _draw(self, block: SlotBlock, sampler: Sampler) -> Proposal:
        network, context, hidden_NH, logits_NV = block
        context.head_begins()
        sampler = Sampler(sampler.temperature, sampler.uniforms)  # top-p, top-k: only the target's
        count = min(self.drafter.config.candidates, logits_NV.shape[1])
        ids_NK = logits_NV.topk(count).indices.sort(1).values  # drawn in the order of token ids
        unary_NK = logits_NV.gather(1, ids_NK)
        anchor_1K = context.tokens_L[-1:].expand(1, count)
        before_NK = torch.cat([anchor_1K, ids_NK[:-1]])
        score_NKK = unary_NK[:, None] + network.path_biases(before_NK, hidden_NH, ids_NK)
        places, distributions = [constant(0, ids_NK.device).reshape(1)], []
        for score_KK in score_NKK:
            place_1, probabilities_1K = sampler.sample(score_KK.index_select(0, places[-1]))
            places.append(place_1)
            distributions.append(probabilities_1K)
        tokens_N1 = ids_NK.gather(1, torch.cat(places[1:])[:, None])
        drawn_NV = sampler.joined(distributions)
        if drawn_NV is not None:
            among_NV = torch.zeros_like(logits_NV, dtype=drawn_NV.dtype)
            drawn_NV = among_NV.scatter_(1, ids_NK, drawn_NV)
        return Proposal(tokens_N1[:, 0], drawn_NV)


# --- DDTree ---------------------------------------------------------------------------------------


@register("draft.ddtree")
@dataclass(frozen=True)
class DDTree(DFlash):
    """DDTree (arXiv 2604.12989): a tree of drafts from the marginals of a block drafter.

    The most probable prefixes of a block, as a tree; a temperature does not change it. Released
    code: liranringel/ddtree@c96427a, ddtree.py. A block drafter gives every slot a distribution of
    its own, so a prefix of tokens is as probable as the product of its tokens. The tree of B tokens
    with the longest expected path under that product is that of the B most probable prefixes
    (propositions 1 and 2).
    """

    budget: Positive | None = None
    """B, draft tokens of a tree; None: as many as the block has slots that predict a token."""
    width: Positive | None = None
    """Tokens of a slot that are considered, the most probable ones; None: as many as `budget`."""
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether blocks get shorter near the limit of a text, to `budget` and one more than the tokens
    left, as the released buffer has room for. Its slice of their logits begins with the anchor's
    slot, so that every marginal is read one slot late. The text is the same."""
    needs = needing({"verify": Condition.DRAFT_TREES})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.config.has_transition_head or self.drafter.config.candidates:
            raise DllmBenchError(
                "DDTree takes the tokens of a block as independent, and this drafter has a head "
                "that makes each depend on the one before it; choose a DFlash drafter, or "
                "decoder/draft=dspark or dflash2."
            )

    @property
    def longest(self) -> int:
        slots = super().longest
        return min(slots, 1) * (self.budget or slots)

    def slots_in(self, context: Context) -> int:
        slots = super().slots_in(context)
        if not self.released or context.left is None:
            return slots
        return min(slots, context.left + 1 + (self.budget or self._slots))

    def _first(self, slots: int) -> int | None:
        return 0 if slots < self._slots else None

    def _draw(self, block: SlotBlock, sampler: Sampler) -> Proposal:
        width = min(self.width or self.longest, block.network.drafted)  # no others are drafted
        tokens_D, parents_D = likeliest_tree(block.logits_NV, self.longest, width)
        return Proposal(tokens_D, parents_D=parents_D)


def likeliest_tree(
    logits_NV: Tensor, budget: int, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens (D,) of the most probable prefixes of N slots, best first, and parents.

    Parents are those of `Proposal`. D is `budget`, or the number of prefixes if there are fewer.
    width: tokens of a slot that are considered; None: as many as `budget`.
    """
    ranks = min(budget, width or budget, logits_NV.shape[1])
    top_NK = logits_NV.topk(ranks)
    best_N, _, sum_N, _ = statistics(logits_NV, logits_NV.dtype, entropy=False)
    score_NK = at_least_float32(top_NK.values) - (best_N + sum_N.log())[:, None]
    pairs = _pairs(len(logits_NV), ranks, budget, logits_NV.device)
    score_X = score_NK.flatten()[pairs.ends_2X[0]].double()
    score_X[0] = 0.0  # the anchor, which every prefix contains
    anchor_1, first_S, *added = score_X.split(pairs.sizes)
    _, _, *before = pairs.before_X.split(pairs.sizes)
    scores = [anchor_1, first_S]  # of the kept prefixes, each slot's from the best on
    kept = [constant(range(len(one)), one.device) for one in scores]
    for prefix_X, added_X in zip(before, added, strict=True):
        best = (scores[-1][prefix_X] + added_X).sort(descending=True, stable=True)
        scores.append(best.values[:budget])
        kept.append(best.indices[:budget])
    # A parent is at least as probable as its children, and stands before them.
    order_Y = torch.cat(scores).sort(descending=True, stable=True).indices
    place_Y = torch.empty_like(order_Y)
    place_Y.scatter_(0, order_Y, constant(range(len(order_Y)), order_Y.device))
    pair_Y = torch.cat(kept) + pairs.level_Y
    token_D, parent_D = pairs.ends_2X.index_select(1, pair_Y[order_Y[1 : budget + 1]])
    return top_NK.indices.flatten()[token_D], place_Y[parent_D]


class _Pairs(NamedTuple):
    """The anchor, then pairs of a prefix and its next token, slot by slot: X.

    The best `budget` pairs of a slot are the prefixes for the next one. The anchor and these of all
    slots are Y.
    """

    sizes: list[int]
    """1 for the anchor, then the number of pairs with a token of each slot."""
    before_X: Tensor
    """The prefix, as its place among the prefixes kept of the slot before."""
    ends_2X: Tensor
    """The token, as an index into (N, K), and the prefix, as an index into Y."""
    level_Y: Tensor
    """Index of the first pair with a token of the same slot."""


@lru_cache
def _pairs(slots: int, ranks: int, budget: int, device: torch.device) -> _Pairs:
    """Return the pairs that can be among the best `budget` of their slot: (p + 1) * (r + 1) pairs
    are at least as probable as that of prefix p and rank r.
    """
    rows, sizes, levels = [(0, 0, 0)], [1], [0]
    prefixes, first = 1, 0  # kept of the slot before, and where they are in Y
    for slot in range(slots):
        pairs = [
            (p, slot * ranks + r, first + p)
            for p in range(prefixes)
            for r in range(min(ranks, budget // (p + 1)))
        ]
        first += prefixes
        prefixes = min(budget, len(pairs))
        sizes.append(len(pairs))
        levels += [len(rows)] * prefixes
        rows += pairs
    before_X, *ends = to_device(rows, device).unbind(1)
    return _Pairs(sizes, before_X, torch.stack(ends), to_device(levels, device))


# --- DSpark ---------------------------------------------------------------------------------------


@register("draft.dspark")
@dataclass(frozen=True)
class DSpark(DFlash):
    """A block of draft tokens whose drafter has a transition head (Markov, gated or RNN).

    DSpark (§3.1): the block of DFlash, its tokens drawn one after the other.

    p_k = softmax(U_k + B_k): a small sequential head reads the token before slot k and adds B_k to
    the block's logits U_k, so the block still takes one forward. A confidence head estimates how
    likely each token is accepted, given the token before it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.config.has_transition_head:
            raise DllmBenchError(
                "DSpark needs a drafter with a transition head, and this one has none; choose "
                "another drafter, or decoder/draft=dflash."
            )

    @property
    def gives(self) -> Conditions:
        return holding({Condition.SURVIVAL_ESTIMATES: self.drafter.config.confidence})

    def _draw(self, block: SlotBlock, sampler: Sampler) -> Proposal:
        network, context, hidden_NH, logits_NV = block
        context.head_begins()
        tokens, distributions = [context.tokens_L[-1:]], []
        state: Tensor | None = None
        for hidden_H, logits_1V in zip(hidden_NH, logits_NV.split(1), strict=True):
            state = network.transition(logits_1V, tokens[-1][0], hidden_H, state)
            token_1, probabilities_1V = sampler.sample(logits_1V)
            tokens.append(token_1)
            distributions.append(probabilities_1V)
        text_R, estimated = torch.cat(tokens), self.drafter.config.confidence
        survival_D = network.survival(text_R[:-1], hidden_NH) if estimated else None
        return Proposal(text_R[1:], sampler.joined(distributions), survival_D)


# --- DSpark's scheduler of verification: Algorithm 1, and the asynchronous form of section 5.2 ----
#
# A draft token is verified if it increases the expected tokens per second of the whole batch on
# this machine. c[r][j] is the probability that token j of request r is accepted if all before it
# are; a[r][j], the product of c[r][0..j], is the probability that it is reached and accepted.
# Verifying the n tokens with the largest a gives Θ_n = (R + Σ a) · SPS(R + n) expected tokens per
# second for R requests. Stopping at the first descent of Θ keeps the output distribution, because
# the decision about a token depends only on earlier draft tokens; the global maximum over the same
# step does not (Appendix A). The asynchronous form computes the size of a step from the
# probabilities of two steps before, so it may use the global maximum. Confidences are treated as
# probabilities, so calibrate them first. The cost of drafting is not included.

Probabilities = Sequence[Sequence[float]]
"""c[r][j]; requests may have different numbers of tokens."""


def ranked(probabilities: Probabilities) -> list[tuple[float, int, int]]:
    """Return (a, j, r) of all tokens with a > 0, the most likely first.

    A token is ranked after all earlier ones of its request, so the first n tokens of the list are
    a prefix of every draft, and whether a token is among them depends only on tokens before it.
    """
    survivals = [list(accumulate(row, mul)) for row in probabilities]
    tokens = [(a, j, r) for r, row in enumerate(survivals) for j, a in enumerate(row) if a > 0]
    return sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))


def admit(probabilities: Probabilities, n: int) -> list[int]:
    """Return the number of verified tokens per request if the n most likely of all are verified."""
    counts = Counter(r for _, _, r in ranked(probabilities)[:n])
    return [counts[r] for r in range(len(probabilities))]


def throughputs(probabilities: Probabilities, profile: StepProfile) -> list[float]:
    """Return Θ_0, Θ_1, …: expected tokens per second with the n most likely tokens verified.

    The list ends at the largest step in the profile; DllmBenchError if there are more requests than
    that.
    """
    requests = len(probabilities)
    expected = accumulate((a for a, _, _ in ranked(probabilities)), initial=float(requests))
    room = max(0, profile.largest - requests)
    return [tokens * profile.rate(requests + n) for n, tokens in enumerate(expected) if n <= room]


def highest_peak(probabilities: Probabilities, profile: StepProfile) -> int:
    """Return n of the largest Θ; of equal ones the smallest n."""
    rates = throughputs(probabilities, profile)
    return rates.index(max(rates))


def early_stop(probabilities: Probabilities, profile: StepProfile) -> list[int]:
    """Return the lengths at the first peak of Θ (Algorithm 1), which is the global one if Θ has a
    single peak."""
    rates = throughputs(probabilities, profile)
    descents = (n for n, (here, after) in enumerate(pairwise(rates)) if after <= here)
    return admit(probabilities, next(descents, len(rates) - 1))


class TwoStepsAhead:
    """Scheduler for an engine that must know the size of a step two steps ahead.

    The size of step t is the best one for the probabilities of step t - 2; it is filled with the
    most likely tokens of step t. The first two steps have no such size and use the early stop. A
    request that joined since then uses one token of the size; a request that left frees one.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile, self.sizes = profile, deque[int]()

    def __call__(self, probabilities: Probabilities) -> list[int]:
        """Return the lengths of the current step."""
        self.sizes.append(len(probabilities) + highest_peak(probabilities, self.profile))
        if len(self.sizes) <= 2:
            return early_stop(probabilities, self.profile)
        return admit(probabilities, max(0, self.sizes.popleft() - len(probabilities)))


@register("length.hardware_aware")
@dataclass(frozen=True)
class HardwareAwareLength(VerifyLength):
    """Algorithm 1: lengths at the first peak of the expected tokens per second."""

    profile: StepProfile
    """Speed of this machine with this model."""
    temperatures: Temperatures = field(default_factory=Temperatures)
    """Calibration of the confidence head."""

    needs = needing({"draft": Condition.SURVIVAL_ESTIMATES})

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return early_stop(acceptance_probabilities(proposals, self.temperatures), self.profile)


@register("length.asynchronous")
@dataclass(frozen=True)
class AsynchronousLength(HardwareAwareLength):
    """Section 5.2, for an engine that overlaps steps: the number of tokens is the best one for the
    probabilities of two steps before; the first two steps of a batch use the early stop.
    """

    def begin(self) -> LengthRule:
        rule = TwoStepsAhead(self.profile)
        return lambda proposals: rule(acceptance_probabilities(proposals, self.temperatures))


# --- EAGLE-3 --------------------------------------------------------------------------------------


@register("draft.eagle3")
@dataclass(frozen=True)
class Eagle3(Draft):
    """EAGLE-3 as DeepSpec implements it: one layer drafts a chain of tokens.

    A chain of draft tokens; an end token is the last one of a draft. The layer reads the target's
    features at the committed tokens, and then its own hidden state for every token it drafts. After
    a draft its cache is cropped: the next round feeds the target's features of what was committed.
    Left out, as in DeepSpec: the trees of candidates of the original.
    """

    drafter: TrainedChainDrafter
    tokens: Positive | None = None
    """Draft tokens per round; None: as many as the drafter was unrolled for in training."""

    @property
    def longest(self) -> int:
        return self.tokens or self.drafter.config.slots

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.config.feature_layers

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        network, kv = self.drafter.on(context.target), context.kv
        assert kv is not None
        cached = kv.length
        hidden_11H, logits_1V = network.extend(context)
        drawn = [sampler.sample(logits_1V)]
        for _ in range(self.longest - 1):
            hidden_11H, logits_1V = network.step(drawn[-1][0], hidden_11H, context)
            drawn.append(sampler.sample(logits_1V))
        fed = kv.length - cached
        kv.crop(context.anchor)
        tokens, distributions = zip(*drawn, strict=True)
        joined = sampler.joined(distributions)
        return Proposal(torch.cat(tokens), joined, calls=len(tokens), fed=fed, cached=cached)

    def cut(self, proposals: Sequence[Proposal], target: Target) -> list[Proposal]:
        """Return the drafts, each cut after its first end token."""
        drafted = zip(proposals, to_host([one.tokens_D for one in proposals]), strict=True)
        ends = [(one, first_end(tokens, target.special)) for one, tokens in drafted]
        return [one if end is None else one.first(end + 1) for one, end in ends]
