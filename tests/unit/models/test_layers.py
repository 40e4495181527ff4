"""Every way to run the layers gives what transformers' layers give, in every kind of forward."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.batching import RunForward, forward
from dllm_bench.methods.remasking import leave_one_out
from dllm_bench.models import attention
from dllm_bench.models.acceleration import CompiledDenoiser, FixedShapeDenoiser
from dllm_bench.models.attention import attend_windows
from dllm_bench.models.layers import PlainLayer, module_layers, own_layers
from dllm_bench.models.load import load_model
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.models.wrapped import BorrowedDenoiser
from tests.helpers import IDS, LAYERS, VOCAB, tiny_checkpoint, tiny_denoiser
from tests.unit.models.common import spec
from tests.unit.models.test_loading import write_adapter

PLAIN = ("llada", "dream", "fast_dllm_v2", "sdar", "qwen2", "qwen3", "llama")
OTHERS = ("llada_moe", "llada2")
KINDS = {"fixed": FixedShapeDenoiser, "compiled": CompiledDenoiser}
CASES = [(way, layout) for way in ("apart", "joined", *KINDS) for layout in PLAIN]
LENGTHS = (60, 300)  # of the canvases; the second one needs a longer store
SEEDS, FORWARDS, TAPS = 4, 6, (-1, 0, 1)
FORMS = (("full", 0, 0), ("full", 0, 0), ("block_causal", 1, 0), ("block_causal", 4, 3))
EXTRAS = ("", "", "visible", "alone", "added", "sets")


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches behind a prefix are worth two attentions; torch.compile hands the function back."""
    monkeypatch.setattr(attention, "WORTH_MASKED", 0)
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)


def drawn(draw: random.Random, length: int, held: int, shifted: bool, way: str) -> Any:
    """Return tokens (K, L) of a canvas of which `held` positions are cached, a plan, and the branch
    that is kept."""
    start = min(draw.choice((held, held, 0, draw.randint(0, held))), length - 9)
    stop = min(length, start + draw.choice((6, 9, 32, 40, length)))
    branches, feed, first = draw.choice((1, 1, 2, 3, 5)), (start, stop), min(held, start + 2)
    rows, store = (start + 1, stop), (max(first, start), draw.randint(max(first, start), stop))
    kind = draw.choice((ForwardKind.DENOISE, ForwardKind.DENOISE, ForwardKind.PREFILL))
    form: Any = draw.choice(FORMS)
    taps = () if way == "compiled" else TAPS
    plan = ForwardPlan(kind, feed, rows, store, *form, feature_layers=taps)
    extra, full = draw.choice(EXTRAS), form[0] == "full"
    if extra == "visible":
        ends = [draw.randint(start + 2, stop) for _ in range(branches)]
        store = (store[0], max(store[0], min(store[1], *ends, stop)))
        plan = replace(plan, visible_K=torch.tensor(ends), store=store)
    elif extra == "alone":
        plan = replace(plan, alone=draw.randint(start, stop))
    elif extra == "added" and full and not shifted:
        added = leave_one_out((start + 1, start + 4), feed, 0, torch.device("cpu"))
        plan, branches = replace(plan, rows=feed, added=added), 1
    elif extra == "sets" and full and held > 9 and way not in KINDS:
        places = draw.sample(range(held), 9)
        fed, read = (torch.tensor(sorted(some)) for some in (places[:5], places[5:]))
        sets = PositionSets(fed, read, fed)
        plan = replace(plan, sets=sets, feed=(0, length), rows=(2, length), store=(0, held))
        branches = 1
    generator = torch.Generator().manual_seed(draw.randint(0, 99))
    tokens_KL = torch.randint(0, VOCAB - len(IDS), (branches, length), generator=generator)
    return tokens_KL, plan, torch.tensor(draw.randrange(branches))


def outcome(kv: Any, plan: ForwardPlan, winner: Tensor, logits_KRV: Tensor) -> list[Tensor]:
    """Return logits and outputs of layers, up to the visible ends, and the K/V that are kept."""
    pairs = [(plan.rows[0], logits_KRV)]
    if plan.feature_layers:
        pairs.append((plan.feed[0], kv.features.view(len(logits_KRV), plan.fed, -1)))
    found = [values_KXE for _, values_KXE in pairs]
    if plan.visible_K is not None:
        ends = plan.visible_K.tolist()
        found = [
            one[: max(0, end - at)]
            for at, all_ in pairs
            for one, end in zip(all_, ends, strict=True)
        ]
    kv.keep(plan, winner)
    return found + [part[:, :, : kv.length].clone() for part in kv._buffers()]


@pytest.mark.filterwarnings("ignore:hardware.compile=max")
@pytest.mark.parametrize(("way", "layout"), [*CASES, ("compiled", "llada2")])
def test_random_plans_give_what_the_layers_of_transformers_give(way: str, layout: str) -> None:
    """Two requests take turns or form a batch."""
    law = tiny_denoiser(layout, seed=4)
    model: Any = KINDS.get(way, TransformerDenoiser)(law.module, law.special, law.shifted)
    if way not in KINDS:
        model.layers = own_layers(law.module, joined=way == "joined")
    assert isinstance(model.layers[0], PlainLayer) == (way != "compiled")
    law.layers = module_layers(law.module)
    for seed in range(SEEDS):
        draw = random.Random(f"{way} {layout} {seed}")
        caches = [[one.new_cache(length) for length in LENGTHS] for one in (law, model)]
        for _ in range(FORWARDS):
            steps = [
                (i, *drawn(draw, LENGTHS[i], caches[0][i].length, law.shifted, way))
                for i in draw.sample(range(2), draw.choice((1, 2)))
            ]
            results = []
            for one, kvs in zip((law, model), caches, strict=True):
                together = one is model and way not in KINDS and seed % 2
                found = list[Tensor]()
                for batch in [steps] if together else [[step] for step in steps]:
                    runs = [RunForward(tokens_KL, plan, kvs[i]) for i, tokens_KL, plan, _ in batch]
                    logits = forward(one, runs)
                    for (i, _, plan, winner), logits_KRV in zip(batch, logits, strict=True):
                        found += outcome(kvs[i], plan, winner, logits_KRV)
                results.append(found)
            for found, wanted in zip(*results, strict=True):
                scale = float(wanted.abs().max().clamp_min(1)) if wanted.numel() else 1
                torch.testing.assert_close(found, wanted, atol=1e-5 * scale, rtol=1e-5)
    assert way != "fixed" or len(model.shapes_met) > 1


LENGTH, PREFIX = 27, 11
TOKENS = torch.arange(3 * LENGTH).view(3, LENGTH)
WHOLE = ForwardPlan(ForwardKind.PREFILL, (0, LENGTH), (1, LENGTH), (0, PREFIX))
WINDOW = ForwardPlan(ForwardKind.DENOISE, (PREFIX, LENGTH), (PREFIX + 1, LENGTH), (0, 0))


def cached(model: TransformerDenoiser, tokens_KL: Tensor) -> Any:
    """Return a cache that holds the first positions of the first branch."""
    kv = model.new_cache(LENGTH)
    model.forward(tokens_KL[:1], WHOLE, kv)
    kv.keep(WHOLE, torch.tensor(0))
    return kv


def test_branches_behind_one_prefix_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of a batch with equal windows, which attends to all windows at once."""
    watched = Mock(wraps=attend_windows)
    monkeypatch.setattr(attention, "attend_windows", watched)
    model, tokens = tiny_denoiser("llada", seed=4), (TOKENS, TOKENS.flip(1)[:2])
    alone = [model.forward(one, WINDOW, cached(model, one)) for one in tokens]
    assert watched.call_count == 2 * LAYERS
    together = model.forward_batch(tokens, [WINDOW] * 2, [cached(model, one) for one in tokens])
    assert watched.call_count == 3 * LAYERS
    torch.testing.assert_close(together, alone, atol=5e-5, rtol=1e-5)
    for masked in (
        replace(WINDOW, visible_K=torch.tensor([LENGTH, 16, 20])),
        replace(WINDOW, attention="block_causal", block=4, origin=3),
        replace(WINDOW, feed=(4, 9), rows=(5, 9)),
    ):
        model.forward(TOKENS, masked, cached(model, TOKENS))
    assert watched.call_count == 3 * LAYERS


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
    found = []
    for side in (layers, module_layers(model.module)):
        model.layers = side
        found.append(model.forward(TOKENS, WINDOW, cached(model, TOKENS)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)


FALLBACKS: dict[str, dict[str, Any]] = {  # settings of a model; "layout" of its checkpoint
    **{layout: {"layout": layout} for layout in OTHERS},
    "eager": {"attention": "eager"},
    "compiled": {"compile": "default"},
    "an adapter apart": {"merge_lora": False},
    "quantised": {"quantization": "w8a8"},
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_other_layers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    if name == "quantised":
        pytest.importorskip("torchao")
    settings = {"layout": "dream", **FALLBACKS[name]}
    folder = tiny_checkpoint(settings.pop("layout"), tmp_path / "base", 4)
    if "merge_lora" in settings:
        key = "model.layers.1.self_attn.o_proj.weight"
        pair = torch.randn(2, 32), torch.randn(32, 2)
        settings["lora"] = str(write_adapter(tmp_path / "adapter", key, pair))
    denoiser: Any = load_model(spec(folder, **settings)).denoiser
    assert not any(isinstance(layer, PlainLayer) for layer in denoiser.layers)


def test_the_layers_of_an_object_are_its_own() -> None:
    law = tiny_denoiser("dream", seed=4)
    model = BorrowedDenoiser(law.module, law.special, law.shifted)
    assert not any(isinstance(layer, PlainLayer) for layer in model.layers)
