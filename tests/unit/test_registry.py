"""Registered names: what enters a run's identity, and that nothing else can be built from data."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import yaml

from dllm_bench import registry
from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.methods.common import Blocks, Threshold
from dllm_bench.paths import conf_dir
from dllm_bench.registry import TARGET, check_plain_types, describe, find, instantiate, register
from dllm_bench.store.spec import RunSpec


def test_a_class_moved_to_another_module_keeps_every_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["model=tiny-llada", "decoder=fast_dllm", "benchmark=minigsm", "limit=2"])
    before = RunSpec.from_config(config).identity_hash
    elsewhere = types.ModuleType("dllm_bench.methods.moved")
    elsewhere.Threshold = Threshold  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)
    monkeypatch.setattr(Threshold, "__module__", elsewhere.__name__)
    config["decoder"]["select"][TARGET] = f"{elsewhere.__name__}.Threshold"
    assert RunSpec.from_config(config).identity_hash == before


def test_a_setting_that_came_later_leaves_the_hash_of_a_run_as_it_was() -> None:
    pieces = Blocks(8), Blocks(8, short=True)
    plain, short = map(describe, pieces)
    assert "short" not in plain and short == {**plain, "short": True}
    assert [instantiate(one, None) for one in (plain, short)] == [*pieces]


def test_a_name_is_given_once_and_only_what_has_one_is_described() -> None:
    with pytest.raises(DllmBenchError, match=r"select\.threshold.*already has"):
        register("select.threshold")(dict)
    with pytest.raises(DllmBenchError, match="no registered name"):
        describe(make_dataclass("Nameless", ())())


FAILURES = {
    "absent": "import no_such_package_here",
    "division": "1 / 0",
    "syntax": "def (",
    "exit": "raise SystemExit(0)",
    "recursion": "f = lambda: f()\nf()",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_plug_in_that_fails_is_named_and_leaves_the_others(name, tmp_path, monkeypatch) -> None:
    for kind in registry.HOMES:
        registry._import_kind(kind)
    for table in ("_objects", "_names"):  # the test registers into copies
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    named = f"@registry.register('select.beside_{name}')"
    good = f"from dllm_bench import registry\n{named}\nclass Beside: pass\n"
    modules = {f"failing_{name}": FAILURES[name], f"beside_{name}": good}
    for module, code in modules.items():
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [EntryPoint(module, module, registry.PLUGINS) for module in modules]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry.load_plugins.cache_clear()
    assert find(f"select.beside_{name}").__name__ == "Beside"
    with pytest.raises(DllmBenchError, match=f"'failing_{name}'.*cannot be imported"):
        find("select.of_the_failing_one")
    registry.load_plugins.cache_clear()


def wrong_values() -> Iterator[tuple[str, dict[str, Any]]]:
    """(slot, the piece) for every piece without others, a setting of it beyond any bounds or of
    another type."""
    for path in sorted((conf_dir() / "decoder").glob("*/*.yaml")):
        plain = yaml.safe_load(path.read_text())
        if "defaults" not in plain:
            for key in (key for key, value in plain.items() if type(value) in (int, float, bool)):
                for wrong in (-3, 1.5, "high", None):
                    yield path.parent.name, {**plain, key: wrong}


def test_what_a_piece_refuses_is_told_from_its_source_in_the_same_words() -> None:
    """Those told late are checked by a class or function of another module."""
    early, late = 0, list[str]()
    for slot, plain in wrong_values():
        try:
            instantiate(plain, slot)
        except DllmBenchError as refused:
            try:
                check_plain_types({"decoder": [plain]})
                late.append(str(refused))
            except DllmBenchError as told:
                assert str(told) == str(refused) or "missing a required argument" in str(refused)
                early += 1
        else:
            check_plain_types(plain)
    assert early > 300 and len(late) < 10, late


@pytest.mark.parametrize("target", ["dllm_bench.paths.Any", "another.package.Threshold"])
def test_classes_from_outside_are_left_to_the_class(target: str) -> None:
    check_plain_types({TARGET: target, "tau": "high"})
