"""Every piece and decoder of `conf/decoder`, made small for tests.

The laws, the product and the golden checks pick up a new yaml without a change of a test. Blocks
have 8 positions and step counts are small; trained parts are replaced by random ones of that size.
`Table` is a model of a few operations whose cache checks every plan it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.api import compose as composing
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Stop
from dllm_bench.core.decoder import Condition, Need, Piece
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState
from dllm_bench.core.transfer import to_device
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.kv import PositionCache
from dllm_bench.paths import options
from dllm_bench.registry import instantiate
from dllm_bench.store.cache import SettingsCache
from tests.helpers import ROLES, VOCAB

BLOCK = 8
SMALL = {"block": BLOCK, "small": 4, "steps": 4, "forwards": 5, "initial": 4, "eos_window": 4}
SLOTS = ("score", "select", "explore", "schedule", "stop", "cache", "revise")


@dataclass(frozen=True)
class RandomHead:
    """A filter of one random layer."""

    block: int = BLOCK

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        weight_BB = torch.randn(self.block, self.block, generator=generator)
        return confidence_KNB @ to_device(weight_BB, confidence_KNB.device)


def small(value: Any) -> Any:
    """Return the same value with small numbers, at any depth."""
    if isinstance(value, tuple):
        return tuple(small(part) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {}
    for field in (field for field in fields(value) if field.init):
        inner = getattr(value, field.name)
        most = SMALL.get(field.name)
        changes[field.name] = min(inner, most) if inner and most else small(inner)
        if field.name == "head":
            changes["head"] = RandomHead()
    return replace(value, **changes)


def composed(group: str) -> dict[str, Any]:
    """Name -> settings of every yaml of a group.

    Ten are composed at once, which takes a third as long. The result is kept as the command line
    keeps it, in the cache folder of the user and not in that of the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        settings = SettingsCache(Path(__file__), composing.compose)
    names, found = options(group), dict[str, Any]()
    for first in range(0, len(names), 10):
        asked = [f"+{group}@every.{name}={name}" for name in names[first : first + 10]]
        found |= settings.compose(asked)["every"]
    settings.save()
    return found


@lru_cache
def pieces(slot: str) -> dict[str, Piece]:
    """Name -> piece of every yaml of a slot."""
    plain = composed(f"decoder/{slot}")
    return {name: small(instantiate(value, slot)) for name, value in plain.items()}


@lru_cache
def decoders() -> dict[str, MaskedDecoder]:
    """Name -> decoder of every yaml in `conf/decoder` that is a masked one."""
    masked = {
        n: x for n, x in composed("decoder").items() if x["_target_"].endswith("MaskedDecoder")
    }
    return {name: small(instantiate(plain, "decoder")) for name, plain in masked.items()}


def needs_unshifted(decoder: Any) -> bool:
    """Return whether a piece needs a model whose rows predict their own positions."""
    return any(Need("model", Condition.UNSHIFTED) in piece.needs for piece in decoder.pieces())


class Table(Denoiser):
    """Logits from a table of positions and the mean of the tokens that are seen."""

    chooses_rows = True

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.special, self.vocab_size = SpecialTokens(**ROLES), VOCAB
        self.device = torch.device("cpu")
        self.place = 2.5 * torch.randn(64, VOCAB, generator=generator)
        self.token = 4.0 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.place[:, ROLES["eos"]] += 2.0

    def embed(self, ids: Tensor) -> Tensor:
        return self.token[ids]

    def new_cache(self, length: int) -> PositionCache:
        return PositionCache(0, length)

    def forward(self, tokens_KL: Tensor, plan: Any, kv: PositionCache) -> Tensor:
        first, last = plan.feed
        assert 0 <= first <= kv.length and first < last <= tokens_KL.shape[1]
        assert first <= plan.rows[0] < plan.rows[1] <= last + (plan.rows[0] == last)
        kv.begin(plan, tokens_KL.shape[1])
        nothing_1X1, rule = torch.zeros(1, last, 1), plan.recompute
        if plan.probe is not None:
            rows_R = None if rule is None else rule.rows(None)
            fed_1F1 = nothing_1X1[:, : plan.fed if rows_R is None else len(rows_R)]
            kv.probes.append(plan.probe(fed_1F1, nothing_1X1, 1.0, None))
        kv.hold(plan, tokens_KL[:, first:last, None])
        seen_KV = self.token[tokens_KL[:, :last]].mean(1)
        rows_X = torch.arange(*plan.rows)
        if plan.added is not None:
            rows_X = torch.cat([rows_X, plan.added.position_E])
        return self.place[rows_X] + seen_KV[:, None]


@dataclass(frozen=True)
class CutAt(Stop):
    """Give up what lies beyond `length` after the second forward."""

    length: int

    def on_commit(self, round: Round) -> None:
        state = round.state
        round.cut(torch.tensor(self.length if state.forwards >= 1 else state.length))


def opened(
    masked_KL: Tensor, block: int | None = None, seed: int = 0
) -> tuple[DecodeState, Window]:
    """Return a state with these masks and the window over all of it, without a prompt; every mask
    is open. block: positions of a block, all without it."""
    tokens_KL = torch.where(masked_KL, ROLES["mask"], 0)
    born_KL = torch.where(masked_KL, MASKED, PROMPT)
    state = DecodeState(torch.stack([tokens_KL, born_KL]), 0, SpecialTokens(**ROLES), seed=seed)
    width = masked_KL.shape[1]
    return state, Window(0, width, width, block or width, 0, masked_KL)
