"""The keys of a job's encryption."""

from __future__ import annotations

import argparse
import os

from ...core.wire.keys import SECRET_VARIABLE, JobKeys, derive_keys, others_may_read, random_secret, read_secret
from ..say import say
from .plan import Plan


def job_keys(args: argparse.Namespace, plan: Plan) -> JobKeys:
    """From the job's secret; without one, made for this launch, or from what all nodes know."""
    secret = read_secret(args.secret_file)
    os.environ.pop(SECRET_VARIABLE, None)  # no rank needs it, nor what a rank starts
    if sentence := others_may_read(args.secret_file):
        say(sentence)
    if secret is None and plan.local:
        secret = random_secret()
    elif secret is None:
        say(
            f"encrypting with keys derived from the rendezvous id {plan.job!r}; to keep others on this network out, "
            "give every node the same GPUWATCH_SECRET or --secret-file"
        )
        secret = f"rendezvous id {plan.job}"
    return derive_keys(secret, plan.job)
