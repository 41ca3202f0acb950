"""Which ranks a user means with `--rank`: one by its number, or those at a place in a DeviceMesh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.text import ranks_text

if TYPE_CHECKING:
    from ..collector.facts.facts import RunFacts

RankChoice = int | dict[str, int]
"""A number, or a coordinate by dimension."""


def parse_rank(ctx: click.Context, param: click.Parameter, value: str | None) -> RankChoice | None:
    """For an option of click. Raises UsageError."""
    if value is None or re.fullmatch(r"-?[0-9]{1,9}", value):
        return int(value) if value is not None else None
    if not re.fullmatch(r"[^=,\s]+=[0-9]{1,9}(,[^=,\s]+=[0-9]{1,9})*", value):
        raise UsageError(
            Code.WRONG_VALUE, f"--rank: expected a number, or a place in a DeviceMesh as tp=2,dp=0, found {value!r}"
        )
    return {name: int(number) for name, _, number in (part.partition("=") for part in value.split(","))}


def ranks_of(choice: RankChoice, facts: RunFacts) -> list[int]:
    """The numbers of these ranks, in order. Raises UsageError if the run has none."""
    known = sorted({each.rank for each in facts.ranks.values()})
    if isinstance(choice, int):
        expect_rank(choice, known)
        return [choice]
    places = {each.rank: each.coordinates for each in facts.of_attempt(facts.last_attempt)}
    found = sorted(rank for rank, place in places.items() if choice.items() <= place.items())
    if not found:
        sizes: dict[str, int] = {}
        for place in places.values():
            sizes.update({name: max(at + 1, sizes.get(name, 0)) for name, at in place.items()})
        dims = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        meshes = f"its meshes have {dims}" if sizes else "no DeviceMesh with names was seen"
        asked = ",".join(f"{name}={at}" for name, at in choice.items())
        raise UsageError(
            Code.NOT_IN_RUN, f"--rank: expected a place in a DeviceMesh of this run ({meshes}), found {asked}"
        )
    return found


def one_rank(choice: RankChoice | None, run: Path) -> int | None:
    """The number of one rank; a number is not looked up. Raises UsageError if it is several."""
    if choice is None or isinstance(choice, int):
        return choice
    with facts_of(run) as facts:
        found = ranks_of(choice, facts)
    if len(found) > 1:
        raise UsageError(
            Code.NOT_IN_RUN,
            f"--rank: expected the place of one rank, found that of {ranks_text(found)}; add a dimension",
        )
    return found[0]


def expect_rank(rank: int, known: list[int]) -> None:
    """Raises UsageError, saying which ranks the run has."""
    if rank not in known:
        there = ranks_text(known) if known else "it has none"
        raise UsageError(Code.NOT_IN_RUN, f"--rank: expected one of the ranks of this run ({there}), found {rank}")


@contextmanager
def facts_of(run: Path) -> Iterator[RunFacts]:
    """All that the store of a run says. Raises UsageError if there is no store."""
    from ..collector.finish import fold_store
    from ..collector.run_files import RunPaths
    from ..collector.store import RunStore

    if run.is_file():
        raise UsageError(Code.NO_STORE, f"expected a run with its store, found the spool file {run}")
    with closing(RunStore(RunPaths(run).store)) as store:
        yield fold_store(store).facts([])
