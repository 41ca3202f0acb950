"""Turns NVML's answers into findings. A fact that is not known is `unknown`, which is neither good nor bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..codes import Code
from ..errors import UsageError
from ..preflight import Grade, PreflightFinding
from ..text import toml_of
from .limits import CHECKS, DEFAULTS, LOADED_FACTS, CheckLimits, HealthCheck
from .nvml_child import NO_ANSWER_YET, ChildAnswer, GpuReading

STAGE = "health"

RECOVERY_ACTIONS = {
    1: ("a reset of the GPU", "End all processes on the GPU, reset it with nvidia-smi -r, and use it again."),
    2: ("a reboot of the node", "Reboot the node: its operating system may be in an inconsistent state."),
    3: (
        "the end of all peer-to-peer traffic",
        "End all processes that use peer-to-peer traffic, then look at nvidia-smi -q again: it will ask for more.",
    ),
    4: (
        "a reset after its jobs are drained",
        "Give the GPU no new job, and reset it with nvidia-smi -r when the present ones are done.",
    ),
    5: ("a recovery of the IMEX domain", "Recover the IMEX domain of the node."),
    6: ("a reset of its PCIe bus", "Reset the PCIe bus of the GPU, or reboot the node."),
    7: ("a reboot of the system", "Reboot the node."),
}
"""nvmlDeviceGpuRecoveryAction_t: in words, and what to do."""


@dataclass(frozen=True)
class HealthGrade:
    """One check of one GPU."""

    check: str
    grade: Grade
    sentence: str
    next: str = ""
    optional: bool = False
    """If it is unknown, that is no finding."""


def judge(reading: GpuReading, limits: Mapping[str, CheckLimits]) -> list[HealthGrade]:
    """Every check that means something for this GPU, in the table's order."""
    facts = {"lost": 0, **reading.values}
    judged = []
    for check in CHECKS:
        missing = [name for name in check.needs if name not in facts]
        if not missing:
            judged.append(_compare(check, check.value_of(facts), limits[check.name], reading))
        elif check.moot_with not in facts:
            why, optional = reading.unknown.get(missing[0], NO_ANSWER_YET), check.optional
            if missing[0] in LOADED_FACTS and missing[0] not in reading.unknown:
                why, optional = "not under load", True
            judged.append(HealthGrade(check.name, "unknown", why, optional=optional))
    return judged


def _compare(check: HealthCheck, value: int, limits: CheckLimits, reading: GpuReading) -> HealthGrade:
    grade: Grade = (
        "fail" if check.reaches(value, limits.fail) else "warn" if check.reaches(value, limits.warn) else "ok"
    )
    sentence = check.what if check.flag else f"{check.what}: {value}"
    found = HealthGrade(check.name, grade, sentence, check.next)
    if check.name == "recovery_action" and value in RECOVERY_ACTIONS:
        action, todo = RECOVERY_ACTIONS[value]
        return replace(found, sentence=f"the driver asks for {action}", next=todo)
    if check.name == "other_processes" and reading.processes:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in reading.processes[:5])
        return replace(found, sentence=f"{sentence}: {names}")
    return found


def grade(
    reading: GpuReading, limits: Mapping[str, CheckLimits], ranks: list[int], host: str
) -> list[PreflightFinding]:
    """One finding for each thing that is wrong with a GPU, and one for all that is unknown. Empty: the GPU is well."""
    who = f"{reading.name or 'GPU'} {reading.device} on {host}"
    judged = judge(reading, limits)
    about = partial(PreflightFinding, STAGE, subject="gpu", ranks=ranks, hosts=[host], device=reading.device)
    findings = [
        about(grade=one.grade, sentence=f"{who}: {one.sentence}", next=one.next, code=Code.GPU_UNHEALTHY)
        for one in judged
        if one.grade in ("warn", "fail")
    ]
    unknown = [one for one in judged if one.grade == "unknown" and not one.optional]
    if unknown:
        sentence = f"{who}: NVML does not report {_reasons(unknown)}"
        todo = "Only root may read some of these values; if they matter, ask the node's administrator."
        todo = todo if any("Permission" in one.sentence for one in unknown) else ""
        findings.append(about(grade="unknown", sentence=sentence, next=todo, code=Code.HEALTH_UNKNOWN))
    return findings


def _reasons(unknown: list[HealthGrade]) -> str:
    """`remap_failed, remap_pending (Not Supported); sram_threshold_exceeded (Insufficient Permissions)`"""
    by_reason: dict[str, list[str]] = {}
    for one in unknown:
        by_reason.setdefault(one.sentence, []).append(one.check)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def grade_answer(
    answer: ChildAnswer, device: str, limits: Mapping[str, CheckLimits], ranks: list[int], host: str
) -> tuple[list[PreflightFinding], str]:
    """Findings about one GPU from a child's answer, and one line that counts the checks."""
    reading = answer.readings.get(device)
    findings = grade(reading, limits, ranks, host) if reading is not None else []
    if answer.trouble:
        sentence = f"the health of GPU {device} on {host} is unknown: {answer.trouble}"
        known = [one for one in findings if one.grade in ("warn", "fail")]
        findings = [
            *known,
            PreflightFinding(
                STAGE, "unknown", "gpu", ranks, [host], sentence, answer.next, device, code=Code.HEALTH_UNKNOWN
            ),
        ]
    return findings, summary(reading, limits, answer)


def summary(reading: GpuReading | None, limits: Mapping[str, CheckLimits], answer: ChildAnswer) -> str:
    """`29 checks: 24 ok, 1 warn, 4 unknown: sram_threshold_exceeded (Insufficient Permissions); ...`"""
    if reading is None:
        return answer.trouble or NO_ANSWER_YET
    judged = judge(reading, limits)
    grades = [one.grade for one in judged]
    counts = [f"{grades.count(word)} {word}" for word in ("ok", "warn", "fail", "unknown") if word in grades]
    unknown = _reasons([one for one in judged if one.grade == "unknown"])
    return f"{len(grades)} checks: {', '.join(counts)}{f': {unknown}' if unknown else ''}"


# The file of --health-thresholds, which changes the table of limits.py.


def load_thresholds(path: str) -> dict[str, CheckLimits]:
    """The table's limits, replaced by those of the file; "" is no file. Raises UsageError."""
    if not path:
        return dict(DEFAULTS)
    found = _parse(Path(path))
    if not isinstance(found, dict):
        raise UsageError(Code.SETTINGS_FILE, f"expected a table per check in {path}, found {type(found).__name__}")
    limits = dict(DEFAULTS)
    for name, row in found.items():
        if name not in DEFAULTS:
            raise UsageError(
                Code.SETTINGS_FILE, f"expected checks out of {', '.join(DEFAULTS)} in {path}, found {name!r}"
            )
        limits[name] = _limits(path, name, row, limits[name])
    return limits


def _parse(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            Code.SETTINGS_FILE, f"expected a file that can be read, found {str(path)!r}: {error.strerror}"
        ) from error
    try:
        return msgspec.json.decode(data) if path.suffix == ".json" else toml_of(data.decode(), path)
    except (ValueError, msgspec.DecodeError) as error:  # of TOML, of JSON, of UTF-8
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(Code.SETTINGS_FILE, f"expected {kind} in {path}, found: {error}") from error


def _limits(path: str, name: str, row: Any, default: CheckLimits) -> CheckLimits:
    if not isinstance(row, dict) or not row or row.keys() - {"warn", "fail"}:
        found = ", ".join(map(str, row)) if isinstance(row, dict) and row else repr(row)
        raise UsageError(Code.SETTINGS_FILE, f"expected warn, fail or both for {name} in {path}, found {found}")
    limits = {"warn": default.warn, "fail": default.fail}
    for key, value in row.items():
        if value is False:
            limits[key] = None
        elif isinstance(value, int | float) and value is not True and value == value:
            limits[key] = float(value)
        else:
            raise UsageError(
                Code.SETTINGS_FILE, f"expected a number, or false for never, as {name}.{key} in {path}, found {value!r}"
            )
    return CheckLimits(**limits)
