"""Files of drafters and filters: what is read, what is refused, and that content is identity."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import parse
from dllm_bench.cli.train import given_fields
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.speculative import Draft
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import ModelDraft
from dllm_bench.methods.trained_drafts import DDTree, DFlash, DFlash2, DSpark, Eagle3
from dllm_bench.models.drafter_config import read_drafter_config
from dllm_bench.models.drafters import SmallModelDrafter, TrainedBlockDrafter, TrainedChainDrafter
from dllm_bench.models.filters import FilterMetadata, LearnedFilter, read_state_dict
from dllm_bench.paths import assets_dir
from dllm_bench.registry import describe, instantiate
from dllm_bench.store.groups import Role
from dllm_bench.store.inputs import weights_hash
from dllm_bench.store.spec import split
from dllm_bench.training.filters import FilterJob, network_of, save_filter
from tests.helpers import fed_causally, tiny_checkpoint, tiny_denoiser
from tests.speculative import DRAFTERS, DSPARK, write_drafter
from tests.unit.models.common import edit

REQUEST = Request("drafters", (1, 2, 3), 4)


def stored(folder: Path, name: str, **changes: Any) -> str:
    return write_drafter(folder / name, {**DRAFTERS[name], **changes})


def test_features_come_in_the_requested_order_and_may_start_at_the_embedding() -> None:
    target, tokens_1L = tiny_denoiser("qwen3", 0), torch.tensor([[1, 2, 3, 4]])
    logits, kv = fed_causally(target, (1, 2, 3, 4), (1, -1, 0))
    last, embedded, first = kv.features.chunk(3, dim=-1)
    assert torch.equal(embedded, target.embed(tokens_1L))
    assert not torch.equal(first, last)
    torch.testing.assert_close(target.head(target.module.model.norm(last)), logits)


def test_what_the_two_formats_say(tmp_path: Path) -> None:
    deepspec, zlab = (TrainedBlockDrafter(stored(tmp_path, n)) for n in ("dflash", "dflash_zlab"))
    longest = [DFlash(deepspec).longest, DFlash(zlab).longest, DFlash(zlab, slots=3).longest]
    assert longest == [4, 5, 2]
    assert Eagle3(TrainedChainDrafter(stored(tmp_path, "eagle3"))).longest == 5
    silent = write_drafter(tmp_path / "s", {**DSPARK, "enable_confidence_head": False})
    assert DSpark(TrainedBlockDrafter(silent)).gives == frozenset()
    newer = {key: value for key, value in DRAFTERS["dflash_zlab"].items() if key != "block_size"}
    newer["dflash_config"] = {**newer["dflash_config"], "block_size": 8}
    assert TrainedBlockDrafter(write_drafter(tmp_path / "newer", newer)).config.slots == 8


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("causal", [None, False, True])
def test_a_config_may_say_that_no_slot_sees_a_later_one(kinds, causal) -> None:
    """For all layers, named or not; else layers with a sliding window alone are causal."""
    config = DRAFTERS["dflash_zlab"] | {"layer_types": kinds, "sliding_window": 5}
    found = read_drafter_config(config | {"is_causal": causal}).causal
    assert found == ((False, bool(kinds)) if causal is None else (causal, causal))


def test_content_is_identity_and_the_path_is_not(tmp_path: Path) -> None:
    here = TrainedBlockDrafter(stored(tmp_path, "dspark"))
    shutil.copytree(here.source, tmp_path / "there")
    there = TrainedBlockDrafter(str(tmp_path / "there"))
    other = TrainedBlockDrafter(write_drafter(tmp_path / "other", DSPARK, seed=1))
    assert here == there and hash(here) == hash(there) and here != other
    plain = describe(SpeculativeDecoder(DSpark(here)))
    assert instantiate(plain, "decoder") == SpeculativeDecoder(DSpark(there))
    found = split({"decoder": plain})[Role.IDENTITY]["decoder"]["draft"]["drafter"]
    assert found["sha256"] == here.sha256
    assert "source" not in found
    with pytest.raises(DllmBenchError, match="sha256"):
        TrainedBlockDrafter(other.source, sha256=here.sha256)


def drafter(folder: Path, name: str = "dspark", **changes: Any) -> TrainedBlockDrafter:
    """Return a drafter whose config is changed after its weights were written."""
    source = stored(folder, name)
    edit(Path(source) / "config.json", **changes)
    return TrainedBlockDrafter(source)


def prepared(draft: Draft) -> None:
    """Let a draft read its network for a target."""
    SpeculativeDecoder(draft).prepare(tiny_denoiser("qwen3", 0), REQUEST)


SPECFORGE = {**DRAFTERS["dflash_zlab"]["dflash_config"], "projector_type": "dspark"}
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
    ({"markov_head_type": "transformer"}, "markov_head_type"),
    ({"block_size": None}, "block_size"),
    ({"block_size": 0}, "slots 0"),
    ({"block_size": "7"}, "slots '7'"),
    ({"target_layer_ids": [0, 9]}, r"layers \[0, 9\] of"),
    ({"target_layer_ids": 1}, "value of another type"),
    ({"rope_parameters": 5}, "value of another type"),
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
    ({"mask_token_id": 500}, "mask token 500 of"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"num_target_layers": 9}, "9 layers"),
    ({"vocab_size": 100}, "100 tokens"),
    ({"hidden_size": 64}, "width 64"),
    ({"intermediate_size": 64}, "do not fit"),
    ({"attention_bias": True}, "attention_bias"),
    *(({"draft_token_ids": ids}, "ascending") for ids in ([5, 3], [-1, 3], [3, 3])),
]
FILTERS: dict[str, dict[str, Tensor]] = {  # words of the refusal -> tensors of no filter
    "0.weight, 1.weight": {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 4)},
    "read": {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)},
    "not linear": {"0.weight": torch.zeros(4), "0.bias": torch.zeros(4)},
    "nothing": {},
}
UNFIT: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: drafter(path, "eagle3"), "decoder/draft=eagle3"),
    (lambda path: TrainedChainDrafter(stored(path, "dspark")), "dflash, dflash2 or dspark"),
    (lambda path: DSpark(drafter(path, "dflash")), "drafter with a transition head"),
    (lambda path: DSpark(drafter(path, "dflash2")), "drafter with a transition head"),
    (lambda path: DFlash2(drafter(path, "dspark")), "drafter with a path selector"),
    *(
        (lambda path, name=name: DDTree(drafter(path, name)), "takes the tokens of a block as inde")
        for name in ("dspark", "dflash2")
    ),
    (lambda path: SpeculativeDecoder(DDTree(drafter(path, "dflash_zlab"))), "DDTree needs a ver"),
    (lambda path: drafter(path, "dflash2", hidden_size=41), "of 41 channels"),
    (lambda path: DFlash(drafter(path, "dflash_zlab"), slots=7), "choose 1 to 6"),
    (lambda path: DFlash(drafter(path, "dflash"), slots=5), "choose 1 to"),
    (lambda _: TrainedBlockDrafter("assets/drafters/none"), r"decoder\.draft\.drafter\.source"),
    (lambda _: TrainedBlockDrafter("/nowhere/at/all"), "no model folder"),
    (lambda path: drafter(path, "dflash_zlab", dflash_config=SPECFORGE), "projector_type"),
    (
        lambda path: prepared(
            ModelDraft(SmallModelDrafter(str(tiny_checkpoint("dream", path, 0))), 3)
        ),
        "autoregressive model over the target's vocabulary",
    ),
    *(
        (lambda path, changes=changes: prepared(DSpark(drafter(path, **changes))), words)
        for changes, words in CHANGED
    ),
    (lambda _: LearnedFilter("assets/filters/no"), "filters/tiny-llada-block32.*train filter"),
    *(
        (lambda path, own=own: save_filter(path, own, FilterMetadata()).block, words)
        for words, own in FILTERS.items()
    ),
]


@pytest.mark.parametrize(("make", "words"), UNFIT, ids=[words for _, words in UNFIT])
def test_what_does_not_fit_is_refused(make, words, tmp_path) -> None:
    with pytest.raises(DllmBenchError, match=words):
        make(tmp_path)


FACTS = FilterMetadata(labels="masked", gen_length=64, model="tiny", weights="w" * 64)
SHIPPED = sorted(path.name for path in (assets_dir() / "filters").iterdir())


def stored_filter(folder: Path, seed: int = 0) -> LearnedFilter:
    return save_filter(folder, network_of(32, 2, seed).state_dict(), FACTS)


@pytest.mark.parametrize(
    ("name", "module"), [("relu", nn.ReLU), ("gelu", nn.GELU), ("silu", nn.SiLU)]
)
def test_logits_are_the_networks(tmp_path: Path, name: str, module: type[nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(8, 5), module(), nn.Linear(5, 5), module(), nn.Linear(5, 8))
    learned = save_filter(tmp_path, network.state_dict(), FilterMetadata(activation=name))
    confidence_KNB = torch.rand(2, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        wanted = network(confidence_KNB.float())
    found = learned(confidence_KNB)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_runs_on_the_device_of_the_confidences(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = stored_filter(tmp_path)(torch.rand(1, 2, 32, device=device))
    assert (found.device.type, found.shape) == (device, (1, 2, 32))


class Planted:
    """Writes a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_weights_that_torch_saved_are_converted_and_nothing_in_them_is_run(tmp_path: Path) -> None:
    network = network_of(16, 2, 0)
    named = {f"net.fc{name}": value for name, value in network.state_dict().items()}
    torch.save(named, tmp_path / "a")
    learned = save_filter(tmp_path / "own", read_state_dict(tmp_path / "a"), FACTS)
    confidence_KNB = torch.rand(1, 2, 16)
    assert torch.equal(learned(confidence_KNB), network(confidence_KNB))
    assert learned.metadata == FACTS
    for content, words in (
        (Planted(tmp_path / "ran"), r"tensors alone \(UnpicklingError.*; save"),
        (b"h\5.", "tensors alone"),
        ({"embedding": torch.ones(2)}, "holds embedding"),
        ({}, "stack of linear layers"),
        ({1: torch.ones(2)}, "tensors alone"),
        ({"state_dict": 5}, "tensors alone"),
        ({"a.weight": [1.0], "a.bias": [1.0]}, "no floating-point tensors"),
        ({"a.weight": torch.ones(2), "a.bias": torch.ones(2)}, "not linear"),
        ({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(3)}, "not linear"),
    ):
        torch.save(content, tmp_path / "b")
        if isinstance(content, bytes):
            (tmp_path / "b").write_bytes(content)
        with pytest.raises(DllmBenchError, match=words):
            read_state_dict(tmp_path / "b")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    plain = describe(stored_filter(tmp_path))
    before = instantiate(plain, "filter")(torch.ones(1, 1, 32))
    changed = stored_filter(tmp_path, seed=1)
    assert not torch.equal(changed(torch.ones(1, 1, 32)), before)
    with pytest.raises(DllmBenchError, match="sha256"):
        instantiate(plain, "filter")


def test_a_file_without_metadata_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file, stored = tmp_path / "own.safetensors", dict(network_of(16, 2, 0).state_dict())
    save_file(stored, file)
    learned = LearnedFilter(str(file))
    assert (learned.block, learned.metadata) == (16, FilterMetadata())
    learned.check_model("any", "w")
    for header in ("{", "[]", '{"activation": ["relu"]}', '{"gen_length": NaN}'):
        save_file(stored, file, {"filter": header})
        with pytest.raises(DllmBenchError, match="is no safetensors file of a filter"):
            LearnedFilter(str(file)).block  # noqa: B018
    file.write_bytes(b"pickle")
    with pytest.raises(DllmBenchError, match="is no safetensors file"):
        LearnedFilter(str(file)).block  # noqa: B018


def test_another_model_is_refused_unless_allowed(tmp_path: Path) -> None:
    learned = stored_filter(tmp_path)
    learned.check_model("tiny", "w" * 64)
    with pytest.raises(DllmBenchError, match=r"trained for the weights of tiny.*train filter big"):
        learned.check_model("big", "x" * 64)
    allowed = LearnedFilter(str(tmp_path), any_model=True)
    allowed.check_model("big", "x" * 64)
    assert allowed == learned


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_filters_fit_their_models_and_name_their_commands(name: str) -> None:
    """The command on a card is read as `train filter` reads it today."""
    learned = LearnedFilter(f"assets/filters/{name}")
    assert f"block{learned.block}" in name and name.startswith(learned.metadata.model)
    model = compose([f"model={learned.metadata.model}"])["model"]
    learned.check_model(learned.metadata.model, weights_hash(model))
    card = (assets_dir() / "filters" / name / "CARD.md").read_text()
    assert f"{learned.parameters:,} parameters" in card
    assert learned(torch.rand(1, 1, learned.block)).isfinite().all()
    asked = parse(re.findall(r"`dllm-bench (train filter [^`]+)`", card)[0].split())
    job = FilterJob(**given_fields(asked, FilterJob))
    prompts, tasks, tokens = re.findall(
        r"(\d+) prompts \(train splits of ([^)]+), in turn\), (\d+) new", card
    )[0]
    assert (job.prompts, job.gen_length) == (int(prompts), int(tokens))
    assert list(job.benchmarks) == re.split(", | and ", tasks)
    assert name in (job.name(asked.model), f"{job.name(asked.model)}-seed{job.seed}")
