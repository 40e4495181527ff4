"""The report in a browser, from file://, as a reader uses it: mouse, keyboard, narrow window, dark.

Headless Chromium on made-up results (`builders`); skipped if it is not installed. In every test the
pages load only the site's own files, and log and throw nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from dllm_bench.site.pages import run_address
from scripts import screenshots
from tests.site import builders
from tests.site.browser import Browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium found; install the package chromium"),
    pytest.mark.xdist_group("browser"),
]
PLAYER = ".player .controls"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a run -> address of its folder; "site" -> that of the first page."""
    root = tmp_path_factory.mktemp("results")
    records = builders.fill(root)
    builders.make(root)
    short = {name: record.spec.short for name, record in records.items()}
    folders = {name: (root / "site" / run_address(one)).parent for name, one in short.items()}
    return {name: f"file://{path}" for name, path in {**folders, "site": root / "site"}.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """Yield the browser, which has nothing to say and asks for nothing but files afterwards."""
    started.events.clear()
    started.size(1280, 900)
    started.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    yield started
    assert started.complaints() == []
    assert [url for url in started.requests() if not url.startswith("file://")] == []
    assert len(started.requests()) > 2  # the page, its style, its script: the log is on


def each(browser: Browser, selector: str, script: str) -> list[Any]:
    """Return what a script gives of each element `e` that fits."""
    every = f"[...document.querySelectorAll('{selector}')]"
    return list(browser.value(f"{every}.map((e) => {script})"))


def shown(browser: Browser) -> list[int]:
    """Positions whose token is shown."""
    masked = each(browser, ".token", "e.classList.contains('masked')")
    return [position for position, is_masked in enumerate(masked) if not is_masked]


def open_sample(browser: Browser, folder: str, index: int = 0) -> None:
    browser.open("about:blank")
    browser.open(f"{folder}/sample.html#{index}")
    browser.wait("document.querySelector('.player')")


def test_clicks_lead_from_the_board_through_a_table_and_a_run_to_a_sample(browser, pages) -> None:
    browser.open(f"{pages['site']}/index.html")
    browser.click("#tables td a")
    browser.wait("document.querySelector('article.table h1')")
    assert browser.text("h1").startswith("Small Table 1")
    browser.click(f"article.table td.here a[href*='{pages['table'].rpartition('/')[2]}']")
    browser.wait("document.querySelector('.tiles')")
    score = browser.text(".tiles .value")
    browser.click("#samples td a")
    browser.wait("document.querySelector('.heading h1')")
    assert score.endswith("%") and browser.text(".heading h1") == "item-0"
    browser.click("nav li:nth-child(3) a")
    browser.wait("document.querySelector('.tiles')")
    assert browser.text(".tiles .value") == score


def test_a_sample_that_is_gone_says_so(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(f"{pages['table']}/sample.html#1")
    browser.wait("document.querySelector('.heading h1')")
    assert "only its line in the record" in browser.text(".columns")


def test_samples_far_apart_come_from_their_own_scripts(browser, pages) -> None:
    open_sample(browser, pages["lookahead"], 44)
    assert browser.text(".heading h1") == "item-44"
    scripts = [url for url in browser.requests() if "samples-" in url]
    assert [url.rpartition("/")[2] for url in scripts] == ["samples-2.js"]
    browser.click(".turn a")
    browser.wait("document.querySelector('.heading h1').innerText === 'item-43'")


def test_a_script_that_comes_late_does_not_replace_the_sample_chosen_since(browser, pages) -> None:
    open_sample(browser, pages["lookahead"])
    browser.value("(load = loadPack, late = {}, window.loadPack = (number) => number === 2"
                  " ? new Promise((done) => late.come = () => load(2).then(done)) : load(number))"
                  " && 0")  # fmt: skip
    for index in (44, 1):
        browser.value(f"(location.hash = '#{index}') && new Promise((done) => setTimeout(done))")
    browser.wait("document.querySelector('.heading h1').innerText === 'item-1'")
    browser.value("late.come().then(() => new Promise((done) => setTimeout(done)))")
    assert browser.text(".heading h1") == "item-1"


def test_keys_step_through_the_filling(browser: Browser, pages: dict[str, str]) -> None:
    open_sample(browser, pages["lookahead"])
    assert shown(browser) == list(range(9))  # the last position stays masked
    browser.key("Home")
    assert shown(browser) == [] and "all positions are masked" in browser.text(".status")
    for forward, positions in enumerate(([0, 4, 5], [1], [2, 3, 6, 7, 8])):
        before = shown(browser)
        browser.key("ArrowRight")
        assert sorted({*before, *positions}) == shown(browser)
        assert browser.text(".status").startswith(f"Forward {forward + 1} of 3")
        assert browser.value("document.querySelectorAll('.token.fresh').length") == len(positions)
    status = browser.text(".status")
    assert "continued with lookahead 2" in status and "○●□" in status
    browser.key("ArrowLeft")
    assert "1 by the stall rule" in browser.text(".status") and shown(browser) == [0, 1, 4, 5]
    browser.key("End")
    assert shown(browser) == list(range(9))
    browser.key("n")
    browser.wait("document.querySelector('.heading h1').innerText === 'item-1'")


def test_space_plays_to_the_end_and_pauses(browser: Browser, pages: dict[str, str]) -> None:
    open_sample(browser, pages["lookahead"])
    browser.value("document.querySelector('.controls select').value = '15'")
    browser.key("Home")
    browser.key(" ")
    browser.wait("document.querySelectorAll('.token.masked').length === 1")
    browser.wait("document.querySelector('.play').innerText === 'Play'")
    assert shown(browser) == list(range(9))
    assert each(browser, ".controls select", "(e.options[0].value = 0.001, e.selectedIndex = 0)")
    browser.key(" ")  # from the start again, one forward in a thousand seconds
    assert browser.text(f"{PLAYER} .play") == "Pause" and shown(browser) == []
    browser.key(" ")
    assert browser.text(f"{PLAYER} .play") == "Play" and shown(browser) == []


def test_buttons_and_slider_do_the_same(browser: Browser, pages: dict[str, str]) -> None:
    open_sample(browser, pages["lookahead"])
    browser.click(f"{PLAYER} .first")
    browser.click(f"{PLAYER} .next")
    assert shown(browser) == [0, 4, 5]
    browser.value("document.querySelector('.player input').focus()")
    browser.key("ArrowRight")
    assert shown(browser) == [0, 1, 4, 5]  # one step, by slider or page but not by both
    assert browser.value("document.querySelector('.player input').value") == "2"
    browser.click(".timeline span:nth-child(3)")
    assert shown(browser) == list(range(9))
    browser.click(".forwards tbody tr:nth-child(1) td:nth-child(3)")
    assert shown(browser) == [0, 4, 5]
    browser.value("document.querySelector('.text').focus()")
    browser.key("End")
    assert shown(browser) == [0, 4, 5], "the key scrolls the text"


def test_colours_go_by_the_forward_and_nothing_is_coloured_after_the_end(browser, pages) -> None:
    open_sample(browser, pages["lookahead"])
    grounds = each(browser, ".token", "e.style.background")
    assert grounds[0] == grounds[4] != grounds[1] != grounds[2] == grounds[3]
    assert grounds[5:] == [""] * 5  # the text ends at 5
    assert browser.text(".canvas .end") == "eos"
    assert browser.value("document.querySelectorAll('.canvas .border').length") == 2


def test_drafts_are_shown_as_accepted_rejected_or_not_asked(browser, pages) -> None:
    open_sample(browser, pages["drafts"])
    assert "2 of 3 drafts accepted" in browser.text(".status")
    kinds = each(browser, ".draft [title]", "[e.className, e.innerText]")
    assert [kind for kind, _ in kinds] == ["kept", "kept", "refused", "unasked"]
    assert [text.strip().split("\n")[0][:3] for _, text in kinds] == ["and", "two", "fou", "is "]
    assert "0.88" in kinds[0][1] and "0.50" in kinds[1][1]  # sigmoid of 2 and 0
    browser.key("ArrowLeft")
    assert each(browser, ".draft [title]", "e.className") == ["pending"] * 4
    browser.key("End")
    assert each(browser, ".token", "e.matches('.own')") == [False, False, False, True]


def test_what_a_model_wrote_is_text(browser: Browser, pages: dict[str, str]) -> None:
    open_sample(browser, pages["drafts"], 3)
    assert browser.text(".heading h1").startswith("</script>")
    assert "<img src=x onerror" in browser.text(".columns")
    assert browser.value("document.images.length") == 0
    browser.open(f"{pages['drafts']}/index.html")
    assert "<img src=x" in browser.text("#samples") and browser.value("document.images.length") == 0


def test_lists_are_sorted_and_narrowed_by_keyboard(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(f"{pages['lookahead']}/index.html")
    browser.value("document.querySelector('.filters input').focus()")
    browser.write("item-4")
    assert browser.text(".filters output") == "6 of 45"  # 4 and 40 to 44
    browser.value("document.querySelector('.filters input').value = ''")
    browser.value("document.querySelector('.filters select').value = 'wrong'")
    typed = "new Event('input', {bubbles: true})"
    browser.value(f"document.querySelector('.filters').dispatchEvent({typed})")
    assert browser.text(".filters output") == "15 of 45"
    browser.value("document.querySelector('#samples th:nth-child(4) button').focus()")
    browser.key("Enter", times=2)
    column = each(browser, "#samples tbody tr", "+e.cells[3].innerText")
    assert column == sorted(column, reverse=True) and len(set(column)) == 3
    assert browser.value("document.querySelector('[aria-sort]').ariaSort") == "descending"


def test_the_keyboard_reaches_content_and_controls_in_order(browser, pages) -> None:
    open_sample(browser, pages["lookahead"])
    reached = []
    for _ in range(14):
        browser.key("Tab")
        reached += each(browser, ":focus", "`${e.tagName} ${e.type || ''} ${e.innerText}`.trim()")
        assert each(browser, ":focus", "getComputedStyle(e).outlineStyle") != ["none"], reached
    assert reached[0] == "A  Skip to the content"
    order = [name for name in reached if name.startswith(("INPUT range", "BUTTON", "SELECT"))]
    assert [name.split()[0] for name in order] == ["INPUT", *["BUTTON"] * 5, "SELECT"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(browser, pages, scheme) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    browser.size(360, 740)
    grounds = set()
    names = ("index", "tables/small/table1", "figures/embedded/small/figure1")
    of_run = (f"{pages['drafts']}/{name}" for name in ("index.html", "sample.html#3"))
    for page in (*(f"{pages['site']}/{name}.html" for name in names), *of_run):
        browser.open(page)
        browser.wait("document.querySelector('h1')")
        assert browser.value("document.documentElement.scrollWidth") <= 360, page
        grounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert grounds == {"rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 31)"}
    browser.open(f"{pages['site']}/index.html")
    assert each(browser, ".links", "(e.innerHTML = `<li><a href='#'>${'word+'.repeat(30)}</a>`)")
    assert browser.value("document.documentElement.scrollWidth") <= 360


def test_the_first_column_of_a_list_stays_readable_on_a_phone(browser, pages) -> None:
    browser.size(360, 740)
    browser.open(f"{pages['lookahead']}/index.html")
    browser.wait("document.querySelector('#samples td')")
    cell = "document.querySelector('#samples td').getBoundingClientRect()"
    left = browser.value(f"{cell}.left")
    browser.value("document.querySelector('#samples').parentNode.scrollLeft = 150")
    assert browser.value(f"{cell}.left") == left
    assert browser.value(f"{cell}.height") < 40, "one line"


def test_the_screenshots_of_the_docs_are_taken(pages, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(screenshots, "FOLDER", tmp_path)
    site, _, run = pages["lookahead"].removeprefix("file://").rpartition("/runs/")
    screenshots.main(site, "board", f"lookahead={run}#0@2")
    sizes = {path.stem: Image.open(path).size for path in tmp_path.iterdir()}
    assert sizes == {n: (screenshots.WIDTH, screenshots.HEIGHTS[n]) for n in ("board", "lookahead")}
