"""The nodes of a job before its ranks start: who is missing, and which do not fit together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...core.text import joined
from ...core.wire.messages import AgentHello
from ...core.wire.spool import SUFFIX
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import grouped

_LOOK_FOR_THEM = (
    "Look at the missing nodes: whether they were started with the same --rdzv-endpoint, --rdzv-id and --nnodes, and "
    "whether the head node's ports can be reached from there."
)


def missing_nodes(facts: RunFacts) -> str:
    """`1 of 2 nodes; heard from n0`; "" once a rank has been started, or if no node is missing."""
    hellos = facts.hellos
    expected = max((hello.min_nodes for hello in hellos), default=0)
    if facts.ranks or not hellos or len(hellos) >= expected or any(hello.starts_all for hello in hellos):
        return ""
    hosts = ", ".join(sorted(hello.host for hello in hellos))
    return f"{expected - len(hellos)} of {expected} nodes; heard from {hosts}"


def waited_for_nodes(facts: RunFacts) -> tuple[str, list[str]]:
    """(a sentence for the end of a statement, what to do); nothing if no node was missing."""
    missing = missing_nodes(facts)
    return (f" It waited for {missing}.", [_LOOK_FOR_THEM]) if missing else ("", [])


_MOST_HOSTS = 4


def unheard_hosts(facts: RunFacts) -> list[str]:
    """Hosts of the last attempt's nodes of which nothing has come here, as a blocked port makes them."""
    attempt = facts.attempts.get(facts.last_attempt)
    heard = Counter(hello.host for hello in facts.hellos)
    return sorted((Counter(attempt.hosts) - heard).elements()) if attempt is not None else []


def unheard_nodes(facts: RunFacts) -> tuple[list[str], list[str]]:
    """(a line of evidence, what to do) about the nodes that ran, and of which nothing has come here."""
    hosts = unheard_hosts(facts)
    if not hosts:
        return [], []
    more = [f"{len(hosts) - _MOST_HOSTS} more nodes"] if len(hosts) > _MOST_HOSTS else []
    who, one = joined([*hosts[:_MOST_HOSTS], *more]), len(hosts) == 1
    line = f"{who} {'was' if one else 'were'} never heard from: what {'its' if one else 'their'} ranks did is not here"
    step = (
        f"What {who} recorded is there in a {SUFFIX} file in --runs-dir, once that launch has ended. Copy it beside "
        f"this run's folder if it is not there, then: {facts.report_command}"
    )
    return [line], [step]


def unequal_nodes(facts: RunFacts) -> str:
    """`vm was started with --nnodes 2 and n1 with --nnodes 3; give ...`; "" if the nodes agree, or a rank runs."""
    hellos = facts.hellos
    if facts.ranks or any(hello.starts_all for hello in hellos):
        return ""
    ways: tuple[Callable[[AgentHello], str], ...] = (
        lambda hello: f"--nnodes {_range(hello)}",
        lambda hello: f"--nproc-per-node {hello.nproc}",
    )
    for option in ways:
        groups = grouped(hellos, option)
        if len(groups) > 1:
            each = " and ".join(f"{', '.join(sorted(h.host for h in some))} with {how}" for how, some in groups.items())
            return f"the nodes were started differently: {each}"
    return ""


def _range(hello: AgentHello) -> str:
    one = hello.min_nodes == hello.max_nodes
    return str(hello.min_nodes) if one else f"{hello.min_nodes}:{hello.max_nodes}"
