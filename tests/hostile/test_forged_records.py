"""Records whose inner values have other types, under hashes that fit: a sentence, no traceback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.record import BEFORE
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import RECORD, SPEC, read_record
from tests.hostile.test_planted_targets import sealed
from tests.site.builders import fill, make
from tests.tiers import covering

VALUES: tuple[Any, ...] = (5, "x", None, [], {}, True, [None], {"a": 5})
TURNS = 8  # spots are divided among the cases; each meets another value in each of them
Spot = tuple[str | int, ...]
NO_HASH = (DllmBenchError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What ends the hashing of a specification that no hash fits."""


def spots(plain: Any, path: Spot = ()) -> Iterator[Spot]:
    """Yield where a value can be replaced, at every depth; of a list, its first entry."""
    inner = plain if isinstance(plain, dict) else dict(enumerate(plain[:1]))
    for key, value in inner.items():
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from spots(value, (*path, key))


def replaced(plain: dict[str, Any], spot: Spot, value: Any) -> dict[str, Any]:
    """Return a copy of plain data with another value at a spot."""
    changed: dict[str, Any] = json.loads(json.dumps(plain))
    node: Any = changed
    for key in spot[:-1]:
        node = node[key]
    node[spot[-1]] = value
    return changed


def forged(plain: dict[str, Any], spot: Spot, value: Any) -> str:
    """Return the record's text with another value at a spot, and both of its hashes made to fit."""
    changed = replaced(plain, spot, value)
    changed.pop("sha256", None)
    with suppress(*NO_HASH):
        changed["identity_hash"] = RunSpec.from_plain(changed["spec"]).identity_hash
    text = json.dumps(changed, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(BEFORE, f'\n "sha256": "{digest}",{BEFORE}', 1)


def forgeries(text: str, turn: int, of: int = TURNS) -> Iterator[tuple[Spot, str]]:
    """(where, the record's text) for every `of`-th spot from `turn` on."""
    plain = json.loads(text)
    plain.pop("sha256")
    for number, spot in enumerate(spots(plain)):
        if number % of == turn:
            yield spot, forged(plain, spot, VALUES[(number // of + turn) % len(VALUES)])


@pytest.mark.parametrize("turn", covering(TURNS, range(TURNS)))
def test_commands_name_a_forged_record_or_show_it(
    turn: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, record = sealed(tmp_path)
    folder, results = store.path(record.spec), str(tmp_path)
    (folder / SPEC).unlink()
    for spot, text in forgeries(record.to_json(), turn):
        (folder / RECORD).write_text(text)
        short = str(json.loads(text)["identity_hash"])[:10]
        named = ""
        try:
            read_record(folder)
        except DllmBenchError as error:
            named = str(error)
        for command in (["status"], ["show", short], ["compare", short, short], ["rescore", short]):
            code = main([*command, "--results", results])
            printed = capsys.readouterr()
            assert code in (0, 2), (spot, command)
            if named and command == ["status"]:
                assert folder.name in printed.out and "damaged" in printed.out, spot


@pytest.mark.parametrize("turn", covering(3, range(3)))
def test_pages_and_tables_leave_a_forged_record_out_or_show_it(turn: int, tmp_path: Path) -> None:
    made = fill(tmp_path)
    for name, record in made.items():
        (folder,) = tmp_path.glob(f"runs/*/*/*-{record.spec.short}")
        whole = (folder / RECORD).read_text()
        length: Spot = ("spec", "benchmark", "max_new_tokens")  # costs are estimated from it
        further = [(length, forged(json.loads(whole), length, VALUES[1 + turn % 3]))]
        for spot, text in [*forgeries(whole, turn, of=64), *further]:
            (folder / RECORD).write_text(text)
            lines = make(tmp_path)
            assert any(line.startswith("written: ") for line in lines), (name, spot)
        (folder / RECORD).write_text(whole)
