"""What of an outcome is wrong: the truth is known, and a failure of ours may make an answer less sure, and no more."""

from __future__ import annotations

from trial import BATCHES, Outcome

CERTAINTIES = ("unknown", "supported", "established")
CODES = {"clean": {"clean": 0, "unknown": 6}, "overflow": {"overflow": 4, "unknown": 4}}
CODES_UNSEEN = {"unknown": 6, "clean": None}


def wrongs(outcome: Outcome) -> list[str]:
    """[] where nothing is."""
    if outcome.code is None:
        return ["the launch did not end"]
    return [*_training(outcome), *_verdict(outcome), *(f"left behind: {what}" for what in outcome.left)]


def _training(outcome: Outcome) -> list[str]:
    """A healthy script trains to its end. One with an overflow too, unless it is to be ended for it and was seen."""
    good = " ".join(str(1 / (1 + batch)) for batch in range(BATCHES))
    bad = " ".join("inf" if batch == 3 else str(1 / (1 + batch)) for batch in range(BATCHES))
    expected = {0: good, 1: good if outcome.job == "clean" else bad}
    if outcome.losses == expected or (outcome.job == "overflow" and not outcome.losses and outcome.code == 4):
        return []
    return [f"trained {outcome.losses}"]


def was_seen(outcome: Outcome) -> bool:
    """Whether the rank with the overflow was watched: where its recorder cannot be made, it is not, and says so."""
    return "rank 1 goes on unwatched" not in outcome.said


def _verdict(outcome: Outcome) -> list[str]:
    found: list[str] = []
    verdict = outcome.report["verdict"] if outcome.report is not None else None
    kind = verdict["kind"] if verdict is not None else "unknown"
    if outcome.job == "clean" or not was_seen(outcome):
        allowed = {0: ("clean",), 6: ("unknown",)}
        if outcome.job != "clean":
            allowed = {6: ("unknown",)}
    else:
        allowed = {4: ("overflow", "unknown")}
    if outcome.code not in allowed:
        found.append(f"exit code {outcome.code}")
    elif kind not in allowed[outcome.code]:
        found.append(f"exit code {outcome.code}, and the report says {kind}")
    if kind == "overflow" and verdict is not None:
        if outcome.job == "clean":
            found.append("an overflow of a clean run")
        named = (verdict["rank"], verdict["module"])
        if named not in ((1, "fc2"), (1, None), (None, None)):
            found.append(f"named {named}")
    elif kind not in ("overflow", "clean", "unknown"):
        found.append(f"the verdict is {kind}, {verdict and verdict['certainty']}: {verdict and verdict['statement']}")
    return found
