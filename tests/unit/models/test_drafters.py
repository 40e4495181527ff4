"""Drafter files: both formats are read, content is identity, and a misfit raises an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import ModelDraft
from dllm_bench.methods.trained_drafts import DFlash, DFlash2, DSpark, Eagle3
from dllm_bench.models.drafters import SmallModelDrafter, TrainedBlockDrafter, TrainedChainDrafter
from dllm_bench.registry import describe, instantiate
from dllm_bench.store.spec import Role, split
from tests.helpers import tiny_checkpoint, tiny_denoiser
from tests.speculative import DRAFTERS, DSPARK, write_drafter

REQUEST = Request("drafters", (1, 2, 3), 4)


def stored(folder: Path, name: str, **changes: Any) -> str:
    return write_drafter(folder / name, {**DRAFTERS[name], **changes})


def test_features_come_in_the_requested_order_and_may_start_at_the_embedding() -> None:
    target, tokens_1L = tiny_denoiser("qwen3", 0), torch.tensor([[1, 2, 3, 4]])
    plan = ForwardPlan(
        ForwardKind.PREFILL, (0, 4), (1, 5), (0, 0), "block_causal", 1, feature_layers=(1, -1, 0)
    )
    kv = target.new_cache(4)
    logits = target.forward(tokens_1L, plan, kv)
    last, embedded, first = kv.features.chunk(3, dim=-1)
    assert torch.equal(embedded, target.embed(tokens_1L))
    assert not torch.equal(first, last)
    torch.testing.assert_close(target.head(target.module.model.norm(last)), logits)


def test_what_the_two_formats_say(tmp_path: Path) -> None:
    deepspec, zlab = (TrainedBlockDrafter(stored(tmp_path, n)) for n in ("dflash", "dflash_zlab"))
    assert (deepspec.slots, deepspec.silent, deepspec.feature_layers) == (4, 0, (-1, 0))
    assert (zlab.slots, zlab.silent, zlab.feature_layers) == (6, 1, (0,))
    assert DFlash(deepspec).longest == 4
    assert DFlash(zlab).longest == 5
    assert DFlash(zlab, slots=3).longest == 2
    assert Eagle3(TrainedChainDrafter(stored(tmp_path, "eagle3"))).longest == 5
    assert not deepspec.has_transition_head
    dspark = TrainedBlockDrafter(stored(tmp_path, "dspark"))
    assert dspark.has_transition_head and dspark.has_confidence_head
    assert DSpark(dspark).gives == {"survival estimates"}
    silent = TrainedBlockDrafter(
        write_drafter(tmp_path / "s", {**DSPARK, "enable_confidence_head": False})
    )
    assert DSpark(silent).gives == frozenset()
    newer = {key: value for key, value in DRAFTERS["dflash_zlab"].items() if key != "block_size"}
    newer["dflash_config"] = {**newer["dflash_config"], "block_size": 8}
    assert TrainedBlockDrafter(write_drafter(tmp_path / "newer", newer)).slots == 8


def test_content_is_identity_and_the_path_is_not(tmp_path: Path) -> None:
    here = TrainedBlockDrafter(stored(tmp_path, "dspark"))
    shutil.copytree(here.source, tmp_path / "there")
    there = TrainedBlockDrafter(str(tmp_path / "there"))
    other = TrainedBlockDrafter(write_drafter(tmp_path / "other", DSPARK, seed=1))
    assert here == there
    assert hash(here) == hash(there)
    assert here != other
    plain = describe(SpeculativeDecoder(DSpark(here)))
    assert instantiate(plain, "decoder") == SpeculativeDecoder(DSpark(there))
    drafter = split({"decoder": plain})[Role.IDENTITY]["decoder"]["draft"]["drafter"]
    assert drafter["sha256"] == here.sha256
    assert "source" not in drafter
    with pytest.raises(DllmBenchError, match="sha256"):
        TrainedBlockDrafter(other.source, sha256=here.sha256)


def block_drafter(folder: Path, name: str) -> TrainedBlockDrafter:
    return TrainedBlockDrafter(stored(folder, name))


WRONG_PIECES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: block_drafter(path, "eagle3"), "decoder/draft=eagle3"),
    (
        lambda path: TrainedChainDrafter(stored(path, "dspark")),
        "decoder/draft=dflash, dflash2 or dspark",
    ),
    (lambda path: DSpark(block_drafter(path, "dflash")), "drafter with a transition head"),
    (lambda path: DSpark(block_drafter(path, "dflash2")), "drafter with a transition head"),
    (lambda path: DFlash2(block_drafter(path, "dspark")), "drafter with a path selector"),
    (lambda path: DFlash(block_drafter(path, "dflash_zlab"), slots=7), "choose 1 to 6"),
    (lambda path: DFlash(block_drafter(path, "dflash"), slots=5), "choose 1 to"),
    (lambda _: TrainedBlockDrafter("assets/drafters/none"), r"decoder\.draft\.drafter\.source"),
    (lambda _: TrainedBlockDrafter("/nowhere/at/all"), "no model folder"),
]


def specforges_dspark(folder: Path) -> object:
    config = dict(DRAFTERS["dflash_zlab"])
    config["dflash_config"] = {**config["dflash_config"], "projector_type": "dspark"}
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text(json.dumps(config))
    return TrainedBlockDrafter(str(folder))


@pytest.mark.parametrize(("make", "words"), [*WRONG_PIECES, (specforges_dspark, "projector_type")])
def test_a_drafter_that_does_not_fit_is_refused(make, words, tmp_path) -> None:
    with pytest.raises(DllmBenchError, match=words):
        make(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"markov_head_type": "transformer"}, "markov_head_type"),
        ({"block_size": None}, "block_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_target_layers": 9}, "9 layers"),
        ({"vocab_size": 50}, "50 tokens"),
        ({"hidden_size": 64}, "width 64"),
        ({"intermediate_size": 64}, "do not fit"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_would_be_read_wrongly(tmp_path, changes, match) -> None:
    folder = Path(stored(tmp_path, "dspark"))
    (folder / "config.json").write_text(json.dumps({**DSPARK, **changes}))
    with pytest.raises(DllmBenchError, match=match):
        prepare(folder)


def prepare(folder: Path) -> None:
    """Make the decoder and read its network."""
    decoder = SpeculativeDecoder(DSpark(TrainedBlockDrafter(str(folder))))
    decoder.prepare(tiny_denoiser("qwen3", 0), REQUEST)


def test_a_draft_model_over_other_tokens(tmp_path: Path) -> None:
    small = SmallModelDrafter(str(tiny_checkpoint("dream", tmp_path, 0)))
    with pytest.raises(DllmBenchError, match="autoregressive model over the target's vocabulary"):
        SpeculativeDecoder(ModelDraft(small, 3)).prepare(tiny_denoiser("qwen3", 0), REQUEST)
