"""The drawing of where the time of `make table4` goes: its parts are the whole, all shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.perf.table4 import (
    COLOURS,
    DRAWING,
    MEASURED,
    Made,
    Session,
    Stage,
    drawing,
    in_minutes,
    parts_of,
    stages_of,
)
from tests.site import builders

SECONDS = re.compile(r"<!-- (\d+\.\d) s, \d+ % -->")  # of a bar; texts are drawn as paths


@pytest.mark.parametrize("redrawn", [False, True], ids=["committed", "drawn from the JSON"])
def test_the_numbers_of_the_drawing_add_up_and_none_is_blank(redrawn: bool) -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    picture = (drawing(measured) if redrawn else DRAWING.read_bytes()).decode()
    shown = [float(seconds) for seconds in SECONDS.findall(picture)]
    parts = measured["parts"]
    assert shown == [round(seconds, 1) for _, _, seconds in parts] and min(shown) > 0
    assert sum(shown) == pytest.approx(measured["total_s"], abs=0.05 * len(shown) + 0.1)
    assert all(f"<!-- {stage}: {part} -->" in picture for stage, part, _ in parts)
    assert f": {in_minutes(measured['total_s'])} from a clone -->" in picture
    assert measured["cpu"] in picture and f"load {measured['load']} before" in picture


def test_parts_of_two_workers_are_the_time_that_passed() -> None:
    """Ten items: one worker has two runs, the other one and waits; then one run of 30 items."""
    first = Stage(
        10,
        began=20.0,
        ended=40.0,
        sessions=[
            Session(began=24.0, graded_from=28.0, sealed=29.0, decoding=3.0),
            Session(began=26.0, graded_from=30.0, sealed=32.0, decoding=4.0),
            Session(began=31.0, graded_from=37.0, sealed=38.0, decoding=5.0),
        ],
    )
    second = Stage(30, 40.0, 60.0, [Session(42.0, 52.0, 55.0, 8.0)])
    made = Made(0.0, 15.0, 20.0, [], Path())
    parts = parts_of(made, [first, second], workers=2, forwards=0.75)
    assert sum(seconds for _, _, seconds in parts) == pytest.approx(60.0)
    assert {part for _, part, _ in parts} <= set(COLOURS)
    assert {(stage, part): seconds for stage, part, seconds in parts} == {
        ("clone", "install"): 15.0,
        ("clone", "imports, planning"): 5.0,
        ("10 items", "imports, first models"): 5.0,
        ("10 items", "models, warm-up"): 1.0,
        ("10 items", "forwards"): 4.5,
        ("10 items", "rounds outside forwards"): 1.5,
        ("10 items", "texts, files"): 1.0,
        ("10 items", "grading"): 2.0,
        ("10 items", "one worker waits"): 3.0,
        ("10 items", "table"): 2.0,
        ("30 items", "models, warm-up"): 1.0,
        ("30 items", "forwards"): 3.0,
        ("30 items", "rounds outside forwards"): 1.0,
        ("30 items", "texts, files"): 1.0,
        ("30 items", "grading"): 1.5,
        ("30 items", "one worker waits"): 7.5,
        ("30 items", "table"): 5.0,
    }


def test_times_of_a_run_are_read_from_its_samples(tmp_path: Path) -> None:
    """The made-up run has 45 samples of 10 ms, all at time 0 of its one session."""
    records = builders.fill(tmp_path)
    folder = next(tmp_path.glob(f"runs/*/*/*{records['lookahead'].spec.short}"))
    made = Made(-1.0, -1.0, 0.0, [(45, 9.0, {folder.name: 2.0})], tmp_path)
    [stage] = stages_of(made)
    [session] = stage.sessions
    assert session == Session(0.0, 0.01, 2.0, pytest.approx(0.45))
