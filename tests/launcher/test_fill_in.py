from __future__ import annotations

import os
import shlex

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.fill_in import fill_in, given_options, read_job, read_task
from gpuwatch.launcher.options import get_check_parser, get_parser
from gpuwatch.launcher.plan import make_plan

from .environments import STEP

HEAD = {**STEP, "SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu-007"}
ALONE = {**HEAD, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu-007"}
PLAIN = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "3000", "NPROC_PER_NODE": "4"}


@pytest.fixture(autouse=True)
def no_torchrun_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def no_gpus() -> int:
    return 0


def filled(line, environ, gpus=no_gpus, parser=get_parser, script=("train.py",)):
    """What a launch with this line makes of its options, and whether the nodes meet at the job's own head."""
    arguments = [*shlex.split(line), *script]
    args = parser().parse_args(arguments)
    ours = fill_in(args, given_options(parser(), arguments, os.environ), read_job(environ), gpus)
    return args, ours


def changed(line, environ, **more):
    """The options that are not what torchrun's own defaults would make them."""
    before = vars(get_parser().parse_args([*shlex.split(line), "train.py"]))
    after = vars(filled(line, environ, **more)[0])
    return {name: value for name, value in after.items() if value != before[name]}


def test_in_a_step_of_two_nodes_nothing_need_be_said():
    assert changed("", STEP) == {
        "nnodes": "2",
        "nproc_per_node": "8",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "gpu-007:20422",
        "rdzv_id": "4711.0",
        "rdzv_conf": "is_host=0",
        "local_addr": "gpu-008",
    }
    assert changed("", HEAD) == {**changed("", STEP), "rdzv_conf": "is_host=1", "local_addr": "gpu-007"}
    assert filled("", STEP)[1]


def test_the_first_node_hosts_the_collector_and_the_other_connects_to_it():
    def unknown(host):
        raise AssertionError("is_host says it")

    head = make_plan(filled("", HEAD)[0], unknown)
    other = make_plan(filled("", STEP)[0], unknown)
    assert (head.hosts, head.bind) == (True, "tcp://*:20423")
    assert (other.hosts, other.connect) == (False, "tcp://gpu-007:20423")
    assert head.job == other.job == "4711.0"


def test_a_check_is_filled_in_the_same_way():
    args, ours = filled("--quick", STEP, parser=get_check_parser, script=())
    assert (args.nnodes, args.rdzv_endpoint, args.nproc_per_node) == ("2", "gpu-007:20422", "8")
    assert ours
    assert args.check_only


def test_one_node_needs_no_port_of_its_own():
    assert changed("", ALONE) == {
        "nproc_per_node": "8",
        "nnodes": "1",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_id": "4711.0",
    }


def test_without_a_job_torchruns_defaults_stay():
    assert changed("", {}) == {}
    assert changed("", {"PATH": "/bin"}, gpus=lambda: 8) == {}


EXPLICIT = [
    ("--nproc-per-node 2", {"nproc_per_node": "2"}),
    ("--nproc-per-node 1", {"nproc_per_node": "1"}),  # the default, said
    ("--nnodes 1:2", {"nnodes": "1:2", "rdzv_endpoint": "gpu-007:20422"}),
    ("--rdzv-id mine", {"rdzv_id": "mine"}),
    ("--rdzv_id mine", {"rdzv_id": "mine"}),
    ("--rdzv-conf join_timeout=9", {"rdzv_conf": "join_timeout=9,is_host=0"}),
    ("--rdzv-conf is_host=1", {"rdzv_conf": "is_host=1"}),
    ("--local-addr 10.0.0.8", {"local_addr": "10.0.0.8"}),
    ("--node-rank 0", {"node_rank": 0, "rdzv_conf": "is_host=1"}),
    # another place to meet: who hosts it is torchrun's to find out, and node names may mean nothing there
    ("--rdzv-endpoint h:1", {"rdzv_endpoint": "h:1", "rdzv_backend": "c10d", "rdzv_conf": "", "local_addr": None}),
    ("--rdzv-backend etcd-v2", {"rdzv_backend": "etcd-v2", "rdzv_endpoint": ""}),
    # torchrun's static rendezvous, as scripts have it
    ("--rdzv-backend static", {"master_addr": "gpu-007", "master_port": 20422, "node_rank": 1, "rdzv_endpoint": ""}),
    ("--master-port 9", {"rdzv_backend": "static", "master_addr": "gpu-007", "master_port": 9, "node_rank": 1}),
    ("--master-addr h", {"rdzv_backend": "static", "master_addr": "h", "master_port": 20422, "node_rank": 1}),
    ("--master-addr h --master-port 9 --node-rank 0", {"master_addr": "h", "master_port": 9, "node_rank": 0}),
    ("--rdzv-endpoint h:1 --node-rank 1", {"rdzv_backend": "static", "rdzv_endpoint": "h:1", "node_rank": 1}),
    ("--rdzv-backend c10d --master-port 9", {"rdzv_backend": "c10d", "rdzv_endpoint": "gpu-007:9"}),
    # this node alone, whatever the job has
    ("--nnodes 1", {"nnodes": "1", "rdzv_endpoint": "localhost:0", "local_addr": None}),
    ("--standalone", {"nnodes": "1:1", "rdzv_endpoint": "", "nproc_per_node": "8"}),
]


@pytest.mark.parametrize(("line", "expected"), EXPLICIT)
def test_what_is_said_wins(line, expected):
    args, _ = filled(line, STEP)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(("line", "expected"), EXPLICIT)
def test_what_is_said_in_torchruns_variables_wins(line, expected, monkeypatch):
    words = shlex.split(line)
    while words:
        name = f"PET_{words.pop(0)[2:].replace('-', '_').upper()}"
        monkeypatch.setenv(name, words.pop(0) if words and not words[0].startswith("--") else "1")
    args, _ = filled("", STEP)
    numbers = {"node_rank", "master_port"}
    got = {name: int(getattr(args, name)) if name in numbers else getattr(args, name) for name in expected}
    assert got == expected


def test_only_a_meeting_point_of_the_job_is_ours():
    assert [filled(line, STEP)[1] for line in ("", "--rdzv-conf a=b", "--rdzv-backend static")] == [True] * 3
    assert not any(filled(line, STEP)[1] for line in ("--rdzv-endpoint h:1", "--master-addr h", "--nnodes 1"))


def test_the_options_of_the_script_are_not_ours():
    args, _ = filled("", STEP, script=("train.py", "--nnodes", "7", "--nproc-per-node", "3"))
    assert (args.nnodes, args.nproc_per_node) == ("2", "8")
    assert args.training_script_args == ["--nnodes", "7", "--nproc-per-node", "3"]


@pytest.mark.parametrize(("gpus", "nproc"), [(4, "4"), (0, "1")])
def test_where_slurm_tells_no_gpus_the_driver_is_asked(gpus, nproc):
    args, _ = filled("", {**STEP, "SLURM_GPUS_ON_NODE": ""}, gpus=lambda: gpus)
    assert args.nproc_per_node == nproc


def test_the_driver_is_not_asked_for_what_is_known():
    def fail():
        raise AssertionError

    filled("", STEP, gpus=fail)
    filled("--nproc-per-node 2", {**STEP, "SLURM_GPUS_ON_NODE": ""}, gpus=fail)
    filled("", PLAIN, gpus=fail)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


BATCH = {**without(STEP, "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"), "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("line", "environ", "words"),
    [
        ("", {"SLURM_JOB_ID": "4711"}, ["SLURM job 4711", "SLURM_STEP_NUM_NODES", "--nnodes"]),
        ("", without(STEP, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST", "--rdzv-endpoint HEAD_HOST:PORT"]),
        ("", without(STEP, "SLURM_NODEID"), ["SLURM_NODEID", "--node-rank"]),
        ("", {**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, ["one task", "found 8", "--ntasks-per-node=1"]),
        ("", {**ALONE, "SLURM_STEP_TASKS_PER_NODE": "8"}, ["one task", "found 8", "--ntasks=1"]),
        ("", BATCH, ["SLURM job 4711 has 2 nodes", "srun --ntasks=2 --ntasks-per-node=1", "--nnodes 1"]),
        ("--nnodes 3 --node-rank 3", STEP, ["0 to 2", "found 3", "--node-rank"]),
        ("", {**PLAIN, "MASTER_ADDR": ""}, ["2 nodes", "MASTER_ADDR", "--rdzv-endpoint HEAD_HOST:PORT"]),
        ("", {**PLAIN, "NODE_RANK": "2"}, ["NODE_RANK", "0 to 1", "found 2"]),
        ("--nnodes 2", {"NODE_RANK": "1"}, ["MASTER_ADDR", "--rdzv-endpoint"]),
        ("--nnodes two", STEP, ["--nnodes", "'two'"]),
    ],
)
def test_what_is_missing_is_told_in_one_sentence(line, environ, words):
    with pytest.raises(UsageError) as caught:
        filled(line, environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("--nnodes 1", {"SLURM_JOB_ID": "4711"}),
        ("--standalone", {"SLURM_JOB_ID": "4711"}),
        ("--nnodes 1", BATCH),
        ("--rdzv-endpoint h:1", without(STEP, "SLURM_STEP_NODELIST", "SLURM_NODEID")),
        ("--node-rank 1", without(STEP, "SLURM_NODEID")),
        ("--nnodes 16 --rdzv-endpoint h:1", {**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}),
    ],
)
def test_what_is_said_need_not_be_known(line, environ):
    filled(line, environ)


@pytest.mark.parametrize("environ", [STEP, HEAD, BATCH, PLAIN, without(STEP, "SLURM_STEP_NODELIST"), {"NNODES": "2"}])
@pytest.mark.parametrize("line", ["", "--nnodes 2", "--master-port 9", "--rdzv-backend static", "--nnodes 1:2"])
def test_several_nodes_never_meet_at_localhost(line, environ):
    try:
        args, _ = filled(line, environ)
    except UsageError:
        return
    meeting = args.rdzv_endpoint or args.master_addr
    assert meeting.startswith(("gpu-007", "head"))


def test_plain_variables_do_the_same():
    assert changed("", PLAIN) == {
        "nnodes": "2",
        "nproc_per_node": "4",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "head:3000",
        "rdzv_conf": "is_host=0",
    }
    assert changed("", {**PLAIN, "NODE_RANK": "0"})["rdzv_conf"] == "is_host=1"
    assert changed("", without(PLAIN, "MASTER_PORT"))["rdzv_endpoint"] == "head:29400"
    assert changed("", {**PLAIN, "MASTER_ADDR": "fe80::1"})["rdzv_endpoint"] == "[fe80::1]:3000"
    assert "rdzv_conf" not in changed("", without(PLAIN, "NODE_RANK"))  # torchrun knows its own addresses


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --master-addr other --master-port 1 --node-rank 1",
        "--nnodes 2 --rdzv-endpoint other:1 --node-rank 1",
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint other:1 --rdzv-id 7",
    ],
)
def test_a_whole_command_line_of_torchrun_means_what_it_means_there(line):
    assert changed(line, without(PLAIN, "NPROC_PER_NODE")) == {}


def test_one_node_of_plain_variables_is_as_without_them():
    assert changed("", {"NNODES": "1", "MASTER_ADDR": "head", "NODE_RANK": "0"}) == {"nnodes": "1"}


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("variables", "here"),
    [
        (BY_HAND, 2),
        ({**BY_HAND, "MASTER_ADDR": "127.0.0.1"}, 2),
        ({**BY_HAND, "MASTER_ADDR": "gpu-007", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({**BY_HAND, "NNODES": "1"}, 2),
        ({**BATCH, **BY_HAND}, 2),
        # not several ranks of this host, as far as the variables say
        ({**BY_HAND, "MASTER_ADDR": "gpu-007"}, 1),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, 1),
        ({**BY_HAND, "NNODES": "2"}, 1),
        ({**BY_HAND, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1),
        ({**BY_HAND, "WORLD_SIZE": "1", "RANK": "0"}, 1),
        ({**BY_HAND, "RANK": "2"}, 1),
        ({**BY_HAND, "RANK": "gold"}, 1),
        ({**BY_HAND, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),
        (without(BY_HAND, "MASTER_PORT"), 1),
        (without(BY_HAND, "RANK"), 1),
        ({**STEP, **BY_HAND}, 1),
    ],
)
def test_ranks_that_a_script_starts_on_one_host_are_its_tasks(variables, here):
    job = read_task(variables)

    assert job is not None
    assert job.tasks_here == here


def test_jobs_of_one_host_are_told_apart_by_where_their_ranks_meet():
    one, other = read_task(BY_HAND), read_task({**BY_HAND, "MASTER_PORT": "29512"})

    assert one.rdzv_id != other.rdzv_id
    assert read_task({**BY_HAND, "RANK": "0"}) == one
