"""Turn drawings of a results folder, which may be a stranger's, into files that cannot execute
anything.

An SVG may contain scripts, links, style sheets and further documents. `shapes_of` makes a new SVG
from its shapes only, with lists of the elements and attributes that drawings of `figures` use;
everything else is dropped. A PNG is copied after checking that it is one.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, ParseError

from dllm_bench.core.errors import DllmBenchError

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
ELEMENTS = frozenset("svg g defs path use clipPath rect pattern image".split())
ATTRIBUTES = frozenset(
    "id version width height viewBox x y d transform style clip-path fill opacity patternUnits "
    "preserveAspectRatio".split()
)
LINES = {"stroke-linejoin": "round", "stroke-linecap": "butt"}  # of the style sheet, left out
VALUE = re.compile(r"(?:(?<!url)\(|url\(#[\w.-]+\)|(?!url)[\w\s#:;.,%+)-])*", re.IGNORECASE)
IMAGE = re.compile(r"data:image/png;base64,[\w+/=\s]*", re.ASCII)
LEVELS = 32  # nesting depth of elements
PNG_START = b"\x89PNG\r\n\x1a\n"


def harmless(form: str, content: bytes, name: str) -> bytes:
    """Return the content of a drawing's file in this format; DllmBenchError if it is not in the
    format."""
    if form == "svg":
        return shapes_of(content, name)
    if form == "png" and not content.startswith(PNG_START):
        raise _no_drawing(name, "it does not begin as a PNG does")
    return content


def shapes_of(content: bytes, name: str) -> bytes:
    """Return an SVG of the shapes of another one; DllmBenchError if it cannot be read."""
    if b"<!ENTITY" in content:
        raise _no_drawing(name, "it declares entities")
    try:
        root = ElementTree.fromstring(content)
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise _no_drawing(name, str(error)) from error
    if root.tag != f"{SVG}svg":
        raise _no_drawing(name, "it is no SVG")
    paths = {f"#{path.get('id')}" for path in root.iter(f"{SVG}path")}
    drawn = _copy(root, paths, LEVELS)
    drawn.attrib.update(LINES)
    ElementTree.register_namespace("", SVG[1:-1])
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    return ElementTree.tostring(drawn, encoding="utf-8", xml_declaration=True)


def _copy(element: Element, paths: set[str], levels: int) -> Element:
    """Return a copy of the element with its allowed parts. `paths`: targets of a `use`; groups are
    excluded, because groups that use groups grow without limit.
    """
    copied = Element(element.tag)
    for key, value in element.attrib.items():
        if key in ATTRIBUTES and VALUE.fullmatch(value):
            copied.set(key, value)
    link = element.get(LINK) or element.get("href") or ""
    if link in paths or (element.tag == f"{SVG}image" and IMAGE.fullmatch(link)):
        copied.set(LINK, link)
    for inner in element if levels else ():
        is_shape = isinstance(inner.tag, str) and inner.tag.removeprefix(SVG) in ELEMENTS
        if is_shape and inner.tag.startswith(SVG):
            copied.append(_copy(inner, paths, levels - 1))
    return copied


def _no_drawing(name: str, why: str) -> DllmBenchError:
    return DllmBenchError(
        f"The drawing {name} cannot be shown ({why}); draw the figure again with `dllm-bench "
        "figure`."
    )
