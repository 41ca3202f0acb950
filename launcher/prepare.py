"""What is found out before a launch starts anything: what is wrong in its options, its ranks, its keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.distributed.run import determine_local_world_size

from ..core.errors import UsageError
from ..core.keys import JobKeys, derive_keys, random_secret, read_secret
from .plan import Plan
from .say import say


def expect_script(args: argparse.Namespace) -> None:
    """What torchrun would only find out later, said in one sentence."""
    if args.no_python and args.module:
        raise UsageError("expected one of --no-python and -m/--module, found both; drop one of them")
    if not args.module and not args.no_python and not Path(args.training_script).exists():
        raise UsageError(f"expected a script to run, found no file {args.training_script!r} in {Path.cwd()}")


def number_of_ranks(args: argparse.Namespace) -> int:
    """Of this node."""
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: expected 0 or more, found {args.max_restarts}")
    try:
        nproc = int(determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node: expected a number, cpu, gpu or auto, found {args.nproc_per_node!r} ({error})"
        ) from error
    if nproc < 1:
        raise UsageError(f"--nproc-per-node: expected 1 or more, found {nproc}")
    return nproc


def job_keys(args: argparse.Namespace, plan: Plan) -> JobKeys:
    """From the job's secret; without one, made for this launch, or from what all nodes know."""
    secret = read_secret(args.secret_file)
    if secret is None and plan.local:
        secret = random_secret()
    elif secret is None:
        say(
            f"encrypting with keys derived from the rendezvous id {plan.job!r}; to keep others on this network out, "
            "give every node the same GPUWATCH_SECRET or --secret-file"
        )
        secret = f"rendezvous id {plan.job}"
    return derive_keys(secret, plan.job)
