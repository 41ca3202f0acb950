"""What argparse says of a value that it refuses, as one of our sentences."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from ..core.misspelled import did_you_mean


def value_sentence(message: str, actions: Mapping[str, argparse.Action]) -> str:
    """`--on-hang: expected one of abort, report, found 'kill'`, of argparse's `argument --on-hang/--on_hang: invalid
    choice: 'kill' (choose from ...)`; another message as it is."""
    named = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if named is None:
        return message
    option, text = named[1].split("/")[0], named[2]
    action = actions.get(option)
    choices = [str(choice) for choice in (action.choices if action is not None else None) or ()]
    few = f"one of {', '.join(choices)}" if choices else "a value"
    if wrong := re.match(r"invalid choice: '(.*?)'", text):
        text = f"expected {few}, found {wrong[1]!r}{did_you_mean(wrong[1], choices)}"
    elif wrong := re.match(r"invalid int value: (.*)", text):
        text = f"expected a whole number, found {wrong[1]}"
    elif wrong := re.match(r"ignored explicit argument (.*)", text):
        text = f"expected no value, found {wrong[1]}"
    elif text == "expected one argument":
        text = f"expected {few}, found nothing"
    return f"{option}: {text}"
