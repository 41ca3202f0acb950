"""The page in a real browser: headless Chromium from Debian, which .ci/run installs."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from gpuwatch.collector.report.html.page import render_html

from .conftest import HOSTILE, KINDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chromium")]

IN_FIRST_SCREEN = """selector => {
    const box = document.querySelector(selector).getBoundingClientRect();
    return box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth && box.height > 0;
}"""


CLIPPED = """() => [...document.querySelectorAll("main *, footer *")].filter(each => {
    const style = getComputedStyle(each), box = each.getBoundingClientRect();
    if (!box.width || !each.textContent.trim() || each.closest("svg, header, .skip")) return false;
    const cut = style.overflowX === "hidden" && each.scrollWidth > each.clientWidth + 1;
    const outside = box.right > innerWidth + 1 && !each.closest(".wide, pre");
    return cut || outside;
}).map(each => each.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sample(1, of=f"a first screen: {kind}")) for kind in KINDS]
)
def test_the_verdict_is_in_the_first_screen_and_nothing_goes_wrong(opened, report_of, kind, scheme):
    shown = opened(kind, color_scheme=scheme)
    page = shown.go()
    assert page.evaluate(IN_FIRST_SCREEN, "#statement")
    assert page.inner_text("#statement") == report_of(kind).verdict.statement.replace("`", "")
    assert page.evaluate(IN_FIRST_SCREEN, "#picture")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
    assert shown.troubles == []
    assert shown.requests == [shown.address]


@pytest.mark.sample(4)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_nothing(opened, kind, scheme):
    """axe-core's rules for WCAG, with all sections unfolded. (github.com/dequelabs/axe-core)"""
    page = opened(kind, color_scheme=scheme).go()
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found] == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_clipped_at_any_width(opened, kind, width):
    """What is wider than the screen can be scrolled to, inside of its own box."""
    page = opened(kind).go()
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_command_is_copied(opened):
    page = opened("forward", permissions=["clipboard-read", "clipboard-write"]).go()
    command = page.locator("code.command").first
    button = page.locator("button.copy").first
    assert button.get_attribute("aria-label") == f"copy {command.inner_text()}"
    button.click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command.inner_text()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_read_with_scripts_off(opened, report_of, kind):
    shown = opened(kind, java_script_enabled=False)
    page = shown.go()
    assert page.locator("#statement").is_visible()
    assert not page.locator(".tools").is_visible(), "what only a script can do is not offered"
    closed = page.locator("main > section > details:not([open]) > summary")
    while closed.count():
        closed.first.click()
    if report_of(kind).ranks:
        assert page.locator("#ranks tbody tr").count() == len(report_of(kind).ranks)


def test_search_by_module(opened):
    shown = opened("forward")
    page = shown.go()
    page.keyboard.press("/")
    page.keyboard.type("FC2")
    assert page.locator("#heat tbody tr:visible").count() == 1
    assert page.locator("#frames tbody:visible").get_attribute("data-module") == "encoder.fc2"
    assert page.inner_text("#found") == "1 module"
    assert page.url.endswith("#module=FC2")
    page.keyboard.press("Escape")
    assert page.locator("#heat tbody tr:visible").count() == 2
    assert page.url == shown.address
    assert shown.troubles == []


def test_a_click_on_the_heat_map_chooses_its_rank_and_its_module(opened):
    shown = opened("forward")
    page = shown.go()
    page.click("#heat tr[data-module='encoder.fc1'] td[data-rank='0'] a")
    assert page.url.endswith("#rank=0&module=encoder.fc1")
    assert page.locator("#by-rank details[data-rank='0']").get_attribute("open") is not None
    assert not page.locator("#by-rank details[data-rank='1']").is_visible()
    assert page.locator("#heat tbody tr:visible").count() == 1
    assert page.locator("#ranks tr.chosen").get_attribute("data-rank") == "0"
    page.click("#clear")
    assert page.url == shown.address
    assert page.locator("#heat tbody tr:visible").count() == 2


def test_the_link_holds_the_state(opened):
    shown = opened("forward")
    page = shown.go("#rank=1&batch=7")
    frames = page.locator("#by-rank details[data-rank='1'][data-batch='7']")
    assert frames.is_visible() and frames.get_attribute("open") is not None
    assert page.input_value("#rank") == "1"
    page.goto(shown.address + "#rank=0")
    assert not frames.is_visible()
    assert page.locator("#by-rank details[data-rank='0']").is_visible()


def test_a_link_to_a_code_keeps_the_chosen_rank(opened):
    page = opened("forward").go("#rank=1&batch=7")
    page.click("a.code >> nth=0")
    assert "#gw" in page.url
    assert page.input_value("#rank") == "1"
    assert page.locator("#ranks tr.chosen").get_attribute("data-rank") == "1"
    page.fill("#search", "fc1")
    assert page.evaluate("location.hash") == "#rank=1&batch=7&module=fc1"


def test_a_link_that_names_nothing_does_no_harm(opened):
    shown = opened("forward")
    page = shown.go("#rank=%22%5D%3Cimg%20src%3Dx%3E&batch=zz&module=%00")
    assert page.locator("#statement").is_visible()
    assert shown.troubles == []


def test_a_table_is_sorted_by_its_heads_with_the_keyboard(opened):
    page = opened("thousand").go()
    page.locator("#ranks summary").click()
    head = page.locator("#ranks thead th", has_text="rank").first
    head.locator("button").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("#ranks tbody tr").first.get_attribute("data-rank") == "1023"


def test_a_rank_of_a_thousand_is_found(opened):
    shown = opened("thousand")
    page = shown.go()
    page.fill("#rank", "77")
    assert page.locator("#ranks tr.chosen").get_attribute("data-rank") == "77"
    assert shown.troubles == []


def test_what_a_script_chose_stays_text(opened):
    shown = opened("hostile")
    page = shown.go()
    assert page.locator("body script").count() == 1, "ours alone"
    assert HOSTILE in page.inner_text("#statement")
    assert page.evaluate("document.querySelectorAll('img, iframe, object, embed').length") == 0
    page.fill("#search", HOSTILE)
    assert page.locator("#heat tbody tr:visible").count() == 2
    assert shown.troubles == []


def test_no_other_script_runs_even_if_it_got_in(chromium, report_of, tmp_path):
    """The policy stands behind the escaping."""
    path = tmp_path / "page.html"
    injected = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    path.write_text(render_html(report_of("clean")).replace("<main>", f"<main>{injected}"), encoding="utf-8")
    page = chromium.new_page()
    page.goto(path.as_uri())
    assert page.title() == "clean: gpuwatch report run-clean"
    page.close()


def test_it_prints_with_everything_open(opened):
    page = opened("forward").go()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("main > section > details:not([open])").count() == 0
    assert not page.locator(".tools").is_visible()
    assert page.pdf()[:4] == b"%PDF"
