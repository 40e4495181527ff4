"""How a sample was decoded: every position has its forward, and the picture shows nothing else.

Laws over arbitrary samples (token texts with control characters among them), then one sample
in detail, then the command.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dllm_bench.cli import show
from dllm_bench.cli.show import named_sample
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import painted
from dllm_bench.core.trace import GIVEN, Forward, ForwardKind, Trace
from dllm_bench.site.decoding_order import DecodingOrder, block_borders, decoding_order
from dllm_bench.store.record import SampleRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store
from tests.sample_stats import stored_sample
from tests.site.builders import LOOKAHEADS, lookaheads, revisions

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


def stored(root: Path) -> str:
    """Return a run of the embedded model with one sample; its hash."""
    group, model = {"name": "n"}, {"name": "tiny-dream-base"}
    spec = RunSpec(model, LOOKAHEADS, benchmark=group, hardware=group, label="d")
    with Store(root / "runs").open(spec) as opened:
        opened.expect(2)
        opened.begin(Session(0.0, 0, {}))
        opened.append(EXAMPLE)
    return spec.short


def test_show_prints_the_picture_and_its_data(command, tmp_path) -> None:
    show = f"show {stored(tmp_path)}"
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
