"""`gpuwatch explain-log`: the rank at fault, or unknown, and never another one."""

from __future__ import annotations

import gzip
import json

import pytest
from click.testing import CliRunner
from gpuwatch.cli.explain_log import explain_log
from gpuwatch.collector.decide.log_verdict import log_verdict
from gpuwatch.collector.facts.log_lines import log_lines
from gpuwatch.collector.facts.log_reader import facts_of_logs
from gpuwatch.core.known_errors import explain
from hypothesis import given
from hypothesis import strategies as st

from .job_logs import KILLED, LOGS, TRAINING, TRAPS, WENT_ON, JobLog, raised


def verdict_of(log: JobLog):
    return log_verdict(facts_of_logs(line for name, text in log.files.items() for line in log_lines(name, text)))


@pytest.mark.parametrize("log", LOGS, ids=[log.name for log in LOGS])
def test_a_log_has_the_verdict_that_it_can_have(log):
    verdict = verdict_of(log)

    named = [verdict.rank] if verdict.rank is not None else [one.rank for one in verdict.concurrent]
    assert (verdict.kind, verdict.certainty, named) == (log.kind, log.certainty, log.ranks)
    assert log.words in verdict.statement
    assert verdict.next
    assert all(step.endswith((".", ")")) for step in verdict.next)
    assert all(any(line.startswith(name) for name in log.files) for line in verdict.evidence)


def test_nothing_in_a_log_is_established():
    assert {verdict_of(log).certainty for log in LOGS} == {"supported", "unknown"}
    assert len(LOGS) >= 40


@pytest.mark.parametrize("log", [log for log in LOGS if log.ranks], ids=lambda log: log.name)
def test_half_of_a_log_names_nobody_else(log):
    """A log that was cut off, and one of which a file is missing: the same ranks, some of them, or none."""
    for files in (
        *({name: text} for name, text in log.files.items()),
        {name: text[: len(text) // 2] for name, text in log.files.items()},
        {name: text[len(text) // 2 :] for name, text in log.files.items()},
    ):
        verdict = verdict_of(log._replace(files=files))
        named = {verdict.rank} - {None} | {one.rank for one in verdict.concurrent}
        assert named <= set(log.ranks), verdict.statement


@pytest.mark.parametrize(("name", "files", "may"), TRAPS, ids=[name for name, _, _ in TRAPS])
def test_nobody_innocent_is_named(name, files, may):
    verdict = verdict_of(JobLog(name, "", "", [], "", files))
    named = {verdict.rank} - {None} | {one.rank for one in verdict.concurrent}
    assert named <= may, verdict.statement


@pytest.mark.parametrize("line", WENT_ON, ids=lambda line: line[:40])
@pytest.mark.parametrize("end", [TRAINING, KILLED, raised(2, "KeyError", "'labels'")], ids=["well", "killed", "raised"])
def test_a_line_of_a_job_that_went_on_is_no_verdict(line, end):
    verdict = verdict_of(JobLog("", "", "", [], "", {"out": TRAINING + line + TRAINING + end}))
    raised_it = verdict.rank == 2 and "KeyError" in verdict.statement
    was_killed = verdict.rank == 3 and verdict.statement == "torchrun saw rank 3 end first, by SIGKILL."
    assert raised_it or was_killed or verdict.certainty == "unknown", verdict.statement


def test_a_kill_that_torchrun_saw_is_told_with_where_to_look_for_its_sender():
    log = next(log for log in LOGS if log.name == "a kill whose sender is not known")
    verdict = verdict_of(log)

    assert (verdict.host, verdict.code) == ("n1", "GW106")
    assert "dmesg -T | grep -i oom (on n1)" in verdict.next[0]
    assert "oom_kill" in verdict.next[0]
    assert verdict.evidence[0].endswith("exitcode : -9 (pid: 771)")


def test_a_log_that_does_not_say_it_is_headed_by_that_word_alone(tmp_path):
    (tmp_path / "out").write_text(TRAINING)
    told = CliRunner().invoke(explain_log, [str(tmp_path / "out")], standalone_mode=False)
    assert told.output.startswith("VERDICT  unknown [GW108]\n")


def test_the_command_reads_files_folders_and_gzip(tmp_path):
    log = next(log for log in LOGS if log.name == "a GPU that fell off the bus")
    for name, text in log.files.items():
        path = tmp_path / "logs of a job" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    told = CliRunner().invoke(explain_log, [str(tmp_path / "logs of a job")], standalone_mode=False)

    assert told.return_value == 5
    assert told.output.startswith("VERDICT  lost, supported [GW106]\nThe driver of node7 reported XID 79")
    assert "dmesg.gz:1: " in told.output
    told = CliRunner().invoke(explain_log, [str(tmp_path / "logs of a job"), "--format", "json"], standalone_mode=False)
    assert json.loads(told.output)["kind"] == "lost"


@pytest.mark.parametrize("name", ["no such file", "."])
def test_a_file_that_cannot_be_read_is_told_in_a_sentence(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(explain_log, [name], standalone_mode=False)
    assert "expected a " in str(told.exception)


@given(st.text(), st.text())
def test_any_text_is_read(one, other):
    assert log_verdict(facts_of_logs([*log_lines("rank1.log", one), *log_lines("out", other)])).statement


def test_each_known_line_is_known_as_its_program_prints_it():
    """Every row of the table for jobs, from the lines of these logs and those below."""
    from gpuwatch.core import known_job_errors

    text = "\n".join(text for log in LOGS for text in log.files.values())
    rows = {**known_job_errors.OF_THE_WRITER, **known_job_errors.OF_OTHERS}
    steps = {found.next for line in [*text.splitlines(), *FURTHER] for found in explain(line)}
    unseen = [step for _, step in rows.values() if step not in steps and "{" not in step]
    assert unseen == []


FURTHER = [
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "ImportError: libnccl.so.2: cannot open shared object file: No such file or directory",
    "RuntimeError: received 0 items of ancdata",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 116] Stale file handle",
    "[W1127 socket.cpp:764] [c10d] The IPv4 network addresses of (n9, 29500) cannot be retrieved (gai error: -2 - Name "
    "or service not known).",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they "
    "have already been freed).",
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "slurmstepd: error: *** JOB 4242 ON n0 CANCELLED AT 2026-11-27T03:12:55 DUE TO PREEMPTION ***",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=18, OpType=ALLREDUCE), but Rank 2 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=18, OpType=BROADCAST).",
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'  what():  [enforce fail at "
    "gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 512 vs 128",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
    "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "mlx5: node7: got completion with error:",
]
