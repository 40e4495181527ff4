"""Nothing that a stranger sends reaches the terminal as a control character or turns its text."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace

import pytest

from dllm_bench.cli.main import main
from dllm_bench.core import output
from dllm_bench.runs.progress import ManyRunsProgress
from dllm_bench.runs.runner import run
from dllm_bench.store.store import ERROR, RECORD, SAMPLES, Store, read_samples
from tests.hostile.test_planted_targets import sealed
from tests.resume import fakes

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\x08\u2028[red]"
OBEYED = frozenset(HOSTILE) - frozenset("[2J]0;owned31mred")
KEY = "sk-secret-0123456789"


def assert_clean(text: str) -> None:
    assert not OBEYED & set(text), repr(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("field", ["id", "text", "raw", "cut"])
def test_show_writes_no_code_of_a_sample(field, tmp_path, capsys) -> None:
    store, record = sealed(tmp_path)
    folder, short = store.path(record.spec), record.spec.short
    (name, sample), *_ = read_samples(folder).items()
    changed = replace(sample, **{field: {HOSTILE: 1} if field == "cut" else HOSTILE})
    (folder / SAMPLES).write_text(changed.to_line(short) + "\n", encoding="utf-8")
    chosen = HOSTILE if field == "id" else name
    for more in ([], ["--canvas"], ["--json"]):
        code = main(["show", short, "--sample", chosen, *more, "--results", str(tmp_path)])
        printed = capsys.readouterr()
        assert code in (0, 2)
        assert_clean(printed.out + printed.err)
        assert field != "cut" or code == 0


def test_names_in_files_and_folders_are_written_out(tmp_path, command) -> None:
    table = tmp_path / "tables" / f"x{HOSTILE}" / "t.json"
    figure = tmp_path / "figures" / "embedded" / f"y{HOSTILE}" / "f.csv"
    for path, text in ((table, "{}"), (figure, f"kind,y,state\nmeasured,,{HOSTILE[:4]}\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    listed = command("status")
    refused = command("show", HOSTILE, code=2) + command("run", f"model={HOSTILE}", code=2)
    assert "\\x1b" in listed and "\\x1b" in refused
    assert_clean(listed + refused)


def test_names_of_a_run_are_written_out(tmp_path, command) -> None:
    store, benchmark = Store(tmp_path / "runs"), {**fakes.spec().benchmark, "name": HOSTILE}
    spec = fakes.spec(2, label=HOSTILE, model={"name": HOSTILE}, benchmark=benchmark)
    run(spec, store=store, deps=fakes.deps())
    sealed_run = [command(line) for line in ("status", f"show {spec.short}")]
    sealed_run.append(command("compare", spec.short, spec.short))
    (store.path(spec) / RECORD).unlink()
    (store.path(spec) / ERROR).write_text(f"failed {HOSTILE}")
    for text in (*sealed_run, command("status"), command("show", spec.short)):
        assert_clean(text)
        assert r"\x1b]0;owned\x07" in text


@pytest.mark.parametrize("tty", [True, False])
def test_progress_shows_no_code_and_no_secret(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_secrets", {})
    monkeypatch.setenv("TERM", "xterm")
    output.keep_out(KEY)
    stream = Terminal() if tty else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with ManyRunsProgress(2) as progress:
        progress.update("a", f"{HOSTILE} {KEY}")
        progress.update("[b]", "5/9")
        if tty:
            progress.bars.refresh()  # else ten times a second
        progress.end(HOSTILE, KEY)
    text = stream.getvalue()
    assert not tty or all(part in text for part in ("[1/2] ", "[red]", "━", "[b]: 5/9"))
    assert "\\x9b31m" in text and "***" in text and KEY not in text
    assert not set(text) & (OBEYED - frozenset("\x1b\r"))  # rich's own colours and cursor moves
    assert "\x1b]0;" not in text


def test_errors_warnings_and_consoles_are_cleaned(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "_secrets", {})
    output.keep_out(KEY)
    output.clean_warnings()
    output.show(HOSTILE + KEY)
    output.show_error(HOSTILE + KEY)
    output.console(width=80).print(HOSTILE + KEY, markup=False)
    shown = warnings.formatwarning(HOSTILE + KEY, UserWarning, "file", 1, "line")
    printed = capsys.readouterr()
    for text in (shown, printed.out, printed.err):
        assert "***" in text and KEY not in text
        assert_clean(text)
