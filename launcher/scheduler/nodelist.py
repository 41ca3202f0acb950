"""SLURM's short form of host names, written out: without `scontrol`, which a container rarely has."""

from __future__ import annotations

import itertools
import math
import re

from ...core.errors import UsageError

_ENTRY = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST = 1 << 16
"""SLURM's own limit of a range. A longer list is no node list of a job."""


def expand_nodelist(text: str) -> list[str]:
    """Host names in the order of the list, which is that of SLURM_NODEID. Raises UsageError on what is no node list.

    `gpu-[008-010,12],login1` is gpu-008, gpu-009, gpu-010, gpu-12, login1: a number has as many digits as the first
    of its range is written with. `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2.
    """
    entries = _ENTRY.findall(text)
    if not entries or _ENTRY.sub("", text).strip(", \t\n"):
        raise _not_a_nodelist(text)
    hosts: list[str] = []
    for entry in entries:
        literals, ranges = _BRACKET.split(entry)[::2], _BRACKET.split(entry)[1::2]
        numbers = [_numbers(inside, text) for inside in ranges]
        if len(hosts) + math.prod(len(choices) for choices in numbers) > _MOST:
            raise _too_long(text)
        for chosen in itertools.product(*numbers):
            hosts.append(literals[0] + "".join(map(str.__add__, chosen, literals[1:])))
    return hosts


def _numbers(inside: str, text: str) -> list[str]:
    """`001-003,7`: 001, 002, 003, 7"""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise _not_a_nodelist(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_a_nodelist(text)
        if len(found) + int(last) - int(first) >= _MOST:
            raise _too_long(text)
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def _not_a_nodelist(text: str) -> UsageError:
    return UsageError(f"expected a SLURM node list such as gpu-[001-003,7],login1, found {text[:200]!r}")


def _too_long(text: str) -> UsageError:
    return UsageError(f"expected a SLURM node list of at most {_MOST} hosts, found more in {text[:200]!r}")
