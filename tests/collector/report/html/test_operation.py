"""The line of an operation on the page: whole, with the operation underlined."""

from __future__ import annotations

from gpuwatch.collector.report.html import page as page_module
from gpuwatch.collector.report.html.page import render_html

from .conftest import HOSTILE
from .test_page import outline

LONG = f"{'h = s.n(x); ' * 10}a = s.q(h) @ s.k(h); {'y = a < 0; ' * 10}".strip()
PART = "s.q(h) @ s.k(h)"


def columns_in(code, part=PART):
    return code.index(part), code.index(part) + len(part)


def test_the_operation_is_underlined_in_the_whole_line(report_of_line):
    page = render_html(report_of_line(LONG, columns_in(LONG)))
    before, behind = (part.replace("<", "&lt;") for part in LONG.split(PART))
    assert f"<li><code>{before}<u>{PART}</u>{behind}</code>, train.py:12, aten.mm.default" in page
    assert page.count("<u>") == 1
    assert LONG in outline(page).text


def test_a_line_without_columns_is_as_it_was(report_of_line):
    page = render_html(report_of_line(LONG, None))
    assert f"<li><code>{LONG.replace('<', '&lt;')}</code>, train.py:12, aten.mm.default" in page
    assert "<u>" not in page


def test_what_a_script_wrote_is_text_before_and_behind_and_inside(report_of_line):
    part = f'a["{HOSTILE}</u></code>`"] * 2'
    code = f'"{HOSTILE}`</u>"; {part}; "{HOSTILE} & `"'
    page = render_html(report_of_line(code, columns_in(code, part)))
    found = outline(page)
    assert HOSTILE not in page
    assert code in found.text
    assert found.tags.count("u") == 1
    underlined = page[page.index("<u>") + len("<u>") : page.index("</u>")]
    assert outline(f"<p>{underlined}</p>").text == part


def test_columns_that_are_no_part_of_the_line_underline_nothing_outside_of_it(report_of_line):
    """A report can come from anywhere."""
    for columns in ((-7, 1 << 40), (1 << 40, -7), (5, 2)):
        page = render_html(report_of_line("y = x @ w", columns))
        assert "y = x @ w, train.py:12" in outline(page).text


def test_what_follows_the_line_is_marked_as_ever(report_of_line):
    """Also where the code has a backtick of its own. The code is never spelled in another way, the rest is."""
    code = "y = x @ w  # `--all"
    verdict = report_of_line(code, (4, 9)).verdict
    context = {"verdict": verdict, "spelled": lambda text: text.replace("--", "as_")}
    text = f"`{code}`, train.py:12; see `fc`, or gpuwatch runs, or --rank"
    assert page_module._spelled_code(context, text) == (
        "<code>y = <u>x @ w</u>  # `--all</code>, train.py:12; see <code>fc</code>, "
        'or <code class="command">gpuwatch runs</code>, or as_rank'
    )
