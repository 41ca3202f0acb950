"""What of an outcome is wrong: the truth is known, and a failure of ours may make an answer less sure, and no more."""

from __future__ import annotations

from disturbed_run import BATCHES, OVERFLOW, Outcome


def wrongs(outcome: Outcome) -> list[str]:
    """[] where nothing is."""
    if outcome.code is None:
        return ["the launch did not end"]
    return [*_training(outcome), *_verdict(outcome), *_left(outcome)]


def _left(outcome: Outcome) -> list[str]:
    """A launch that can open nothing more at its end cannot remove its folder; the next launch does."""
    failure = outcome.failure
    may_stay = failure.role == "launcher" and failure.kind == "open" and failure.lasting
    return [f"left behind: {what}" for what in outcome.left if not (may_stay and what.startswith("/dev/shm/"))]


def _training(outcome: Outcome) -> list[str]:
    """A script trains to its end. One whose overflow was seen does not, unless it goes on."""
    good = [str(1 / (1 + batch)) for batch in range(BATCHES)]
    bad = [loss if batch != OVERFLOW[1] else "inf" for batch, loss in enumerate(good)]
    expected = {0: " ".join(good), 1: " ".join(good if outcome.job == "clean" else bad)}
    ended = outcome.job == "overflow" and _has_seen_it(outcome)
    return [] if outcome.losses == ({} if ended else expected) else [f"trained {outcome.losses}"]


def _has_seen_it(outcome: Outcome) -> bool:
    """Whether the rank with the overflow was watched. One whose recorder cannot be made is not, and says so."""
    return f"rank {OVERFLOW[0]} goes on unwatched" not in outcome.said


def _verdict(outcome: Outcome) -> list[str]:
    """No report is as good as one that says unknown."""
    verdict = outcome.report["verdict"] if outcome.report is not None else {"kind": "unknown"}
    kind = verdict["kind"]
    if outcome.job == "clean":
        allowed = {(0, "clean"), (6, "unknown")}
        if "no verdict: the collector at" in outcome.said:  # it came too late to its agent, and is in the report
            allowed = {(6, "clean"), (6, "unknown")}
    elif _has_seen_it(outcome):
        allowed = {(4, "overflow"), (4, "unknown")}
    else:
        allowed = {(6, "unknown")}
    if (outcome.code, kind) not in allowed:
        return [f"exit code {outcome.code}, {kind}: {verdict.get('statement', 'no report')}"]
    if kind == "overflow":
        named = verdict["rank"], verdict["module"], verdict["batch"]
        right = OVERFLOW[0], "fc2", OVERFLOW[1]
        if any(name not in (truth, None) for name, truth in zip(named, right, strict=True)):
            return [f"named rank, module and batch {named}"]
        if verdict["certainty"] == "established" and named != right:
            return [f"established without a name: {named}"]
    return []
