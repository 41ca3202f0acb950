"""`gpuwatch explain`: what the code of a message means."""

from __future__ import annotations

import re
import textwrap
from difflib import get_close_matches

import click
from click.shell_completion import CompletionItem

from ..core.codes import Code, code_texts
from ..core.errors import UsageError
from .report import text_width

_MOST_NEAR = 3


def _complete_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    texts = code_texts()
    return [CompletionItem(code, help=texts[code].title) for code in Code if code.startswith(incomplete.upper())]


@click.command(name="explain")
@click.argument("code", required=False, shell_complete=_complete_codes)
def explain(code: str | None) -> int:
    """Print what the CODE at the end of a message means, why it comes, and what to do: gpuwatch explain GW205

    Without CODE: all codes. This command has nothing to do with gpuwatch.explain(module, ...) in Python or with
    gpuwatch launch --explain, which look for the operation that overflowed.
    """
    texts, width = code_texts(), text_width()
    if code is None:
        for each, (title, _) in texts.items():
            click.echo(textwrap.fill(f"{each}  {title}", width, subsequent_indent=" " * 7))
        return 0
    found = _code_of(code)
    title, text = texts[found]
    click.echo(textwrap.fill(f"{found}  {title}", width, subsequent_indent=" " * 7))
    click.echo(f"\n{textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)}")
    return 0


def _code_of(word: str) -> Code:
    """`GW205`, `gw205`, `205` or `near_overflow`. Raises UsageError, with codes near it."""
    by_name = {str(code): code for code in Code} | {code.kind.upper(): code for code in Code}
    name = re.sub(r"^\[?(?:GW)?(\d+)\]?$", r"GW\1", word.strip().upper().replace("-", "_"))
    if name in by_name:
        return by_name[name]
    number = re.fullmatch(r"GW(\d{1,9})", name)
    if number is not None:
        near = sorted(Code, key=lambda code: abs(int(code[2:]) - int(number[1])))[:_MOST_NEAR]
    else:
        near = [by_name[close] for close in get_close_matches(name, by_name, n=_MOST_NEAR)]
    hint = f"near it: {', '.join(f'{code} ({code.kind})' for code in near)}; " if near else ""
    raise UsageError(Code.NO_SUCH_CODE, f"expected a code such as GW205, found {word!r}; {hint}all: gpuwatch explain")
