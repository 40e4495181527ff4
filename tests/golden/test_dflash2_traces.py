"""z-lab's own loop with DFlash 2, token for token, and the modules of its drafter.

Greedy runs, stops, blocks shorter than in training, sliding windows, and sampled runs whose uniform
numbers are given, with top-p and top-k. Every round is compared: what was drafted, accepted and
committed. A round of theirs ends at the limit, ours behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.speculative import Context
from dllm_bench.methods.trained_drafts import DFlash2
from dllm_bench.models.drafters import TrainedBlockDrafter
from tests.golden.cases import GOLDEN, Case, agreement, replayed
from tests.golden.test_speculative_traces import (
    NO_END,
    TOLERANCE,
    read_by_target,
    speculative,
    target,
    verified,
)
from tests.helpers import DEVICE
from tests.speculative import Scripted, WatchedLength, scripted

FOLDER = GOLDEN / "new2026"
MODULES = FOLDER / "dflash2_modules.json"
CHECKPOINTS = ("dflash2_b8", "dflash2_b16_swa")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"no golden traces at {FOLDER}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], str]:
    """Return the folder of a case's drafter, with the config that the case asks for.

    One case has more slots than its drafter was trained with, which is refused here.
    """

    def folder(case: Case) -> str:
        published = FOLDER / "ckpt" / case["checkpoint"]
        config = json.loads((published / "config.json").read_text())
        longer = case["block_size"] > config["dflash_config"]["block_size"]
        if not (case["config_override"] or longer):
            return str(published)
        made = tmp_path_factory.mktemp("drafter")
        config |= case["config_override"] or {}
        config["dflash_config"] |= {"block_size": case["block_size"]} if longer else {}
        config = {key: value for key, value in config.items() if value is not None}
        (made / "config.json").write_text(json.dumps(config))
        (made / "model.safetensors").symlink_to(published / "model.safetensors")
        return str(made)

    return folder


def decoder_of(case: Case, folder: str) -> tuple[Scripted, WatchedLength]:
    """Return the decoder of a case, with its random numbers."""
    plain = speculative(
        "dflash2",
        {
            "draft.drafter.source": folder,
            "draft.slots": case["block_size"],
            "temperature": case["temperature"],
            "top_p": case["top_p"],
            "top_k": case["top_k"] or None,
        },
    )
    watched = WatchedLength(plain.length)
    return scripted(plain, case.get("uniforms") or [], length=watched), watched


@replayed("new2026/dflash2.json")
def test_dflash2(case: Case, checkpoint: Callable[[Case], str]) -> None:
    ended = case["output"][-1] in (case["stop_token_ids"] or [])
    target().special = SpecialTokens(mask=0, eos=case["output"][-1] if ended else NO_END)
    decoder, watched = decoder_of(case, checkpoint(case))
    limit = case["max_new_tokens"]
    generation = decoder.generate(target(), Request("golden", tuple(case["prompt"]), limit))
    with agreement(case):
        assert list(generation.ids[:limit]) == case["output"]
        found, rounds = verified(generation), case.get("rounds", [])
        made = [len(new) for _, new in found]
        if made:
            made[-1] -= max(0, len(generation.ids) - limit)
        assert made == case["acceptance_lengths"]
        for (row, new), proposal, entry in zip(found, watched.seen, rounds, strict=bool(rounds)):
            assert proposal.tokens_D.tolist() == entry["drafted"]
            assert row.cached == entry["anchor_pos"]
            first, last = entry["position_range"]
            assert (proposal.cached, proposal.cached + proposal.fed) == (first, last)
            assert new[: len(entry["committed"])] == entry["committed"]
            if proposal.probabilities_DV is not None:
                drawn_D = proposal.probabilities_DV.gather(1, proposal.tokens_D[:, None])[:, 0]
                wanted_D = torch.tensor(entry["draft_prob"], device=DEVICE)
                torch.testing.assert_close(drawn_D, wanted_D, atol=TOLERANCE, rtol=0)


@lru_cache
def stored() -> dict[str, torch.Tensor]:
    return load_file(MODULES.with_suffix(".safetensors"), device=DEVICE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafter_forwards_sharing_one_cache(name: str) -> None:
    recorded = json.loads(MODULES.read_text())
    ids_L = torch.tensor(recorded["sequence"], device=DEVICE)
    _, features_1FC = read_by_target(ids_L[None])
    piece = DFlash2(TrainedBlockDrafter(str(FOLDER / "ckpt" / name)))
    network: Any = piece.drafter.on(target())
    kv = piece.new_cache(target(), 64)
    for entry in (call for call in recorded["calls"] if call["checkpoint"] == name):
        start, (first, last) = entry["start"], entry["new_context_rows"]
        context = Context(ids_L[: start + 1], features_1FC[:, first:last], target(), kv)
        with torch.inference_mode():
            hidden_DH, logits_DV = network.block(context, piece.drafter.slots)
        key = f"{name}/{start}"
        torch.testing.assert_close(hidden_DH, stored()[f"{key}/hidden"][1:], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(logits_DV, stored()[f"{key}/logits"], atol=TOLERANCE, rtol=0)
        assert logits_DV.argmax(-1).tolist() == entry["unary_argmax"]
        ids_DK = stored()[f"{key}/candidates"].long()
        assert logits_DV.topk(ids_DK.shape[1]).indices.tolist() == ids_DK.tolist()
        if f"{key}/edge_scores" in stored():
            before_DK = torch.stack([ids_L[start].expand(ids_DK.shape[1]), *ids_DK[:-1]])
            bias_DKK = network.path_biases(before_DK, hidden_DH, ids_DK)
            scores_DKK = bias_DKK + logits_DV.gather(1, ids_DK)[:, None]
            wanted_DKK = stored()[f"{key}/edge_scores"]
            torch.testing.assert_close(scores_DKK, wanted_DKK, atol=TOLERANCE, rtol=0)
