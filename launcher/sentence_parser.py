"""Parsers of command lines that report a mistake in one sentence, and offer what was meant."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any, NoReturn

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.misspelled import expect_hyphens, meant_option
from ..core.secrets import masked_command, masked_text
from .option_tables import OptionTable
from .refused_value import value_sentence
from .short_help import WholeHelp, short_help

_HELP_ALL = "--help-all"
_VERSION = "--version"
"""An option of `gpuwatch` alone."""


class SentenceParser(argparse.ArgumentParser):
    """Reports an error in one sentence, where argparse prints two screens of usage."""

    def _get_option_tuples(self, option_string: str) -> Any:
        """What a shortened option may be. Two spellings of one option are no ambiguity, and `--hel` is `--help`."""
        meant = {id(found[0]): found for found in super()._get_option_tuples(option_string)}
        few = [found for found in meant.values() if not isinstance(found[0], WholeHelp)]
        return few or list(meant.values())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Called by `parse_args`, too."""
        self._typed = list(args or ())
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        """Called by argparse for `--help`: the common options."""
        self._print_message(short_help(self.prog), file if file is not None else sys.stdout)

    def _unknown_option(self) -> str:
        """The first word with two dashes that is none of the options, nor a shortened one."""
        words = (word.partition("=")[0] for word in self._typed if word.startswith("--") and word != "--")
        is_known = self._option_string_actions.__contains__
        return next((word for word in words if not is_known(word) and not self._get_option_tuples(word)), "")

    def _meant(self, option: str) -> str:
        if option == "-c":
            return "; to run code, write it to a file and launch that"
        known = {*self._option_string_actions, _VERSION}
        for name, action in self._option_string_actions.items():
            known |= {f"{name} {choice}" for choice in action.choices or ()}
        close = meant_option(option, known)
        if close in self._option_string_actions:  # as it is spelled with hyphens
            spellings = self._option_string_actions[close].option_strings
            close = next((spelled for spelled in spellings if spelled.startswith("--")), close)
        elif close == _VERSION:
            close = f"gpuwatch {_VERSION}"
        return f"; did you mean {close}?" if close else ""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        if message.endswith(("required: training_script", "required: training_script, training_script_args")):
            unknown = self._unknown_option()
            message = f"unrecognized arguments: {unknown}" if unknown else message
        code, (what, _, words) = Code.WRONG_VALUE, message.partition(": ")
        if what == "unrecognized arguments":
            option = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), "")
            code, message = Code.NO_SUCH_OPTION if option else Code.ARGUMENT_TOO_MANY, masked_text(message)
            message += self._meant(option)
        elif what == "the following arguments are required" and words.startswith("training_script"):
            code, message = Code.NO_SCRIPT, "expected a training script, found none"
        elif words.startswith("expected ") and words.endswith(" argument"):
            code, message = Code.ARGUMENT_MISSING, value_sentence(message, self._option_string_actions)
        else:
            message = value_sentence(message, self._option_string_actions)
        raise UsageError(code, f"{message} (all options: {self.prog} {_HELP_ALL})")


def add_group(parser: argparse.ArgumentParser, *tables: OptionTable) -> None:
    """gpuwatch's own options, `--min-busbw`, and `--min_busbw` as torchrun spells its own; and `--help-all`."""
    parser.add_argument(_HELP_ALL, "--help_all", dest="help_all", action=WholeHelp)
    group = parser.add_argument_group("gpuwatch")
    for name, settings in ((name, settings) for table in tables for name, settings in table.items()):
        group.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **settings)


class CheckParser(SentenceParser):
    """Knows a script that was given by mistake."""

    def parse_args(  # type: ignore[override]  # the overloads of argparse are of no use here
        self, args: list[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's. Raises UsageError for a script, and for options that say how to run one."""
        mode = next((at for at, word in enumerate(args) if word.partition("=")[0] == "--preflight"), None)
        if mode is not None:
            found = shlex.join(args[mode : mode + 1 + ("=" not in args[mode])])
            raise UsageError(
                Code.NO_SUCH_OPTION,
                f"check is the full preflight, without --preflight, found {found}; for the quick one, which every "
                "launch runs: gpuwatch check --quick",
            )
        parsed: argparse.Namespace
        parsed, rest = self.parse_known_args(args, namespace)
        expect_hyphens(rest[:1], self._option_string_actions)
        if rest and not rest[0].startswith("-"):
            raise UsageError(
                Code.ARGUMENT_TOO_MANY,
                f"check runs no script, found {masked_text(rest[0])!r}; to train after the same test: "
                f"gpuwatch launch --preflight full [options] {shlex.join(masked_command(rest))}",
            )
        if rest:
            self.error(f"unrecognized arguments: {shlex.join(masked_command(rest))}")
        for name in ("-m/--module", "--no-python", "--run-path"):
            if getattr(parsed, name.rpartition("--")[2].replace("-", "_")):
                raise UsageError(
                    Code.WRONG_TOGETHER, f"check runs no script, found {name}, which says how to run one; drop it"
                )
        return parsed
