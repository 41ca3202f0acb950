"""Words that were typed wrong: what was meant."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from .codes import Code
from .errors import UsageError

_ALIKE = 0.6
_HARDLY_OTHERWISE = 0.75
_SAME_LETTERS = 0.85
_WORD = 4
"""Letters of a word that is worth looking for in longer names."""
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What a web page or a word processor makes of the hyphens of an option."""


_OTHERS = {
    "--json": ("--format json", "--format jsonl"),
    "--csv": ("--format csv",),
    "--html": ("--format html",),
    "--text": ("--format text",),
    "--save": ("--output",),
    "--out": ("--output", "--runs-dir"),
    "--output-dir": ("--output", "--runs-dir"),
    "--name": ("--run-name",),
    "--dry-run": ("--show-settings",),
    "--batches": ("--trace-batches", "--batch"),
    "--nodes": ("--nnodes",),
    "--num-nodes": ("--nnodes",),
    "--num-machines": ("--nnodes",),
    "-N": ("--nnodes",),
    "--machine-rank": ("--node-rank",),
    "--main-process-ip": ("--master-addr",),
    "--main-process-port": ("--master-port",),
    **dict.fromkeys(("-v", "-V", "--ver"), ("--version",)),
    **dict.fromkeys(
        ("-n", "-np", "--np", "--gpus", "--ngpus", "--num-gpus", "--num-processes", "--world-size"),
        ("--nproc-per-node",),
    ),
}
"""What options of other programs are called here: the first that a command has."""


def closest(word: str, known: Iterable[str], *, alike: float = _ALIKE) -> str:
    """The known word that is most like it; "" if none is. `alike`: from 0, anything, to 1, the word itself."""
    return next(iter(get_close_matches(word, known, n=1, cutoff=alike)), "")


def mistyped(word: str, known: Iterable[str]) -> str:
    """The known word that was hardly meant otherwise; "" if none was. Letters may be in another order: `ervy`."""
    known = list(known)
    by_letters = {"".join(sorted(each)): each for each in known}
    letters = closest("".join(sorted(word)), by_letters, alike=_SAME_LETTERS)
    begin_alike = [each for each in known if each[:1] == word[:1]]  # BATCH is not WATCH
    return closest(word, begin_alike, alike=_HARDLY_OTHERWISE) or by_letters.get(letters, "")


def meant_option(word: str, known: Collection[str]) -> str:
    """The option that a word was meant as; "" if there is none.

    `known` are options with their dashes, and where one takes certain words, such as `--format json`, these, too.
    """
    option = word if word[:2] != "--" else word.partition("=")[0].replace("_", "-")
    if other := next((each for each in _OTHERS.get(option, ()) if each in known), ""):
        return other
    names = {each[2:]: each for each in known if each.startswith("--") and " " not in each}
    name = option.lstrip("-")
    close = mistyped(name, names)
    if not close and len(name) >= _WORD:  # --timeout for --hang-timeout
        close = closest(name, [each for each in names if name in each.split("-")], alike=0.0)
    return names.get(close, "")


def did_you_mean(word: str, known: Iterable[str], *, alike: float = _ALIKE) -> str:
    """`; did you mean torchrun?`, for the end of a sentence; "" if no known word is like it."""
    close = closest(word, known, alike=alike)
    return f"; did you mean {close}?" if close else ""


def with_hyphens(word: str) -> str:
    """The option that a word is meant as whose first character is another dash than a hyphen; else ""."""
    if word[:1] not in _DASHES or not word:
        return ""
    name = word.lstrip(f"-{_DASHES}")
    return f"-{name}" if len(name) == 1 else f"--{name}"


def expect_hyphens(words: Iterable[str], options: Collection[str]) -> None:
    """Raises UsageError for the first of `words` that is one of `options`, written with another dash."""
    for word in words:
        if (meant := with_hyphens(word)).partition("=")[0] in options:
            dash = unicodedata.name(word[0]).lower()
            article = "an" if dash[0] in "aeiou" else "a"
            hyphens = "one hyphen" if len(meant) == 2 else "two hyphens"
            raise UsageError(
                Code.NO_SUCH_OPTION,
                f"expected an option that begins with {hyphens}, found {word!r}, which begins with {article} {dash}; "
                f"did you mean {meant}?",
            )
