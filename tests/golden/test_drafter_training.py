"""DeepSpec's training forward of DFlash, DSpark and EAGLE-3: logits, losses, gradients; and its
record of confidences over the decoded traces.

The reference's `l1` is the full norm. Anchor sampling is not compared: it depends on a stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.metrics import drafts as draft_metrics
from dllm_bench.metrics.drafts import ObservedDraft
from dllm_bench.training import drafter_objectives as objectives
from dllm_bench.training.drafter_objectives import LossShares
from tests.golden.test_speculative_traces import FOLDER, greedy_runs, read, tensors
from tests.helpers import load_denoiser
from tests.speculative import trainable
from tests.tiers import covering

KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn")
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"no golden data at {FOLDER}")


def recorded(name: str) -> torch.Tensor:
    return tensors("modules.safetensors")[name].cpu()


def network(kind: str) -> Any:
    found = trainable(FOLDER / "ckpt" / kind)
    frozen = {name for name, weight in found.named_parameters() if not weight.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
    return found


def rows() -> objectives.TargetRows:
    names = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    ids, answer, features, last = (recorded(f"train/{name}") for name in names)
    return objectives.TargetRows(ids, answer.bool(), features, last)


def blocks(kind: str) -> objectives.DraftBlocks:
    given = read("modules.json")["train"][kind]
    anchors, kept = (torch.tensor(given[n]) for n in ("anchor_positions", "block_keep_mask"))
    return objectives.blocks_at(anchors, kept.bool(), rows().answer_BL, slots=7)


def losses(net: Any, found: Any, kind: str, decay: float | None) -> objectives.DraftLosses:
    target = objectives.at(net.lm_head(rows().last_BLH), blocks(kind).labels_BND - 1)
    return objectives.block_losses(found, target, rows().ids_BL, blocks(kind), decay)


def test_the_targets_own_part() -> None:
    target = load_denoiser(FOLDER / "ckpt" / "target")
    found = objectives.target_rows(target, rows().ids_BL, rows().answer_BL, (0, 1, 2))
    torch.testing.assert_close(found.features_BLC, rows().features_BLC, **TOLERANCE)
    torch.testing.assert_close(found.last_BLH, rows().last_BLH, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", covering(2, KINDS))
@pytest.mark.parametrize("kernel", [objectives.dense, objectives.flex])
def test_training_forward(kind: str, kernel: Any) -> None:
    name, net, at = f"train/{kind}", network(kind), blocks(kind)
    with torch.no_grad():
        found = objectives.block_forward(net, rows(), at, kernel)
    kept = recorded(f"{name}/eval_mask").bool()
    assert torch.equal(at.supervised_BND, kept)
    labels = objectives.at(rows().ids_BL, at.labels_BND)
    assert torch.equal(labels[kept], recorded(f"{name}/target_ids")[kept])
    wanted = recorded(f"{name}/draft_logits")
    torch.testing.assert_close(found.logits_BNDV[:2][kept[:2]], wanted[kept[:2]], **TOLERANCE)
    if found.survival_BND is not None:
        survival = recorded(f"{name}/confidence_logits")
        torch.testing.assert_close(found.survival_BND[kept], survival[kept], **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients(kind: str) -> None:
    net, reference = network(kind), read("modules.json")["train"][kind]
    drafted = objectives.block_forward(net, rows(), blocks(kind))
    for wanted in reference["losses"].values():
        alphas, terms, metrics = wanted["alphas"], wanted["terms"], wanted["metrics"]
        shares = LossShares(alphas["ce"], alphas["l1"], alphas["conf"], wanted["gamma"])
        found = losses(net, drafted, kind, shares.decay)
        pairs = [(found.total(shares), wanted["total"])]
        pairs += [(found.terms[name], terms[f"{name}_loss_num"]) for name in ("ce", "confidence")]
        pairs += [(found.length, metrics["tau_probabilistic"])]
        if alphas["l1"]:  # the reference leaves out what does not count
            pairs.append((found.terms["l1"], terms["l1_loss_num"]))
        assert [own.item() for own, _ in pairs] == pytest.approx([x for _, x in pairs], rel=1e-5)
        assert found.weight.item() == pytest.approx(terms["ce_loss_den"], rel=1e-6)
    name, shares = "grad_l2_of_dspark_cfg", LossShares()
    if kind == "dflash":
        name, shares = "grad_l2_of_dflash_cfg", LossShares(1.0, 0.0, 0.0)
    losses(net, drafted, kind, shares.decay).total(shares).backward()
    compare_gradients(net, reference[name])


def compare_gradients(net: Any, wanted: dict[str, float]) -> None:
    found = {n: w.grad.norm().item() for n, w in net.named_parameters() if w.grad is not None}
    assert found == pytest.approx(wanted, rel=1e-3)


def test_eagle3_unrolled() -> None:
    net, wanted = network("eagle3"), read("modules.json")["eagle3"]["train"]
    counts = recorded("train/eagle3_loss_mask").bool()
    valid = recorded("train/eagle3_attention_mask").sum(1)
    counts[torch.arange(len(counts)), valid - 1] = False  # as the reference does
    for step, mask in enumerate(recorded("eagle3/train_position_masks")):
        assert torch.equal(objectives.shifted(counts, step), mask.bool())
    every = objectives.chain_forward(net, rows(), torch.ones_like(counts))
    for step, row_LV in enumerate(recorded("eagle3/train_logits_row0_steps")):
        inside = slice(None, len(row_LV) - step)  # the reference fills the end otherwise
        first_text = every[step].view(len(counts), -1, row_LV.shape[-1])[0]
        torch.testing.assert_close(first_text, row_LV[inside], **TOLERANCE)
    logits = objectives.chain_forward(net, rows(), counts)
    steps = objectives.chain_losses(logits, net.lm_head(rows().last_BLH[counts.roll(1, 1)]), counts)
    assert [s.item() for s in steps] == pytest.approx(wanted["step_losses"], rel=1e-5)
    total = objectives.decayed_sum(steps)
    assert total.item() == pytest.approx(wanted["total"], rel=1e-5)
    total.backward()
    compare_gradients(net, wanted["grad_l2"])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_confidences_of_the_traces(kind: str) -> None:
    """Four prompts decoded greedily, every verified position beside what became of it."""
    found = []
    for generation, drafts in greedy_runs(kind):
        rounds = draft_metrics.rounds_of(generation.trace, generation.born)
        for made, proposal in zip(rounds, drafts, strict=True):
            assert proposal.survival_D is not None
            logits = proposal.survival_D[: made.proposed].tolist()
            found.append(ObservedDraft(tuple(logits), made.accepted))
    metrics = read(f"trace_{kind}.json")["confidence_metrics_T0"]
    assert len(found) == metrics["proposal_count"]
    positions = draft_metrics.outcomes_by_position(found)
    for own, wanted in zip(positions, metrics["per_position"], strict=True):
        assert len(own.predicted) == wanted["total_weight"]
        assert draft_metrics.ece(own) == pytest.approx(wanted["ece"], abs=1e-5)
        assert draft_metrics.brier(own) == pytest.approx(wanted["brier"], abs=1e-5)
        bins = tuple(float(min(int(1000 * p), 999)) for p in own.predicted)  # as their AUROC does
        assert draft_metrics.auroc(replace(own, predicted=bins)) == pytest.approx(wanted["auc"])
        for bar, one in zip(
            draft_metrics.reliability_bins(own), wanted["reliability"], strict=True
        ):
            assert [bar.low, bar.high, bar.count] == pytest.approx([*one["range"], one["weight"]])
            means = one["avg_pred"], one["avg_target"]
            assert (bar.predicted, bar.happened) == pytest.approx(means, abs=1e-5)
