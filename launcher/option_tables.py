"""The options of `gpuwatch launch`, `check` and `run`: a worker's stand in core/settings.py, all others here."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from ..core.host import host_name
from ..core.settings import OnHang, PreflightMode, WorkerOption, WorkerSettings
from . import option_types as parsers
from .saved_settings import SHOW

OptionTable = Mapping[str, Mapping[str, Any]]
"""By name, what argparse's `add_argument` takes."""

AGENT_OPTIONS: OptionTable = {
    "--max-frames": {
        "type": parsers.at_least(1, "a number of frames"),
        "default": 21,
        "metavar": "N",
        "help": "frames that the report shows for each rank (%(default)s)",
    },
    "--hang-timeout": {
        "type": parsers.hang_timeout,
        "metavar": "DURATION",
        "help": "when a rank has made no progress for this long, such as 120 or 2m (auto: ten times its slowest recent "
        "step, and at least 60; 300 until three steps are known; 0: never), ask all ranks for their positions and "
        "report which one the others wait for; the limit is four times as long before the first batch, and at least "
        "three times the longest pause after which the rank moved again",
    },
    "--on-hang": {
        "choices": get_args(OnHang),
        "default": "auto",
        "help": "when no rank makes progress any more: only report it, or end the ranks, too (--max-restarts can "
        "start them again); auto (the default) ends them only if no rank can go on by itself, as in a deadlock",
    },
    "--telemetry": {
        "type": parsers.telemetry,
        "default": 5.0,
        "metavar": "DURATION",
        "help": "how often to read each node's figures: processors, memory, network, disks, GPUs (%(default)g; 0: "
        "never); the report shows what stood out around the event",
    },
}
COLLECTOR_OPTIONS: OptionTable = {
    "--runs-dir": {
        "type": parsers.runs_folder,
        "default": "gpuwatch-runs",
        "metavar": "DIR",
        "help": "folder for the runs' folders, on the head node (%(default)s)",
    },
    "--run-name": {
        "type": parsers.run_name,
        "metavar": "NAME",
        "help": "name of the run's folder (the time and four random letters)",
    },
    "--collector": {
        "type": parsers.address,
        "metavar": "tcp://HOST:PORT",
        "help": "use a collector that was started by hand (gpuwatch collect), instead of starting one on the head node",
    },
    "--collector-port": {
        "type": parsers.port,
        "metavar": "PORT",
        "help": "port of the collector on the head node (several nodes: the rendezvous port + 1; one node: any free "
        "one)",
    },
    "--secret-file": {
        "metavar": "FILE",
        "help": "file with the secret for the encryption, the same on all nodes (or the variable GPUWATCH_SECRET)",
    },
}
METRICS_OPTIONS: OptionTable = {
    "--metrics-port": {
        "type": parsers.metrics_address,
        "metavar": "[HOST:]PORT",
        "help": "on the head node, serve Prometheus metrics on this port of 127.0.0.1, or of HOST, another address "
        "of that node (0.0.0.0: all); needs the extra `metrics`",
    },
}
NOTIFY_OPTIONS: OptionTable = {
    "--notify": {
        "type": parsers.notify_target,
        "action": "append",
        "default": None,
        "metavar": "URL|COMMAND",
        "help": "at the verdict, a stall and a forecast, post a small JSON to this address (Slack, Discord, any "
        "webhook) or run this command with the JSON on its stdin, on the head node; may be repeated (or the variable "
        "GPUWATCH_NOTIFY, which keeps an address out of command lines)",
    },
}
SAVED_OPTIONS: OptionTable = {
    SHOW: {
        "action": "store_true",
        "help": "print each option of gpuwatch with its value and where that is from, and end",
    },
}
LAST_OPTIONS = (COLLECTOR_OPTIONS, METRICS_OPTIONS, NOTIFY_OPTIONS, SAVED_OPTIONS)
LAUNCH_OPTIONS: OptionTable = {
    "--preflight": {
        "choices": get_args(PreflightMode),
        "default": "quick",
        "help": "before the script starts, test memory, consistency and communication of every rank (quick), as "
        "gpuwatch check does (full), or nothing (off)",
    },
}
CHECK_OPTIONS: OptionTable = {
    "--quick": {
        "action": "store_const",
        "const": "quick",
        "default": "full",
        "dest": "preflight",
        "help": "run only the tests that every launch runs: a few seconds",
    },
    "--force": {
        "action": "store_true",
        "help": "start more ranks than this host's cores and memory carry, too",
    },
    "--slurm": {
        "action": "store_true",
        "help": "submit the check as a SLURM job, with sbatch's options (gpuwatch submit --help)",
    },
    "--format": {
        "choices": ["text", "json"],
        "default": "text",
        "help": "what to print on stdout: text, or report.json",
    },
}
RUN_OPTIONS: OptionTable = {
    "--nnodes": {
        "metavar": "N",
        "help": "number of nodes, each with its own gpuwatch run (default: from the scheduler or MPI, else 1)",
    },
    "--node-rank": {
        "type": int,
        "metavar": "N",
        "help": "rank of this node; node 0 has the report (default: from the scheduler or MPI)",
    },
    "--head": {
        "metavar": "HOST[:PORT]",
        "help": "the first node, under a name by which all others reach it (default: from the scheduler, or "
        "MASTER_ADDR)",
    },
    "--other-hosts": {
        "action": "store_true",
        "help": "let ranks join that the command starts on other hosts (Ray, DeepSpeed, mpirun, ssh): they need the "
        "variables that gpuwatch env prints; --head gives the name by which they reach this host",
    },
    "--preflight": {
        "choices": get_args(PreflightMode),
        "default": "off",
        "help": "when all ranks have reached their first init_process_group, before it runs, test memory, consistency "
        "and communication (quick), as gpuwatch check does (full), or nothing (off, the default)",
    },
}


def _worker_options(part: str | None = None) -> Iterator[tuple[str, str, WorkerOption, msgspec.structs.FieldInfo]]:
    """(field, destination, option, field info) of the options of a worker, or of a part of them."""
    for field in _worker_fields():
        if get_origin(field.type) is Annotated and (option := get_args(field.type)[1]).part == (part or option.part):
            yield field.name, field.name.removesuffix("_s"), option, field


@cache
def _worker_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """Read from the annotations, which takes a millisecond."""
    return msgspec.structs.fields(WorkerSettings)


def options_of_workers(part: str) -> OptionTable:
    """Those of a part of the settings: watching, preflight or failure."""
    table: dict[str, dict[str, Any]] = {}
    for _, name, option, field in _worker_options(part):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        # argparse would read an empty text as if it had been typed
        settings = {"help": option.help, "default": default if default != "" else None}
        table["--" + name.replace("_", "-")] = settings
        kind = get_args(field.type)[0]
        if option.metavar is not None:
            settings |= {"metavar": option.metavar, "type": _reader(kind, option)}
            settings |= {"action": "append"} if option.repeats else {}
        else:
            settings |= {"choices": words} if (words := get_args(kind)) else {"action": "store_true"}
    return table


def _reader(kind: Any, option: WorkerOption) -> Any:
    if option.form:
        return getattr(parsers, option.form)
    if kind is float:
        return parsers.number(option.least, option.most, option.of)
    return parsers.at_least(option.least, option.of)


def worker_settings(args: argparse.Namespace, scratch: Path, logs: Path) -> WorkerSettings:
    """`scratch` holds the recorders of this launch, `logs` of the run's folder the files of `--nccl-debug`.

    `logs` is `scratch` on a node that does not know the run's folder: it has one of its own for `--capture`.
    """
    given: dict[str, Any] = {field: getattr(args, name, None) for field, name, _, _ in _worker_options()}
    given = {field: value for field, value in given.items() if value is not None}
    given["nccl_debug"] = str(logs) if args.nccl_debug else ""
    own = Path(args.runs_dir).absolute() / f"capture-{host_name()}-{secrets.token_hex(4)}"
    given["capture"] = str(logs.parent if logs != scratch else own) if getattr(args, "capture", False) else ""
    return WorkerSettings(str(scratch), check_only=args.check_only, preflight=args.preflight, **given)
