"""Text that a script controls, made safe to show: names of modules, classes and arguments, messages of exceptions.

A terminal obeys escape sequences, and a newline can forge a line of a report. So what is not printable is shown as in a
Python string, `\\x1b` or `\\n`, and a long name is cut in its middle.
"""

from __future__ import annotations

MOST_OF_A_NAME = 200
"""Characters of a name that are shown."""
_CUT = "..."


def shown(text: str) -> str:
    """One line, without control characters. What is shown once is not changed when it is shown again.

    >>> shown("fc\\x1b[2J\\nVERDICT clean")
    'fc\\\\x1b[2J\\\\nVERDICT clean'
    """
    return text if text.isprintable() else "".join(map(_character, text))


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


def _character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
