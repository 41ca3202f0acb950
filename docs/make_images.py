"""Write docs/images: what the page of each kind of verdict opens with, in a real browser.

    python -m docs.make_images [NAME...]

Each picture is of a real run: the first command of the page in docs/verdicts, and of README.md. A kind has four, at
1280 and 390 pixels, light and dark. They are WebP without loss, of at most 64 colours.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.docs.walk import ROOT, Walk, blocks, place

FOLDER = ROOT / "docs" / "images"
SOURCES = {"demo": ROOT / "README.md"} | {
    page.stem: page for page in sorted((ROOT / "docs" / "verdicts").glob("*.md")) if page.stem != "index"
}
SCREENS = {1280: 800, 390: 844}
"""Pixels: width -> height."""


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


def main(names: list[str]) -> None:
    """Run each, and write its pictures."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, report in reports(names):
            for width in SCREENS:
                for scheme in ("light", "dark"):
                    target = FOLDER / f"{name}-{width}-{scheme}.webp"
                    picture(browser, report, width, scheme).save(target, lossless=True, method=6)
                    print(f"{target.relative_to(ROOT)}  {target.stat().st_size // 1024} kB", flush=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:] or list(SOURCES))
