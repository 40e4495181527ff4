"""Filter files: what is read and what raises an error; content, not path, is identity."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.filters import FilterMetadata, LearnedFilter, convert_filter, save_filter
from dllm_bench.paths import assets_dir
from dllm_bench.registry import describe, instantiate
from dllm_bench.training.filters import network_of

FACTS = FilterMetadata(labels="masked", gen_length=64, model="tiny", weights="w" * 64)
SHIPPED = sorted(path.name for path in (assets_dir() / "filters").iterdir())


def stored(folder: Path, layers: int = 2, block: int = 32, seed: int = 0) -> LearnedFilter:
    return save_filter(folder, network_of(block, layers, seed).state_dict(), FACTS)


@pytest.mark.parametrize(("layers", "parameters"), [(1, 1056), (2, 2112), (4, 4224)])
def test_sizes_are_the_papers(tmp_path: Path, layers: int, parameters: int) -> None:
    learned = stored(tmp_path, layers)
    assert (learned.block, learned.parameters, learned.metadata) == (32, parameters, FACTS)


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
    found = stored(tmp_path)(torch.rand(1, 2, 32, device=device))
    assert (found.device.type, found.shape) == (device, (1, 2, 32))


class Planted:
    """Writes a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_weights_that_torch_saved_are_converted_and_nothing_in_them_is_run(tmp_path: Path) -> None:
    network = network_of(16, 2, 0)
    torch.save(
        {f"net.fc{name}": value for name, value in network.state_dict().items()}, tmp_path / "a"
    )
    learned = convert_filter(tmp_path / "a", tmp_path / "own", FACTS)
    confidence_KNB = torch.rand(1, 2, 16)
    assert torch.equal(learned(confidence_KNB), network(confidence_KNB))
    assert learned.metadata == FACTS
    for content, words in (
        (Planted(tmp_path / "ran"), "tensors alone"),
        ({"embedding": torch.ones(2)}, "holds embedding"),
        ({}, "stack of linear layers"),
    ):
        torch.save(content, tmp_path / "b")
        with pytest.raises(DllmBenchError, match=words):
            convert_filter(tmp_path / "b", tmp_path / "other", FACTS)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "other").exists()


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    plain = describe(stored(tmp_path))
    before = instantiate(plain, "filter")(torch.ones(1, 1, 32))
    changed = stored(tmp_path, seed=1)
    assert not torch.equal(changed(torch.ones(1, 1, 32)), before)
    with pytest.raises(DllmBenchError, match="sha256"):
        instantiate(plain, "filter")


def test_a_file_without_metadata_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(network_of(16, 2, 0).state_dict()), tmp_path / "own.safetensors")
    learned = LearnedFilter(str(tmp_path / "own.safetensors"))
    assert (learned.block, learned.metadata) == (16, FilterMetadata())
    learned.check_model("any", "w")


WRONG: dict[str, dict[str, Tensor]] = {
    "0.weight, 1.weight": {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 4)},
    "read": {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)},
    "nothing": {},
    "no safetensors file": {},
}


@pytest.mark.parametrize("word", WRONG)
def test_other_files_are_refused(tmp_path: Path, word: str) -> None:
    learned = save_filter(tmp_path, WRONG[word], FilterMetadata())
    if word == "no safetensors file":
        (tmp_path / "filter.safetensors").write_bytes(b"pickle")
        learned = LearnedFilter(str(tmp_path))
    with pytest.raises(DllmBenchError, match=word):
        learned.block  # noqa: B018


def test_a_missing_filter_lists_the_shipped_ones() -> None:
    with pytest.raises(DllmBenchError, match=r"assets/filters/tiny-llada-block32.*train filter"):
        LearnedFilter("assets/filters/nope")


def test_another_model_is_refused_unless_allowed(tmp_path: Path) -> None:
    learned = stored(tmp_path)
    learned.check_model("tiny", "w" * 64)
    with pytest.raises(DllmBenchError, match=r"trained for the weights of tiny.*train filter big"):
        learned.check_model("big", "x" * 64)
    allowed = LearnedFilter(str(tmp_path), any_model=True)
    allowed.check_model("big", "x" * 64)
    assert allowed == learned


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_filters_fit_the_models_that_ship(name: str) -> None:
    from dllm_bench.api.compose import compose
    from dllm_bench.store.inputs import weights_hash

    learned = LearnedFilter(f"assets/filters/{name}")
    assert f"block{learned.block}" in name and name.startswith(learned.metadata.model)
    model = compose([f"model={learned.metadata.model}"])["model"]
    learned.check_model(learned.metadata.model, weights_hash(model))
    card = (assets_dir() / "filters" / name / "CARD.md").read_text()
    assert f"{learned.parameters:,} parameters" in card
    assert learned(torch.rand(1, 1, learned.block)).isfinite().all()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_command_on_a_shipped_card_asks_for_the_data_it_describes(name: str) -> None:
    """Its settings are read as `dllm-bench train filter` reads them today."""
    from dllm_bench.cli.main import parse
    from dllm_bench.cli.train import given_fields
    from dllm_bench.training.filters import FilterJob

    card = (assets_dir() / "filters" / name / "CARD.md").read_text()
    asked = parse(re.findall(r"`dllm-bench (train filter [^`]+)`", card)[0].split())
    job = FilterJob(**given_fields(asked, FilterJob))
    prompts, tasks, tokens = re.findall(
        r"(\d+) prompts \(train splits of ([^)]+), in turn\), (\d+) new", card
    )[0]
    assert (job.prompts, job.gen_length) == (int(prompts), int(tokens))
    assert list(job.benchmarks) == re.split(", | and ", tasks)
    assert name in (job.name(asked.model), f"{job.name(asked.model)}-seed{job.seed}")
