"""Write docs/images: what the page of each kind of verdict opens with, in a real browser, and the screen of `top`.

    python -m docs.make_images [NAME...]

Each picture is of a real run: the first command of the page in docs/verdicts, and of README.md. A kind has four, at
1280 and 390 pixels, light and dark. They are WebP without loss, of at most 64 colours. `top` is of the job that
docs/top.md tells of: four ranks, of which one stands still.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwatch.collector.views.publisher import job_viewer
from gpuwatch.collector.views.top_app import TopApp
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.docs.walk import ROOT, Walk, blocks, place
from tests.docs.walk_table import RUNNING

FOLDER = ROOT / "docs" / "images"
SOURCES = {"demo": ROOT / "README.md"} | {
    page.stem: page for page in sorted((ROOT / "docs" / "verdicts").glob("*.md")) if page.stem != "index"
}
SCREENS = {1280: 800, 390: 844}
"""Pixels: width -> height."""
TOP = (100, 13)
"""Columns and lines of the terminal of `top`."""


def reports(names: list[str]) -> Iterator[tuple[str, Path]]:
    """(name, report.html) of each run, while it is there."""
    for name in names:
        page = SOURCES[name]
        with place(page) as folder:
            command = next(run[0] for block in blocks(page) if (run := block.parts()[0]))
            Walk(page, folder).run(command)
            report = folder / "gpuwatch-runs" / "latest" / "report.html"
            shown = report.read_text().replace(str(folder), "/home/me").replace(str(ROOT), "/home/me/gpuwatch")
            report.write_text(shown)
            yield name, report


def picture(browser: Browser, report: Path, width: int, scheme: str) -> Image.Image:
    """The first screen."""
    page = browser.new_page(viewport={"width": width, "height": SCREENS[width]}, color_scheme=scheme)
    page.goto(report.as_uri())
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    return shown.quantize(64, dither=Image.Dither.NONE).convert("RGB")


def top_screen(run: Path) -> str:
    """What `gpuwatch top` shows of a job of which one rank is waited for, as SVG."""
    link = job_viewer(run)
    app = TopApp(lambda: link.newest(0), lambda: not link.is_shown, "")

    async def shown() -> str:
        async with app.run_test(size=TOP) as pilot:
            while "WAITED FOR" not in (screen := app.export_screenshot(title="gpuwatch top")).replace("&#160;", " "):
                await pilot.pause(0.5)
            return screen

    try:
        return asyncio.run(shown())
    finally:
        link.close()


def picture_of_top() -> Image.Image:
    """In a browser, as textual draws it for one."""
    with place(ROOT / "docs" / "top.md") as folder:
        walk = Walk(ROOT / "docs" / "top.md", folder)
        try:
            walk.run(RUNNING)
            drawn = top_screen(folder / "gpuwatch-runs" / "pretrain")
        finally:
            walk.end()
    with browser_of_this_machine() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_content(f"<style>body {{ margin: 0 }} svg {{ width: 1280px }}</style>{drawn}")
        shown = Image.open(io.BytesIO(page.locator("svg").screenshot(omit_background=True))).convert("RGB")
    return shown.quantize(64, dither=Image.Dither.NONE).convert("RGB")


@contextmanager
def browser_of_this_machine() -> Iterator[Browser]:
    """Chromium or Chrome."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def save(shown: Image.Image, name: str) -> None:
    """Write a picture, and say how large its file is."""
    target = FOLDER / f"{name}.webp"
    shown.save(target, lossless=True, method=6)
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size // 1024} kB", flush=True)


def main(names: list[str]) -> None:
    """Run each, and write its pictures."""
    if "top" in names:
        save(picture_of_top(), "top")
    with browser_of_this_machine() as browser:
        for name, report in reports([name for name in names if name != "top"]):
            for width in SCREENS:
                for scheme in ("light", "dark"):
                    save(picture(browser, report, width, scheme), f"{name}-{width}-{scheme}")


if __name__ == "__main__":
    main(sys.argv[1:] or [*SOURCES, "top"])
