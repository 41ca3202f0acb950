"""What click refuses, in one sentence: what was expected, what was found, and what was meant."""

from __future__ import annotations

import re

import click

from ..core.codes import Code
from ..core.misspelled import did_you_mean, meant_option
from ..core.secrets import masked_text

_NOT_OURS = ("--help", "-h")


def sentence_of(error: click.ClickException) -> tuple[str, Code]:
    """The sentence, and its code."""
    text, code = _sentence(error)
    return masked_text(text), code


def _sentence(error: click.ClickException) -> tuple[str, Code]:
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption):
        return _no_option(error, context), Code.NO_SUCH_OPTION
    if isinstance(error, click.MissingParameter):
        return f"expected {_arguments(context)}, found none{_as(context)}", Code.ARGUMENT_MISSING
    if isinstance(error, click.BadOptionUsage):
        return _no_value(error, context), Code.ARGUMENT_MISSING
    if isinstance(error, click.BadParameter):
        return _wrong_value(error), Code.WRONG_VALUE
    return _too_many(error, context), Code.ARGUMENT_TOO_MANY


def _no_option(error: click.NoSuchOption, context: click.Context | None) -> str:
    found = error.option_name
    if context is None or context.parent is None:
        if close := meant_option(found, ("--version", "--help")):
            return f"expected a command or an option of gpuwatch, found {found}; did you mean gpuwatch {close}?"
        return f"expected a command before {found}; did you mean gpuwatch launch {found}?"
    known = {option for param in context.command.params for option in param.opts if option not in _NOT_OURS}
    for param in context.command.params:
        if isinstance(param.type, click.Choice):
            known |= {f"{option} {choice}" for option in param.opts for choice in param.type.choices}
    close = meant_option(found, known)
    meant = f"; did you mean {close}?" if close else ""
    return f"expected an option of {context.command_path}, found {found}{meant} (all: {context.command_path} --help)"


def _no_value(error: click.BadOptionUsage, context: click.Context | None) -> str:
    params = context.command.params if context is not None else []
    param = next((param for param in params if error.option_name in param.opts), None)
    if "requires an argument" not in error.message:
        return error.format_message()
    expected = _values(param) if param is not None else "a value"
    return f"{error.option_name}: expected {expected}, found nothing"


def _wrong_value(error: click.BadParameter) -> str:
    param, found = error.param, re.match(r"(.+?) is not (?:one of|a valid|in the range)", error.message)
    if param is not None and (folder := re.fullmatch(r"File ('.*') is a directory\.", error.message)):
        return f"{_name(param)}: expected a file, found the folder {folder[1]}"
    if param is None or found is None or not isinstance(param, click.Option):
        return error.format_message()
    hint = ""
    if isinstance(param.type, click.Choice):
        hint = did_you_mean(found[1].strip("'\""), param.type.choices)
    word = found[1] if found[1][:1] in "'\"" else repr(found[1])
    return f"{_name(param)}: expected {_values(param)}, found {word}{hint}"


def _too_many(error: click.ClickException, context: click.Context | None) -> str:
    found = re.match(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if found is None or context is None:
        return error.format_message()
    expected = f"no more than {few}" if (few := _arguments(context)) else "options alone"
    return f"expected {expected}, found also {found[1]!r} (all options: {context.command_path} --help)"


def _arguments(context: click.Context | None) -> str:
    """`[RUN]`, as in the usage."""
    params = context.command.params if context is not None else []
    arguments = (param for param in params if isinstance(param, click.Argument))
    return " ".join(argument.make_metavar(context) for argument in arguments if context is not None)


def _as(context: click.Context | None) -> str:
    return f": {context.command_path} {_arguments(context)}" if context is not None else ""


def _name(param: click.Parameter) -> str:
    return next((option for option in param.opts if option.startswith("--")), param.opts[0])


def _values(param: click.Parameter) -> str:
    """`one of text, json`"""
    kind = param.type
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    if isinstance(kind, click.IntRange) and kind.max is None:
        return f"a whole number of {kind.min} or more"
    if isinstance(kind, click.IntRange):
        return f"a whole number from {kind.min} to {kind.max}"
    return "a path" if isinstance(kind, click.Path) else "a value"
