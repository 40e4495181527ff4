"""Every value of a run's files replaced by bad ones, under hashes that fit: each reader shows the
run or names it in a sentence, without a traceback."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api import exports
from dllm_bench.api.runs import RunComparison, records
from dllm_bench.cli.main import main
from dllm_bench.cli.runs import row_of_sealed
from dllm_bench.cli.show import summary_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.site.compare_page import comparable_runs, comparison_page
from dllm_bench.site.decoding_order import decoding_order
from dllm_bench.site.run_page import run_page, sample_page, scripts
from dllm_bench.site.texts import TextSource
from dllm_bench.store.files import checksum
from dllm_bench.store.index import IndexedRun
from dllm_bench.store.record import BEFORE, RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import RECORD, SESSIONS, SPEC, Store, read_entry, read_record, verify
from dllm_bench.tables.cost import measured_runs
from tests.hostile.test_planted_targets import planted, sealed
from tests.site.builders import drafts, fill, lookaheads, make, revisions
from tests.tiers import covering

TURNS = 40  # pairs of a spot and a value are divided among the cases
OF_PAGES = 5903  # the same, where each pair takes longer; a few cases are made
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


def forged(plain: dict[str, Any], spot: Spot, value: Any) -> str:
    """Return the record's text with another value at a spot, and both of its hashes made to fit."""
    changed = planted(plain, spot, value)
    changed.pop("sha256", None)
    with suppress(*NO_HASH):
        changed["identity_hash"] = RunSpec.from_plain(changed["spec"]).identity_hash
    text = json.dumps(changed, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(BEFORE, f'\n "sha256": "{digest}",{BEFORE}', 1)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


VALUES: list[Any] = [-1e18, 1e308, -1, 2**62, 10**400, 5, *map(float, ("nan", "inf", "-inf"))]
VALUES += ["", "x", "../../x", "\ud800", "\x1b[2J\0", "x" * 10**6]
VALUES += [[], {}, None, True, [None], {"a": {"b": 5}}, nested(20), nested(500)]
NO_TEXTS: Any = type("NoTexts", (), {"prompts": lambda *_: {}, "answers": lambda *_: {}})()


def mutations(plain: dict[str, Any], turn: int, of: int = TURNS) -> Iterator[tuple[Spot, Any]]:
    """(spot, value): every spot meets every value in one of so many turns."""
    return islice(product(spots(plain), VALUES), turn, None, of)


def forgeries(text: str, turn: int, of: int = TURNS) -> Iterator[tuple[Spot, Any, str]]:
    """(spot, value, the record's text with that value) for the pairs of a turn."""
    for spot, value in mutations(json.loads(text), turn, of):
        yield spot, value, forged(json.loads(text), spot, value)


@pytest.mark.parametrize("turn", covering(3, range(3)))
def test_pages_and_tables_leave_a_forged_record_out_or_show_it(turn: int, tmp_path: Path) -> None:
    for name, record in fill(tmp_path).items():
        (folder,) = tmp_path.glob(f"runs/*/*/*-{record.spec.short}")
        whole = (folder / RECORD).read_text()
        length: Spot = ("spec", "benchmark", "max_new_tokens")  # costs are estimated from it
        wrong = ("x", None, [])[turn]
        further = [(length, wrong, forged(json.loads(whole), length, wrong))]
        for spot, _, text in [*forgeries(whole, turn, OF_PAGES), *further]:
            (folder / RECORD).write_text(text)
            assert any(line.startswith("written: ") for line in make(tmp_path)), (name, spot)
        (folder / RECORD).write_text(whole)


def views(
    record: RunRecord, other: RunRecord, folder: Path, out: Path
) -> Iterator[Callable[[], Any]]:
    """Yield what each command makes of a sealed run."""
    entry = read_entry(folder)
    assert entry
    export = exports.Export([entry], NO_TEXTS, out, organization="us", dataset="a/b", task="c")
    yield lambda: row_of_sealed(IndexedRun.of(record))
    yield lambda: list(summary_lines(record))
    yield lambda: list(RunComparison((record, other)).lines())
    yield lambda: RunComparison((other, record)).to_pandas()
    yield lambda: run_page(record, {}) + sample_page(record)
    yield lambda: [comparison_page(g, frozenset()) for g in comparable_runs([record])]
    for write in (exports.to_hub, exports.to_aup, exports.to_lm_eval, exports.to_eee):
        yield partial(list, write(export))
    yield lambda: records(folder.parents[3])
    yield lambda: measured_runs(Store(folder.parents[2]))
    yield lambda: TextSource(lambda _: defaultdict(dict)).prompts(record.spec, {})


def check(views: Iterable[Callable[[], Any]], where: object) -> None:
    """Nothing but a sentence ends each of the calls, and what it gives can be written."""
    for view in views:
        try:
            with suppress(DllmBenchError):
                str(view()).encode()
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error


@pytest.mark.parametrize("turn", covering(TURNS, range(TURNS), often=TURNS))
def test_a_mutated_record_is_refused_in_a_sentence_or_shown(turn: int, tmp_path: Path) -> None:
    made = fill(tmp_path)
    store, other = Store(tmp_path / "runs"), made["table"]
    for name in ("lookahead", "drafts"):
        folder = store.path(made[name].spec)
        whole = (folder / RECORD).read_text(encoding="utf-8")
        for spot, value, text in forgeries(whole, turn):
            (folder / RECORD).write_text(text, encoding="utf-8")
            try:
                record = read_record(folder)
            except DllmBenchError as error:
                assert str(folder) in str(error), spot
                continue
            assert record, spot
            check(views(record, other, folder, tmp_path / "out"), f"{spot} = {str(value)[:40]!r}")
        (folder / RECORD).write_text(whole, encoding="utf-8")


def sample_views(record: RunRecord, sample: SampleRecord) -> Iterator[Callable[[], Any]]:
    yield sample.stats
    yield lambda: decoding_order(sample, lambda ids: "x", record.spec.decoder).to_json()
    one = dict.fromkeys(record.columns["id"], sample)
    yield lambda: list(scripts(record, one, {}, lambda ids: "x", {}))
    yield lambda: run_page(record, {sample.id: sample.text})


@pytest.mark.parametrize("turn", covering(TURNS, range(TURNS), often=8))
def test_a_mutated_sample_is_refused_in_a_sentence_or_shown(turn: int, tmp_path: Path) -> None:
    record = fill(tmp_path)["lookahead"]
    for made in (lookaheads("a"), revisions("b"), drafts("c")):
        whole = json.loads(made.to_line())
        whole.pop("check")
        for spot, value in mutations(whole, turn):
            changed = planted(whole, spot, value)
            line = json.dumps({**changed, "check": checksum(changed)})
            try:
                sample = SampleRecord.from_line(line)
            except ValueError:
                continue
            check(sample_views(record, sample), f"{spot} = {str(value)[:40]!r}")


@pytest.mark.parametrize("turn", covering(TURNS, range(TURNS), often=8))
def test_a_mutated_start_of_a_run_is_named_or_shown(turn: int, tmp_path: Path) -> None:
    store, record = sealed(tmp_path)
    folder = store.path(record.spec)
    (folder / RECORD).unlink()
    for name in (SPEC, SESSIONS):
        whole = (folder / name).read_text(encoding="utf-8")
        plain = json.loads(whole)
        plain.pop("check", None)
        for spot, value in mutations(plain, turn):
            changed = planted(plain, spot, value)
            with suppress(*NO_HASH):
                changed["identity_hash"] = RunSpec.from_plain(changed["spec"]).identity_hash
            with suppress(RecursionError):  # no checksum fits a value that cannot be written
                changed = {**changed, "check": checksum(changed)}
            (folder / name).write_text(json.dumps(changed) + "\n", encoding="utf-8")
            check((partial(read_entry, folder), partial(verify, folder)), (name, spot))
        (folder / name).write_text(whole, encoding="utf-8")


# --- the commands --------------------------------------------------------------------------------


def test_every_command_shows_the_good_runs_beside_a_bad_one(tmp_path, capsys) -> None:
    made = fill(tmp_path)
    store, good, other = Store(tmp_path / "runs"), made["lookahead"].spec, made["drafts"].spec
    folder = store.path(other)
    plain = json.loads((folder / RECORD).read_text("utf-8"))
    text = forged(plain, ("spec", "decoder", "deep"), nested(500))
    (folder / RECORD).write_text(text, encoding="utf-8")
    named, shown, away = folder.name, good.short, str(tmp_path / "away")
    shows = ("show {0}", "compare {0} {0}")
    names = ("show {1}", "compare {0} {1}", "export {1} --to lm-eval --out {2}", "rescore {1}")
    commands = {"status": (0, named), "runs verify": (1, named)}
    commands |= dict.fromkeys(shows, (0, shown)) | dict.fromkeys(names, (2, named))
    commands["export {0} --to lm-eval --out {2}"] = (0, "written")
    for line, (code, words) in commands.items():
        command = line.format(shown, other.short, away).split()
        assert main([*command, "--results", str(tmp_path)]) == code, command
        printed = capsys.readouterr()
        assert words in printed.out + printed.err, command
    assert any(named in line for line in make(tmp_path) if line.startswith("left out"))
    with pytest.warns(UserWarning, match=named):
        assert shown in set(records(tmp_path)["run"])
