"""The process of `gpuwatch replay`: runs a captured forward as it was and in other dtypes, and writes what came out.

Its one argument is a JSON value: a ReplayRequest. Code of the capture's (the class of its module, objects in pickles)
runs with `trust` alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...core.codes import ExitCode
from ...core.guest.own_imports import path_as_given


class ReplayRequest(msgspec.Struct, frozen=True):
    """What the command asks for."""

    path: str
    out: str
    """The file to write the ReplayAnswer into: the forward itself may print."""
    device: str
    """`cpu`, the type of a GPU, or "" for the one that it ran on, if that is here."""
    dtypes: list[str]
    trust: bool


class ReplayRow(msgspec.Struct, frozen=True):
    """One run of the forward."""

    dtype: str
    value: str
    """Its output: `finite`, `nan`, `+inf`, `-inf`; "" if it raised."""
    abs_max: float | None = None
    operation: str = ""
    """The first that made a non-finite value of finite ones: `aten.mul.Tensor`."""
    place: str = ""
    """`model.py:87: scores = q @ k`"""
    note: str = ""
    """Why there is no output, or no operation."""


class ReplayAnswer(msgspec.Struct, frozen=True):
    """What came out of it. `refused`: nothing ran, and why."""

    refused: str = ""
    needs_trust: bool = False
    title: str = ""
    notes: list[str] = []
    rows: list[ReplayRow] = []


def main() -> int:
    """Write the answer."""
    request = msgspec.json.decode(sys.argv[1], type=ReplayRequest)
    path_as_given()
    from . import reproduce

    try:
        answer = _answer(request)
    except reproduce.CaptureError as error:
        answer = ReplayAnswer(refused=str(error))
    except BaseException as error:  # what it imports may raise anything, and a damaged capture has anything
        answer = ReplayAnswer(refused=f"{type(error).__name__}: {error}")
    Path(request.out).write_bytes(msgspec.json.encode(answer))
    return ExitCode.CLEAN


def _answer(request: ReplayRequest) -> ReplayAnswer:
    import torch

    from ..device.accelerator import built_gpu
    from . import (
        forward_thread,  # noqa: F401  # before the capture's folders are on sys.path
        reproduce,
    )

    version = tuple(int(part) for part in torch.__version__.split(".")[:2] if part.isdigit())
    if not request.trust and version < (2, 6):  # CVE-2025-32434: a file may run code in spite of weights_only
        return ReplayAnswer(f"torch {torch.__version__} cannot read a file without trusting it (2.6 can)", True)
    path = Path(request.path)
    capture = reproduce.load(path)
    why = reproduce.needs_trust(capture)
    if why and not request.trust:
        return ReplayAnswer(why, True)
    gpu = built_gpu()
    if gpu is not None and not gpu.count():
        gpu = None
    if request.device not in ("", "cpu") and gpu is None:
        return ReplayAnswer(f"expected a GPU for --device {request.device}, found none that torch can use")
    first = next((tensor.split()[-1] for tensor in capture["tensors"]), "cpu")
    device = request.device or (gpu.type if gpu is not None and first.startswith(gpu.type) else "cpu")
    sys.argv = [capture["source"]["file"]]
    own = ", ".join([f"autocast {str(dtype).removeprefix('torch.')}" for dtype in capture["autocast"].values()])
    notes = list(capture["notes"])
    if capture["rng"] is None:
        notes.append("the random numbers of its call are not known: dropout may drop others")
    rows = [_row(path, device, f"as captured ({own})" if own else "as captured", "")]
    rows += [_row(path, device, dtype, dtype) for dtype in request.dtypes]
    title = f"{capture['name'] or '(root)'} ({capture['class']}) of rank {capture['rank']}, on {device}"
    return ReplayAnswer(title=title, notes=notes, rows=rows)


def _row(path: Path, device: str, title: str, dtype: str) -> ReplayRow:
    """Run it. Each run loads the file anew: the last one may have changed what it held."""
    import torch

    from ..record.names import outputs_of
    from . import reproduce
    from .forward_thread import explain
    from .operands import numbers_of

    try:
        capture = reproduce.load(path, device)
        call = reproduce.rebuild(capture, device)
        if dtype:
            call = reproduce.as_dtype(call, getattr(torch, dtype))
        outputs: list[Any] = []
        call.module.register_forward_hook(lambda module, args, output: outputs.append(output))
        with reproduce.surroundings(capture, device, autocast=not dtype):
            found = explain(call.module, *call.args, **call.kwargs)
    except reproduce.CaptureError:
        raise
    except BaseException as error:  # SystemExit, too: the script's code runs here
        return ReplayRow(title, "", note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    leaves = [leaf for _, leaf in outputs_of(outputs[0]) if isinstance(leaf, torch.Tensor)] if outputs else []
    numbers = [read for read, _ in map(numbers_of, leaves) if read.value]
    bad = next((read.value for read in numbers if read.value != "finite"), "finite")
    largest = max((read.abs_max for read in numbers if read.abs_max is not None), default=None)
    if found.operation is None:
        return ReplayRow(title, bad, largest, note=found.unknown)
    at = found.operation
    is_own = at.file in ("", sys.modules["__main__"].__file__)  # torch's code alone ran
    place = f"in `{at.module or 'its root'}`" if is_own else f"{Path(at.file).name}:{at.line}: {at.code}"
    return ReplayRow(title, bad, largest, at.op, place)
