"""Laws of texts that a parent reads: they stay the run's; greedy decoding agrees with itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.items import request_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Option
from dllm_bench.launch.local import run
from dllm_bench.methods.likelihood import LikelihoodDecoder
from dllm_bench.models.load import load_model
from dllm_bench.runs.runner import Parent, emitted_ids
from dllm_bench.store.inputs import model_spec
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples

PARENT = "model@parent=tiny-qwen3"


def spec(*overrides: str) -> RunSpec:
    settings = ["model=tiny-qwen3", "decoder=ar", "benchmark=open_text", "limit=3", "hardware=cpu"]
    return RunSpec.from_config(compose([*settings, *overrides]))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_parent_s_own_greedy_text_agrees_and_has_its_likelihood(batch, tmp_path) -> None:
    store, read = Store(tmp_path), spec(PARENT, f"batch={batch}")
    record = run(read, store=store)
    assert record.summary["quality/agreement"] == 1.0
    model = load_model(model_spec(read.parent))
    decoder, nats, tokens, trigrams = LikelihoodDecoder(block=1, exact=True), 0.0, 0, []
    for sample in read_samples(store.path(read)).values():
        ids = emitted_ids(sample.ids, sample.born, sample.cut, model.special.mask)
        turns = json.loads(sample.prompt) if read.model.chat else sample.prompt
        option = Option(tuple(model.encode(turns)), tuple(ids))
        (found,) = decoder.generate(model.denoiser, request_of("text", [option])).likelihoods
        nats, tokens = nats - found.nats, tokens + len(ids)
        trigrams.append([tuple(ids[i : i + 3]) for i in range(len(ids) - 2)])
    assert record.summary["quality/nll_under_parent"] == pytest.approx(nats / tokens, abs=1e-5)
    distinct = sum(len(set(each)) for each in trigrams) / sum(map(len, trigrams))
    assert record.summary["quality/distinct_3"] == pytest.approx(distinct)
    assert sum(record.columns["emitted"]) == tokens


def test_a_run_that_is_read_is_another_run_with_the_same_texts(tmp_path: Path) -> None:
    store, plain, read = Store(tmp_path), spec(), spec(PARENT)
    assert plain.identity_hash != read.identity_hash and "parent" not in plain.identity()
    texts = []
    for one in (plain, read):
        record = run(one, store=store)
        texts.append([sample.text for sample in read_samples(store.path(one)).values()])
        assert (record.summary["quality/agreement"] is None) == (one is plain)
    assert texts[0] == texts[1]


def test_a_parent_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match="choose an autoregressive model"):
        run(spec("model@parent=tiny-llada"), store=Store(tmp_path))
    model: Any = SimpleNamespace(encode=lambda text: [len(text)])
    with pytest.raises(DllmBenchError, match="another tokenizer"):
        Parent(load_model(model_spec(spec(PARENT).parent)), "tiny-qwen3").check(model)
