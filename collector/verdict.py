"""The answer: which rank and module was first, why we know, and how sure we are. A pure function of the facts.

Clocks of different hosts are not compared. A rank's place in the run is (attempt, number of collectives that it had
issued, step, batch): between two matching collectives only local order exists, so two origins there are concurrent.
"""

from __future__ import annotations

import signal

import msgspec

from ..core.frames import Page
from ..core.records import ScriptError, Where, WorkerExit
from .facts import NodeFacts, RankFacts, RunFacts
from .origin import Finding, analyze, from_event


class Concurrent(msgspec.Struct, frozen=True):
    """Another origin that nothing puts before or after the one in the verdict."""

    rank: int
    module: str
    cls: str = msgspec.field(name="class")
    role: str
    value: str
    host: str = ""


class Cascade(msgspec.Struct, frozen=True):
    """A rank that ended because of the verdict's one."""

    rank: int
    how: str


class Verdict(msgspec.Struct, frozen=True):
    """report.json's `verdict`; what does not apply is null."""

    kind: str
    statement: str
    certainty: str
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    module: str | None = None
    cls: str | None = msgspec.field(name="class", default=None)
    root: str | None = None
    phase: str | None = None
    role: str | None = None
    value: str | None = None
    dtype: str | None = None
    attempt: int | None = None
    step: int | None = None
    batch: int | None = None
    between: tuple[str | None, str | None] | None = None
    evidence: list[str] = []
    next: list[str] = []
    concurrent: list[Concurrent] = []
    cascade: list[Cascade] = []
    signal: str | None = None
    stage: str | None = None


def decide(facts: RunFacts) -> Verdict:
    """The verdict of a run."""
    for rule in (_preflight, _overflow, _lost_or_crashed, _lost_node, _interrupted, _failed_without_word):
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return _clean(facts)


# -- preflight ----------------------------------------------------------------------------------------------------


def _preflight(facts: RunFacts) -> Verdict | None:
    ranks = facts.of_attempt(facts.last_attempt)
    if not any(rank.preflight is not None and rank.preflight.stops for rank in ranks):
        return None
    guilty = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "failed"]
    victims = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "victim"]
    cascade = [Cascade(rank.rank, _preflight_text(rank)) for rank in victims]
    evidence = [f"rank {rank.rank} on {facts.host(rank)}: {_preflight_text(rank)}" for rank in [*guilty, *victims]]
    if not guilty:
        return Verdict(
            kind="preflight",
            statement="The preflight failed; each rank that failed was waiting for another: nobody is to blame.",
            certainty="unknown",
            attempt=facts.last_attempt,
            evidence=evidence,
            next=["Run it again with NCCL_DEBUG=INFO and look at the rank that is missing from the evidence."],
            cascade=cascade,
        )
    first = guilty[0]
    assert first.preflight is not None
    others = f" (and {_ranks([rank.rank for rank in guilty[1:]])})" if guilty[1:] else ""
    host = facts.host(first)
    return Verdict(
        kind="preflight",
        statement=(
            f"Preflight: rank {first.rank}{others} on {host} failed in stage {first.preflight.stage}: "
            f"{first.preflight.detail}."
        ),
        certainty="established",
        rank=first.rank,
        host=host,
        device=first.preflight.device or None,
        attempt=first.attempt,
        stage=first.preflight.stage,
        evidence=evidence,
        next=[f"Look at {host}, local rank {_local_rank(first)}, or leave that node out of the next run."],
        cascade=cascade,
    )


def _preflight_text(rank: RankFacts) -> str:
    assert rank.preflight is not None
    return f"{rank.preflight.outcome} in stage {rank.preflight.stage}: {rank.preflight.detail}"


# -- overflow -----------------------------------------------------------------------------------------------------


def _overflow(facts: RunFacts) -> Verdict | None:
    findings = [finding for rank in facts.ranks.values() if (finding := finding_of(rank)) is not None]
    if not findings:
        return None
    first_attempt = min(finding.attempt for finding in findings)
    findings = sorted((f for f in findings if f.attempt == first_attempt), key=lambda f: (_order(f), f.rank))
    earliest = [finding for finding in findings if _order(finding) == _order(findings[0])]
    candidates = [finding for finding in earliest if finding.is_origin or finding.phase == "input"]
    if not candidates and (len(earliest) > 1 or earliest[0].phase == "collective"):
        return _unknown_overflow(facts, earliest)
    first, *rest = candidates or earliest
    rank = facts.ranks[first.attempt, first.rank]
    host = facts.host(rank)
    concurrent = [
        Concurrent(f.rank, f.module, f.cls, f.role, f.value, facts.host(facts.ranks[f.attempt, f.rank])) for f in rest
    ]
    certainty, evidence = _evidence(facts, first, findings, rest)
    return Verdict(
        kind="overflow",
        statement=_overflow_sentence(first, host, rest),
        certainty=certainty,
        rank=first.rank,
        host=host or None,
        device=_device(rank),
        module=first.module,
        cls=first.cls,
        root=first.root,
        phase="forward" if first.phase == "carrier" else first.phase,
        role=first.role,
        value=first.value,
        dtype=first.dtype,
        attempt=first.attempt,
        step=first.step,
        batch=first.batch,
        between=first.between,
        evidence=evidence,
        next=_overflow_next(first),
        concurrent=concurrent,
        cascade=_cascade(facts, first.attempt, {first.rank, *(f.rank for f in rest)}),
    )


def finding_of(rank: RankFacts) -> Finding | None:
    """The first bad value of a rank, from its page if it is there."""
    if not rank.anomalies:
        return None
    anomaly = rank.anomalies[0]
    page = rank.pages.get(anomaly.where.page)
    return analyze(page, anomaly) if page is not None else from_event(anomaly)


def _order(finding: Finding) -> tuple[int, int, int]:
    """Before any collective (-1) only steps and batches put ranks in order."""
    return (finding.seq, finding.step, finding.batch) if finding.seq < 0 else (finding.seq, 0, 0)


def _evidence(
    facts: RunFacts, first: Finding, findings: list[Finding], concurrent: list[Finding]
) -> tuple[str, list[str]]:
    evidence: list[str] = []
    certainty = "established"
    where = f"batch {first.batch}, frame {first.frame}"
    if first.is_origin:
        evidence.append(
            f"rank {first.rank}, {where}: inputs and weights of {_name(first)} were finite, its {first.role} was not"
            if first.between is None
            else f"rank {first.rank}, {where}: no module call before it returned a non-finite value"
        )
    elif first.phase == "carrier":
        certainty = "supported"
        evidence.append(
            f"rank {first.rank}, {where}: {_name(first)} was handed a non-finite value; its maker was not seen"
        )
    if not first.from_page:
        certainty = "supported"
        evidence.append(f"the frames of batch {first.batch} of rank {first.rank} were not received, only the event")
    if concurrent:
        certainty = "supported"
        evidence.append(
            f"{_ranks([f.rank for f in concurrent])}: an origin of its own in the same stretch between two "
            "collectives; nothing puts them in order"
        )
    unsettled = _unsettled(facts, first, findings)
    if unsettled:
        certainty = "supported"
        evidence += unsettled
    later = [f for f in findings if _order(f) > _order(first)]
    for finding in later[:8]:
        when = f", after {finding.seq} collectives against {first.seq}" if first.seq >= 0 else ""
        evidence.append(f"rank {finding.rank} first saw one later: batch {finding.batch}, {_name(finding)}{when}")
    if later and first.seq < 0:
        certainty = "supported"
        evidence.append("the ranks had no process group, so their batches alone put them in order")
    clean = _clean_peers(facts, first)
    if clean:
        evidence.append(f"{_ranks(clean)}: every frame received of that batch was finite")
    return certainty, evidence


def _unsettled(facts: RunFacts, first: Finding, findings: list[Finding]) -> list[str]:
    """Why another rank might have been first without our knowing it; empty when none can have been."""
    reasons: list[str] = []
    ranks = facts.of_attempt(first.attempt)
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    expected_nodes = max((hello.min_nodes for hello in hellos), default=1)
    missing = sum(hello.nproc for hello in hellos) - len(ranks)
    if len(hellos) < expected_nodes:
        reasons.append(f"{expected_nodes - len(hellos)} of {expected_nodes} nodes were never heard")
    if missing > 0:
        reasons.append(f"{missing} ranks were never heard")
    heard = {finding.rank for finding in findings} | set(_clean_peers(facts, first))
    # What a rank was handed could have been handed to all: there only a clean page of the same batch clears a peer.
    if first.phase not in ("weight", "carrier"):
        heard |= {rank.rank for rank in ranks if rank.exit is not None}
    unheard = [rank.rank for rank in ranks if rank.rank not in heard]
    if unheard:
        reasons.append(f"{_ranks(unheard)}: no frames of that batch were received, so the same may be true there")
    return reasons


def _clean_peers(facts: RunFacts, first: Finding) -> list[int]:
    return [
        rank.rank
        for rank in facts.of_attempt(first.attempt)
        if rank.rank != first.rank
        and (page := page_of_batch(rank, first.root, first.batch)) is not None
        and all(row.finite for frame in page.frames for row in frame.rows)
    ]


def page_of_batch(rank: RankFacts, root: str, batch: int) -> Page | None:
    """The page of one batch of one root, if it was received."""
    return next((p for p in rank.pages.values() if p.batch == batch and p.root == root), None)


def _unknown_overflow(facts: RunFacts, earliest: list[Finding]) -> Verdict:
    """Several ranks met it at once and none made it in a watched place: say so, name nobody."""
    first = earliest[0]
    what = "a non-finite weight" if first.phase == "weight" else "a non-finite value"
    who = _ranks([f.rank for f in earliest]).capitalize()
    if first.phase == "collective":
        statement = (
            f"{who} met {what} in batch {first.batch} in {_name(first)}'s own forward, "
            f"{between_text(first.between or (None, None))}; collectives ran there, so it may have come from any rank."
        )
    else:
        statement = (
            f"{who} met {what} in batch {first.batch} at the same point (`{first.module}`, {first.role}); "
            "it was made before, where nobody looked, so the first rank is unknown."
        )
    return Verdict(
        kind="overflow",
        statement=statement,
        certainty="unknown",
        module=first.module,
        cls=first.cls,
        root=first.root,
        phase=first.phase if first.phase != "carrier" else "forward",
        role=first.role,
        value=first.value,
        dtype=first.dtype,
        attempt=first.attempt,
        step=first.step,
        batch=first.batch,
        evidence=[f"rank {f.rank}: {f.value} in {f.role} of {_name(f)}, batch {f.batch}" for f in earliest[:8]],
        between=first.between,
        next=["Look at the gradients and the optimizer of the step before."] if first.phase == "weight" else [],
    )


def _overflow_sentence(first: Finding, host: str, concurrent: list[Finding]) -> str:
    who = f"Rank {first.rank}{f' on {host}' if host else ''}"
    if concurrent:
        who += f" and, concurrently, {_ranks([f.rank for f in concurrent])}"
    lead = f"{who} overflowed first: "
    if concurrent:
        lead = f"{who} overflowed: "
    batch = f"batch {first.batch}" + (f" (step {first.step})" if first.step != first.batch else "")
    if first.phase == "weight":
        return f"{who} had {first.value} in the {first.role} of {_name(first)} at the start of its forward in {batch}."
    if first.phase == "input":
        return (
            f"{who} was fed {first.value}: {first.role} of {_name(first)} in {batch} was bad before the model saw it."
        )
    if first.phase == "carrier":
        return (
            f"{who} handed {first.value} to {_name(first)} ({first.role}) in {batch}; where it was made was not seen."
        )
    if first.between is not None:
        return f"{lead}{first.value} in {_name(first)}'s own forward, {between_text(first.between)}, {batch}."
    return f"{lead}{first.value} in the {first.role} of {_name(first)}, forward, {batch}."


def between_text(between: tuple[str | None, str | None]) -> str:
    """The stretch of code between two calls, in words."""
    after, before = between
    ending = f"before `{before}` was called" if before else "before its own return"
    return f"after `{after}` returned and {ending}" if after else ending


def _overflow_next(first: Finding) -> list[str]:
    steps = []
    if first.is_origin and first.dtype == "float16":
        steps.append(
            "float16 ends at 65504: compute this part in bfloat16, or in float32 under torch.autocast(enabled=False)."
        )
    if first.is_origin:
        steps.append(
            "Look at abs max in the frames before it: growth over many batches means a learning rate that is too high."
        )
    elif first.phase == "input":
        steps.append("Look at the data loader of this rank: the value was in the batch.")
    elif first.phase == "weight":
        steps.append("The step before made it: look at the gradients and the learning rate.")
    steps.append(
        "To see whole batches: gpuwatch launch --trace-batches N,N; to train on past it: --on-overflow continue."
    )
    return steps


# -- ranks that ended badly ---------------------------------------------------------------------------------------


def _lost_or_crashed(facts: RunFacts) -> Verdict | None:
    if not _job_failed(facts):
        return None
    attempt = facts.last_attempt
    ranks = facts.of_attempt(attempt)
    interrupted = any(node.signal is not None for node in facts.nodes.values())
    ended = [(_end_order(rank), rank) for rank in ranks if _ended_by_itself(rank, interrupted)]
    if not ended:
        return None
    ended.sort(key=lambda pair: (pair[0], pair[1].rank))
    first = ended[0][1]
    if ended[0][0][0]:  # all that ended by themselves only say that another rank went away
        return _lost_node(facts) or _unknown_peer(facts, [rank for _, rank in ended])
    same = [rank for order, rank in ended[1:] if order == ended[0][0]]
    if _killed(first):
        return _lost(facts, first, same)
    return _crash(facts, first, same)


def _unknown_peer(facts: RunFacts, victims: list[RankFacts]) -> Verdict:
    """Nobody who was heard went first: say so, name nobody."""
    who = _ranks([rank.rank for rank in victims]).capitalize()
    return Verdict(
        kind="lost",
        statement=f"{who} lost the connection to another rank; which one went first is unknown.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=[f"rank {rank.rank}: {_first_line(rank.errors[0].message)}" for rank in victims if rank.errors],
        next=["Look at the ranks that are not among these: one of them, or the link to it, went first."],
        cascade=[Cascade(rank.rank, f"raised {rank.errors[0].error}") for rank in victims if rank.errors],
    )


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def _job_failed(facts: RunFacts) -> bool:
    return any(node.lost or (node.bye is not None and node.bye.outcome != "ok") for node in facts.nodes.values())


def _killed(rank: RankFacts) -> bool:
    return rank.exit is not None and rank.exit.by == "itself" and rank.exit.code is not None and rank.exit.code < 0


def _own_error(rank: RankFacts) -> ScriptError | None:
    return rank.errors[0] if rank.errors else None


def _ended_by_itself(rank: RankFacts, interrupted: bool) -> bool:
    error = _own_error(rank)
    if error is not None:  # torchrun hands a Ctrl-C on to its ranks
        return not (interrupted and error.error == "KeyboardInterrupt")
    if _killed(rank):
        return True
    if rank.script_exit is not None and rank.script_exit.code != 0:
        return True
    return rank.exit is not None and rank.exit.by == "itself" and rank.exit.code not in (0, None)


def _end_order(rank: RankFacts) -> tuple[int, int]:
    """Fewest collectives first. A rank that only says that another went away comes last among equals.

    A rank that died by a signal was running between the collective that it had issued last and the next: one that
    raised a peer failure there had issued the same one.
    """
    error = _own_error(rank)
    where: Where | None = error.where if error is not None else rank.exit.where if rank.exit is not None else None
    seq = where.seq if where is not None else -1
    if error is not None and error.peer_failure:
        return (1, seq)
    return (0, seq)


def _lost(facts: RunFacts, first: RankFacts, same: list[RankFacts]) -> Verdict:
    exit_ = first.exit
    assert exit_ is not None and exit_.code is not None
    name = _signal_name(-exit_.code)
    host = facts.host(first)
    doing = _doing(exit_)
    hints = []
    if name == "SIGKILL":
        hints.append(
            f"SIGKILL comes from outside: look for an out-of-memory kill with: dmesg -T | grep -i oom (on {host})."
        )
    return Verdict(
        kind="lost",
        statement=f"Rank {first.rank} on {host} was killed by {name} {doing}.",
        certainty="established" if not same else "supported",
        rank=first.rank,
        host=host or None,
        device=_device(first),
        module=exit_.module,
        cls=exit_.cls,
        root=exit_.where.root or None,
        phase="forward" if exit_.phase == "forward" else None,
        attempt=first.attempt,
        step=exit_.where.step,
        batch=exit_.where.batch if exit_.where.batch >= 0 else None,
        signal=name,
        evidence=[
            f"torchrun saw rank {first.rank} (pid {_pid(first)}) end with signal {-exit_.code}; "
            f"its recorder says: {doing}"
        ],
        next=[*hints, f"Its last frames are in the report: gpuwatch report --rank {first.rank}"],
        concurrent=[],
        cascade=_cascade(facts, first.attempt, {first.rank}),
    )


def _crash(facts: RunFacts, first: RankFacts, same: list[RankFacts]) -> Verdict:
    error = _own_error(first)
    host = facts.host(first)
    others = f" (and {_ranks([rank.rank for rank in same])} at the same point)" if same else ""
    who = f"Rank {first.rank}{others} on {host}"
    if error is not None:
        inside = f", inside `{error.module}`" if error.module else ""
        last = _first_line(error.message)
        statement = f"{who} raised {error.error}{inside}{f': {last}' if last else ''}."
        evidence = [error.traceback.strip()]
        where = error.where
    else:
        code = first.script_exit.code if first.script_exit is not None else first.exit.code if first.exit else None
        statement = f"{who} ended with exit code {code}."
        evidence = []
        where = first.exit.where if first.exit is not None else Where(first.rank, first.attempt)
    return Verdict(
        kind="crash",
        statement=statement,
        certainty="established" if not same else "supported",
        rank=first.rank,
        host=host or None,
        device=_device(first),
        module=error.module if error is not None else None,
        root=where.root or None,
        attempt=first.attempt,
        step=where.step,
        batch=where.batch if where.batch >= 0 else None,
        evidence=evidence,
        next=["The script failed by itself: the traceback is above, and as torchrun prints it in the job's output."],
        cascade=_cascade(facts, first.attempt, {first.rank, *(rank.rank for rank in same)}),
    )


def _lost_node(facts: RunFacts) -> Verdict | None:
    lost = [node for node in facts.nodes.values() if node.lost]
    if not lost:
        return None
    hosts = ", ".join(sorted(_node_name(node) for node in lost))
    ranks = sorted({rank.rank for rank in facts.ranks.values() if rank.agent in {node.agent for node in lost}})
    return Verdict(
        kind="lost",
        statement=(
            f"Node {hosts} ({_ranks(ranks) if ranks else 'no rank known'}) went silent: "
            "the node, or the link to it, is lost."
        ),
        certainty="supported",
        rank=ranks[0] if len(ranks) == 1 else None,
        host=hosts,
        attempt=facts.last_attempt,
        evidence=[f"no message from the agent on {hosts} any more, and no goodbye"],
        cascade=_cascade(facts, facts.last_attempt, set(ranks)),
        next=[f"Look whether {hosts} is up; leave it out of the next run if not."],
    )


def _interrupted(facts: RunFacts) -> Verdict | None:
    signals = [node.signal.signal for node in facts.nodes.values() if node.signal is not None]
    if not signals:
        return None
    name = _signal_name(signals[0])
    return Verdict(
        kind="interrupted",
        statement=f"The run was ended from outside by {name}; no overflow had been seen.",
        certainty="established",
        attempt=facts.last_attempt,
        signal=name,
        evidence=[_progress(rank) for rank in facts.of_attempt(facts.last_attempt)],
    )


def _failed_without_word(facts: RunFacts) -> Verdict | None:
    if not _job_failed(facts):
        return None
    return Verdict(
        kind="crash",
        statement="torchrun failed, and no rank said why: see its own output.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=[_progress(rank) for rank in facts.of_attempt(facts.last_attempt)],
    )


def _clean(facts: RunFacts) -> Verdict:
    ranks = facts.of_attempt(facts.last_attempt)
    batches = max((rank.exit.where.batch + 1 for rank in ranks if rank.exit is not None), default=0)
    return Verdict(
        kind="clean",
        statement=(
            f"No overflow: {len(ranks)} rank{'s' if len(ranks) != 1 else ''}, {batches} batches, "
            "every watched tensor finite."
        ),
        certainty="established" if all(rank.script_exit is not None for rank in ranks) and ranks else "supported",
        attempt=facts.last_attempt,
    )


# -- words --------------------------------------------------------------------------------------------------------


def _cascade(facts: RunFacts, attempt: int, initiating: set[int]) -> list[Cascade]:
    found = []
    for rank in facts.of_attempt(attempt):
        if rank.rank in initiating:
            continue
        error = _own_error(rank)
        if error is not None:
            found.append(Cascade(rank.rank, f"raised {error.error} after {max(error.where.seq, 0)} collectives"))
        elif rank.exit is not None and rank.exit.code not in (0, None):
            how = "was stopped by torchrun" if rank.exit.by == "torchrun" else f"ended with {rank.exit.code}"
            found.append(Cascade(rank.rank, f"{how} {_doing(rank.exit)}"))
    return found


def _doing(exit_: WorkerExit) -> str:
    if exit_.phase == "forward":
        inside = f", in {_module_text(exit_.module, exit_.cls)}" if exit_.module is not None else ""
        return f"in the forward of batch {exit_.where.batch}{inside}"
    if exit_.phase == "script":
        return (
            f"outside of a forward, after batch {exit_.where.batch}"
            if exit_.where.batch >= 0
            else "before its first batch"
        )
    return {
        "preflight": "in the preflight",
        "starting": "while starting",
        "finished": "after its script had ended",
        "raised": "after its script had raised",
        "unwatched": "in a program that is not watched",
    }.get(exit_.phase, f"in phase {exit_.phase}")


def _progress(rank: RankFacts) -> str:
    if rank.exit is not None:
        return f"rank {rank.rank}: {_doing(rank.exit)}"
    if rank.state is not None:
        return f"rank {rank.rank}: {rank.state.phase}, step {rank.state.step}, batch {rank.state.batch}"
    return f"rank {rank.rank}: nothing known"


def _name(finding: Finding) -> str:
    return _module_text(finding.module, finding.cls)


def _module_text(module: str, cls: str | None) -> str:
    return f"`{module}` ({cls})" if module else f"the root module ({cls})"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _device(rank: RankFacts) -> str | None:
    if rank.inventory is not None:
        return rank.inventory.device
    return None


def _pid(rank: RankFacts) -> str:
    return str(rank.state.pid) if rank.state is not None else "?"


def _local_rank(rank: RankFacts) -> str:
    return str(rank.state.local_rank) if rank.state is not None else "?"


def _node_name(node: NodeFacts) -> str:
    return node.hello.host if node.hello is not None else node.agent[:8]
