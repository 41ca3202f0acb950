"""Which nodes a verdict blames, and the lines for its scheduler."""

from __future__ import annotations

import shlex

import msgspec
import pytest
from gpuwatch.collector.decide.decide import advice, decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.node_events import GpuCounters, GpuXid, NodeSignal
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.gpu.counters import XIDS
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.core.wire.batch_job import SchedulerJob
from gpuwatch.core.wire.messages import EventMessage, NodeBye
from gpuwatch.launcher.scheduler_job import SchedulerFacts
from gpuwatch.launcher.slurm_variables import SLURM

NODES = ["gpu-1", "gpu-2", "gpu-3"]


def slurm_job(node, nodes=NODES):
    return SchedulerFacts(SLURM, job_id="17", node=node, hosts=tuple(nodes)).on_the_wire


def verdict(make, *, nodes=NODES, in_slurm=True, lost=(), missing=(), **bodies):
    """Of a job with a rank on each node; `bodies` are what each agent (a0, a1, ...) has sent besides."""
    messages = []
    for number, node in enumerate(nodes):
        agent = f"a{number}"
        if node in missing:
            continue
        job = {"job": slurm_job(node, nodes)} if in_slurm else {}
        hello = make.hello(agent, f"host{number}", 1, len(nodes), **job)
        said = [hello, *bodies.get(agent, []), *([] if agent in lost else [NodeBye("failed")])]
        messages += [(agent, n, body) for n, body in enumerate(said, 1)]
    return decide(fold(messages, lost))


def failed(make, *findings):
    """Every rank tells the same conclusion."""
    return {f"a{rank}": [make.concluded(rank, findings)] for rank in range(len(NODES))}


def test_a_node_that_the_preflight_blames(make):
    finding = make.found("compute", subject="rank", ranks=[1], hosts=["host1"])
    found = verdict(make, **failed(make, finding))
    assert found.bad_nodes == ["gpu-2"]
    assert found.next[-2:] == [
        "Drain it, or ask an administrator to:\n"
        "scontrol update nodename=gpu-2 state=drain reason='gpuwatch: preflight compute, job 17'",
        "Leave it out of the next run (gpuwatch submit --exclude-bad RUN does this):\n--exclude=gpu-2",
    ]


def test_several_nodes_are_one_line(make):
    findings = [make.found("health", subject="gpu", ranks=[rank], hosts=[f"host{rank}"]) for rank in (0, 2)]
    found = verdict(make, **failed(make, *findings))
    assert found.bad_nodes == ["gpu-1", "gpu-3"]
    assert "scontrol update nodename=gpu-1,gpu-3 state=drain" in found.next[-2]
    assert found.next[-1].endswith("\n--exclude=gpu-1,gpu-3")


@pytest.mark.parametrize(
    ("stage", "subject", "ranks"),
    [
        ("cross group", "link", [0, 1]),
        ("bandwidth", "job", [0, 1, 2]),
        ("consistency", "rank", [1]),
        ("allocation", "rank", [0, 1, 2]),
    ],
    ids=["a link has two ends", "a job is no node", "settings are the owner's", "all nodes are not the nodes"],
)
def test_what_is_not_one_nodes_fault_drains_nothing(make, stage, subject, ranks):
    finding = make.found(stage, subject=subject, ranks=ranks, hosts=[f"host{rank}" for rank in ranks])
    found = verdict(make, **failed(make, finding))
    assert found.kind == "preflight"
    assert found.bad_nodes == []
    assert not any("scontrol" in step for step in found.next)


def test_what_failed_later_may_be_a_consequence(make):
    first = make.found("health", subject="gpu", ranks=[0], hosts=["host0"])
    later = make.found("node group", subject="rank", ranks=[2], hosts=["host2"])
    assert verdict(make, **failed(make, first, later)).bad_nodes == ["gpu-1"]


def test_a_node_that_never_came_is_known_by_slurms_list(make):
    finding = make.found("arrive", subject="node", ranks=[2], hosts=[])
    bodies = {agent: body for agent, body in failed(make, finding).items() if agent != "a2"}
    assert verdict(make, missing=["gpu-3"], **bodies).bad_nodes == ["gpu-3"]


def test_a_node_that_went_silent(make):
    found = verdict(make, lost=("a1",))
    assert (found.kind, found.bad_nodes) == ("lost", ["gpu-2"])


def test_a_node_that_slurm_has_lost_is_named_though_it_still_speaks(make):
    ended = EventMessage(NodeSignal(15, 1, "SLURM: a node of the job is down", ["gpu-2"], "sinfo"))
    found = verdict(make, a0=[ended, make.ended(0, -15, "torchrun")], a1=[make.ended(1, -15, "torchrun")])
    assert (found.kind, found.certainty, found.rank, found.bad_nodes) == ("lost", "established", 1, ["gpu-2"])
    assert found.statement == "SLURM has lost node gpu-2 (rank 1) and ended the job."
    assert found.evidence[0] == "sinfo says that gpu-2 is down"
    assert found.next[0] == "Check whether gpu-2 is up and its slurmd runs."


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({}, ""),
        ({"n1": 1}, ", blamed by 1 earlier run"),
        ({"n1": 2, "n9": 4}, ", blamed by 2 earlier runs"),
        ({"n1": 2, "n2": 1}, ", blamed by earlier runs: n1 by 2, n2 by 1"),
    ],
)
def test_the_reason_counts_the_earlier_runs(before, said):
    nodes = ["n1", "n2"] if "n2" in before else ["n1"]
    drain = advice(nodes, "lost", slurm_job("n1"), before)[0].splitlines()[1]
    assert shlex.split(drain)[-1] == f"reason=gpuwatch: lost, job 17{said}"


def test_another_scheduler_needs_no_word_here(make):
    """PBS has no option of its own that leaves a node out."""
    job = SchedulerJob("PBS", "8", "n1", ["n1", "n2"], "pbsnodes -o -C {reason} {nodes}")
    assert advice(["n1"], "lost", job, {}) == [
        "Drain it, or ask an administrator to:\npbsnodes -o -C 'gpuwatch: lost, job 8' n1",
    ]
    ended = EventMessage(NodeSignal(15, 1, "PBS: a node of the job is down", ["n2"]))
    hellos = [
        make.hello(f"a{rank}", f"host{rank}", 1, 2, job=msgspec.structs.replace(job, node=f"n{rank + 1}"))
        for rank in range(2)
    ]
    messages = [("a0", 1, hellos[0]), ("a1", 1, hellos[1]), ("a0", 2, ended), ("a0", 3, NodeBye("signal", 15))]
    found = decide(fold([*messages, ("a1", 2, make.ended(1, -15, "torchrun")), ("a1", 3, NodeBye("signal", 15))]))
    assert found.statement == "PBS has lost node n2 (rank 1) and ended the job."
    assert not any("slurm" in text.lower() for text in [*found.evidence, *found.next])


def gpu_messages(make, number: int):
    """A rank on a GPU that the driver reports an XID of."""
    uuid = "GPU-7"
    facts = InventoryFacts(host="host1", uuid=uuid, local_rank=0)
    meaning = XIDS[number]
    return [
        EventMessage(RankInventoryEvent(make.where(1), "cuda:0", {}, facts=facts)),
        EventMessage(GpuCounters(uuid, "before", {}, time_ns=1)),
        EventMessage(GpuXid(uuid, number, 2, meaning.meaning, meaning.next, meaning.grade)),
        make.raised(1),
        make.ended(1, 1),
    ]


@pytest.mark.parametrize(("xid", "nodes"), [(79, ["gpu-2"]), (31, [])])
def test_a_crash_on_a_gpu_that_fails_blames_the_node_and_one_of_the_script_does_not(make, xid, nodes):
    found = verdict(make, a1=gpu_messages(make, xid))
    assert (found.kind, found.rank, found.bad_nodes) == ("crash", 1, nodes)


def test_outside_of_slurm_there_is_no_advice(make):
    found = verdict(make, in_slurm=False, lost=("a1",))
    assert (found.kind, found.bad_nodes) == ("lost", [])
    assert not any("scontrol" in step for step in found.next)


def test_a_job_of_one_node_may_blame_it(make):
    finding = make.found("compute", subject="gpu", ranks=[0], hosts=["host0"])
    assert verdict(make, nodes=["gpu-1"], a0=[make.concluded(0, [finding])]).bad_nodes == ["gpu-1"]


def test_a_clean_run_blames_nobody(make):
    bodies = {f"a{rank}": make.finished(rank) for rank in range(3)}
    messages = []
    for number, node in enumerate(NODES):
        hello = make.hello(f"a{number}", f"host{number}", 1, 3, job=slurm_job(node))
        said = [hello, *bodies[f"a{number}"], NodeBye("ok")]
        messages += [(f"a{number}", n, body) for n, body in enumerate(said, 1)]
    found = decide(fold(messages))
    assert (found.kind, found.bad_nodes) == ("clean", [])


def test_the_lines_are_for_a_shell():
    drain, exclude = (step.splitlines()[1] for step in advice(["a 1", "b;2"], "it's; bad", slurm_job("a 1"), {}))
    assert shlex.split(drain) == [
        "scontrol",
        "update",
        "nodename=a 1,b;2",
        "state=drain",
        "reason=gpuwatch: it's; bad, job 17",
    ]
    assert shlex.split(exclude) == ["--exclude=a 1,b;2"]


def test_a_hello_of_an_earlier_version_has_no_job(make):
    hello = msgspec.to_builtins(make.hello())
    del hello["job"]
    assert msgspec.convert({**hello, "slurm_job": "17"}, type(make.hello())).job is None
