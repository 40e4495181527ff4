"""Drawings of a stranger's results folder run nothing in the report, shown or opened."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.site.pages import LINK, SVG, harmless, shapes_of
from tests.site.builders import fill, make

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
RUNNING = read_yaml(Path(__file__).with_name("drawings.yaml"))


@pytest.mark.parametrize("name", RUNNING)
def test_only_shapes_of_a_drawing_are_kept(name: str) -> None:
    whole = f'{HEAD} onload="alert(1)"><g>{RUNNING[name]}<path d="M 0 0"/></g></svg>'
    drawn = shapes_of(whole.encode()).decode()
    for part in ("alert", "script", "example", "onload", "svg+xml"):
        assert part not in drawn.replace("http://www.w3.org/1999/xlink", "")
    assert 'd="M 0 0"' in drawn


def test_groups_that_use_groups_are_not_kept() -> None:
    """Ten levels of ten uses each are 10^10 shapes in a browser."""
    groups = "".join(
        f'<g id="g{n + 1}">' + f'<use xlink:href="#g{n}"/>' * 10 + "</g>" for n in range(10)
    )
    drawn = shapes_of(f'{HEAD}><g id="g0"><path d=""/></g>{groups}</svg>'.encode())
    assert LINK not in {key for one in ElementTree.fromstring(drawn).iter() for key in one.attrib}


ENTITY = b'<!DOCTYPE svg [<!ENTITY a "b">]><svg xmlns="http://www.w3.org/2000/svg">&a;</svg>'
OTHERS = [b"", b"no xml", b"<html/>", ENTITY, b"\xff\xfe\0<", b'<?xml encoding="none"?><svg/>']


@pytest.mark.parametrize("content", OTHERS)
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_what_is_no_drawing_is_refused(content: bytes, kind: str) -> None:
    with pytest.raises(DllmBenchError, match=rf"x\.{kind} cannot be shown"):
        harmless(kind, content, f"x.{kind}")


def test_a_drawing_of_our_own_keeps_all_its_shapes() -> None:
    reference = sorted((Path(__file__).parents[2] / "results/reference/figures").rglob("*.svg"))
    assert len(reference) > 10
    for path in reference[::4]:
        content = path.read_bytes()
        before, after = (drawn_in(text) for text in (content, shapes_of(content)))
        assert before[1:] == after[1:] and before[0][0] == after[0][0], path


def drawn_in(text: bytes) -> list[tuple[str, dict[str, str]]]:
    every = ((str(one.tag), one.attrib) for one in ElementTree.fromstring(text).iter())
    left_out = (f"{SVG}style", f"{SVG}metadata")
    return [one for one in every if one[0].startswith(SVG) and one[0] not in left_out]


def test_the_report_holds_no_file_of_a_stranger_as_it_was(tmp_path: Path) -> None:
    fill(tmp_path)
    folder = tmp_path / "figures" / "embedded" / "small"
    (folder / "figure1.svg").write_text(f"{HEAD}>{RUNNING['a script']}</svg>")
    (folder / "figure2.svg").write_text("<html><script>alert(1)</script></html>")
    (folder / "figure1.png").write_text("<script>alert(1)</script>")
    assert sum("left out: " in line for line in make(tmp_path)) == 2
    (folder / "figure1.png").unlink()
    make(tmp_path)
    written = tmp_path / "site" / "figures" / "embedded" / "small"
    names = {"figure1.svg", "figure1.csv", "figure1.html"}
    assert {path.name for path in written.iterdir()} == names
    assert "alert" not in (written / "figure1.svg").read_text(encoding="utf-8")
