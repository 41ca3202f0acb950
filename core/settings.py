"""What `gpuwatch launch` tells its workers: one JSON value in one environment variable."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from .text import carried, given_back

VARIABLE = "GPUWATCH_WORKER"
"""The worker removes it from its environment, so that the script's own child processes do not act as workers."""

OnOverflow = Literal["abort", "continue"]
Watched = Literal["forward", "grads", "weights", "comms"]
Explain = Literal["auto", "off"] | int
"""An int is a batch number."""
Every = Literal["auto"] | int
"""An int is a number of batches."""
OnHang = Literal["report", "auto", "abort"]
OnPreflightFailure = Literal["stop", "continue"]
PreflightMode = Literal["full", "quick", "off"]


@dataclass(frozen=True)
class WorkerOption:
    """How a user sets a field of WorkerSettings. launcher/options.py makes the parsers of these.

    A field without a `metavar` is a switch, or one of the words of its type.
    """

    help: str
    """As argparse takes it: %(default)s stands for the default, %% for a percent sign."""
    metavar: str | None = None
    least: int = 0
    most: float = 0.0
    of: str = ""
    """What a number counts, for the sentence that refuses another one."""
    form: str = ""
    """What reads the text in launcher/option_types.py, where it is no number between `least` and `most`."""
    repeats: bool = False
    part: Literal["watching", "preflight", "failure"] = "watching"
    in_python: str | None = None
    """What `gpuwatch.watch` has in place of a keyword of this name, "" for nothing; None: it has the keyword."""


_OfPreflight = partial(WorkerOption, part="preflight")


class WorkerSettings(msgspec.Struct, frozen=True):
    """How a worker behaves. Batches are 0-indexed; times are seconds.

    A field with a WorkerOption is an option of `gpuwatch launch` and `run`: its name, type, default and help stand here
    and nowhere else.
    """

    recorder_dir: str
    round: str = "0"
    """Names this rendezvous. It is the same on every node and changes with every restart."""
    attempt: int = 0
    check_only: bool = False
    """End after the preflight: there is no script."""
    node_hosts: list[str] = []
    """The hosts of all nodes by node rank, as the launches have sent them to each other; [] if unknown."""
    meets_at: str = ""
    """HOST:PORT at which ranks of several hosts meet for the preflight under `gpuwatch run`; "" if all are of one."""
    preflight: PreflightMode = "quick"

    on_overflow: Annotated[
        OnOverflow, WorkerOption("when a rank finds inf or nan: end the job (the default), or record it and train on")
    ] = "abort"
    explain: Annotated[
        Explain,
        WorkerOption(
            "at an overflow that ends the job, run its forward, or its forward and backward, once more to find the "
            "operation and the line: auto (the default) where that is safe, or off; a batch number N: run that batch "
            "with every operation watched, which is slow, and finds them where they cannot run again, too",
            "auto|off|N",
            form="explained",
        ),
    ] = "auto"
    rank: Annotated[
        int | None,
        WorkerOption("with --explain N: watch the operations of this rank alone", "R", of="a rank", in_python=""),
    ] = None
    capture: Annotated[
        str,
        WorkerOption(
            "at an overflow in a forward that ends the job, write that forward to overflow.pt in the run's folder: the "
            "module with its weights, and the data it was handed; gpuwatch replay runs it again"
        ),
    ] = ""
    """That folder; "" writes none."""
    capture_max: Annotated[
        int, WorkerOption("write nothing larger than this with --capture (2GiB)", "SIZE", form="size")
    ] = 2 << 30
    watch: Annotated[
        tuple[Watched, ...],
        WorkerOption(
            "what to watch: forward (inputs and outputs), grads, weights, comms (what passes between ranks); "
            "default: all",
            "WHAT,WHAT",
            form="watched",
        ),
    ] = ("forward", "grads", "weights", "comms")
    modules: Annotated[
        list[str],
        WorkerOption(
            "record frames only of modules whose name matches, such as 'encoder.*'; may be given several times",
            "PATTERN",
            form="module_pattern",
            repeats=True,
        ),
    ] = []
    every: Annotated[
        Every,
        WorkerOption(
            "inspect one batch in N (%(default)s); in the others, read only what the model returns and the gradient of "
            "its first parameter. auto: measure what watching costs in the first steps, and where that is more than "
            "5 %% of a step, choose N",
            "N|auto",
            least=1,
            of="a number of batches",
            form="every",
        ),
    ] = 1
    after_overflow: bool = False
    """An earlier attempt of this node has ended in an overflow."""
    sync: Annotated[
        bool,
        WorkerOption(
            "check and raise in the failing module itself, so that the traceback shows the line; waits for the device"
        ),
    ] = False
    guard_optimizer: Annotated[
        bool,
        WorkerOption(
            "check all gradients before each optimizer step and let no step use a non-finite one; waits for the device"
        ),
    ] = False
    ignore: Annotated[
        list[str],
        WorkerOption(
            "raise no alarm for modules whose name matches, or 'MODULE:ROLE' for one row; the report counts them",
            "PATTERN",
            form="row_pattern",
            repeats=True,
        ),
    ] = []
    near_overflow: Annotated[
        float,
        WorkerOption(
            "warn if an output comes within this many powers of two of its dtype's maximum (%(default)g; 0: never)",
            "POWERS",
            most=64,
            of="powers of two",
        ),
    ] = 1.0
    underflow_share: Annotated[
        float,
        WorkerOption(
            "warn if at least this share of the values of a low-precision tensor is subnormal (%(default)g; 1: never)",
            "SHARE",
            most=1,
            of="a share",
        ),
    ] = 0.1
    scaler_skips: Annotated[
        int,
        WorkerOption(
            "report inf in gradients as an overflow if a GradScaler has skipped N steps in a row (%(default)s)",
            "N",
            least=1,
            of="a number of steps",
        ),
    ] = 12
    state_every: Annotated[
        int,
        WorkerOption(
            "after an optimizer's first step, one in N of the others (%(default)s; 0: never) and the last one, read "
            "the state that it keeps in 16 bits or less: inf there stops all updates",
            "N",
            of="a number of steps",
        ),
    ] = 50
    trace_batches: Annotated[
        list[int],
        WorkerOption(
            "keep all frames of these batches (the first is 0) in the report",
            "N,N",
            form="batches",
            in_python="frames(N) of the watch",
        ),
    ] = []
    abort_after_batch: Annotated[
        int | None,
        WorkerOption("end the job, as a clean one, after this batch", "N", of="a batch number", in_python=""),
    ] = None

    preflight_timeout_s: Annotated[
        float,
        _OfPreflight(
            "how long to wait for all ranks to arrive, such as 90 or 5m (%(default)g seconds); no stage of the "
            "preflight gets more than this",
            "DURATION",
            form="seconds",
        ),
    ] = 300.0
    """On a cold shared file system the import of torch alone can take minutes."""
    alloc: Annotated[
        str,
        _OfPreflight(
            "memory to write and read back: a share of what is free, 80%%, or a size, 256MiB (full: 80%% on CUDA, "
            "256MiB on the CPU; quick: 10%%, at most 1GiB, and 64MiB)",
            "AMOUNT",
            form="amount",
        ),
    ] = ""
    bandwidth_size: Annotated[
        int, _OfPreflight("largest size of the bandwidth test (256MiB on CUDA, 16MiB on the CPU)", "SIZE", form="size")
    ] = 0
    min_busbw: Annotated[
        float,
        _OfPreflight(
            "fail if the bus bandwidth at the largest size, as nccl-tests defines it, is below this (0: never)",
            "GB/S",
            most=1e6,
            of="a bandwidth in GB/s",
        ),
    ] = 0.0
    slow_factor: Annotated[
        float,
        _OfPreflight(
            "warn about a device that is this many times slower than the median of its type (%(default)g)",
            "FACTOR",
            least=1,
            most=1e3,
            of="a factor",
        ),
    ] = 1.5
    nccl_debug: Annotated[
        str, _OfPreflight("write NCCL's log of the preflight to one file per rank, in logs/ of the run's folder")
    ] = ""
    """That folder; "" writes none."""
    health_thresholds: Annotated[
        str,
        _OfPreflight(
            "TOML or JSON file with GPU health limits, in place of the built-in ones", "FILE", form="thresholds"
        ),
    ] = ""
    on_preflight_failure: Annotated[
        OnPreflightFailure,
        WorkerOption(
            "when the preflight fails: end the job with exit code 3 (stop, the default), or record it and train",
            part="failure",
        ),
    ] = "stop"

    def to_json(self) -> str:
        """The value of the environment variable: ASCII, as a locale may have nothing else."""
        return json.dumps(carried(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes) -> WorkerSettings:
        """What `to_json` has made."""
        settings = msgspec.json.decode(data, type=cls)
        return given_back(settings, msgspec.json.encode(settings), cls)

    @classmethod
    def from_environment(cls) -> WorkerSettings | None:
        """Take the settings out of the environment; None when the process was not started by a launch."""
        value = os.environ.pop(VARIABLE, None)
        return cls.from_json(value.encode()) if value is not None else None


_ABORTING = {"sync": "raises in the failing module", "capture": "writes when the run aborts"}
"""Options for which an overflow must abort, and what they do then."""


def wrong_together(given: Any) -> str:
    """What is wrong with `given`'s options, each right by itself, in the command line's words; "" if nothing is."""
    for name, does in _ABORTING.items():
        if getattr(given, name) and given.on_overflow == "continue":
            return f"expected --on-overflow abort with --{name}, which {does}, found continue"
    return ""


def as_keywords(text: str) -> str:
    """Advice to a user of `gpuwatch.watch`: options become keywords, except in code between backticks.

    >>> as_keywords("`f(--sync)`: use --sync a second time, --every 1 (--modules) or --watch grads,weights.")
    '`f(--sync)`: use sync=True a second time, every=1 (modules=) or watch=["grads", "weights"].'
    """
    return _FLAG.sub(_as_keyword, text)


_FLAG = re.compile(
    r"`(?!--)[^`]*`|(?:gpuwatch launch )?(?<![\w-])--(?P<option>[a-z][a-z-]*)(?P<value> (?:'[^']*'|\w[\w.,]*\b))?"
)


def _as_keyword(found: re.Match[str]) -> str:
    name, given = (found["option"] or "").replace("-", "_"), found["value"] or ""
    kind, option = worker_options().get(name, (None, None))
    if option is None or option.part != "watching" or option.in_python == "":
        return found[0]
    if option.in_python is not None:
        return option.in_python
    if kind is bool:
        return f"{name}=True{given}"
    value, words = given.strip(), given.strip().split(",")
    if value[:1] in {*"'0123456789"} or value.replace(",", "").isupper():  # as it is, or what stands for it
        return f"{name}=[{value}]" if get_origin(kind) is list else f"{name}={value}"
    if not set(words) <= set(_words(kind)):
        return f"{name}={given}"
    return f"{name}={json.dumps(words if get_origin(kind) is tuple else value)}"


@lru_cache(maxsize=1)
def worker_options() -> dict[str, tuple[Any, WorkerOption]]:
    """Field -> (type, declaration) of each option."""
    hints = get_type_hints(WorkerSettings, include_extras=True)
    found = {name: get_args(hint) for name, hint in hints.items()}
    return {name: parts for name, parts in found.items() if parts and isinstance(parts[-1], WorkerOption)}


def _words(kind: Any) -> list[str]:
    return [kind] if isinstance(kind, str) else [word for part in get_args(kind) for word in _words(part)]
