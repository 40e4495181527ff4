"""Own decoder layers compute what transformers' modules compute, in every kind of forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods.remasking import leave_one_out
from dllm_bench.models import attention
from dllm_bench.models.attention import attend_windows
from dllm_bench.models.layers import DecoderLayer, PlainLayer, module_layers, own_layers
from dllm_bench.models.load import load_model
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.models.wrapped import BorrowedDenoiser
from tests.helpers import VOCAB, tiny_checkpoint, tiny_denoiser
from tests.unit.models.common import spec
from tests.unit.models.test_loading import write_adapter

PLAIN = ("llada", "dream", "fast_dllm_v2", "sdar", "qwen2", "qwen3", "llama")
OTHERS = ("llada_moe", "llada2")
LENGTH, PREFIX, BLOCK = 27, 11, 4
TAPS = (-1, 0, 1)
LAST = torch.tensor(1)


@pytest.fixture(autouse=True)
def windows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with longer windows, or on a device."""
    monkeypatch.setattr(attention, "WORTH_MASKED", 0)


def span(feed: tuple[int, int], store: tuple[int, int] = (0, 0)) -> ForwardPlan:
    """Return a forward whose logits are of all that is fed but its first position."""
    return ForwardPlan(ForwardKind.DENOISE, feed, (feed[0] + 1, feed[1]), store)


WHOLE, WINDOW = span((0, LENGTH), (0, PREFIX)), span((PREFIX, LENGTH))
SETS = ([12, 15, 16], [0, 1, 5], [12])
ADDED = leave_one_out((PREFIX + 1, PREFIX + 4), WINDOW.feed, 0, torch.device("cpu"))
FORWARDS: dict[str, tuple[ForwardPlan, int]] = {  # what follows WHOLE, and its number of branches
    "without a cache": (span((0, LENGTH)), 1),
    "branches without a cache": (span((0, LENGTH)), 3),
    "behind a prefix": (WINDOW, 1),
    "branches behind a prefix": (WINDOW, 3),
    "branches, kept": (replace(WINDOW, store=(PREFIX, PREFIX + BLOCK)), 2),
    "within a prefix": (span((4, 9)), 1),
    "branches within a prefix": (span((4, 9)), 2),
    "visible ends": (replace(WINDOW, visible_K=torch.tensor([LENGTH, PREFIX + 5])), 2),
    "added rows": (replace(WINDOW, rows=WINDOW.feed, added=ADDED), 1),
    "block-causal": (replace(WINDOW, attention="block_causal", block=BLOCK, origin=3), 2),
    "sets": (replace(WINDOW, sets=PositionSets(*map(torch.tensor, SETS))), 1),
}


def canvas(vocab: int, branches: int) -> Tensor:
    """Return tokens whose branches differ behind the prefix."""
    generator = torch.Generator().manual_seed(0)
    tokens_KL = torch.randint(0, vocab, (branches, LENGTH), generator=generator)
    tokens_KL[:, :PREFIX] = tokens_KL[:1, :PREFIX]
    return tokens_KL


def outputs(model: TransformerDenoiser, plan: ForwardPlan, branches: int) -> list[Tensor]:
    """Outputs of all layers, logits, and the K/V that are kept."""
    tokens_KL, kv = canvas(model.vocab_size, branches), model.new_cache(LENGTH)
    model.forward(tokens_KL[:1], WHOLE, kv)
    kv.keep(WHOLE, torch.tensor(0))
    plan = replace(plan, feature_layers=TAPS)
    logits_KRV = model.forward(tokens_KL, plan, kv)
    assert kv.features is not None
    features = kv.features
    kv.keep(plan, LAST)
    kept = [part for layer in kv.positions for part in layer.stored]
    return [logits_KRV, features, *(part[:, :, : kv.length] for part in kept if part is not None)]


def of_layers(
    model: TransformerDenoiser, layers: list[DecoderLayer], plan: ForwardPlan, branches: int
) -> list[Tensor]:
    """`outputs` of these layers."""
    model.layers = layers
    return outputs(model, plan, branches)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("name", FORWARDS)
def test_own_layers_equal_those_of_transformers(layout: str, name: str, joined: bool) -> None:
    model, (plan, branches) = tiny_denoiser(layout, seed=4), FORWARDS[name]
    model.attention_form, model.shifted = "full", model.shifted and not plan.added
    expected = of_layers(model, module_layers(model.module), plan, branches)
    layers = own_layers(model.module, joined)
    assert all(isinstance(layer, PlainLayer) for layer in layers)
    for found, wanted in zip(of_layers(model, layers, plan, branches), expected, strict=True):
        scale = float(wanted.abs().max().clamp_min(1))
        torch.testing.assert_close(found, wanted, atol=1e-5 * scale, rtol=1e-5)


LOPA = ("branches behind a prefix", "branches, kept")
BATCHES = {"mixed": ("without a cache", *LOPA, "sets"), "equal windows": LOPA}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", PLAIN)
def test_own_layers_take_a_batch(layout: str, batch: str) -> None:
    model = tiny_denoiser(layout, seed=4)
    model.attention_form = "full"
    cases = [FORWARDS[name] for name in BATCHES[batch]]
    alone = [of_layers(model, module_layers(model.module), *case)[0] for case in cases]
    model.layers, caches = own_layers(model.module), [model.new_cache(LENGTH) for _ in cases]
    for kv in caches:
        model.forward(canvas(VOCAB, 1), WHOLE, kv)
        kv.keep(WHOLE, torch.tensor(0))
    tokens, plans = [canvas(VOCAB, n) for _, n in cases], [plan for plan, _ in cases]
    for found, wanted in zip(model.forward_batch(tokens, plans, caches), alone, strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-5)


WINDOWS = {  # forwards whose attention needs no mask, and some that do
    "branches behind a prefix": True,
    "branches, kept": True,
    "behind a prefix": False,
    "branches within a prefix": False,
    "visible ends": False,
    "added rows": False,
    "block-causal": False,
}


@pytest.mark.parametrize("name", WINDOWS)
def test_branches_behind_one_prefix_need_no_mask(monkeypatch, name) -> None:
    watched = Mock(wraps=attend_windows)
    monkeypatch.setattr(attention, "attend_windows", watched)
    outputs(tiny_denoiser("llada", seed=4), *FORWARDS[name])
    assert watched.called == WINDOWS[name]


@pytest.mark.parametrize("layout", PLAIN)
def test_joined_weights_are_the_modules_own(layout: str) -> None:
    """No copy stays behind, and what changes a weight in place changes both."""
    model = tiny_denoiser(layout, seed=4)
    before = {name: weight.clone() for name, weight in model.module.state_dict().items()}
    layers = own_layers(model.module, joined=True)
    assert all(weight.equal(before[name]) for name, weight in model.module.state_dict().items())
    attention = model.module.model.layers[0].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    attention.k_proj.weight.data.mul_(0.5)
    model.module.model.layers[1].mlp.up_proj.weight.data.mul_(0.5)
    model.attention_form = "full"
    both = (layers, module_layers(model.module))
    own, theirs = (of_layers(model, one, *FORWARDS["branches behind a prefix"])[0] for one in both)
    torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-5)


def borrowed(path: Path) -> TransformerDenoiser:
    model = tiny_denoiser("dream", seed=4)
    return BorrowedDenoiser(model.module, model.special, model.shifted)


def loaded(folder: Path, **changes: object) -> object:
    return load_model(spec(folder, **changes)).denoiser


def with_lora(path: Path) -> object:
    """Return an adapter that is kept apart from the weights."""
    key = "model.layers.1.self_attn.o_proj.weight"
    adapter = write_adapter(path / "adapter", key, (torch.randn(2, 32), torch.randn(32, 2)))
    return loaded(tiny_checkpoint("dream", path / "base", 4), lora=str(adapter), merge_lora=False)


def quantised(path: Path) -> object:
    pytest.importorskip("torchao")
    return loaded(tiny_checkpoint("dream", path, 4), quantization="w8a8")


FALLBACKS: dict[str, Callable[[Path], object]] = {
    **{layout: lambda path, layout=layout: tiny_denoiser(layout, seed=4) for layout in OTHERS},
    "eager": lambda path: tiny_denoiser("dream", seed=4, attention="eager"),
    "borrowed": borrowed,
    "compiled": lambda path: loaded(tiny_checkpoint("dream", path, 4), compile="default"),
    "an adapter apart": with_lora,
    "quantised": quantised,
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_other_layers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model: Any = FALLBACKS[name](tmp_path)
    assert not all(isinstance(layer, PlainLayer) for layer in model.layers)
