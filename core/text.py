"""Text: amounts as a user writes them, ranks in words, text that is safe to show, and text that is not UTF-8."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast

import msgspec

from .codes import Code
from .errors import UsageError
from .identity import is_rank, rank_name
from .signal_errors import from_outside, suppress_own

# Amounts of memory: `256MiB`, or a share of the free memory, `80%`.

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{ending}": 1024**power for power, letter in enumerate("kmgt", 1) for ending in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
"""`256M` is 256 MiB, as in nccl-tests."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%", re.ASCII)
_LARGEST = 1 << 50


class MemoryAmount(msgspec.Struct, frozen=True):
    """Bytes, or a share of the free memory; one of them is 0."""

    size: int = 0
    share: float = 0.0

    def of(self, free: int) -> int:
        """Bytes, where `free` are free."""
        return self.size or int(free * self.share)


def parse_size(text: str) -> int | None:
    """Bytes of at least 1; None if it is no size.

    >>> parse_size("256MiB") == parse_size("256M") == 256 * 1024**2
    True
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not 1 <= float(found[1]) * unit <= _LARGEST:
        return None
    return int(float(found[1]) * unit)


def size_text(size: float) -> str:
    """`245 GiB`, `1.5 MiB`: the unit of all sizes in memory and in files that people read."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}" if size < 1000 << power else f"{size / (1 << power):.0f} {unit}"
    return f"{size:.0f} B"


def parse_amount(text: str) -> MemoryAmount | None:
    """A size, or a share above 0 % and up to 100 %; None if it is neither.

    >>> parse_amount("80%")
    MemoryAmount(size=0, share=0.8)
    """
    found = _SHARE.fullmatch(text.strip())
    if found is None:
        size = parse_size(text)
        return MemoryAmount(size=size) if size is not None else None
    share = float(found[1]) / 100
    return MemoryAmount(share=share) if 0 < share <= 1 else None


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?) ?(s|m|min|h|)", re.ASCII)


def parse_seconds(text: str) -> float:
    """Seconds of a duration; nan if it is none, which is in no range.

    >>> parse_seconds("90"), parse_seconds("90s"), parse_seconds("1.5m"), parse_seconds("2h")
    (90.0, 90.0, 90.0, 7200.0)
    """
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * {"m": 60, "min": 60, "h": 3600}.get(found[2], 1) if found else math.nan


# Ranks and other numbers in words: `ranks 0-3, 7`.

MOST_PIECES = 8


def ranks_text(ranks: Iterable[int], most: int = MOST_PIECES) -> str:
    """In ascending order: `rank 3`, `ranks 0, 1`, `ranks 0-3, 7`. Beyond `most` pieces the rest is counted.

    >>> ranks_text([7, 0, 1, 2, 3])
    'ranks 0-3, 7'
    >>> ranks_text(range(0, 10, 2), most=2)
    'ranks 0, 2 and 3 more'
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    processes = [rank_name(number) for number in reversed(ordered) if not is_rank(number)]
    ordered = ordered[len(processes) :]
    if processes:
        named = [*([ranks_text(ordered, most)] if ordered else []), *processes[:most]]
        return ", ".join(named) + (f" and {len(processes) - most} more" if len(processes) > most else "")
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {numbers_text(ordered, most)}"


def joined(words: Sequence[object], last: str = "and") -> str:
    """
    >>> joined([1, 2, 5]), joined(["a", "b"], "or"), joined(["a"])
    ('1, 2 and 5', 'a or b', 'a')
    """
    return f" {last} ".join(filter(None, (", ".join(map(str, words[:-1])), str(words[-1]))))


def numbers_text(numbers: Iterable[int], most: int = MOST_PIECES) -> str:
    """In ascending order, without a noun. Beyond `most` pieces the rest is counted.

    >>> numbers_text([4, 0, 1, 2])
    '0-2, 4'
    >>> numbers_text([])
    'none'
    """
    pieces = list(_pieces(sorted(set(numbers))))
    left = sum(last - first + 1 for first, last in pieces[most:])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces[:most])
    return (text or "none") + (f" and {left} more" if left else "")


def _pieces(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run. Two neighbours are two pieces: `0, 1` reads better than `0-1`."""
    for _, run in groupby(enumerate(ordered), lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        yield from [(numbers[0], numbers[-1])] if len(numbers) > 2 else zip(numbers, numbers, strict=True)


# Text that a script controls, made safe to show: names of modules, classes and arguments, messages of exceptions.
#
# A terminal obeys escape sequences, and a newline can forge a line of a report. So an unprintable character is shown as
# in a Python string, `\x1b` or `\n`, and a long name is cut in its middle.

MOST_OF_A_NAME = 200
"""Characters of a name that are shown."""
_CUT = "..."


def shown(text: str) -> str:
    """One line, without control characters. Applying it twice changes nothing more.

    >>> shown("fc\\x1b[2J\\nVERDICT clean")
    'fc\\\\x1b[2J\\\\nVERDICT clean'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shown_name(name: str, most: int = MOST_OF_A_NAME) -> str:
    """A name on one line, of at most `most` characters: of a longer one, its beginning and its end.

    >>> shown_name("encoder.layers.0", most=11)
    'enco...rs.0'
    """
    text = shown(name)
    if len(text) <= most:
        return text
    kept = most - len(_CUT)
    return f"{text[: kept - kept // 2]}{_CUT}{text[len(text) - kept // 2 :]}"


def is_shown(name: str) -> bool:
    """Whether `shown_name` would leave a name as it is: nearly all are, and this is quick."""
    return len(name) <= MOST_OF_A_NAME and name.isprintable()


def shown_lines(text: str) -> str:
    """A text of several lines, such as a traceback: each line is shown, and stays a line."""
    return "\n".join(map(shown, text.split("\n")))


# Text that is no UTF-8, which messages cannot hold: a folder's name, in bytes that Python shows as surrogates.
#
# Each such byte travels as a character of Unicode's last private plane, which no name has, and is given back.

_FIRST, _CARRIED = 0xDC80, 0x10FF80
_SURROGATES = re.compile("[\ud800-\udfff]")
_CARRIERS = re.compile("[\U0010ff80-\U0010ffff]")
_MARKS = b"\xf4\x8f\xbe", b"\xf4\x8f\xbf"
"""How UTF-8 begins a carrier."""

T = TypeVar("T")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, cut; its class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def error_text(error: BaseException) -> str:
    """`DistNetworkError: The server socket has failed to listen`: its first line, as a compiler's may have hundreds."""
    try:
        message = str(error)
    except Exception as failure:  # its __str__ raises
        if from_outside(failure):
            raise
        message = ""
    lines, name = message.strip().splitlines(), type(error).__name__
    return f"{name}: {lines[0]}"[:1000] if lines else name


def is_web_address(text: str) -> bool:
    """Whether a text is meant as the address of a web server."""
    return text.startswith(("http://", "https://"))


def plain_text(text: str) -> str:
    r"""For a reader: `w\udcff` where the byte 255 was."""
    return text.encode(errors="backslashreplace").decode()


def command_for(*paths: Path, does: str = "report") -> str:
    """What a user may type in any folder: `gpuwatch report --again '/home/me/my runs/1'`."""
    return plain_text(f"gpuwatch {does} {shlex.join(str(path.absolute()) for path in paths)}")


def carried(message: object, text: Callable[[str], str] | None = None) -> Any:
    """The message as built-in values that can be encoded, with `text` of each of its texts."""
    return _map(_plain(message), text or _carry)


def given_back(message: T, data: bytes, kind: Any) -> T:
    """The message as it was before `carried`. `data` is what it was decoded from, `kind` its type."""
    if not any(mark in data for mark in _MARKS):
        return message
    give_back = partial(_CARRIERS.sub, lambda found: chr(ord(found[0]) - _CARRIED + _FIRST))
    back: T = msgspec.convert(_map(_plain(message), give_back), kind, builtin_types=(bytes,))
    return back


def to_json(message: object) -> bytes:
    """As msgspec.json.encode."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(carried(message))


def from_json(data: bytes, kind: type[T] | UnionType) -> T:
    """As msgspec.json.decode."""
    return given_back(cast(T, msgspec.json.decode(data, type=kind)), data, kind)


def messages_among(lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """The messages among the lines that a child has written; those that a library printed are left out."""
    for line in lines:
        with suppress_own(msgspec.DecodeError):
            yield decoder.decode(line)


def _plain(message: object) -> Any:
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map(key, change): _map(each, change) for key, each in value.items()}
    return [_map(each, change) for each in value] if isinstance(value, list | tuple) else value


def _carry(text: str) -> str:
    def carrier(found: re.Match[str]) -> str:
        byte = ord(found[0]) - _FIRST
        return chr(_CARRIED + byte) if 0 <= byte < 0x80 else f"\\u{ord(found[0]):04x}"

    return _SURROGATES.sub(carrier, text)


def toml_of(text: str, path: Path) -> dict[str, Any]:
    """The tables of a file. Raises ValueError if it is no TOML, UsageError where nothing is installed to read it."""
    for reader in ("tomllib", "tomli"):  # the first one is in Python since 3.11
        with suppress(ImportError):
            return cast(dict[str, Any], import_module(reader).loads(text))
    raise UsageError(Code.NOT_INSTALLED, f"{path}: expected Python 3.11 or the package tomli to read it, found neither")
