"""The first screen of each kind of verdict, next to the kept one: where its parts are, and how much ink is in each.

Another machine's fonts move a line or two, and no part of it. A change that is meant is written with:
WRITE_GOLDEN=1 python -m pytest tests/collector/report/html/test_first_screen.py
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy
import pytest
from PIL import Image

from .conftest import KINDS

KEPT = Path(__file__).parent / "first_screens.json"
PARTS = ("header", ".verdict", ".verdict .kind", "#statement", "#picture", "#picture svg, #picture table")
SCREENS = {(1280, "light"): 800, (390, "dark"): 844}
MOVED = 0.12
"""How far an edge may be from the kept one, as a share of the screen's longer side."""
INK = 2.0
"""How many times more or less may differ from a part's usual colour."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chromium")]


def measured(page):
    """part -> (left, top, right, bottom, ink); ink: mean distance of its pixels from their median, of 255."""
    pixels = numpy.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"), dtype=float)
    found = {}
    for part in PARTS:
        box = page.locator(part).first.bounding_box() if page.locator(part).count() else None
        if box is not None:
            left, top, right, bottom = box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]
            inside = pixels[int(top) : int(bottom), int(left) : int(right)]
            ink = float(abs(inside - numpy.median(inside)).mean()) if inside.size else 0.0
            found[part] = [round(number, 1) for number in (left, top, right, bottom, ink)]
    return found


def differences(kept, now, longer):
    """What is not as it was, by part."""
    found = [f"{part} is missing" for part in kept if part not in now]
    found += [f"{part} is new" for part in now if part not in kept]
    for part in kept.keys() & now.keys():
        *box, ink = kept[part]
        moved = max(abs(was - is_) for was, is_ in zip(box, now[part], strict=False)) / longer
        if moved > MOVED:
            found.append(f"{part} moved by {moved:.2f} of the screen")
        if not 1 / INK <= (now[part][-1] + 1) / (ink + 1) <= INK:  # none below the fold
            found.append(f"{part} had ink {ink}, now {now[part][-1]}")
    return found


def screen(opened, kind, width, scheme, style=""):
    """What is measured of one screen, with a style on top of its own."""
    page = opened(kind, color_scheme=scheme).go()
    page.set_viewport_size({"width": width, "height": SCREENS[width, scheme]})
    if style == "none":
        page.evaluate("for (const each of document.styleSheets) each.disabled = true")
    else:
        page.evaluate(
            "css => { const own = new CSSStyleSheet(); own.replaceSync(css); document.adoptedStyleSheets = [own]; }",
            style,
        )
    return measured(page)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_screen_is_what_it_was(opened, kind, width, scheme):
    now, name = screen(opened, kind, width, scheme), f"{kind} {width} {scheme}"
    everything = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if os.environ.get("WRITE_GOLDEN"):
        lines = (f'"{key}": {json.dumps(value)}' for key, value in sorted((everything | {name: now}).items()))
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    assert differences(everything[name], now, max(width, SCREENS[width, scheme])) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["DejaVu Serif", "DejaVu Sans Condensed", "serif", "sans-serif"])
def test_other_fonts_make_no_difference(opened, family):
    now = screen(opened, "forward", 1280, "light", f"* {{ font-family: '{family}' !important }}")
    assert differences(json.loads(KEPT.read_text())["forward 1280 light"], now, 1280) == []


BROKEN = {
    "no style": "none",
    "white on white": "* { color: #fff !important; fill: #fff !important; stroke: #fff !important }",
    "dark text on a dark page": "body, section, figure { background: #111 !important }",
    "one column": ".first { display: block !important }",
    "huge": "* { font-size: 30px !important }",
    "no picture": "#picture { display: none }",
    "an empty picture": "#picture * { visibility: hidden }",
    "no statement": "#statement { display: none }",
    "nothing but the header": "main { display: none }",
    "a banner in front": "header { padding-bottom: 300px !important }",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("kind", ["forward", "hang"])
def test_a_broken_first_screen_is_seen(opened, kind, how):
    now = screen(opened, kind, 1280, "light", BROKEN[how])
    assert differences(json.loads(KEPT.read_text())[f"{kind} 1280 light"], now, 1280) != []
