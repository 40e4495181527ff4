"""Planted `_target_`s: settings and stored runs name things to call, at every depth.

An audit hook watches for started programs, sockets and files opened below a canary folder.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.registry import TARGET, instantiate
from dllm_bench.runs import rescore
from dllm_bench.runs.runner import run
from dllm_bench.site.texts import TextSource
from dllm_bench.store import cache
from dllm_bench.store.cache import on_this_machine
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import SHOWN, RunSpec
from dllm_bench.store.store import RECORD, SPEC, Store, read_samples
from tests.resume import fakes
from tests.tiers import covering

PLANTS = read_yaml(Path(__file__).with_name("planted_targets.yaml"))
EVENTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
DECODERS, BENCHMARKS = "fast_dllm lopa_dream learn2pd dspark".split(), ("minigsm", "minicode")
_watched: list[tuple[Path, list[str]]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for canary, seen in _watched:
        if event in EVENTS or (event == "open" and str(args[0]).startswith(str(canary))):
            seen.append(f"{event} {args}")


@pytest.fixture(scope="module", autouse=True)
def hooked() -> None:
    sys.addaudithook(_audit)  # stays until the process ends


@contextmanager
def nothing_runs(canary: Path) -> Iterator[None]:
    """Check that nothing is started, called over a network, or opened below `canary` inside."""
    seen: list[str] = []
    modules = set(sys.modules)
    _watched.append((canary, seen))
    try:
        yield
    finally:
        _watched.pop()
    assert seen == []
    assert "dllm_bench.__main__" not in set(sys.modules) - modules
    assert not canary.exists()


def plant(name: str, canary: Path) -> Any:
    return json.loads(json.dumps(PLANTS[name]).replace("{canary}", str(canary)))


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in plain data, at any depth."""
    numbered = enumerate(plain) if isinstance(plain, list) else ()
    for key, value in plain.items() if isinstance(plain, dict) else numbered:
        if key != TARGET:
            yield (*path, key)
            yield from places(value, (*path, key))


def planted(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of plain data with another value at a path."""
    made = copy.deepcopy(plain)
    node = made
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return made


def composed(group: str, name: str) -> dict[str, Any]:
    plain = compose([f"{group}={name}"])[group]
    return {key: value for key, value in plain.items() if (group, key) != ("decoder", "name")}


@pytest.mark.parametrize("name", covering(3, PLANTS))
def test_a_target_planted_in_a_decoder_or_benchmark_is_refused(name: str, tmp_path: Path) -> None:
    canary, one, tried = tmp_path / "canary", plant(name, tmp_path / "canary"), 0
    for kind, choice in (*product(["decoder"], DECODERS), *product(["benchmark"], BENCHMARKS)):
        plain = composed(kind, choice)
        for path in places(plain):
            fits = path[-1] == "head" and name == "a filter from a file"
            for value in ([one],) if fits or path[-1] in ("profile", "drafter") else (one, [one]):
                with nothing_runs(canary), pytest.raises(DllmBenchError):
                    instantiate(planted(plain, path, value), kind)
                tried += 1
    assert tried > 100


def test_an_object_of_another_kind_is_refused_in_every_slot() -> None:
    decoder = composed("decoder", "fast_dllm")
    with pytest.raises(DllmBenchError, match="is a benchmark, and a decoder belongs here"):
        instantiate(composed("benchmark", "minigsm"), "decoder")
    with pytest.raises(DllmBenchError, match="is a decoder, and a logger belongs here"):
        instantiate(decoder, "logger")
    for slot in ("score", "select", "schedule", "cache"):
        for other in {"score", "select", "schedule", "cache"} - {slot}:
            with pytest.raises(DllmBenchError, match=f"has {slot} .*; give a {slot.title()}"):
                instantiate({**decoder, slot: decoder[other]}, "decoder")


@pytest.mark.parametrize("name", PLANTS)
def test_a_served_request_cannot_carry_a_target(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    engine = {TARGET: "model.served", "name": "x", "url": "http://127.0.0.1:1/v1"}
    for value in (plant(name, canary), [{"b": plant(name, canary)}]):
        with nothing_runs(canary), pytest.raises(DllmBenchError, match="has body .*; give names"):
            instantiate({**engine, "body": {"a": value}}, "model")


def test_an_override_cannot_plant_a_target(tmp_path, command) -> None:
    canary = tmp_path / "canary"
    target = f"{{_target_: dllm_bench.store.files.write_atomic, path: '{canary}', content: x}}"
    for setting in ("benchmark.stop", "benchmark.template"):
        with nothing_runs(canary):
            said = command("run limit=1", f"{setting}=[{target}]", code=2)
        assert "write_atomic" in said


# --- a stranger's results folder -----------------------------------------------------------------


def sealed(root: Path) -> tuple[Store, RunRecord]:
    """Return a store with a sealed run of minigsm with a real decoder's settings."""
    settings = ["model=tiny-llada", "decoder=fast_dllm", "benchmark=minigsm", "limit=2"]
    store, spec = Store(root / "runs"), RunSpec.from_config(compose(settings))
    return store, run(spec, store=store, deps=fakes.deps())


def replant(store: Store, record: RunRecord, plain: dict[str, Any]) -> str:
    """Store the record with a changed specification under hashes that fit; returns its hash."""
    [folder] = store.folders()
    spec = copy.copy(record.spec)  # a stranger's program checks nothing
    vars(spec).pop("identity_hash", None)
    vars(spec).update(plain)
    try:
        identity = spec.identity_hash
    except DllmBenchError:  # a key that no run has
        identity = record.identity_hash
    text = RunRecord(**{**vars(record), "spec": spec, "identity_hash": identity}).to_json()
    (folder / RECORD).write_text(text)
    (folder / SPEC).unlink(missing_ok=True)
    folder.rename(folder.with_name(f"planted-{identity[:SHOWN]}"))
    return str(identity)


@pytest.mark.parametrize("name", covering(12, PLANTS))
def test_reading_a_strangers_results_runs_nothing(name, tmp_path, capsys) -> None:
    """Planted everywhere in a sealed record; no command reading it may call, open or crash."""
    store, record = sealed(tmp_path)
    canary, results = tmp_path / "canary", str(tmp_path)
    plain = record.spec.to_plain()
    groups = ("model", "decoder", "benchmark", "hardware", "inputs")
    spots = [(group, *path) for group in groups for path in places(plain[group])]
    for path in random.Random(name).sample(spots, 3):
        shown = replant(store, record, planted(plain, path, plant(name, canary)))[:10]
        commands = ("status", "show {}", "show {} --sample item-0", "compare {} {}", "rescore {}")
        with nothing_runs(canary):
            for line in commands:
                words = line.replace("{}", shown).split()
                assert main([*words, "--results", results]) in (0, 2), words
            texts = TextSource(compose)  # what `report` shows of a run
            for entry in store.entries():
                texts.prompts(entry.spec, read_samples(entry.path))
                texts.decode(entry.spec)([5])
        capsys.readouterr()


PIECES: tuple[Any, ...] = (
    *({TARGET: name} for name in ("cache.block", "stop.eos", "select.topk", "drafter.model")),
    *({TARGET: name} for name in ("benchmark.prompts", "", ".", "decoder..x", "no.such")),
    *({}, {"x": {TARGET: "cache.block"}}, {TARGET: {}}, {TARGET: None}, [{TARGET: "stop.eos"}], 5),
)


@pytest.mark.parametrize("slot", covering(2, ["explore", "cache", "stop", "revise"]))
def test_a_piece_of_another_slot_stops_no_rescoring(slot, tmp_path, monkeypatch, command) -> None:
    """Grading succeeds, so that the record is sealed again from its planted settings."""
    store, record = sealed(tmp_path)
    monkeypatch.setattr(rescore, "benchmark_of", lambda plain: fakes.Letters())
    for piece in PIECES:
        plain = planted(record.spec.to_plain(), ("decoder", slot), piece)
        assert "samples changed" in command("rescore", replant(store, record, plain)[:10]), piece


def test_paths_consent_and_servers_of_a_record_are_not_used(tmp_path: Path) -> None:
    """What a stored run says about files, consent and servers is not followed."""
    canary = tmp_path / "canary"
    canary.mkdir()
    stored = {**compose(["benchmark=gsm8k"])["benchmark"], "data_dir": str(canary)}
    stored["allow_code_execution"] = True
    here = on_this_machine("benchmark", stored, compose)
    assert here["data_dir"] is None and here["allow_code_execution"] is False
    for name in ("sudoku_dream", "deepspec_gsm8k"):  # stored under another name
        stored = compose([f"benchmark={name}", "paths.data=/theirs"])["benchmark"]
        ours = on_this_machine("benchmark", stored, lambda o: compose([*o, "paths.data=/ours"]))
        assert ours["data_dir"] == "/ours"
    model = {**compose(["model=tiny-llada"])["model"], "path": str(canary)}
    assert on_this_machine("model", model, compose)["path"] == "assets/tiny-llada"
    assert "path" not in on_this_machine("model", {**model, "name": "../x,a=b"}, compose)


def test_a_cache_that_came_with_a_results_folder_is_ignored(tmp_path, monkeypatch) -> None:
    """A cache holds composed settings, consent among them: only this user's own counts."""
    at = (tmp_path / "results", "settings", ["v"])
    own = cache.DerivedCache(*at)
    own.put("compose []", [], {"allow_code_execution": False})
    own.save()
    assert cache.DerivedCache(*at).get("compose []", [])
    for folder in (tmp_path / "results", tmp_path / "results" / "runs"):
        folder.mkdir()
        shutil.copy(own.path, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user"))
    assert cache.DerivedCache(*at).get("compose []", []) is None
