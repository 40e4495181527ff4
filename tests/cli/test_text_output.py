"""Stored runs as text: `status`, `show` and `compare` print what the records hold.

Also how a sample was decoded: every position has its forward, and the picture shows nothing else.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dllm_bench.api.runs import RunComparison
from dllm_bench.cli import runs, show
from dllm_bench.cli.main import main
from dllm_bench.cli.run import overview
from dllm_bench.cli.show import named_sample
from dllm_bench.core.benchmark import SampleScore, judge_error
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import painted
from dllm_bench.core.trace import GIVEN, Forward, ForwardKind, Trace
from dllm_bench.runs.progress import headline
from dllm_bench.site.decoding_order import DecodingOrder, block_borders, decoding_order
from dllm_bench.site.run_page import tiles
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.seal import seal
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import LOCK, Store, remove, sealed_record
from tests.figures.builders import sample as decoded
from tests.sample_stats import stored_sample
from tests.site.builders import LOOKAHEADS, lookaheads, revisions
from tests.tables.builders import seal as put
from tests.tables.builders import start


def spec(**changes: Any) -> RunSpec:
    group = {"name": "n"}
    plain = {"model": group, "decoder": group, "benchmark": group, "hardware": group, "label": "d"}
    return RunSpec(**{**plain, **changes})


def sample(name: str) -> SampleRecord:
    """Four positions in two forwards: the last two first."""
    prefill = Forward(ForwardKind.PREFILL, 1, 20, 0, ms=5.0)
    denoise = Forward(ForwardKind.DENOISE, 3, 8, 12, ms=2.5, winner=2)
    return decoded(name, [1, 2, 3, 4], [1, 1, 0, 0], [prefill, denoise])


def record(values: list[float], ungraded: int = 0, **changes: Any) -> RunRecord:
    """Return a sealed run of samples with these scores, and some whose grading failed."""
    samples = [sample(str(i)) for i in range(len(values) + ungraded)]
    scores = {str(i): SampleScore(v, "correct" if v else "wrong", {}) for i, v in enumerate(values)}
    scores |= {str(len(values) + i): judge_error("no sandbox") for i in range(ungraded)}
    environment = {"device": "a machine", "threads": 1, "commit": "0123456789abcdef", "dirty": True}
    allowed = replace(spec(**changes), runtime={"max_judge_errors": ungraded})
    return seal(allowed, samples, scores, [Session(0.0, 2, environment)], 0.0)


def store_of(root: Path, *records: RunRecord) -> Store:
    """Return a store of sealed runs."""
    store = Store(root / "runs")
    for one in records:
        put(store, one)
    return store


def test_summary_names_definition_machine_and_commit() -> None:
    text = "\n".join(show.summary_lines(record([1.0, 0.0])))
    for part in (
        *("score 50.0 [", "correct 1, wrong 1", "tpf/emitted", "a machine, 1 thread(s)"),
        *("0123456789 with local changes", "  hardware.name     n"),
    ):
        assert part in text


def test_comparison_speaks_of_shared_samples_and_calls_no_difference_without_ground() -> None:
    text = str(RunComparison((record([1.0] * 8 + [0.0] * 2), record([1.0] * 7 + [0.0] * 3))))
    assert "difference +10.0 [" in text and "10 shared samples" in text
    assert "no difference is shown (McNemar's exact test, p = 1)" in text
    clear = str(RunComparison((record([1.0] * 20), record([0.0] * 20))))
    assert "the runs differ (McNemar's exact test, p = 1.91e-06)" in clear
    columns = record([1.0, 0.0]).columns
    for values in ([None, None], [None, None]), ([1.0, None], [None, 1.0]):
        sides = [replace(record([1.0, 0.0]), columns={**columns, "value": one}) for one in values]
        assert "no score, since nothing is graded" in str(RunComparison(tuple(sides)))
    shares = str(RunComparison((record([0.5, 0.6] * 10), record([0.4] * 20))))
    assert "the runs differ (the interval of paired resamples excludes 0)" in shares


def test_samples_without_a_grade_are_counted_beside_every_score(tmp_path: Path) -> None:
    one, other = record([1.0, 0.0], ungraded=2), record([1.0, 1.0], seed=1)
    assert "n = 2, 2 not graded)" in "\n".join(show.summary_lines(one))
    assert headline(one).endswith("2 not graded")
    assert "] (2 not graded) and" in str(RunComparison((one, other)))
    (line,) = [line for line in overview([one, other]) if "not graded" in line]
    assert "] 2 not graded" in line
    assert "n = 2, 2 not graded" in str(next(tiles(one)))
    lines = runs.run_lines(store_of(tmp_path, one, other))
    assert sum("] 2 not graded" in line for line in lines) == 1


def test_board_shows_sealed_and_partial_runs_but_compares_only_sealed_ones(tmp_path) -> None:
    store = store_of(tmp_path, record([1.0, 1.0]))
    start(store, spec(seed=1), done=1, total=5)
    lines = list(runs.run_lines(store))
    assert sorted(line.split()[1] for line in lines[1:3]) == ["partial", "sealed"]
    assert any(" 1/5 " in line for line in lines)
    assert any("100.0 [" in line and " 2.00 " in line for line in lines)
    (partial,) = [entry for entry in store.entries() if entry.spec.seed == 1]
    with pytest.raises(DllmBenchError, match="partial"):
        sealed_record(partial)


def test_runs_are_told_apart_chosen_and_sorted(command, tmp_path) -> None:
    scores = enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))
    store = store_of(tmp_path, *(record(values, seed=seed) for seed, values in scores))
    start(store, spec(seed=3), done=10, total=12)

    def rows(*options: str) -> list[Any]:
        return list(json.loads(command("status --json", *options)))

    found = [row["settings"] for row in rows("--sort", "score")]
    assert found[:2] == ["seed 1", "seed 0"] and {*found[2:]} == {"seed 2", "seed 3"}
    assert rows("--sort", "done")[0]["settings"] == "seed 3", "10/12 is more than 2/2"
    assert [row["score"] for row in rows("--where", "seed 2")] == [0.0]
    assert rows("--where", "seed 2", "seed 1") == []
    assert "did you mean 'score'?" in command("status --sort scor", code=2)


def test_a_run_of_a_multirun_is_one_line(tmp_path, capsys) -> None:
    settings = ["model=tiny-llada", "hardware=cpu", "limit=1", "benchmark.max_new_tokens=32"]
    taus = ("decoder.select.tau=0.7,0.9", f"paths.results={tmp_path}")
    for known in ("", "nothing was decoded, looked up"):
        assert main(["run", "-m", "decoder=fast_dllm", *taus, *settings]) == 0
        said = capsys.readouterr()
        one, other, empty, head, *rows = said.out.splitlines()
        assert all(re.match(r"minigsm/tiny-llada/fast_dllm-\w+: done, 1", o) for o in (one, other))
        assert known in one and known in other
        assert not empty and head.split()[-3:] == ["tpf/emitted", "tps/e2e", "settings"]
        assert [row.rpartition("  ")[2] for row in rows] == ["select.tau 0.7", "select.tau 0.9"]
        assert "done" not in said.err


def test_removed_runs_are_gone_and_runs_in_use_stay(command, tmp_path, monkeypatch) -> None:
    store = Store(tmp_path / "runs")
    one, other = (spec(seed=seed) for seed in (0, 1))
    with store.open(one), store.open(other):
        assert "being written by process" in command("runs rm", one.short, code=2)
    command("runs rm", one.short, "nothing", code=2)
    assert store.path(one).is_dir()
    folders, held = store.folders(), []
    with monkeypatch.context() as patch:
        look = Mock(side_effect=lambda _: held.append([(f / LOCK).stat().st_size for f in folders]))
        patch.setattr("dllm_bench.store.files.remove_folder", look)
        remove(folders)
    assert [sizes.count(0) for sizes in held] == [1, 1], "one lock, so one open file, at a time"
    command("runs rm", one.identity_hash, one.short[:9])
    assert [entry.spec for entry in store.entries()] == [other]


def row(lines: Iterable[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"{name} ")).split()


def test_settings_that_differ_are_shown_with_the_values_of_each_run() -> None:
    decoders = ({"schedule": {"block": 4}, "explore": {"k": k}} for k in (1, 3, 7))
    made = tuple(record([1.0, 0.0], decoder=decoder) for decoder in decoders)
    lines = list(RunComparison(made).lines())
    assert row(lines, "explore.k")[1:] == ["1", "3", "7"]
    assert not any(line.startswith("schedule.block ") for line in lines)


def test_scores_and_metrics_are_those_of_the_shared_samples() -> None:
    made = record([0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    columns = {**made.columns, "forwards": [1, 1, 4, 4, 2, 2]}
    halves = [{name: values[i : i + 4] for name, values in columns.items()} for i in (0, 2)]
    first, last = (replace(made, columns=half) for half in halves)
    lines = list(RunComparison((first, last)).lines())
    assert "metrics over 2 shared samples" in lines
    assert row(lines, "tpf/emitted")[1:3] == ["1.000", "1.000"]  # four tokens in four forwards
    assert ": score 100.0 [" in "".join(lines)


WORDS = ["<mask>", "four", " and", " two", " is six", "\n", "<end>"]
LAW = settings(max_examples=25, deadline=None)
COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
EXAMPLE = replace(lookaheads("a"), text="")
"""Ten positions in blocks of four, three forwards: base, forced, second of two lookaheads."""


def drawn(view: DecodingOrder, width: int = 100, canvas: bool = False, colours: bool = False):
    terminal = {"color_system": "truecolor" if colours else None, "force_terminal": colours}
    console = Console(file=io.StringIO(), width=width, no_color=False, **terminal)
    return list(painted(show.DecodingOrderPainter(view, console).everything(canvas), console))


def view_of(one: SampleRecord, words: list[str] = WORDS) -> DecodingOrder:
    return decoding_order(one, lambda ids: words[ids[0]], LOOKAHEADS)


@st.composite
def samples(draw: st.DrawFn) -> SampleRecord:
    forwards = []
    for _ in range(draw(st.integers(1, 12))):
        branches = draw(st.integers(1, 5))
        winner, forced = draw(st.integers(0, branches - 1)), draw(st.integers(0, 2))
        forwards.append(Forward(ForwardKind.DENOISE, branches, 8, 12, 1.0, winner, forced))
    size = draw(st.integers(0, 30))
    ids = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    born = draw(st.lists(st.integers(-1, len(forwards) - 1), min_size=size, max_size=size))
    cut = draw(st.dictionaries(st.sampled_from(["eos", "stop", "length"]), st.integers(0, size)))
    return stored_sample(ids, born, Trace(forwards), cut=cut, text="")


@LAW
@given(samples())
def test_every_decoded_position_is_committed_once_by_its_forward(one: SampleRecord) -> None:
    view = view_of(one)
    placed = {at: i for i, step in enumerate(view.steps) for at in step.committed}
    assert placed == {at: i for at, i in enumerate(one.born) if i >= 0}
    assert sum(len(step.committed) for step in view.steps) == len(placed)
    assert [token.born for token in view.tokens] == [placed.get(i) for i in range(len(one.ids))]
    done = 0
    for step in view.steps:
        done += len(step.committed)
        assert step.filled * len(one.ids) == pytest.approx(done)
    assert view.end == min([*one.cut.values(), len(one.ids)])
    assert view.ended_by is None or one.cut[view.ended_by] == view.end


@LAW
@given(samples(), st.lists(st.text(max_size=8), min_size=7, max_size=7), st.integers(20, 160))
def test_tokens_cannot_steer_the_terminal_and_lines_fit_it(one, words, width) -> None:
    words[1] = "\x1b]0;owned\x07\x9b2J\r\x1b[31m" + words[1]
    view = view_of(one, words)
    lines = drawn(view, width, canvas=True)
    assert all(line.isprintable() and cell_len(line) <= width for line in lines)
    coloured = drawn(view, canvas=True, colours=True)
    assert all(COLOUR_CODE.sub("", line).isprintable() for line in coloured)
    assert view.to_json().isascii() and view.to_json().isprintable()


@pytest.mark.parametrize("forwards", [2, 3, 7, 64])
def test_later_forwards_are_lighter_and_every_colour_is_legible(forwards: int) -> None:
    def luminance(colour: Any) -> float:
        """Relative luminance of WCAG 2."""
        shares = [value / 255 for value in colour.triplet]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    styles = [show.forward_style(index, forwards) for index in range(forwards)]
    grounds = [luminance(style.bgcolor) for style in styles]
    assert all(one < other for one, other in pairwise(grounds))
    for ground, style in zip(grounds, styles, strict=True):
        dark, light = sorted([ground, luminance(style.color)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2 level AA


def test_revisions_are_drawn_by_position_and_count_in_what_is_filled() -> None:
    """Two tokens; then one is overwritten and the other masked again; then that one is back."""
    view = view_of(revisions("a"))
    assert [step.filled for step in view.steps] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1])
    text = "\n".join(drawn(view))
    assert "0:␣and ↻0 ⌫1" in text
    assert "positions overwritten" in text and "positions masked again" in text


def test_a_canvas_that_grows_is_drawn_by_its_final_positions() -> None:
    """Two masks, two more, an end token; the first is decoded, two masks replace the last."""
    size, denoise = (Forward(kind, 1, 9, 0) for kind in (ForwardKind.SIZE, ForwardKind.DENOISE))
    forwards = [
        replace(size, canvas=2, inserted=(2, 2)),
        replace(size, canvas=4, inserted=(4, 1)),
        replace(denoise, canvas=5, inserted=(3, 1)),
        replace(denoise, canvas=6),
    ]
    cut, born = {"eos": 5, "length": 6}, [2, 3, 3, 3, 3, GIVEN]
    view = view_of(stored_sample([1, 2, 3, 4, 5, 6], born, Trace(forwards), cut=cut, text=""))
    assert [step.filled for step in view.steps] == [0, 1 / 5, 2 / 6, 1]
    assert [step.inserted for step in view.steps] == [[2, 2], [4, 1], [3, 1], []]
    assert [token.born for token in view.tokens] == [2, 3, 3, 3, 3, 1], "none is masked"
    text = "\n".join(drawn(view))
    assert "+2:2" in text and "+1:4" in text and "positions inserted" in text
    assert "<end>₁" in text and "still masked" not in text


def test_guidance_runs_every_branch_twice_and_is_no_lookahead() -> None:
    one = replace(EXAMPLE, trace={**EXAMPLE.trace, "branches": [2, 6, 6]})
    view = decoding_order(one, lambda ids: WORDS[ids[0]], {**LOOKAHEADS, "guidance": 1.5})
    assert [step.branches for step in view.steps] == [1, 3, 3]
    assert [step.lookahead_won for step in view.steps] == [False, False, True]


@pytest.mark.parametrize("schedule", [{"block": None}, {"block": 4, "absolute": True}, None])
def test_borders_are_shown_only_where_they_are_known(schedule: dict | None) -> None:
    assert (block_borders(10, {"schedule": schedule}), block_borders(10, {})) == ([], [])


def test_the_picture_reads_without_colours() -> None:
    lines = drawn(view_of(EXAMPLE), canvas=True)
    assert lines[0] == "sample a: 10 positions in 3 forwards, ends: eos at 5, length at 10"
    assert lines[2:4] == ["four₀ and₁ two₂ is six₂│\\n₀", "⟦eos⟧<end>₀<end>₂<end>₂│<end>₂░"]
    rows = [line.split() for line in lines[6:9]]
    assert rows[0] == "0 prefill ■ 20 0 5.0 30% 0:four 4:\\n 5:<end>".split()
    assert rows[1] == "1 denoise ○○■ 8 12 2.5 40% 1:␣and!".split()
    assert rows[2][2] == "○●□" and rows[2][7:9] == ["2:␣two", "3:␣is␣six"]
    assert lines[lines.index("after forward 1 (40%)") + 1] == "four₀ and₁░░│\\n₀<end>₀░░│░░"


def test_forced_tokens_among_others_are_counted_not_guessed() -> None:
    rows = drawn(view_of(replace(EXAMPLE, trace={**EXAMPLE.trace, "forced": [2, 0, 0]})))[6:9]
    assert rows[0].endswith("0:four 4:\\n 5:<end> (2!)") and "!" not in rows[1]


def test_equal_neighbours_are_written_once() -> None:
    trace = Trace([Forward(ForwardKind.DENOISE, 1, 12, 0)])
    one = stored_sample([1, *[6] * 11], [0] * 12, trace, cut={"eos": 1, "length": 12}, text="")
    lines = drawn(decoding_order(one, lambda ids: WORDS[ids[0]], {}))
    assert lines[2] == "four₀⟦eos⟧<end>×11₀" and lines[5].endswith("0:four 1–11:<end>×11")


def test_colours_follow_the_forward_and_what_is_after_the_end_is_dimmed() -> None:
    lines = drawn(view_of(EXAMPLE), colours=True)
    first, last = (show.forward_style(i, 3).render("x").split("x")[0] for i in (0, 2))
    assert f"{first}four\x1b[0m" in lines[2] and f"{last} two\x1b[0m" in lines[2]
    assert not any(f"{first}<end>" in line for line in lines)
    assert "\x1b[2m<end>\x1b[0m" in lines[3] and "\x1b[2m░\x1b[0m" in lines[3]
    assert not re.search("[₀-₉]", "".join(lines))


def test_numbers_stand_for_colours_that_the_user_does_not_want(monkeypatch) -> None:
    """As NO_COLOR asks of a terminal, which is as wide as COLUMNS says."""
    for name, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "72"}.items():
        monkeypatch.setenv(name, value)
    console = show.terminal()
    painter = show.DecodingOrderPainter(view_of(EXAMPLE), console)
    text = "\n".join(painted(painter.everything(False), console))
    assert console.width == 72
    assert "\x1b[" in text and "four₀" in text and "48;" not in text  # a background


def test_watching_shows_the_text_being_filled(monkeypatch, command) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = command("generate tiny-llada fast_dllm --watch", "Tom has 3 apples.", here=False)
    masks = [frame.count(show.MASK) for frame in shown.split("forward ")[:-1]]
    assert masks == sorted(masks, reverse=True) and len(set(masks)) > 3 and masks[-1] == 0


def test_show_prints_the_picture_and_its_data(command, tmp_path) -> None:
    stored = spec(model={"name": "tiny-dream-base"}, decoder=LOOKAHEADS)
    with Store(tmp_path / "runs").open(stored) as opened:
        opened.expect(2)
        opened.begin(Session(0.0, 0, {}))
        opened.append(EXAMPLE)
    show = f"show {stored.short}"
    picture = command(f"{show} --sample a --canvas")
    assert "○●□" in picture and "after forward 2 (90%)" in picture
    plain = json.loads(command(f"{show} --sample a --json"))
    assert [token["born"] for token in plain["tokens"]] == [0, 1, 2, 2, 0, 0, 2, 2, 2, None]
    assert "add --sample ID" in command(f"{show} --json", code=2)


def test_a_number_counts_samples_in_the_order_of_the_record() -> None:
    """Not in that of the lines, which processes that share a run write as they finish."""
    lines = {name: replace(EXAMPLE, id=name) for name in ("c", "a", "7")}
    order = ["a", "7", "b", "c"]
    names = {"0": "a", "1": "7", "3": "c", "c": "c", "7": "7"}
    assert {n: named_sample(lines, order, n, "run").id for n in names} == names
    said = r"among 3; the first are: c, a, 7\. .* samples from 0"
    for held, missing, text in [*((lines, m, said) for m in "24x"), ({}, "0", "an archive keeps")]:
        with pytest.raises(DllmBenchError, match=f"no stored sample '{missing}' .*{text}"):
            named_sample(held, order, missing, "run")
