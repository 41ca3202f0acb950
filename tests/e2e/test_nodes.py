"""Several nodes: each launch is a node of its own, here on one host."""

import signal
import socket
from pathlib import Path

import psutil
import pytest
from gpuwatch.core.recorder.run_folder import remove_stale

pytestmark = pytest.mark.sample(2, of="several nodes")  # of those without a mark of their own

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = ("--preflight", "off")


def start_node(bench, port: int, *options: str, script: str = "ddp_overflow.py", args: tuple[str, ...] = ()):
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a job")
    return bench.start(
        "gpuwatch.cli.main", "launch", "--nproc-per-node", "1", *where, *options, bench.script(script), *args
    )


@pytest.mark.slow
@pytest.mark.comes_first
def test_two_nodes_make_one_report_and_end_together(bench, port):
    nodes = [start_node(bench, port, args=("--rank", "1", "--batch", "2")) for _ in range(2)]
    runs = [bench.finish(process) for process in nodes]

    assert [run.code for run in runs] == [4, 4]
    (report_file,) = (bench.cwd / "gpuwatch-runs").glob("*-*/report.json")
    assert report_file.parent.name == runs[0].report["run"]["id"]
    report = runs[0].report
    assert (report["run"]["nnodes"], report["run"]["world_size"]) == (2, 2)
    assert [len(node["ranks"]) for node in report["nodes"]] == [1, 1]
    assert (report["verdict"]["rank"], report["verdict"]["module"]) == (1, "block.widen")
    for run in runs:
        assert report["verdict"]["statement"] in run.stderr.replace("\n", " ")
        assert "keys derived from the rendezvous id" in run.stderr
    stopped, named = report["ranks"]
    assert named["frames"]
    assert stopped["frames"] or stopped["exit"] == -signal.SIGTERM, "torchrun may stop it as its batch begins"


@pytest.mark.slow
def test_a_rank_that_was_waited_for_on_another_node_is_named(bench, port):
    nodes = [start_node(bench, port, *PLAIN, script="aborts.py", args=("backward",)) for _ in range(2)]
    runs = [bench.finish(process) for process in nodes]

    assert [run.code for run in runs] == [5, 5]
    verdict = runs[0].verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "supported")
    assert any("in elsewhere: time.sleep(3600)" in line for line in verdict["evidence"])


@pytest.mark.slow
def test_a_job_that_waits_for_a_node_says_so_and_so_does_its_report(bench, port):
    process = start_node(bench, port, *PLAIN, script="clean.py")
    assert process.stderr is not None
    assert any("waiting for 1 of 2 nodes; heard from" in line for line in process.stderr), "it was never told"
    process.send_signal(signal.SIGINT)
    run = bench.finish(process)

    assert run.verdict["kind"] == "interrupted"
    assert "It waited for 1 of 2 nodes; heard from" in run.verdict["statement"]


@pytest.mark.slow
def test_a_rendezvous_whose_name_is_not_known_is_told_at_once(bench, port):
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"no-such-host.invalid:{port}")
    process = bench.start("gpuwatch.cli.main", "launch", "--nproc-per-node", "1", *where, bench.script("clean.py"))
    assert process.stderr is not None
    told = "the host name no-such-host.invalid is not known here"
    assert any(told in line for line in process.stderr), "it was never told"
    process.send_signal(signal.SIGINT)
    bench.finish(process)


@pytest.mark.slow
def test_a_clean_run_on_two_nodes_with_a_secret(bench, port):
    (bench.cwd / "secret").write_text("a secret that is long enough\n")
    nodes = [start_node(bench, port, "--secret-file", "secret", script="clean.py") for _ in range(2)]
    runs = [bench.finish(process) for process in nodes]

    assert [run.code for run in runs] == [0, 0]
    assert runs[0].verdict["kind"] == "clean"
    assert not any("keys derived" in run.stderr for run in runs)


@pytest.mark.slow
def test_static_rendezvous_with_node_ranks(bench, port):
    nodes = []
    for node_rank in ("0", "1"):
        where = ("--nnodes", "2", "--node-rank", node_rank, "--master-addr", "127.0.0.1", "--master-port", str(port))
        command = ("launch", "--nproc-per-node", "1", *where, bench.script("clean.py"))
        nodes.append(bench.start("gpuwatch.cli.main", *command))
    runs = [bench.finish(process) for process in nodes]

    assert [run.code for run in runs] == [0, 0]
    assert runs[0].report["run"]["nnodes"] == 2


@pytest.mark.slow
def test_a_port_in_use_by_someone_else_is_one_sentence(bench, port):
    with socket.socket() as stranger:
        stranger.bind(("", port + 1))
        stranger.listen()
        run = bench.finish(start_node(bench, port, args=("--rank", "1", "--batch", "2")))

    assert run.code == 2
    assert "in use" in run.stderr
    assert "--collector-port" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow  # a collector is given up after 15 s of silence
def test_a_collector_that_does_not_answer_is_said_and_the_training_goes_on(bench, port):
    run = bench.launch("clean.py", *PLAIN, "--collector", f"tcp://127.0.0.1:{port}", nproc=1)

    assert run.code == 6
    assert "rank 0 step 9" in run.stdout
    assert f"the collector at tcp://127.0.0.1:{port} did not answer" in run.stderr
    assert len(list((bench.cwd / "gpuwatch-runs").glob("*.spool"))) == 1


@pytest.mark.slow
def test_a_collector_that_was_started_by_hand(bench, port):
    (bench.cwd / "secret").write_text("a secret that is long enough\n")
    collector = bench.start(
        "gpuwatch.cli.main", "collect", "--bind", f"tcp://127.0.0.1:{port}", "--secret-file", "secret", "--nodes", "1"
    )
    options = (*PLAIN, "--collector", f"tcp://127.0.0.1:{port}", "--secret-file", "secret")
    run = bench.launch("ddp_overflow.py", *options, args=("--rank", "0", "--batch", "1"))
    collected = bench.finish(collector)

    assert run.code == 4
    assert collected.code == 4
    assert collected.verdict["rank"] == 0
    assert collected.verdict["statement"] in collected.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nnodes", "2"), ("--nnodes 2", "--rdzv-endpoint HEAD_HOST:PORT")),
        (("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"), ("port 0",)),
        (("--nnodes", "two"), ("--nnodes", "'two'")),
        (("--nproc-per-node", "many"), ("--nproc-per-node", "'many'")),
        (("--max-frames", "0"), ("--max-frames", "'0'")),
        (("--trace-batches", "1,x"), ("--trace-batches", "'1,x'")),
        (("--on-overflow", "panic"), ("--on-overflow", "panic")),
        (("--collector", "somewhere:1"), ("--collector", "tcp://HOST:PORT")),
        (("--collector", "tcp://a:1", "--collector-port", "2"), ("--collector-port",)),
        (("--secret-file", "none"), ("--secret-file", "none")),
        (("--no-such-option",), ("--help",)),
    ],
)
def test_wrong_usage_is_one_sentence(refused, options, words):
    code, stdout, stderr = refused("launch", *options, str(SCRIPTS / "clean.py"))

    assert code == 2
    assert stdout == ""
    (sentence,) = [line for line in stderr.splitlines() if not line.startswith(("W1", "W0"))]
    assert sentence.startswith("gpuwatch: ")
    for word in words:
        assert word in sentence


def test_a_script_that_is_not_there_is_one_sentence(refused):
    code, _, stderr = refused("launch", "no such script.py")

    assert code == 2
    assert stderr.startswith("gpuwatch: expected a script to run, found no file 'no such script.py'")


def test_a_folder_that_python_cannot_run_is_one_sentence(refused, tmp_path):
    code, _, stderr = refused("launch", str(tmp_path))

    assert code == 2
    sentence = f"gpuwatch: expected a script to run, found the folder '{tmp_path}', which has no __main__.py"
    assert stderr.startswith(sentence)


@pytest.mark.slow
def test_a_node_that_is_gone_is_lost_and_its_victims_are_not_blamed(bench, port):
    head = start_node(bench, port, *PLAIN, "--collector-port", str(port + 1), args=LONG)
    assert head.stderr is not None
    while "the report will be in" not in head.stderr.readline():
        pass
    before = {process.pid for process in bench.processes()}
    other = start_node(bench, port, *PLAIN, args=LONG)
    assert head.stdout is not None
    assert head.stdout.readline().startswith("batch 0")
    power_cut = [process for process in bench.processes() if process.pid not in before and is_of(process, other.pid)]
    for process in power_cut:
        process.kill()
    run = bench.finish(head)
    other.communicate()

    assert run.code == 5
    verdict = run.verdict
    assert (verdict["kind"], verdict["certainty"]) == ("lost", "supported")
    assert "ended without a word" in verdict["statement"]
    assert sorted(node["state"] for node in run.report["nodes"]) == ["failed", "lost"]
    remove_stale()  # as the next launch on that host does: nobody was left to clear up there


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_while_the_exit_barrier_holds_its_launch(bench, port):
    """torchrun holds a node whose ranks have ended well for five minutes: for the others, which have failed."""
    nodes = []
    for node_rank in ("0", "1"):
        where = ("--nnodes", "2", "--node-rank", node_rank, "--master-addr", "127.0.0.1", "--master-port", str(port))
        script = (bench.script("hang.py"), "--how", "leaves", "--rank", "0")
        nodes.append(bench.start("gpuwatch.cli.main", "launch", "--nproc-per-node", "1", *where, *PLAIN, *script))
    failed = bench.finish(nodes[1])
    held = nodes[0].poll() is None
    nodes[0].kill()  # torch's wait hears no other signal
    nodes[0].communicate()

    assert held
    verdict = failed.verdict
    assert (verdict["kind"], verdict["rank"]) == ("crash", 0)
    assert "left early: its process ended with exit code 0 at hang.py:130 in main, " in verdict["statement"]
    assert sorted(node["state"] for node in failed.report["nodes"]) == ["failed", "unknown"]


LONG = ("--rank", "9", "--batch", "0", "--batches", "100000")


def is_of(process: psutil.Process, pid: int) -> bool:
    try:
        return process.pid == pid or pid in {parent.pid for parent in process.parents()}
    except psutil.NoSuchProcess:
        return False
