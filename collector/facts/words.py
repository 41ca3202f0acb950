"""The phrases of verdicts: which rank, where, and what it was doing; and notes beside the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.codes import RANK_OVERFLOW
from ...core.events.agent_events import RankLook, WorkerExit
from ...core.events.alarms import IgnoredAlarm, RangeWarning
from ...core.events.run_position import RunPosition
from ...core.frames import FramePhase, module_text
from ...core.identity import is_rank, pid_of_number, rank_name
from ..report.rank_states import AT_OVERFLOW, RUNS_ON, code_text, signal_name, stopped_text
from ..report.sentence_parts import badness, coarse_share_text
from ..report.verdict import CascadedRank, PlaceFields, RankFields
from .diagnosis import number_text
from .rank_facts import RankFacts
from .run_facts import RunFacts

_COMPILED = (
    "To have a module inside the compiled code named, let torch.compile capture the whole model in one graph "
    "(fullgraph=True shows what breaks it; for transformers: use_cache=False), or run without torch.compile."
)
_NOT_WITH_THIS_TORCH = (
    "To have a module inside the compiled code named, use torch 2.8 to 2.15, or run without torch.compile."
)


def step_for_compiled(ranks: Iterable[RankFacts]) -> str:
    """What to do to have a module inside of compiled code named."""
    blind = any(unseen.calls for rank in ranks for unseen in rank.compiled_unseen)
    return _NOT_WITH_THIS_TORCH if blind else _COMPILED


def cascade_of(facts: RunFacts, attempt: int, initiating: set[int]) -> list[CascadedRank]:
    """How the other ranks ended, which are not `initiating`."""
    found = []
    for rank in facts.of_attempt(attempt):
        if rank.rank in initiating:
            continue
        if rank.error is not None:
            how = f"raised {rank.error.error} after {max(rank.error.where.collectives, 0)} collectives"
            found.append(CascadedRank(rank.rank, how))
        elif rank.exit is not None and rank.exit.code:
            code = rank.exit.code
            ended = f"was ended by {signal_name(-code)}" if code < 0 else code_text(code)
            how = f"was stopped by {facts.starter}" if rank.exit.by == "torchrun" else ended
            found.append(CascadedRank(rank.rank, f"{how} {doing(rank.exit)}"))
    return found


OUTSIDE = "outside of a forward, "
_SINCE = {
    "": OUTSIDE + "after batch {}",
    "forward": "after the forward of batch {}",
    "backward": "after the backward of batch {}",
    "optimizer": "after the optimizer step of batch {}",
}
"""By what is known to have ended last. What the recorder cannot show may have run since: a backward that reaches no
watched tensor, a step that is written by hand. So nothing is said to follow."""


def doing(seen: WorkerExit | RankLook, error: str = "") -> str:
    """Where a rank was when it ended, or when it was asked for its position. `error`: what its script raised."""
    batch = seen.where.batch
    if seen.phase == "forward":
        inside = f", in {module_text(seen.module, seen.cls)}" if seen.module is not None else ""
        return f"in the forward of batch {batch}{inside}"
    if seen.phase in ("backward", "optimizer"):
        inside = f"in the {'backward' if seen.phase == 'backward' else 'optimizer step'} of batch {batch}"
        # a backward's end is seen by the stack alone: a process that is stopped or was killed gives none
        stack = seen.stack or (seen.main if isinstance(seen, WorkerExit) else [])
        return inside if stack or seen.phase != "backward" else f"{inside}, or after it"
    if seen.phase == "script":
        return _SINCE[seen.after].format(batch) if batch >= 0 else "before its first batch"
    last = f" (its last batch: {batch})" if batch >= 0 else ""
    return {
        "preflight": "in the preflight",
        "starting": "while starting",
        "finished": f"after its script had ended{last}",
        "raised": f"after its script had raised {error}".rstrip() + last,
        "unwatched": "in a program that is not watched",
    }.get(seen.phase, f"in phase {seen.phase}")


def whose(facts: RunFacts, rank: RankFacts) -> RankFields:
    """rank, host and device for a verdict that names a rank, or pid and host of a process that is none."""
    host = facts.host(rank) or None
    if not is_rank(rank.rank):
        return {"pid": pid_of_number(rank.rank), "host": host}
    return {"rank": rank.rank, "host": host, "device": rank.device}


def when_of(where: RunPosition) -> PlaceFields:
    """root, attempt, step and batch for a verdict about a place in the run."""
    batch = where.batch if where.batch >= 0 else None
    return {"root": where.root or None, "attempt": where.attempt, "step": where.step, "batch": batch}


def progress_of(facts: RunFacts, attempt: int) -> list[str]:
    """How far each rank of an attempt got."""
    return [f"{rank_name(rank.rank)}: {_progress(rank)}" for rank in facts.of_attempt(attempt)]


def _progress(rank: RankFacts) -> str:
    if rank.unfinished_stage and any(
        seen is not None and seen.phase == "preflight" for seen in (rank.exit, rank.state)
    ):
        return f"in the preflight, stage {rank.unfinished_stage}"
    if rank.exit is not None:
        place = doing(rank.exit, rank.error.error if rank.error is not None else "")
        return f"{RUNS_ON}, {place}" if rank.runs_on else place
    state = rank.state
    return f"{state.phase}, step {state.step}, batch {state.batch}" if state is not None else "nothing known"


def end_text(rank: RankFacts, exit_: WorkerExit, starter: str) -> str:
    """How its process ended, in the words of `state_text`: `stopped by torchrun`, `killed (SIGKILL)`,
    `ended at its overflow`, `ended with code 3`, `running when the launch was killed`"""
    if exit_.runs_on:
        return RUNS_ON
    if exit_.by == "torchrun":
        return stopped_text(starter)
    if exit_.code is None:
        return "gone when the launch was killed"
    if exit_.code == RANK_OVERFLOW and rank.anomalies:
        return AT_OVERFLOW
    return code_text(exit_.code)


def first_line(text: str) -> str:
    """The first line of a message, at most 300 characters."""
    return next(iter(text.strip().splitlines()), "")[:300]


def error_line(message: str) -> str:
    """The first line of an exception's message, and what it passes on of a worker's: `Caught KeyError in DataLoader
    worker process 0: KeyError: 'no label'`."""
    first = first_line(message).rstrip(". ")
    return f"{first}: {first_line(message.strip().splitlines()[-1])}" if "\nOriginal Traceback" in message else first


def between_text(between: tuple[str | None, str | None]) -> str:
    """The stretch of code between two calls, in words."""
    after, before = between
    ending = f"before `{before}` was called" if before else "before its own return"
    return f"after `{after}` returned and {ending}" if after else ending


# Notes beside the verdict: values near their limits, skipped steps, waived rows.


def worst_first(warnings: list[tuple[int, RangeWarning]]) -> list[tuple[int, RangeWarning]]:
    """(rank, warning), the one with the least room first, and near overflow before underflow."""

    def key(entry: tuple[int, RangeWarning]) -> tuple[Any, ...]:
        number, row = entry
        bad = badness(row.kind, row.headroom, row.subnormals, row.zeros)
        return *bad, number, row.where.page, row.module, row.role

    return sorted(warnings, key=key)


def warning_text(warned: RangeWarning) -> str:
    """`near overflow: output of up (Linear) in batch 3: abs max 6.20e+04, 0.1 powers of two below float16's limit`."""
    phase = "" if warned.phase == FramePhase.FORWARD else f", {warned.phase}"
    place = f"{warned.role} of {warned.module or 'the root'} ({warned.cls}{phase}) in batch {warned.where.batch}"
    return f"{warned.kind}: {place}: {_amount_text(warned)}"


def _amount_text(warned: RangeWarning) -> str:
    if warned.kind == "near overflow":
        size = f"abs max {number_text(warned.abs_max)}"
        left = f"{warned.headroom:.1f} powers of two below" if warned.headroom is not None else "beyond"
        return f"{size}, {left} {warned.dtype}'s limit"
    shares = ((warned.subnormals, "subnormal"), (warned.zeros, "zeros"))
    text = ", ".join(f"{coarse_share_text(share)} {what}" for share, what in shares if share)
    return f"{text or 'lost precision'} in {warned.dtype}"


def fields_of(event: Any, *places: str) -> dict[str, Any]:
    """All of an event as report.json calls it, with these of its place in the run."""
    names = [name for name in event.__struct_fields__ if name != "where"]
    found = {"class" if name == "cls" else name: getattr(event, name) for name in names}
    return found | {name: getattr(event.where, name) for name in places}


def scaler_of(rank: RankFacts) -> dict[str, Any] | None:
    """For report.json: what a GradScaler skipped, and where the first bad gradient was."""
    if not rank.skipped_steps:
        return None
    skips, names = rank.scaler_skips, ("module", "class", "role", "value", "batch")
    first = fields_of(skips[0], "batch") if skips else {}
    return {
        "skips": rank.skipped_steps,
        "last_scale": skips[-1].scale if skips else None,
        "in_a_row": max((skip.in_a_row for skip in skips), default=None),
    } | {name: first.get(name) for name in names}


def waived_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json: the first waived row of each rule and place."""
    found: dict[tuple[str, str, str], IgnoredAlarm] = {}
    for ignored in rank.ignored:
        found.setdefault((ignored.pattern, ignored.module, ignored.role), ignored)
    return [fields_of(ignored, "batch") for ignored in found.values()]
