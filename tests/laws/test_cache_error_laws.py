"""Laws of the measured error of a cache: exact caches have none, and measuring changes no token."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.core.contracts import Round
from dllm_bench.core.decoder import Condition
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.launch.local import run
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.fast_dllm import VicinityCache
from dllm_bench.methods.position_caches import DKVCache
from dllm_bench.methods.row_caches import DLLMCache
from dllm_bench.metrics.sample_stats import NO_TIME
from dllm_bench.paths import assets_dir
from dllm_bench.runs.progress import summary
from dllm_bench.runs.sessions import MeasuredDenoiser, check_measured, kl
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples
from tests.helpers import load_denoiser, tiny_denoiser
from tests.pieces import decoders
from tests.tiers import covering

BLOCK, NEW = 8, 24
REQUEST = Request("error", tuple(range(3, 14)), NEW)
BASE = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(BLOCK), NoCache())
EXACT = 1e-6  # nats
EVERY = [cache(every=1) for cache in (PrefixCache, DualCache, VicinityCache, DKVCache)]
CACHED = {
    name: one
    for name, one in decoders().items()
    if Condition.NO_CACHE not in one.cache.gives
    and one.summary().attention == "full"
    and not one.smoothing
}


def measured(decoder: MaskedDecoder, model: Any, request: Request = REQUEST) -> MeasuredDenoiser:
    """Return the measurement of one request, whose tokens are those without it."""
    found = MeasuredDenoiser(model)
    own, plain = decoder.generate(cast("Any", found), request), decoder.generate(model, request)
    assert text(own) == text(plain)
    assert found.rows > 0
    return found


def text(generation: Generation) -> tuple[object, ...]:
    return generation.ids, generation.born, len(generation.trace)


@pytest.mark.parametrize(
    "cache", [NoCache(), *EVERY, DLLMCache(prompt_every=1, every=1)], ids=lambda c: type(c).__name__
)
def test_no_cache_and_one_renewed_at_every_forward_have_no_error(model, cache) -> None:
    found = measured(replace(BASE, cache=cache), model)
    assert found.nats / found.rows < EXACT


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache(), BlockCache("full")], ids=str)
def test_caches_that_are_not_renewed_have_an_error_with_full_attention(model, cache) -> None:
    found = measured(replace(BASE, cache=cache), model)
    assert found.nats / found.rows > 1e-4


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada2"])
def test_the_block_cache_of_a_block_causal_model_has_no_error(name: str) -> None:
    embedded = load_denoiser(assets_dir() / name)
    decoder = replace(
        BASE, cache=BlockCache(), schedule=Blocks(4, absolute=True, sees_future=False)
    )
    found = measured(decoder, embedded, replace(REQUEST, prompt_ids=tuple(range(30, 41))))
    assert found.nats / found.rows < EXACT


def test_the_branches_of_a_lookahead_are_measured_each(model) -> None:
    found = measured(replace(BASE, cache=BlockCache(), explore=Lookahead(3)), model)
    assert found.rows > measured(replace(BASE, cache=BlockCache()), model).rows
    assert found.nats / found.rows < EXACT


@pytest.mark.parametrize("name", covering(2, sorted(CACHED)))
def test_what_is_compared_is_the_forward_of_no_cache(name: str) -> None:
    """Of every decoder with a cache and full attention: what is fed, seen and read."""
    decoder, wanted, made = CACHED[name], list[ForwardPlan](), list[ForwardPlan]()
    kind = type(decoder.cache)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def plan(self, round: Round) -> ForwardPlan:
            wanted.append(NoCache().plan(round))
            return cast("ForwardPlan", super().plan(round))

    cache = Watched(**{part.name: getattr(decoder.cache, part.name) for part in fields(kind)})
    model = tiny_denoiser("llada", seed=1)
    forward = model.forward
    model.forward = lambda *asked: made.append(asked[1]) or forward(*asked)
    replace(decoder, cache=cache).generate(cast("Any", MeasuredDenoiser(model)), REQUEST)
    made = made[1::2]  # every second forward is the uncached one
    assert [view(plan) for plan in made] == [view(plan) for plan in wanted]
    assert not any(plan.stores or plan.sets or plan.probe or plan.recompute for plan in made)


def view(plan: ForwardPlan) -> tuple[object, ...]:
    return plan.feed, plan.rows[0], plan.attention


def test_the_divergence_is_the_written_out_sum() -> None:
    exact_MV, cached_MV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    p_MV, q_MV = exact_MV.double().softmax(-1), cached_MV.double().softmax(-1)
    torch.testing.assert_close(
        kl(exact_MV, cached_MV).double(), (p_MV * (p_MV / q_MV).log()).sum(-1), atol=1e-6, rtol=0
    )
    impossible = torch.full((5, 1), -torch.inf)
    both = kl(torch.cat([exact_MV, impossible], 1), torch.cat([cached_MV, impossible], 1))
    torch.testing.assert_close(both, kl(exact_MV, cached_MV))


def spec(*overrides: str) -> RunSpec:
    settings = ["model=tiny-llada", "benchmark=minigsm", "decoder=fast_dllm", "limit=2"]
    return RunSpec.from_config(compose([*settings, "decoder/cache=dual", *overrides]))


def samples_of(store: Store, run_spec: RunSpec) -> tuple[RunRecord, list[tuple[object, ...]]]:
    record = run(run_spec, store=store)
    lines = read_samples(store.path(run_spec)).values()
    return record, [(one.ids, one.born, one.text) for one in lines]


def test_a_measured_run_has_the_samples_of_the_run_and_no_times(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plain, texts = samples_of(store, spec())
    record, measured_texts = samples_of(store, spec("measure_kl=true"))
    assert measured_texts == texts
    assert record.columns["forwards"] == plain.columns["forwards"]
    assert record.columns["seconds"] == [None, None]
    assert "kl_rows" not in plain.columns
    assert plain.summary["quality/kl_to_uncached"] is None
    mean = sum(record.columns["kl_nats"]) / sum(record.columns["kl_rows"])
    assert record.summary["quality/kl_to_uncached"] == pytest.approx(mean)
    assert 0 < mean < 1
    assert f"left empty: {NO_TIME}" in summary(record)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["batch=2"], "batch=2"),
        (["hardware=cpu-bp2"], "in one process"),
        (["decoder@baseline=vanilla"], "leave out decoder@baseline"),
        (["decoder=dinfer", "decoder.smoothing=0.3"], "decoder.smoothing=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(DllmBenchError, match=sentence):
        check_measured(spec("measure_kl=true", *overrides))
