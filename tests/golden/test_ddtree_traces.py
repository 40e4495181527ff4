"""DDTree's own loop and the construction of its trees, node for node.

Greedy and sampled runs with given uniform numbers. Every round is compared: the tree, what the
target says of each of its nodes, the accepted path and the features that the next draft reads. The
reference goes on until the limit is exceeded, so one token more is asked for here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.speculative import Proposal, Sampler, VerifyResult
from dllm_bench.decoding.speculative import GreedyMatch
from dllm_bench.methods.trained_drafts import likeliest_tree
from dllm_bench.metrics.drafts import depths
from tests.golden.cases import GOLDEN, Case, agreement, replayed
from tests.golden.test_speculative_traces import NO_END, source, speculative, target, verified
from tests.speculative import Scripted, scripted

pytestmark = pytest.mark.skipif(
    not (GOLDEN / "new2026").exists(), reason=f"no golden traces at {GOLDEN / 'new2026'}"
)


@dataclass(frozen=True)
class WatchedMatch(GreedyMatch):
    """Keeps what it decides, and the most probable tokens of the target."""

    seen: list[tuple[VerifyResult, list[int]]] = field(default_factory=list, compare=False)

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        result = super().__call__(proposal, logits_RV, sampler)
        self.seen.append((result, logits_RV.argmax(-1).tolist()))
        return result


def decoder_of(case: Case) -> tuple[Scripted, WatchedMatch]:
    """Return the decoder of a case, with its random numbers; a tree of no nodes is one that is not
    fed."""
    budget = case["tree_budget"]
    settings: dict[str, Any] = {
        "draft.drafter.source": source("zlab_dflash"),
        "draft.slots": case["block_size"],
        "draft.budget": None if budget is None else max(budget, 1),
        "draft.released": True,
        "length.tokens": None if budget is None or budget > 0 else 0,
        "temperature": case["temperature"],
        "checks_first": False,
    }
    plain, watched = speculative("ddtree", settings), WatchedMatch()
    return scripted(plain, case.get("uniforms") or [], verify=watched), watched


@replayed("new2026/ddtree.json")
def test_ddtree(case: Case) -> None:
    ended = case["output"][-1] in (case["stop_token_ids"] or [])
    target().special = SpecialTokens(mask=0, eos=case["output"][-1] if ended else NO_END)
    decoder, watched = decoder_of(case)
    request = Request("golden", tuple(case["prompt"]), case["max_new_tokens"] + 1)
    generation = decoder.generate(target(), request)
    assert list(generation.ids[: len(case["output"])]) == case["output"]
    found, rounds = verified(generation), case["rounds"]
    with agreement(case):
        for (row, new), (result, own), entry in zip(found, watched.seen, rounds, strict=False):
            nodes = len(entry["nodes"])
            assert [*row.drafted[:nodes]] == entry["nodes"]
            assert [*row.parents[:nodes]] == entry["parents"]
            assert depths(row.parents[:nodes])[1:] == entry["depths"]
            assert (row.proposed, row.fed, row.cached) == (nodes, nodes + 1, entry["anchor_pos"])
            if not case["temperature"]:
                assert own == entry["target_tokens"]
            assert result.path_D is not None
            path = (result.path_D[: int(result.count)] + 1).tolist()
            assert path == entry["accepted_path"]
            assert int(result.bonus) == entry["next_token"]
            assert row.accepted + 1 == len(new) or ended
        made = [int(result.count) + 1 for result, _ in watched.seen]
        assert made == case["acceptance_lengths"]


@replayed("new2026/ddtree_build.json")
def test_a_tree_is_built(case: Case) -> None:
    logits_NV, budget = torch.tensor(case["logits"]), case["budget"]
    with agreement(case):
        tokens_D, parents_D = likeliest_tree(logits_NV, budget)
        assert tokens_D.tolist() == case["nodes"]
        assert parents_D.tolist() == case["parents"]
        path_DR = Proposal(tokens_D, parents_D=parents_D).path_DR
        rows = ["".join(str(int(seen)) for seen in row) for row in path_DR]
        assert rows == case["visibility_rows"][1:]
