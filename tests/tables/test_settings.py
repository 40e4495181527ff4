"""What tables remember of their settings is what composing and resolving would say again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench import paths
from dllm_bench.api import compose as composing
from dllm_bench.core import output
from dllm_bench.paths import assets_dir, conf_dir, place_of
from dllm_bench.store import cache, inputs
from dllm_bench.store.cache import (
    DerivedCache,
    SettingsCache,
    default_paths,
    fingerprint,
    fingerprints,
)
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.spec import RunSpec
from dllm_bench.tables import load
from dllm_bench.tables.load import load_profile, names_of
from dllm_bench.tables.spec import Query
from tests.helpers import forget_composed
from tests.tables.builders import queries_of

QUERY = ("decoder=fast_dllm", "hardware=cpu", "limit=3")
never = Mock(side_effect=AssertionError("worked out again"))


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of conf that may be changed."""
    copy = tmp_path / "conf"
    shutil.copytree(conf_dir(), copy)
    for module in (paths, load):
        monkeypatch.setattr(module, "conf_dir", lambda: copy)
    forget_composed()
    yield copy
    forget_composed()


def sampled() -> list[Query]:
    """Return some queries of some tables, as the embedded profile has them."""
    profile, queries = load_profile("embedded"), []
    for name in names_of("table")[::8]:
        for query in list(queries_of(name))[::30]:
            with suppress(composing.DllmBenchError):  # no counterpart
                queries.append(profile.translate(query))
    return list(dict.fromkeys(queries))


def test_nothing_is_kept_without_a_home_directory_and_no_secret_ever(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(output, "_secrets", {"sk-0123456789abcdef": None})
    cache = DerivedCache(tmp_path, "kind", ["1"])
    cache.put("key", [], {"url": "x?key=sk-0123456789abcdef"})
    assert cache.get("key", []) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-here/caches")
    cache = DerivedCache(tmp_path, "kind", ["1"])
    cache.put("key", [], 1)
    cache.save()
    assert cache.get("key", []) == 1
    assert DerivedCache(tmp_path, "kind", ["1"]).get("key", []) is None


def test_what_is_remembered_is_what_was_worked_out(tmp_path, monkeypatch) -> None:
    real = {f"model={file.stem}" for file in (conf_dir() / "model").glob("smollm2*.yaml")}
    queries = [query for query in sampled() if not {"model=served", *real} & set(query)]
    first = SettingsCache(tmp_path, composing.compose)
    made = {}
    for query in queries:
        config = first.compose(query)
        by_hydra = composing.to_plain(composing.compose_groups(tuple(query)))
        assert config == composing.compose(query) == by_hydra, query
        try:
            made[query] = RunSpec.from_config(config, first.resolve)
        except composing.DllmBenchError:
            continue  # weights that are not here
        assert made[query].to_plain() == RunSpec.from_config(composing.compose(query)).to_plain()
    assert len(made) > 3
    first.save()
    again = SettingsCache(tmp_path, never)
    monkeypatch.setattr(inputs, "resolve", never)
    for query, spec in made.items():
        found = RunSpec.from_config(again.compose(query), again.resolve)
        assert (found.to_plain(), found.runtime) == (spec.to_plain(), spec.runtime)


@pytest.mark.parametrize("file", ["decoder/select/threshold.yaml", "paths/default.yaml"])
def test_a_changed_yaml_forgets_everything(conf: Path, tmp_path: Path, file: str) -> None:
    first = SettingsCache(tmp_path, composing.compose)
    before = first.compose(QUERY)
    first.save()
    assert SettingsCache(tmp_path, never).compose(QUERY) == before
    text = (conf / file).read_text()
    changed = text.replace("tau: 0.9", "tau: 0.8").replace(",results}", ",elsewhere}")
    assert changed != text
    (conf / file).write_text(changed)
    forget_composed()
    after = SettingsCache(tmp_path, composing.compose).compose(QUERY)
    assert after != before and after == composing.compose(QUERY)


def test_a_changed_variable_forgets_everything(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DLLM_BENCH_DATA", raising=False)
    first = SettingsCache(tmp_path, composing.compose)
    assert first.compose(QUERY)["paths"]["data"] is None
    first.save()
    monkeypatch.setenv("DLLM_BENCH_DATA", "/somewhere")
    again = SettingsCache(tmp_path, composing.compose).compose(QUERY)
    assert again["paths"]["data"] == "/somewhere"


def test_a_changed_line_of_the_package_forgets_everything(tmp_path, monkeypatch) -> None:
    package = tmp_path / "package"
    (package / "assets").mkdir(parents=True)
    (package / "code.py").write_text("a = 1\n")
    monkeypatch.setattr(cache, "PACKAGE", package)
    before = cache.made_by()
    (package / "assets" / "weights").write_text("read where settings name it")
    assert cache.made_by() == before
    (package / "code.py").write_text("a = 2\n")
    assert cache.made_by() != before


def test_a_file_that_a_decoder_names_is_part_of_what_it_is_remembered_by(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text((assets_dir() / "profiles" / "tiny-qwen3-cpu.json").read_text())
    query = ("model=tiny-qwen3", "decoder=dspark", "decoder/length=hardware_aware", "hardware=cpu")
    config = composing.compose((*query, f"decoder.length.profile.source={profile}"))
    first = SettingsCache(tmp_path, composing.compose)
    before = RunSpec.from_config(config, first.resolve)
    first.save()
    plain = json.loads(profile.read_text())
    plain["steps_per_s"] = [2 * rate for rate in plain["steps_per_s"]]
    profile.write_text(json.dumps(plain))
    after = RunSpec.from_config(config, SettingsCache(tmp_path, never).resolve)
    assert after.identity_hash != before.identity_hash and after == RunSpec.from_config(config)


def test_what_files_do_not_tell_is_not_remembered() -> None:
    def files(*overrides: str) -> Any:
        return inputs.files_of(RunConfig(composing.compose((*QUERY, *overrides))))

    head = "decoder/select=filter", "decoder.select.head.source=nowhere"
    assert files() is not None and files(head[0]) is not None
    for unknown in (("hardware=auto",), ("model=llada-instruct",), head, ("benchmark=gsm8k",)):
        assert files(*unknown) is None, unknown
    imported = files("model=smollm2-block4")
    assert place_of("imported/smollm2") in imported, "before it is imported too"


@pytest.mark.parametrize("results", [None, "there", ""])
def test_paths_are_read_without_hydra_or_left_to_it(conf: Path, monkeypatch, results) -> None:
    monkeypatch.delenv("DLLM_BENCH_RESULTS", raising=False)
    monkeypatch.setenv("DLLM_BENCH_DATA", "null")
    if results is not None:
        monkeypatch.setenv("DLLM_BENCH_RESULTS", results)
    forget_composed()
    assert default_paths() == composing.compose(())["paths"]
    file = conf / "paths" / "default.yaml"
    file.write_text(file.read_text() + "more: ${paths.results}/more\n")
    assert default_paths() is None, "of another form"


def test_a_derived_value_is_kept_while_its_fingerprint_holds(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    cache = DerivedCache(tmp_path, "kind", ["v1"])
    before = fingerprints([tmp_path / "file"])
    cache.put("one", before, {"a": [1, 2.5, None]})
    cache.put("changed by json", before, (1, 2))
    cache.put("two", [], 2)
    cache.save()
    assert list(tmp_path.iterdir()) == [file], "results stay as they are"
    others = DerivedCache(tmp_path / "other", "kind", ["v1"]), DerivedCache(tmp_path, "x", ["v1"])
    assert [other.get("two", []) for other in others] == [None, None]
    again = DerivedCache(tmp_path, "kind", ["v1"])
    assert again.get("one", before) == {"a": [1, 2.5, None]}
    assert again.get("changed by json", before) is None
    file.write_text("ab")
    assert again.get("one", fingerprints([file])) is None
    assert DerivedCache(tmp_path, "kind", ["v2"]).get("two", []) is None
    again.save(lambda key: key != "two")
    assert DerivedCache(tmp_path, "kind", ["v1"]).get("two", []) is None
    for damaged in ("no json", "[]", "{}", json.dumps({"made_by": 1, "values": 2})):
        cache.path.write_text(damaged)
        assert DerivedCache(tmp_path, "kind", ["v1"]).get("one", before) is None
    assert fingerprint(tmp_path / "absent") == []
