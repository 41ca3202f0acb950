"""The phrases of verdicts: which rank, where, and what it was doing; and notes beside the verdict."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

from ...core.events import IgnoredAlarm, RangeWarning, RankLook, RunPosition, ScriptError, WorkerExit
from ...core.frames import FramePhase, module_text
from ...core.identity import is_rank, pid_of_number, rank_name
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.facts import NodeFacts, RankFacts, RunFacts
from ..report.model import CascadedRank, SeenIn
from ..report.sentence_parts import coarse_share_text

_COMPILED = (
    "To have a module inside the compiled code named, let torch.compile capture the whole model in one graph "
    "(fullgraph=True shows what breaks it; for transformers: use_cache=False), or run without torch.compile."
)
_NOT_WITH_THIS_TORCH = (
    "To have a module inside the compiled code named, use torch 2.8 to 2.15, or run without torch.compile."
)


def counted(number: int, word: str) -> str:
    """`1 row`, `2 rows`"""
    return f"{number} {word}{'s' if number != 1 else ''}"


def unseen_texts(ranks: Iterable[RankFacts]) -> list[str]:
    """Parts of these ranks' compiled modules that their version of torch does not show."""
    return [*dict.fromkeys(unseen.text for rank in ranks for unseen in rank.compiled_unseen)]


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
        error = own_error(rank)
        if error is not None:
            found.append(
                CascadedRank(rank.rank, f"raised {error.error} after {max(error.where.collectives, 0)} collectives")
            )
        elif rank.exit is not None and rank.exit.code not in (0, None):
            how = f"was stopped by {facts.starter}" if rank.exit.by == "torchrun" else f"ended with {rank.exit.code}"
            found.append(CascadedRank(rank.rank, f"{how} {doing(rank.exit)}"))
    return found


def doing(seen: WorkerExit | RankLook) -> str:
    """Where a rank was when it ended, or when it was asked for its position."""
    batch = seen.where.batch
    if seen.phase == "forward":
        inside = f", in {module_text(seen.module, seen.cls)}" if seen.module is not None else ""
        return f"in the forward of batch {batch}{inside}"
    if seen.phase in ("backward", "optimizer"):
        return f"in the {'backward' if seen.phase == 'backward' else 'optimizer step'} of batch {batch}"
    if seen.phase == "script":
        return f"outside of a forward, after batch {batch}" if batch >= 0 else "before its first batch"
    last = f" (its last batch: {batch})" if batch >= 0 else ""
    return {
        "preflight": "in the preflight",
        "starting": "while starting",
        "finished": f"after its script had ended{last}",
        "raised": f"after its script had raised{last}",
        "unwatched": "in a program that is not watched",
    }.get(seen.phase, f"in phase {seen.phase}")


def left_silently(rank: RankFacts) -> bool:
    """Whether a process ended with code 0 in the middle of its work, as `os._exit(0)` does it."""
    exit_ = rank.exit
    return (
        exit_ is not None
        and (exit_.code, exit_.by) == (0, "itself")
        and rank.script_exit is None
        and not rank.errors
        and exit_.phase in ("forward", "backward", "optimizer")
    )


def told_its_end(rank: RankFacts) -> bool:
    """Whether its script has ended, or it has left its group and called nothing after that.

    Ray kills its workers once they have left their group.
    """
    if rank.script_exit is not None:
        return True
    left, end = rank.left_group, rank.exit
    if left is None or end is None or end.phase != "script":
        return False
    return (left.where.step, left.where.batch) == (end.where.step, end.where.batch)


def was_killed(rank: RankFacts) -> bool:
    """Whether a signal ended its process that its launcher did not send."""
    return rank.exit is not None and rank.exit.by == "itself" and rank.exit.code is not None and rank.exit.code < 0


def was_aborted(rank: RankFacts) -> bool:
    """Whether it ended its own process by SIGABRT, as a library does."""
    return rank.exit is not None and (rank.exit.by, rank.exit.code) == ("itself", -signal.SIGABRT)


def was_aborted_at_exit(rank: RankFacts) -> bool:
    """Whether torch aborted the process after its script had ended well: a thread of gloo, say, that had lost its peers
    (pytorch/pytorch#179291)."""
    return was_aborted(rank) and rank.script_exit is not None and rank.script_exit.code == 0


def hid_a_peer_failure(rank: RankFacts) -> bool:
    """Whether it left with an exit code of its own after a collective had raised in it, and its script caught that."""
    exit_, script = rank.exit, rank.script_exit
    if exit_ is None or own_error(rank) is not None:
        return False
    left_badly = (script is not None and script.code != 0) or (exit_.by == "itself" and (exit_.code or 0) > 0)
    return left_badly and any(group.phase == "failed" for group in exit_.groups)


def _progress(rank: RankFacts) -> str:
    """How far a rank got."""
    stage = unfinished_stage(rank)
    if stage and "preflight" in (
        rank.exit.phase if rank.exit is not None else "",
        rank.state.phase if rank.state else "",
    ):
        return f"{rank_name(rank.rank)}: in the preflight, stage {stage}"
    if rank.exit is not None:
        return f"{rank_name(rank.rank)}: {doing(rank.exit)}"
    if rank.state is not None:
        return f"{rank_name(rank.rank)}: {rank.state.phase}, step {rank.state.step}, batch {rank.state.batch}"
    return f"{rank_name(rank.rank)}: nothing known"


def unfinished_stage(rank: RankFacts) -> str:
    """The stage of the preflight that a rank has begun and not ended; "" if there is none."""
    ended = {event.stage for event in rank.stages}
    return next((event.stage for event in reversed(rank.begun) if event.stage not in ended), "")


def place_of(diagnosis: LocalDiagnosis) -> str:
    """The module of a diagnosis."""
    return module_text(diagnosis.module, diagnosis.cls)


def found_text(diagnosis: LocalDiagnosis) -> str:
    """What was found, and in which row: `nan in output of `fc` (Linear)`.

    If no row of the named module holds the value, the text names the row that does: `nan in input[0] of `attn.c_proj`
    (Linear), made in `attn` (Attention)'s own code`.
    """
    if diagnosis.own_role is not None:
        return f"{diagnosis.value} in {diagnosis.own_role} of {place_of(diagnosis)}"
    module, cls, role = diagnosis.at
    text = f"{diagnosis.value} in {role} of {module_text(module, cls)}"
    if diagnosis.source == "outside":
        return f"{text}, from outside the model"
    code = "backward" if diagnosis.seen_in == "backward" else "own code"
    return f"{text}, {'made' if diagnosis.source == 'made' else 'passed on'} in {place_of(diagnosis)}'s {code}"


def seen_in(diagnosis: LocalDiagnosis) -> SeenIn | None:
    """The row of another module in which the value was first seen; None if it is the named module's own."""
    return SeenIn(*diagnosis.at) if diagnosis.own_role is None else None


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def device_of(rank: RankFacts) -> str | None:
    """The device that a rank ran on, if it said so."""
    return rank.inventory.device if rank.inventory is not None else None


def whose(facts: RunFacts, rank: RankFacts) -> dict[str, Any]:
    """rank, host and device for a verdict that names a rank, or pid and host of a process that is none."""
    host = facts.host(rank) or None
    if not is_rank(rank.rank):
        return {"pid": pid_of_number(rank.rank), "host": host}
    return {"rank": rank.rank, "host": host, "device": device_of(rank)}


def when_of(where: RunPosition) -> dict[str, Any]:
    """root, attempt, step and batch for a verdict about a place in the run."""
    batch = where.batch if where.batch >= 0 else None
    return {"root": where.root or None, "attempt": where.attempt, "step": where.step, "batch": batch}


def progress_of(facts: RunFacts, attempt: int) -> list[str]:
    """How far each rank of an attempt got."""
    return [_progress(rank) for rank in facts.of_attempt(attempt)]


def pid_of(rank: RankFacts) -> str:
    """Process id, `?` if unknown."""
    return str(rank.state.pid) if rank.state is not None else "?"


def local_rank_of(rank: RankFacts) -> str:
    """Local rank, `?` if unknown."""
    return str(rank.state.local_rank) if rank.state is not None else "?"


def node_name(node: NodeFacts) -> str:
    """Host of a node, the first letters of its agent's id if unknown."""
    return node.hello.host if node.hello is not None else node.agent[:8]


def first_line(text: str) -> str:
    """The first line of a message, at most 300 characters."""
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def own_error(rank: RankFacts) -> ScriptError | None:
    """The first exception that left the rank's script."""
    return rank.errors[0] if rank.errors else None


def between_text(between: tuple[str | None, str | None]) -> str:
    """The stretch of code between two calls, in words."""
    after, before = between
    ending = f"before `{before}` was called" if before else "before its own return"
    return f"after `{after}` returned and {ending}" if after else ending


# Notes beside the verdict: values near their limits, skipped steps, waived rows, the cost of watching.


def worst_first(warnings: list[tuple[int, RangeWarning]]) -> list[tuple[int, RangeWarning]]:
    """(rank, warning), the one with the least room first, and near overflow before underflow."""

    def badness(entry: tuple[int, RangeWarning]) -> tuple[Any, ...]:
        number, warned = entry
        near = warned.kind == "near overflow"
        lost = max(warned.subnormals or 0.0, warned.zeros or 0.0)
        left = warned.headroom if warned.headroom is not None else 1e9
        return (not near, left if near else -lost, number, warned.where.page, warned.module, warned.role)

    return sorted(warnings, key=badness)


def warning_text(warned: RangeWarning) -> str:
    """`near overflow: output of up (Linear) in batch 3: abs max 6.20e+04, 0.1 powers of two below float16's limit`."""
    phase = "" if warned.phase == FramePhase.FORWARD else f", {warned.phase}"
    place = f"{warned.role} of {warned.module or 'the root'} ({warned.cls}{phase}) in batch {warned.where.batch}"
    return f"{warned.kind}: {place}: {_amount_text(warned)}"


def _amount_text(warned: RangeWarning) -> str:
    """How close it was."""
    if warned.kind == "near overflow" and warned.headroom is not None:
        return (
            f"abs max {number_text(warned.abs_max)}, {warned.headroom:.1f} powers of two below {warned.dtype}'s limit"
        )
    shares = []
    if warned.subnormals:
        shares.append(f"{coarse_share_text(warned.subnormals)} subnormal")
    if warned.zeros:
        shares.append(f"{coarse_share_text(warned.zeros)} zeros")
    return f"{', '.join(shares) or 'lost precision'} in {warned.dtype}"


def _fields(event: Any, *places: str) -> dict[str, Any]:
    """All of an event as report.json calls it, with these of its place in the run."""
    names = [name for name in event.__struct_fields__ if name != "where"]
    found = {"class" if name == "cls" else name: getattr(event, name) for name in names}
    return found | {name: getattr(event.where, name) for name in places}


def warnings_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json, worst first."""
    return [
        _fields(warned, "batch", "step") for _, warned in worst_first([(rank.rank, warned) for warned in rank.warned])
    ]


def scaler_of(rank: RankFacts) -> dict[str, Any] | None:
    """For report.json: what a GradScaler skipped, and where the first bad gradient was."""
    if not rank.skipped_steps:
        return None
    skips, names = rank.scaler_skips, ("module", "class", "role", "value", "batch")
    first = _fields(skips[0], "batch") if skips else {}
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
    return [_fields(ignored, "batch") for ignored in found.values()]


def absorbed_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json: the first bad value of each module and role that led nowhere."""
    return [_fields(absorbed, "batch") for absorbed in rank.absorbed]


def cost_of(rank: RankFacts) -> dict[str, Any] | None:
    """For report.json: medians of the time from one batch to the next."""
    cost = rank.cost
    if cost is None:
        return None
    return _fields(cost) | {"ratio": cost.watched_ns / cost.plain_ns if cost.plain_ns > 0 else None}


def passed_of(rank: RankFacts) -> list[dict[str, Any]]:
    """For report.json: what was not finite and passed between this rank and others, the earliest first."""
    return [_fields(one, "step", "batch") for one in rank.passed]
