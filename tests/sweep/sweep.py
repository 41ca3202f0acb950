"""Fails each call of gpuwatch's own processes in turn: `python tests/sweep/sweep.py [--role ROLE] [--kind KIND]`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from disturbed_run import JOBS, KINDS, PARTS, ROLES, Failure, Launches, Outcome
from wrongs import wrongs

MOST = 150
"""The most calls of a role and kind that are failed one by one; of more a sample is drawn, as for allocations."""
LASTING = 12
"""How many calls of a role and kind are drawn from which on all fail: such runs take half a minute."""


def failures(calls: dict[tuple[str, str, str], int], rng: random.Random, most: int = MOST) -> Iterator[Failure]:
    """Every call that an undisturbed run makes, and for some of them all calls from there on."""
    for (role, part, kind), count in calls.items():
        if role:
            numbers = range(1, count + 1)
            once = numbers if count <= most else sorted(rng.sample(numbers, most))
            yield from (Failure(role, part, kind, n) for n in once)
            lasting = sorted(rng.sample(numbers, min(LASTING, count)))
            yield from (Failure(role, part, kind, n, lasting=True) for n in lasting)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description="Fails the n-th call, for every n, and looks at what becomes of it.")
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--role", action="append", choices=ROLES)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--n", type=int, action="append", help="this one alone")
    parser.add_argument("--once", action="store_true", help="no lasting failures")
    parser.add_argument("--lasting", action="store_true", help="lasting failures alone")
    parser.add_argument("--errno", type=int, default=0, help="another one than the kind's usual")
    parser.add_argument(
        "--most", type=int, default=MOST, help=f"of so many calls all are failed, of more a sample ({MOST})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all failures, drawn by the seed")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what the launch said where something is wrong"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    ends = time.monotonic() + 60 * args.minutes
    told: Counter[str] = Counter()
    bad = runs = 0
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder, Launches(Path(folder)) as launches:
        for job in args.job or ("clean", "overflow"):
            plain = launches.run(job, Failure())
            show(plain, args.verbose)
            for (role, part, kind), count in plain.calls.items():
                if role and count:
                    print(f"    {role:10s} {part:6s} {kind:7s} {count}")
            chosen = [
                Failure(f.role, f.part, f.kind, f.n, f.lasting, args.errno)
                for f in failures(plain.calls, rng, args.most)
                if f.role in (args.role or ROLES)
                and f.part in (args.part or PARTS)
                and f.kind in (args.kind or KINDS)
                and not (args.n and f.n not in args.n)
                and not (args.once and f.lasting)
                and not (args.lasting and not f.lasting)
                and rng.random() < args.share
            ]
            print(f"{len(chosen)} failures", flush=True)
            for failure in chosen:
                if time.monotonic() > ends:
                    break
                outcome = launches.run(job, failure)
                runs += 1
                bad += show(outcome, args.verbose)
                told[summary(outcome)] += 1
    print(f"{runs} runs, {bad} wrong")
    for line, count in told.most_common():
        print(f"{count:6d} {line}")
    return 1 if bad else 0


def summary(outcome: Outcome) -> str:
    """The answer in a few words."""
    verdict = outcome.report["verdict"] if outcome.report is not None else None
    answer = f"{verdict['kind']}, {verdict['certainty']}" if verdict is not None else "no report"
    return f"{outcome.job}: code {outcome.code}, {answer}{'' if outcome.failed else ' (never reached it)'}"


def show(outcome: Outcome, verbose: bool) -> bool:
    """Print a line. Returns whether something was wrong."""
    found = wrongs(outcome)
    mark = "WRONG " if found else ""
    print(
        f"{mark}{outcome.failure} [{outcome.failed}: {outcome.first}] {summary(outcome)}, {outcome.seconds:.1f} s"
        + "".join(f"\n    {one}" for one in found),
        flush=True,
    )
    if found and verbose:
        print("\n".join(f"    | {line}" for line in outcome.said.splitlines()[-12:]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
