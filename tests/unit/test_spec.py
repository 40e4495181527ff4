"""A run's identity: every key is classed, equal content is one hash, other content another; and the
device that it names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.rounds import Clock
from dllm_bench.methods.learn2pd import Filter
from dllm_bench.models.filters import FilterMetadata, LearnedFilter, filter_file
from dllm_bench.paths import read_yaml
from dllm_bench.registry import TARGET, describe, instantiate
from dllm_bench.store import inputs
from dllm_bench.store.groups import Hardware, Role, role_of
from dllm_bench.store.spec import RunSpec, digest, leaves, slug
from dllm_bench.training.filters import save_filter

PLAIN = read_yaml(Path(__file__).with_name("spec.yaml"))
DECODER, CONFIG, LEARN2PD = (PLAIN[name] for name in ("decoder", "config", "learn2pd"))
SOME_OTHER: dict[type, Any] = {bool: True, str: "other", int: 7, float: 0.123, type(None): "other"}


def resolve(config: dict[str, Any]) -> dict[str, Any]:
    """Pieces spelled out, inputs of a fixed hash."""
    made = {}
    for role in (role for role in inputs.DECODERS if config.get(role)):
        decoder = {k: v for k, v in config[role].items() if k != "name"}
        label = {"name": config[role]["name"]} if "name" in config[role] else {}
        made[role] = {**describe(instantiate(decoder, "decoder")), **label}
    return {**config, **made, "inputs": {"dataset": "d" * 64, "weights": "w" * 64}}


def spec(**changes: Any) -> RunSpec:
    """Return the fixture's run with dotted keys changed (dots written as two underscores)."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *parents, name = key.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[name] = value
    return RunSpec.from_config(config, resolve)


@pytest.mark.parametrize("key", [k for k, _ in leaves(CONFIG) if not k.endswith(TARGET)])
def test_identity_keys_change_the_hash_and_runtime_keys_do_not(key: str) -> None:
    value = dict(leaves(CONFIG))[key]
    other = not value if isinstance(value, bool) else SOME_OTHER[type(value)]
    changed = spec(**{key.replace(".", "__"): other})
    assert (changed.identity_hash != spec().identity_hash) == (role_of(key) is Role.IDENTITY)


def test_a_filter_is_its_content_wherever_it_lies(tmp_path: Path) -> None:
    """Its place and the leave to use it are no part of a run's identity, its weights are."""
    shipped = LearnedFilter("assets/filters/tiny-llada-block32")
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes(filter_file("assets/filters/tiny-llada-block32").read_bytes())
    bent = {"0.weight": torch.zeros(32, 32), "0.bias": torch.zeros(32)}
    other = save_filter(tmp_path / "other", bent, FilterMetadata())
    heads = (shipped, LearnedFilter(str(copied), any_model=True), other)
    decoders = [LEARN2PD | {"select": describe(Filter(head))} for head in heads]
    runs = [RunSpec.from_config({**CONFIG, "decoder": one}, resolve) for one in decoders]
    assert runs[0] == RunSpec.from_config({**CONFIG, "decoder": LEARN2PD}, resolve)
    assert runs[0].identity_hash == runs[1].identity_hash != runs[2].identity_hash
    assert shipped.sha256 in str(runs[0].identity()) and "assets" not in str(runs[0].identity())
    others = [role_of(f"decoder.{key}") for key in ("source", "select.sources")]
    assert others == [Role.IDENTITY] * 2, "which name no file"


def test_a_filter_of_another_model_is_refused_at_any_depth_of_the_decoder() -> None:
    oracle = {TARGET: "dllm_bench.methods.learn2pd.Oracle", "reference": LEARN2PD}
    weights = inputs.weights_hash({"name": "tiny-llada", "path": "assets/tiny-llada"})
    for decoder in (LEARN2PD, {**LEARN2PD, "select": oracle}):
        made = instantiate(decoder, "decoder")
        inputs.check_filters(made, "tiny-llada", weights)
        with pytest.raises(DllmBenchError, match="the weights of tiny-llada.*other-model"):
            inputs.check_filters(made, "other-model", "x" * 64)


SELECT, DRAFT = "decoder.select.first", "decoder.draft.drafter"
PROFILE = "decoder.length.profile"
DRAFTERS = "assets/drafters/tiny-qwen3"


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        (["model.path=assets/nope"], True),
        (["benchmark=gsm8k", "paths.data=nope"], True),
        (["decoder=learn2pd", f"{SELECT}.head.source=nope"], True),
        (["decoder=dspark", "model=tiny-qwen3", f"{DRAFT}.source=owner/nope"], True),
        (["decoder=dspark", "decoder/length=hardware_aware", f"{PROFILE}.source=nope"], True),
        (["decoder=dflash", "model=tiny-qwen3", f"{DRAFT}.source={DRAFTERS}-eagle3"], False),
        (["decoder=eagle3", "model=tiny-qwen3", f"{DRAFT}.source=assets/tiny-qwen3"], False),
        (["decoder=learn2pd", "model=tiny-dream-instruct"], False),
        (["decoder=learn2pd", "decoder.schedule.block=16"], False),
        (["decoder=fast_dllm", "decoder/cache=causal"], False),
        (["decoder=fast_dllm", "+colour=1"], False),
    ],
)
def test_what_is_not_here_is_told_from_what_does_not_fit(overrides, absent) -> None:
    with pytest.raises(DllmBenchError) as refused:
        RunSpec.from_config(compose(["benchmark=minigsm", "hardware=cpu", *overrides]))
    assert isinstance(refused.value, inputs.MissingInputError) == absent


BASELINE: dict[str, Any] = {**DECODER, "name": "plain"}
CACHED = {**BASELINE, "cache": {TARGET: "dllm_bench.methods.caches.PrefixCache"}}
BACKWARDS = RunSpec.from_config(dict(reversed(list(CONFIG.items()))), resolve)
SAME = [
    (spec(), BACKWARDS),
    (spec(decoder__forbid_mask=True, decoder__schedule__sees_future=True), spec()),  # defaults
    (spec(decoder__select__tau=1), spec(decoder__select__tau=1.0)),
    (spec(decoder__name="my-label"), spec()),
    (spec(baseline=None), spec()),
    (spec(baseline={**BASELINE, "name": "another"}), spec(baseline=BASELINE)),
    (spec(measure_kl=False), spec()),
    (spec(limit=10), spec(limit=None)),
]
OTHERS = [
    spec(),
    spec(seed=1),
    spec(measure_kl=True),
    spec(baseline=BASELINE),
    spec(baseline=CACHED),
    spec(decoder__score={TARGET: "dllm_bench.methods.common.NegEntropy"}),
    RunSpec.from_config(CONFIG, lambda _: {**resolve(CONFIG), "inputs": {"dataset": "x" * 64}}),
    RunSpec.from_plain({**spec().to_plain(), "decoding_version": spec().decoding_version + 1}),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_content_is_one_run_however_it_is_written(one: RunSpec, other: RunSpec) -> None:
    assert one.identity_hash == other.identity_hash and one.identity() == other.identity()
    assert one == other


def test_other_content_is_another_run_and_survives_json() -> None:
    assert len({one.identity_hash for one in OTHERS}) == len(OTHERS)
    for one in (*OTHERS, spec(decoder__name="lopa")):
        again = RunSpec.from_plain(json.loads(json.dumps(one.to_plain())))
        assert again == one and (again.folder, again.label) == (one.folder, one.label)
        assert again.folder.endswith(one.short)
    assert again.label == "lopa" and again.model.path == "assets/tiny-llada"
    assert "results" not in json.dumps(again.to_plain()["hardware"])
    assert instantiate(again.decoder, "decoder") == instantiate(DECODER, "decoder")
    assert len({spec(), spec(decoder__name="b"), spec(seed=1)}) == 2


def test_the_hash_is_that_of_sorted_json_without_absent_values() -> None:
    pinned = "6b8085af"  # sha256sum of {"a":{"x":"é","y":true},"b":[1,0.9,null]}
    plain = {"b": [1.0, 0.9, None], "a": {"y": True, "x": "é"}, "gone": None}
    assert digest(plain)[:8] == pinned


def test_the_folder_names_benchmark_model_decoder_and_hash() -> None:
    run = spec(decoder__name="lopa k=3", model__name="GSAI-ML/LLaDA-8B")
    assert run.folder == f"minigsm/GSAI-ML-LLaDA-8B/lopa-k-3-{run.identity_hash[:10]}"
    assert spec().folder.split("/")[2].startswith("masked-")
    assert slug("../..") == "unnamed"


UNREAD = "nothing in a run reads it"
PROFILED = {
    TARGET: "dllm_bench.methods.drafting.read_step_profile",
    "source": "assets/profiles/tiny-qwen3-cpu.json",
}
WITHOUT_BENCHMARK = {key: value for key, value in CONFIG.items() if key != "benchmark"}
MASKED = "dllm_bench.decoding.masked"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: spec(decoder___target_="os.system"), "not registered"),
        (lambda: spec(decoder___target_=f"{MASKED}.Absent"), "has no 'Absent'"),
        (lambda: spec(decoder___target_=f"{MASKED}.EndTokens"), "not registered"),
        (lambda: spec(decoder___target_="dllm_bench.store.files.write_atomic"), "in no module"),
        (lambda: spec(decoder__cooler=1), "cooler"),
        (lambda: spec(decoder={TARGET: DECODER[TARGET]}), "score"),
        (lambda: spec(model__colour=1), UNREAD),
        (lambda: spec(hardware__cores=1), UNREAD),
        (lambda: spec(temperature=1), UNREAD),
        (lambda: spec(model__name="x" * 201), "more than 200 characters"),
        (lambda: role_of("model.source"), UNREAD),  # a pattern matches whole keys
        (lambda: role_of("xdecoder.select"), UNREAD),
        (lambda: role_of("source"), UNREAD),
        (lambda: RunSpec.from_plain({**spec().to_plain(), "tempo": 1}), "newer version"),
        (lambda: RunSpec.from_config(WITHOUT_BENCHMARK, resolve), "no benchmark"),
        (lambda: inputs.check_profiles(PROFILED, "qwen3-4b"), "with tiny-qwen3, but .* qwen3-4b"),
    ],
)
def test_what_no_run_can_have_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        call()


def test_auto_hardware_is_named_for_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    auto: dict[str, Any] = {"name": "auto", "device": "auto", "dtype": "auto", "attention": "sdpa"}
    auto |= {"threads": "auto", "match": None}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert inputs.resolve_hardware(auto) == CONFIG["hardware"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=None: "NVIDIA H200 NVL")
    found = inputs.resolve_hardware(auto)
    assert (found["name"], found["device"], found["dtype"]) == ("h200", "cuda", "bfloat16")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=None: "NVIDIA A100-SXM4-80GB")
    assert inputs.resolve_hardware(auto)["name"] == "a100"


def test_the_model_takes_what_it_does_not_say_from_the_hardware() -> None:
    hardware = CONFIG["hardware"]
    model = inputs.resolve_model({"name": "m", "path": "p", "dtype": "auto"}, hardware)
    assert (model["dtype"], model["attention"], model["device"]) == ("float32", "sdpa", "cpu")
    assert inputs.resolve_model({"dtype": "bfloat16"}, hardware)["dtype"] == "bfloat16"


NAMES = ["NVIDIA A100", "NVIDIA H200"]


def test_the_second_device_is_looked_for_waited_for_and_timed(monkeypatch) -> None:
    cuda = mock.Mock(current_stream="stream of {}".format)
    cuda.device_count.return_value, cuda.get_device_name = len(NAMES), lambda i: NAMES[i or 0]
    cuda.Event.return_value.elapsed_time.return_value = 2.0
    monkeypatch.setattr(torch, "cuda", cuda)
    for asked, missing in (
        ({"device": "cuda:1", "match": "H200"}, ""),
        ({"device": "cuda", "match": "H200"}, "a GPU (H200)"),
        ({"device": "cuda:2"}, "a GPU (CUDA:2)"),
    ):
        assert inputs.missing_device(Hardware(asked)) == missing
    inputs.wait_for("cuda:1")
    clock = Clock(torch.device("cuda", 1))
    clock.mark()
    assert clock.spans_ms() == [2.0]
    record = mock.call("stream of cuda:1")
    assert cuda.Event.return_value.record.mock_calls == [record, record]
    assert [str(*waited.args) for waited in cuda.synchronize.mock_calls] == ["cuda:1", "cuda:1"]
