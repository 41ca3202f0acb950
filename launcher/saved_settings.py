"""Options that a user has saved: in variables `GPUWATCH_EVERY`, in `gpuwatch.toml`, in `[tool.gpuwatch]` of
`pyproject.toml`.

The command line comes first, then the variable, then the file. The file is that of the working folder or of the nearest
folder above it, as far as these belong to the user: another user's file could name a command to run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.codes import Code, coded
from ..core.errors import UsageError
from ..core.misspelled import did_you_mean, mistyped
from ..core.secrets import masked_text
from ..core.text import toml_of
from .option_types import without_addresses

RUNS_DIR = "gpuwatch-runs"
SHOW = "--show-settings"
_COMMANDS = ("launch", "run", "check")
_FILES = (("gpuwatch.toml", ()), ("pyproject.toml", ("tool", "gpuwatch")))
"""By name, the tables within each that hold the settings."""


@dataclass(frozen=True, slots=True)
class SavedOption:
    """A value as argparse would have it, and as it was written."""

    value: Any
    text: str
    source: str
    """`gpuwatch.toml`, `GPUWATCH_EVERY`."""


def parse_with_saved(
    make_parser: Callable[[], argparse.ArgumentParser], arguments: list[str], known: Collection[str]
) -> argparse.Namespace:
    """The command line's options, completed by the saved ones, with a line for the user in `notes` for each source.

    `known` are the options of all commands, as `every`. Raises UsageError; SystemExit after `--show-settings`.
    """
    parser = make_parser()
    own = _own_options(parser)
    unknown = unknown_variables(known, os.environ)
    saved = _saved_options(own, parser.prog.split()[-1], known, os.environ)
    if _is_asked(arguments):
        line = [*arguments, *([] if parser.prog.endswith("check") else ["-"])]  # there may be no script
        if (args := parser.parse_args(line)).show_settings:
            sys.stdout.write(_table(own, saved, given_options(make_parser(), line, {}), args))
            parser.exit()
    args = parser.parse_args(arguments)
    said = given_options(make_parser(), arguments, {}) if saved else set()
    used = {name: option for name, option in saved.items() if own[name].dest not in said}
    for name, option in used.items():
        setattr(args, own[name].dest, option.value)
    sources = dict.fromkeys(option.source for option in used.values())
    args.notes = [
        f"from {source}: " + " ".join(f"--{name} {one.text}" for name, one in used.items() if one.source == source)
        for source in sources
    ]
    torchruns = [action.dest.upper() for action in parser._actions]
    args.notes += [
        coded(f"{name} is set, and gpuwatch reads no such variable{_near(name, known, torchruns)}", Code.SETTINGS_FILE)
        for name in unknown
    ]
    return args


def _near(variable: str, known: Collection[str], torchruns: Collection[str]) -> str:
    """`; near it: GPUWATCH_TRACE_BATCHES`, for GPUWATCH_BATCH: what has its word."""
    word = variable.removeprefix(_PREFIX)
    own = [name for option in known if word in (name := _variable(option)).removeprefix(_PREFIX)]
    near = sorted(own) or sorted(f"PET_{name}, torchrun's" for name in torchruns if word in name and name not in own)
    return f"; near it: {', '.join(near[:_MOST_NEAR])}" if near and len(word) >= _LEAST_LETTERS else ""


def given_options(parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]) -> set[str]:
    """What was said: on the command line, or in torchrun's own variables (PET_NNODES for --nnodes).

    The parser is of no use afterwards: it has lost its defaults.
    """
    dests = {action.dest for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    said = set(vars(parser.parse_known_args(arguments)[0]))
    return said | {dest for dest in dests if f"PET_{dest.upper()}" in environ}


def _is_asked(arguments: list[str]) -> bool:
    return any(word.replace("_", "-") == SHOW for word in arguments)


def saved_runs_dir() -> str:
    """The folder of the runs: the variable's, the file's, or the default."""
    if variable := os.environ.get("GPUWATCH_RUNS_DIR"):
        return variable
    path, table = _nearest_file(Path.cwd())
    written = table.get("runs-dir", table.get("runs_dir"))
    return _from(path, written) if written else RUNS_DIR


def _from(file: Path, written: Any) -> str:
    """A path in a file: from the file's folder, if that is not the working folder."""
    return str(written) if file.parent == Path.cwd() else str(file.parent / str(written))


def _own_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """By name, such as `every`: what is in the group "gpuwatch"."""
    groups = (group for group in parser._action_groups if group.title == "gpuwatch")
    return {action.option_strings[0][2:]: action for group in groups for action in group._group_actions}


def _saved_options(
    own: Mapping[str, argparse.Action], command: str, known: Collection[str], environ: Mapping[str, str]
) -> dict[str, SavedOption]:
    found: dict[str, SavedOption] = {}
    path, table = _nearest_file(Path.cwd())
    for name, written in _flat(table, command, known, path).items():
        if (action := own.get(name)) is not None:
            value = _from(path, written) if action.metavar in ("DIR", "FILE") else written
            found[name] = _option(action, value, path.name, f"{path}: {name}")
    for name, action in own.items():
        variable = _variable(name)
        if _of_kubernetes(variable, environ):
            continue
        if (text := environ.get(variable)) and action.dest != "show_settings":
            switch = {"1": True, "true": True, "0": False, "false": False} if action.nargs == 0 else {}
            found[name] = _option(action, switch.get(text.lower(), text), variable, variable)
    return found


_PREFIX = "GPUWATCH_"
_MOST_NEAR, _LEAST_LETTERS = 3, 4
_NO_OPTIONS = {"WORKER", "RUN", "JOIN", "DEVICE", "LATE_DEVICE", "SECRET", "NOTIFY"}
"""What else gpuwatch reads of the environment, or gives to its own processes."""


def _variable(option: str) -> str:
    return _PREFIX + option.upper().replace("-", "_")


def unknown_variables(known: Collection[str], environ: Mapping[str, str]) -> list[str]:
    """Those with gpuwatch's prefix that it does not read. Raises UsageError for one that is like one that it does."""
    words = [*(_variable(option).removeprefix(_PREFIX) for option in known), *_NO_OPTIONS]
    unknown = [name for name in sorted(environ) if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in words]
    unknown = [name for name in unknown if not _of_kubernetes(name, environ)]
    for name in unknown:
        if close := mistyped(name.removeprefix(_PREFIX), words):  # without the prefix, which makes all alike
            raise UsageError(
                Code.SETTINGS_FILE,
                f"{name}: expected a variable that gpuwatch reads, found no such one; did you mean {_PREFIX}{close}? "
                f"(all options: gpuwatch launch {SHOW})",
            )
    return unknown


def _of_kubernetes(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether it tells of a service: for one named `gpuwatch-collector`, each container of its namespace gets
    GPUWATCH_COLLECTOR_SERVICE_HOST, and also GPUWATCH_COLLECTOR_PORT=tcp://10.0.0.11:29401."""
    host = "_SERVICE_HOST"
    services = (name.removesuffix(host) for name in environ if name.startswith(_PREFIX[:-1]) and name.endswith(host))
    return any(variable.startswith((f"{of}_SERVICE_", f"{of}_PORT_")) or variable == f"{of}_PORT" for of in services)


def _nearest_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The nearest file that has settings, and these; no settings where there is none."""
    for at in (folder, *folder.parents):
        if at != folder and at.stat().st_uid != os.getuid():
            break
        for name, tables in _FILES:
            path = at / name
            if (table := _read(path, tables)) is not None:
                return path, table
    return folder / _FILES[0][0], {}


def _read(path: Path, tables: tuple[str, ...]) -> dict[str, Any] | None:
    """None where there is no such file, or it has no such table."""
    try:
        text = path.read_text()
        if ".".join(tables) not in text:
            return None
        found: Any = toml_of(text, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            Code.SETTINGS_FILE, f"{path}: expected a TOML file that can be read, found: {error}"
        ) from error
    for name in tables:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _flat(table: dict[str, Any], command: str, known: Collection[str], path: Path) -> dict[str, Any]:
    """The settings for all commands, replaced by those of the table of this one. Raises UsageError for unknown ones."""
    parts = [{name: value for name, value in table.items() if name not in _COMMANDS}]
    parts += [part for name in _COMMANDS if isinstance(part := table.get(name, {}), dict)]
    for name in (name.replace("_", "-") for part in parts for name in part):
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(
                Code.SETTINGS_FILE, f"{path}: expected an option of gpuwatch without its dashes, found {name!r}{hint}"
            )
    merged = {**parts[0], **(table.get(command) or {})}
    return {name.replace("_", "-"): value for name, value in merged.items()}


def _option(action: argparse.Action, written: Any, source: str, where: str) -> SavedOption:
    """Raises UsageError for what the option would not take."""
    if action.nargs == 0:
        if not isinstance(written, bool):
            raise UsageError(Code.SETTINGS_FILE, f"{where}: expected true or false, found {written!r}")
        return SavedOption(action.const if written else action.default, str(written).lower(), source)
    words = [str(word) for word in written] if isinstance(written, list) else [str(written)]
    read = action.type if callable(action.type) else str
    repeats = isinstance(action, argparse._AppendAction)
    try:
        values = [read(word) for word in (words if repeats else [",".join(words)])]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(Code.SETTINGS_FILE, f"{where}: {error}") from error
    if action.choices is not None and values[0] not in action.choices:
        raise UsageError(
            Code.SETTINGS_FILE, f"{where}: expected one of {', '.join(map(str, action.choices))}, found {values[0]!r}"
        )
    return SavedOption(values if repeats else values[0], ",".join(map(_without_secret, words)), source)


def _without_secret(word: str) -> str:
    return masked_text(without_addresses([word], [word])[0])


def _table(
    own: Mapping[str, argparse.Action], saved: Mapping[str, SavedOption], said: set[str], args: argparse.Namespace
) -> str:
    """One line for each option: its name, its value, and where that is from."""
    rows = []
    for name, action in own.items():
        if name == SHOW[2:]:
            continue
        given = getattr(args, action.dest)
        value, source = _shown(bool(given) if action.nargs == 0 else given), "default"
        if action.dest in said:
            source = "command line"
        elif name in saved:
            value, source = saved[name].text, saved[name].source
        rows.append((name, value, source))
    wide = [max(len(row[at]) for row in rows) for at in (0, 1)]
    return "".join(f"{name:{wide[0]}}  {value:{wide[1]}}  {source}\n" for name, value, source in rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(_without_secret(str(word)) for word in value) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
