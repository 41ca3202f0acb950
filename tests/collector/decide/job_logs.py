# ruff: noqa: E501  # lines as they are printed
"""Logs of jobs that ended badly, as NCCL, torch, gloo, torchrun, srun, slurmd and the kernel print them.

The forms are from public reports and from the sources of these programs; hosts and numbers are our own.
"""

from __future__ import annotations

from typing import NamedTuple

PG = "ProcessGroupNCCL.cpp"


class JobLog(NamedTuple):
    name: str
    kind: str
    certainty: str
    ranks: list[int]
    """Those at fault, as far as the log can show it."""
    words: str
    """In the statement."""
    files: dict[str, str]


def timed_out(
    rank, number, operation="ALLREDUCE", elements=4096, seconds=600, *, guid="0(default_pg)", begun=None
) -> str:
    """The two lines of torch 2.6 and later when a watchdog gives up."""
    begun = number if begun is None else begun
    return (
        f"[rank{rank}]:[E1127 03:12:55.90316591 {PG}:683] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={elements}, NumelOut={elements}, "
        f"Timeout(ms)={seconds * 1000}) ran for {seconds * 1000 + 31} milliseconds before timing out.\n"
        f"[rank{rank}]:[E1127 03:12:56.04329395 {PG}:2241] [PG ID 0 PG GUID {guid} Rank {rank}]  failure detected by "
        f"watchdog at work sequence id: {number} PG status: last enqueued work: {begun}, last completed work: {number - 1}\n"
    )


def dumps(rank, first, begun, *, guid="0(default_pg)") -> str:
    """What a rank says that is not in the collective, when another one's watchdog gives up."""
    return (
        f"[rank{rank}]:[E1127 03:12:57.17805729 {PG}:1922] [PG ID 0 PG GUID {guid} Rank {rank}] Observed flight recorder "
        "dump signal from another rank via TCPStore.\n"
        f"[rank{rank}]:[E1127 03:12:57.18102870 {PG}:1987] [PG ID 0 PG GUID {guid} Rank {rank}] Received a dump signal due "
        f"to a collective timeout from  rank {first} and we will try our best to dump the debug info. Last enqueued NCCL "
        f"work: {begun}, last completed NCCL work: {begun}.This is most likely caused by incorrect usages of "
        "collectives, e.g., wrong sizes used across ranks.\n"
    )


def raised(rank, error, message, line=41, *, prefix=None) -> str:
    prefix = f"[rank{rank}]: " if prefix is None else prefix
    text = (
        "Traceback (most recent call last):\n"
        f'  File "/home/me/train.py", line {line}, in main\n'
        "    step(batch)\n"
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl\n'
        "    return forward_call(*args, **kwargs)\n"
        f"{error}: {message}\n"
    )
    return "".join(f"{prefix}{each}\n" for each in text.splitlines())


GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:41234"
NCCL_GONE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, remote process exited or there was a "
    "network error, NCCL version 2.27.5"
)


def torchrun(rank, code, *others, host="n1") -> str:
    def entry(number, of, ended):
        why = f"Signal {-ended} received by PID 77{of}" if ended < 0 else "To enable traceback see: https://pytorch.org"
        return (
            f"[{number}]:\n  time      : 2026-11-27_03:13:02\n  host      : {host}\n"
            f"  rank      : {of} (local_rank: {of})\n  exitcode  : {ended} (pid: 77{of})\n  error_file: <N/A>\n"
            f"  traceback : {why}\n"
        )

    rest = "".join(entry(n, *other) for n, other in enumerate(others, 1)) or "  <NO_OTHER_FAILURES>\n"
    return (
        "Traceback (most recent call last):\n"
        '  File "/venv/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"=====\ntrain.py FAILED\n-----\nFailures:\n{rest}-----\nRoot Cause (first observed failure):\n{entry(0, rank, code)}"
    )


def old(rank, number, operation="ALLREDUCE") -> str:
    """torch before 2.2."""
    return (
        f"[E {PG}:474] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
        f"OpType={operation}, Timeout(ms)=1800000) ran for 1800617 milliseconds before timing out.\n"
    )


TRAINING = "".join(f"step {n} loss {3.1 - n / 100:.3f}\n" for n in range(40))

LOGS = [
    JobLog(
        "other sizes under one number",
        "hang",
        "supported",
        [3],
        "rank 3 waited in BROADCAST of 24084544 elements",
        {"out": TRAINING + "".join(timed_out(r, 7219, "BROADCAST", 24084544 if r == 3 else 64) for r in range(4))},
    ),
    JobLog(
        "two ranks in different collectives",
        "hang",
        "unknown",
        [],
        "It is unknown which rank is the odd one",
        {"out": timed_out(0, 167, "ALLREDUCE", 1) + timed_out(1, 167, "_ALLGATHER_BASE", 1024)},
    ),
    JobLog(
        "one rank that had not begun it",
        "hang",
        "supported",
        [2],
        "Rank 2 had not begun work 168 (ALLREDUCE) of group 0, in which ranks 0, 1 and 3 waited for 600 s: its last begun is 167",
        {"out": "".join(timed_out(r, 168, begun=169) for r in (0, 1, 3)) + dumps(2, 0, 167)},
    ),
    JobLog(
        "one file a rank, and a node that was elsewhere",
        "hang",
        "supported",
        [0, 1],
        "Ranks 0 and 1 had not begun work 167",
        {f"rank{r}.log": timed_out(r, 167, elements=1) if r > 1 else dumps(r, 3, 166) for r in range(4)},
    ),
    JobLog(
        "all waited in the same collective",
        "hang",
        "unknown",
        [],
        "the log does not show for whom",
        {"out": "".join(timed_out(r, 57, "ALLGATHER", 1) for r in range(4))},
    ),
    JobLog(
        "all but one, of whom the log has nothing",
        "hang",
        "unknown",
        [],
        "The log has no timeout of rank 3: look there first",
        {
            "out": "n0:240:240 [0] NCCL INFO comm 0x7f1 rank 0 nranks 4 cudaDev 0 - Init COMPLETE\n"
            + "".join(timed_out(r, 5) for r in range(3))
        },
    ),
    JobLog(
        "two groups with numbers of their own",
        "hang",
        "unknown",
        [],
        "the log does not show for whom",
        {"out": timed_out(0, 96117, guid="3(tp)") + timed_out(4, 64088, guid="4(dp)")},
    ),
    JobLog(
        "an old torch that names no group",
        "hang",
        "unknown",
        [],
        "Ranks 0 and 1 waited",
        {"out": old(0, 96120) + old(1, 96120)},
    ),
    JobLog(
        "an old torch with other operations",
        "hang",
        "unknown",
        [],
        "the log does not show for whom",
        {"out": old(0, 96120) + old(1, 96120, "BROADCAST")},
    ),
    JobLog(
        "a blocking wait",
        "hang",
        "unknown",
        [],
        "Rank 1 waited",
        {
            "out": f"[rank1]:[E1127 01:02:03 {PG}:740] [Rank 1] Work WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=8, "
            "NumelOut=8, Timeout(ms)=600000) timed out in blocking wait.\n"
        },
    ),
    JobLog(
        "torch 2.4's words, whose groups count within a process",
        "hang",
        "unknown",
        [],
        "Rank 0 waited for 600 s in work 7",
        {
            "out": f"[rank0]:[E {PG}:574] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
            "OpType=_ALLGATHER_BASE, NumelIn=1024, NumelOut=16384, Timeout(ms)=600000) ran for 600029 milliseconds before "
            f"timing out.\n[rank0]:[E {PG}:1664] [PG 1 Rank 0] Exception (either an error or timeout) detected by watchdog "
            "at work: 7, last enqueued NCCL work: 8, last completed NCCL work: 6.\n"
            f"[rank1]:[E {PG}:1785] [PG 1 Rank 1] Received a dump signal due to a collective timeout from  rank 0 and we "
            "will try our best to dump the debug info. Last enqueued NCCL work: 6, last completed NCCL work: 6.\n"
        },
    ),
    JobLog(
        "an own error, and those who followed",
        "crash",
        "supported",
        [2],
        "Rank 2 raised ValueError: /data/00017.tar is empty, at train.py:41. Ranks 0 and 1 failed because of it.",
        {
            "out": TRAINING
            + raised(0, "torch.distributed.DistBackendError", NCCL_GONE)
            + raised(2, "ValueError", "/data/00017.tar is empty")
            + raised(1, "RuntimeError", GONE)
            + torchrun(0, 1, (2, 1))
        },
    ),
    JobLog(
        "the same error on all ranks",
        "crash",
        "supported",
        [0, 1],
        "Ranks 0 and 1 raised KeyError: 'labels'",
        {"out": raised(0, "KeyError", "'labels'") + raised(1, "KeyError", "'labels'")},
    ),
    JobLog(
        "different errors on two ranks",
        "crash",
        "unknown",
        [],
        "the log does not show which was first: rank 0 raised KeyError: 'x', at train.py:41; rank 1 raised ValueError",
        {"out": raised(0, "KeyError", "'x'") + raised(1, "ValueError", "bad shard")},
    ),
    JobLog(
        "an error without a rank",
        "crash",
        "supported",
        [],
        "The script raised ModuleNotFoundError: No module named 'flash_attn', at train.py:3.",
        {"out": raised(0, "ModuleNotFoundError", "No module named 'flash_attn'", 3, prefix="") + torchrun(0, 1)},
    ),
    JobLog(
        "an error raised while a lost peer was handled",
        "crash",
        "supported",
        [1],
        "Rank 1 raised AssertionError",
        {
            "out": raised(0, "RuntimeError", GONE)
            + "[rank0]: \n[rank0]: During handling of the above exception, another exception occurred:\n[rank0]: \n"
            + raised(0, "TrainingFailed", "save failed")
            + raised(1, "AssertionError", "loss is nan")
        },
    ),
    JobLog(
        "Ray's prefix",
        "crash",
        "supported",
        [1],
        "Rank 1 raised ZeroDivisionError",
        {"out": raised(1, "ZeroDivisionError", "division by zero", prefix="(WorkerDict pid=3490362) [rank1]: ")},
    ),
    JobLog(
        "the GPU's memory",
        "crash",
        "supported",
        [5],
        "Rank 5 raised torch.OutOfMemoryError: CUDA out of memory",
        {
            "out": raised(
                5,
                "torch.OutOfMemoryError",
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total "
                "capacity of 79.11 GiB of which 1.20 GiB is free.",
            )
            + raised(0, "torch.distributed.DistBackendError", NCCL_GONE)
        },
    ),
    JobLog(
        "an index out of range on a device",
        "crash",
        "supported",
        [3],
        "Rank 3 raised RuntimeError: CUDA error: device-side assert triggered",
        {
            "out": "../aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [12,0,0], thread: [3,0,0] "
            "Assertion `srcIndex < srcSelectDimSize` failed.\n"
            + raised(3, "RuntimeError", "CUDA error: device-side assert triggered")
        },
    ),
    JobLog(
        "two ranks on one GPU",
        "crash",
        "supported",
        [0, 1],
        "Ranks 0 and 1 raised torch.distributed.DistBackendError: NCCL error in",
        {
            "out": "".join(
                raised(
                    r,
                    "torch.distributed.DistBackendError",
                    "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage "
                    f"(run with NCCL_DEBUG=WARN for details). Last error: Duplicate GPU detected : rank {r} and rank {1 - r} "
                    "both on CUDA device 2000",
                )
                for r in range(2)
            )
        },
    ),
    JobLog(
        "a port that is taken",
        "crash",
        "supported",
        [0],
        "Rank 0 raised torch.distributed.DistNetworkError",
        {
            "out": raised(
                0,
                "torch.distributed.DistNetworkError",
                "The server socket has failed to listen on any local "
                "network address. port: 29517, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            )
        },
    ),
    JobLog(
        "a segmentation fault that torchrun saw",
        "lost",
        "supported",
        [1],
        "Rank 1 on n1 was killed by SIGSEGV",
        {"out": TRAINING + torchrun(1, -11, (0, -15))},
    ),
    JobLog(
        "a kill whose sender is not known",
        "lost",
        "supported",
        [1],
        "torchrun saw rank 1 end first, by SIGKILL.",
        {"out": TRAINING + torchrun(1, -9)},
    ),
    JobLog(
        "a kill, and ranks that torchrun then ended or that lost their peer",
        "lost",
        "supported",
        [1],
        "torchrun saw rank 1 end first, by SIGKILL.",
        {"out": raised(0, "RuntimeError", GONE) + TRAINING + torchrun(1, -9, (0, 1), (2, -15), (3, -2))},
    ),
    JobLog(
        "a kill, and another node's torchrun that saw a victim first",
        "lost",
        "supported",
        [1],
        "torchrun saw rank 1 end first, by SIGKILL.",
        {
            "n1.log": TRAINING + torchrun(1, -9),
            "n2.log": raised(8, "RuntimeError", GONE) + torchrun(8, 1, host="n2"),
        },
    ),
    JobLog(
        "an exit code of the script's own, and a peer that lost the rank",
        "crash",
        "supported",
        [1],
        "torchrun saw rank 1 end first, with exit code 3.",
        {"out": raised(0, "RuntimeError", GONE) + TRAINING + torchrun(1, 3, (0, -15))},
    ),
    JobLog(
        "exit codes of two ranks of one node",
        "lost",
        "unknown",
        [],
        "Signals or exit codes of their own ended ranks 1 and 2, and the log does not show which was first.",
        {"out": TRAINING + torchrun(1, 3, (2, 4))},
    ),
    JobLog(
        "the exit code of an error that is not in the log",
        "unknown",
        "unknown",
        [],
        "The log does not show which rank failed first",
        {"out": raised(0, "RuntimeError", GONE) + TRAINING + torchrun(1, 1, (0, -15))},
    ),
    JobLog(
        "a library's abort that no watchdog explains",
        "lost",
        "supported",
        [2],
        "torchrun saw rank 2 end first, by SIGABRT.",
        {"out": TRAINING + torchrun(2, -6, (0, -15))},
    ),
    JobLog(
        "an abort by the watchdog",
        "hang",
        "unknown",
        [],
        "Rank 0 waited",
        {"out": timed_out(0, 168) + torchrun(0, -6)},
    ),
    JobLog(
        "two kills in one look of torchrun's",
        "lost",
        "unknown",
        [],
        "Signals ended ranks 1 and 3, and the log does not show which was first.",
        {"out": TRAINING + torchrun(1, -9, (3, -9))},
    ),
    JobLog(
        "a signal that torchrun sends to the healthy",
        "unknown",
        "unknown",
        [],
        "do not show why",
        {"out": TRAINING + torchrun(1, -15, (0, -15))},
    ),
    JobLog(
        "a kill of one node, and another node's torchrun that saw a rank of which nothing is known",
        "unknown",
        "unknown",
        [],
        "do not show why",
        {"n1.log": torchrun(1, -9), "n2.log": torchrun(8, 1, host="n2")},
    ),
    JobLog(
        "a kill beside SLURM's count of them",
        "lost",
        "supported",
        [],
        "The kernel killed a process of the job for lack of host memory",
        {
            "out": torchrun(1, -9)
            + "slurmstepd: error: Detected 1 oom_kill event in StepId=42.0. Some of the step tasks have been OOM Killed.\n"
        },
    ),
    JobLog(
        "an exit code and nothing else",
        "unknown",
        "unknown",
        [],
        "do not show why",
        {"out": TRAINING + torchrun(0, 1, (1, 1))},
    ),
    JobLog(
        "SLURM's memory limit",
        "lost",
        "supported",
        [],
        "on n3 for lack of host memory (task 12)",
        {
            "out": "slurmstepd-n3: error: Detected 1 oom_kill event in StepId=4242.0. Some of the step tasks have been OOM "
            "Killed.\nsrun: error: n3: task 12: Out Of Memory\n" + raised(0, "RuntimeError", GONE)
        },
    ),
    JobLog(
        "the kernel's own words",
        "lost",
        "supported",
        [],
        "The kernel killed a process of the job on node7 for lack of host memory",
        {
            "dmesg": "Nov 27 03:12:55 node7 kernel: Out of memory: Killed process 3490362 (python) total-vm:1kB\n",
        },
    ),
    JobLog(
        "a time limit",
        "interrupted",
        "supported",
        [],
        "The job reached its time limit",
        {
            "out": TRAINING
            + "slurmstepd: error: *** JOB 4242 ON n0 CANCELLED AT 2026-11-27T03:12:55 DUE TO TIME LIMIT ***\n"
        },
    ),
    JobLog(
        "a time limit of a job that stood still",
        "hang",
        "supported",
        [1],
        "Rank 1 had not begun work 9",
        {
            "out": timed_out(0, 9)
            + dumps(1, 0, 8)
            + "slurmstepd: error: *** JOB 4242 ON n0 CANCELLED AT 2026-11-27T03:12:55 DUE TO TIME LIMIT ***\n"
        },
    ),
    JobLog(
        "a node that failed",
        "lost",
        "supported",
        [],
        "SLURM lost node n3",
        {
            "out": "srun: error: Node failure on n3\nslurmstepd: error: *** STEP 4242.0 ON n0 CANCELLED AT "
            "2026-11-27T03:12:55 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
        },
    ),
    JobLog(
        "a bus error of one task",
        "lost",
        "supported",
        [],
        "Task 13 on n7 ended by itself: bus error",
        {"out": "srun: error: n7: task 13: Bus error (core dumped)\nsrun: error: n7: tasks 8-12,14-15: Killed\n"},
    ),
    JobLog(
        "aborted and killed tasks say nothing",
        "unknown",
        "unknown",
        [],
        "do not show why",
        {"out": "srun: error: n7: task 13: Aborted (core dumped)\nsrun: error: n6: tasks 0-7: Killed\n"},
    ),
    JobLog(
        "a GPU that fell off the bus",
        "lost",
        "supported",
        [],
        "The driver of node7 reported XID 79 (GPU has fallen off the bus) for its GPU at PCI 0000:3b:00",
        {
            "dmesg.gz": "Nov 27 03:12:55 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off "
            "the bus.\n",
            "out": timed_out(0, 57) + timed_out(1, 57),
        },
    ),
    JobLog(
        "a contained memory error",
        "lost",
        "supported",
        [],
        "reported XID 94",
        {"dmesg": "Nov 27 03:12:55 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 94, pid=2113, name=python, Contained\n"},
    ),
    JobLog(
        "two GPUs with errors",
        "unknown",
        "unknown",
        [],
        "the driver reported XID",
        {
            "dmesg": "Nov 27 03:12:55 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x\n"
            "Nov 27 03:12:56 node8 kernel: NVRM: Xid (PCI:0000:5e:00): 79, pid=1, name=x\n"
        },
    ),
    JobLog(
        "an XID that is the program's",
        "unknown",
        "unknown",
        [],
        "the driver reported XID 31",
        {"dmesg": "Nov 27 03:12:55 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=2113, name=python, Ch 0000001b\n"},
    ),
    JobLog(
        "a port of InfiniBand that was down",
        "hang",
        "unknown",
        [],
        "The log also says: node-b: the InfiniBand or RoCE port of this host has lost its link.",
        {
            "out": "node-b:77:91 [2] ibvwrap.cc:321 NCCL WARN NET/IB : mlx5_2:1 Got async event : port error\n"
            + timed_out(0, 57)
            + timed_out(1, 57)
        },
    ),
    JobLog(
        "a full /dev/shm of the DataLoader",
        "crash",
        "supported",
        [2],
        "Rank 2 raised RuntimeError: DataLoader worker (pid(s) 4711) exited",
        {
            "out": "[rank2]: ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
            "memory (shm).\n" + raised(2, "RuntimeError", "DataLoader worker (pid(s) 4711) exited unexpectedly")
        },
    ),
    JobLog(
        "a monitored barrier",
        "hang",
        "supported",
        [1],
        "Rank 1 did not reach a monitored barrier",
        {"out": raised(0, "RuntimeError", "Rank 1 failed to pass monitoredBarrier in 2000 ms")},
    ),
    JobLog(
        "nodes that did not meet",
        "unknown",
        "unknown",
        [],
        "only 1 of 2 ranks or nodes came",
        {
            "out": "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.\n"
        },
    ),
    JobLog(
        "a store that nobody answers at",
        "unknown",
        "unknown",
        [],
        "nobody answered to n0, 29500 within 600000 ms",
        {
            "out": "[E1127 socket.cpp:1023] [c10d] The client socket has timed out after 600000ms while trying to connect to "
            "(n0, 29500).\n"
        },
    ),
    JobLog(
        "a watchdog that stands still",
        "unknown",
        "unknown",
        [],
        "NCCL's watchdog stood still",
        {
            "out": f"[rank7]:[E1127 05:14:36.39306754 {PG}:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's "
            "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
        },
    ),
    JobLog(
        "DDP's first collective, which never ends",
        "hang",
        "unknown",
        [],
        "Ranks 0, 1, 2 and 3 waited for 600 s in work 1 (ALLGATHER) at train.py:692, and the log does not show for whom. All ranks",
        {
            "out": "".join(timed_out(r, 1, "ALLGATHER", 1) for r in range(4))
            + "".join(
                f"[rank{r}]:[E606 09:09:08.170090097 {PG}:801] Stack trace of the failed collective:\n"
                "#0 _verify_param_shape_across_processes from /opt/venv/lib/python3.13/site-packages/torch/distributed/utils.py:286\n"
                "#1 __init__ from /opt/venv/lib/python3.13/site-packages/torch/nn/parallel/distributed.py:1020\n"
                "#2 main from /workspace/train.py:692\n#3 <module> from /workspace/train.py:1647\n\n"
                for r in range(4)
            )
            + "".join(
                raised(
                    r,
                    "RuntimeError",
                    f"DDP expects same model across all ranks, but Rank {r} has 51 params, while rank 0 has inconsistent 0 params.",
                )
                for r in range(4)
            )
        },
    ),
    JobLog(
        "other models on two ranks",
        "crash",
        "supported",
        [0, 1],
        "raised RuntimeError: DDP expects same model across all ranks",
        {
            "out": "".join(
                raised(
                    r,
                    "RuntimeError",
                    f"DDP expects same model across all ranks, but Rank {r} has {51 + r} params, while rank {1 - r} has inconsistent {52 - r} params.",
                )
                for r in range(2)
            )
        },
    ),
    JobLog(
        "two of eight in a collective of their own",
        "hang",
        "supported",
        [0, 4],
        "Ranks 0 and 4 had not begun work 78 (BROADCAST) of group 0, in which ranks 1, 2, 3, 5, 6 and 7 waited",
        {
            f"attempt_0/{r}/stderr.log": timed_out(r, 78, "BROADCAST", 80, begun=79)
            if r not in (0, 4)
            else dumps(r, 1, 77) + raised(r, "RuntimeError", GONE)
            for r in range(8)
        },
    ),
    JobLog(
        "a rank that ran ahead of others, which wait for it elsewhere",
        "hang",
        "unknown",
        [],
        "Ranks 0 and 5 had not begun work 56117 of group 0, in which rank 7 waited: their last begun is 56116. They waited for others themselves",
        {
            "out": raised(5, "RuntimeError", GONE)
            + dumps(5, 7, 56116)
            + dumps(0, 7, 56116)
            + f"[rank7]:[E1127 03:12:57.885229863 {PG}:1987] [PG ID 0 PG GUID 0(default_pg) Rank 7] Received a dump signal due to a "
            "collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued NCCL work: "
            "56390, last completed NCCL work: 56116.\n"
        },
    ),
    JobLog("a healthy log", "unknown", "unknown", [], "do not show why", {"out": TRAINING + "saved last.pt\n"}),
    JobLog("an empty one", "unknown", "unknown", [], "do not show why", {"out": ""}),
]


def entry(number, rank, code, at="03:13:02") -> str:
    return (
        f"[{number}]:\n  time      : 2026-11-27_{at}\n  host      : n1\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 77)\n"
    )


KILLED = "Failures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n" + entry(0, 3, -9)
HUNG = timed_out(0, 168) + timed_out(1, 168) + dumps(2, 0, 167)
UNHANDLED = "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
RESTARTS = "[default0]:Worker group FAILED. 2/3 attempts left; will restart worker group\n"


def watchdog_of(rank, number, operation, elements, group) -> str:
    return timed_out(rank, number, operation, elements).replace("PG ID 0 PG GUID 0(default_pg)", group)


TRAPS: list[tuple[str, dict[str, str], set[int]]] = [
    (
        "a rank whose own watchdog line is missing",
        {
            "out": timed_out(0, 1580)
            + timed_out(2, 1580)
            + timed_out(4, 1580)
            + timed_out(3, 1580).splitlines()[1]
            + "\n"
        },
        set(),
    ),
    (
        "groups of one split, which share a name",
        {
            "out": "".join(
                watchdog_of(r, 900, "ALLREDUCE", 4096 if r > 5 else 8192, "PG ID 1 PG GUID 1(mesh_tp)")
                for r in range(8)
            )
        },
        set(),
    ),
    (
        "groups that count within a process",
        {
            "out": "".join(
                watchdog_of(r, 900, "_ALLGATHER_BASE" if r == 6 else "ALLREDUCE", 64 if r == 6 else 4096, "PG 1")
                for r in range(7)
            )
        },
        set(),
    ),
    ("numbers of a receive", {"out": timed_out(1, 38, "RECV") + dumps(0, 1, 19)}, set()),
    ("numbers of sends in one call", {"out": timed_out(1, 38, "COALESCED", 0) + dumps(0, 1, 19)}, set()),
    (
        "a rank that waited in another group itself",
        {
            "out": watchdog_of(1, 900, "ALLREDUCE", 4096, "PG ID 1 PG GUID 1(TP)")
            + timed_out(2, 12, "ALLREDUCE", 1)
            + dumps(1, 2, 11)
        },
        set(),
    ),
    (
        "the default group's numbers of a rank that waited in another",
        {
            "out": watchdog_of(1, 900, "ALLREDUCE", 4096, "PG ID 1 PG GUID 1(TP)")
            + dumps(1, 1, 11)
            .replace("from  rank 1", "from this local rank")
            .replace("work: 11, last", "work: 13, last")
            + dumps(4, 1, 11)
        },
        set(),
    ),
    ("numbers of an attempt before", {"out": dumps(2, 0, 5) + RESTARTS + timed_out(0, 168) + timed_out(1, 168)}, set()),
    (
        "two jobs in one file",
        {
            "out": timed_out(3, 57).replace("E1127 03", "E1126 09")
            + "".join(timed_out(r, 57, "BROADCAST") for r in range(3))
        },
        set(),
    ),
    (
        "torchrun saw another rank first",
        {
            "out": "Failures:\n"
            + entry(1, 5, -11, "03:13:09")
            + "Root Cause (first observed failure):\n"
            + entry(0, 2, 1)
        },
        set(),
    ),
    (
        "two tasks that ended by themselves",
        {
            "out": "srun: error: n6: task 3: Exited with exit code 1\n"
            "srun: error: n7: task 13: Segmentation fault (core dumped)\n"
        },
        set(),
    ),
    (
        "three victims of NCCL's own words",
        {
            "out": "".join(
                raised(r, "torch.distributed.DistBackendError", UNHANDLED)
                + f"[rank{r}]: Last error:\n[rank{r}]: socketStartConnect: Connect to 10.0.0.4<43211> failed\n"
                for r in range(3)
            )
            + KILLED
        },
        {3},
    ),
    (
        "a rank that NCCL's watchdog aborted as its peer was gone",
        {
            "out": f"[rank8]:[E1127 03:12:57.1 {PG}:1458] [PG ID 0 PG GUID 0(default_pg) Rank 8] Process group watchdog "
            "thread terminated with exception: CUDA driver shut down\nterminate called after throwing an instance of "
            "'c10::Error'\n" + torchrun(8, -6, host="n2")
        },
        set(),
    ),
    (
        "a rank that gloo aborted as its peer was gone",
        {
            "out": "terminate called after throwing an instance of 'gloo::IoException'\n"
            f"  what():  {GONE}\n" + torchrun(1, -6)
        },
        set(),
    ),
    ("an exception, and another rank that was killed", {"out": raised(0, "KeyError", "'labels'") + KILLED}, {0}),
    (
        "a timeout whose own line is missing, and a rank that was killed for it",
        {"out": dumps(2, 0, 167) + KILLED},
        set(),
    ),
    ("an error that may be a cause, and a rank that was killed", {"out": raised(0, "EOFError", "") + KILLED}, set()),
    (
        "a task that ended elsewhere, and ranks that were killed",
        {"out": KILLED + "srun: error: n7: tasks 13,14: Segmentation fault (core dumped)\n"},
        set(),
    ),
    (
        "a file server that timed out, and its victim",
        {
            "out": raised(5, "TimeoutError", "[Errno 110] Connection timed out: /nfs/data")
            + raised(0, "RuntimeError", f"{UNHANDLED}")
        },
        {5},
    ),
    (
        "an error whose name has no suffix",
        {
            "out": raised(2, "zipfile.BadZipFile", "File is not a zip file")
            + raised(5, "AttributeError", "'NoneType' object has no attribute 'wait'")
        },
        {2},
    ),
    (
        "a lost peer that was met while an ordinary error was handled",
        {
            "out": raised(0, "StopIteration", "")
            + "[rank0]: \n[rank0]: During handling of the above exception, another exception occurred:\n[rank0]: \n"
            + raised(0, "RuntimeError", GONE)
            + KILLED
        },
        {3},
    ),
    (
        "an exception that Python ignored",
        {
            "out": "[rank0]: Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n"
            + raised(0, "AssertionError", "can only test a child process")
            + KILLED
        },
        {3},
    ),
    (
        "an exception in a thread",
        {
            "out": "[rank0]: Exception in thread Thread-2 (_pin_memory_loop):\n"
            + raised(0, "ConnectionRefusedError", "[Errno 111] Connection refused")
            + KILLED
        },
        {3},
    ),
    (
        "an error of logging",
        {"out": "--- Logging error ---\n" + raised(0, "ValueError", "closed", prefix="") + HUNG},
        {2},
    ),
    (
        "an exception that was handled, of a rank that went on",
        {"out": raised(0, "FileNotFoundError", "/ckpt/last.pt") + HUNG},
        {2},
    ),
    (
        "an exception after the timeout",
        {"out": timed_out(0, 168) + timed_out(1, 168) + raised(1, "TypeError", "x")},
        set(),
    ),
    (
        "an attempt that was survived",
        {"out": raised(1, "KeyError", "'labels'") + RESTARTS + "Training complete\n"},
        set(),
    ),
    (
        "a worker that the time limit ended",
        {
            "out": raised(1, "RuntimeError", "DataLoader worker (pid 4711) is killed by signal: Terminated. ")
            + "slurmstepd: error: *** STEP 42.0 ON n0 CANCELLED AT 2026-11-27T03:12:55 DUE TO TIME LIMIT ***\n"
        },
        set(),
    ),
    (
        "a signal of a preemption",
        {
            "out": "slurmstepd: error: *** STEP 42.0 ON n0 CANCELLED AT 2026-11-27T03:12:55 DUE TO PREEMPTION ***\n"
            + raised(1, "lightning.fabric.utilities.exceptions.SIGTERMException", "")
        },
        set(),
    ),
    (
        "a rank that did not reach rank 0",
        {
            "out": raised(
                1, "RuntimeError", "The client socket has failed to connect to any network address of (n0, 29500)."
            )
        },
        {0},
    ),
    (
        "groups whose ranks have one number, in the form of torch before 2.4",
        {
            "out": "".join(
                f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] Watchdog caught collective operation timeout: "
                f"WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800611 milliseconds "
                "before timing out.\n"
                for rank, number in ((0, 9610), (0, 9607), (0, 9612), (3, 6408), (1, 9611))
            )
        },
        set(),
    ),
    (
        "a step that srun ended because two of its tasks had",
        {
            "out": "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
            "srun: error: n1: task 1: Exited with exit code 1\nsrun: Terminating StepId=42.0\n"
            "srun: error: n2: task 2: Exited with exit code 1\n"
            "slurmstepd: error: *** STEP 42.0 ON n0 CANCELLED AT 2026-11-27T03:12:55 ***\n"
            "WARNING:torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting down workers\n"
        },
        set(),
    ),
    ("a refused connection", {"out": raised(1, "ConnectionRefusedError", "[Errno 111] Connection refused")}, {0}),
    ("a lost actor", {"out": raised(1, "ray.exceptions.ActorDiedError", "The actor died unexpectedly")}, {0}),
    (
        "a traceback that a logger printed",
        {
            "out": "[rank1]: 2026-11-27 03:12:55,123 ERROR train.py:308 -- Traceback (most recent call last):\n"
            + "".join(raised(1, "ValueError", "retrying").splitlines(keepends=True)[1:])
            + KILLED
        },
        {3},
    ),
    ("names of files that are of no rank", {"lora-rank16.out": raised(0, "ValueError", "x", prefix="")}, set()),
    ("the rank of a node", {"node_rank1.log": raised(0, "ValueError", "x", prefix="")}, set()),
    ("the rank within a node", {"local_rank0.log": raised(0, "ValueError", "x", prefix="")}, set()),
    (
        "Ray's prefix before the rank, and the rank within the group",
        {
            "out": "".join(
                f"(MegatronPolicyWorker[rank={r}] pid=3421713, ip=10.1.2.206) {line}\n"
                for r in (97, 98)
                for line in timed_out(r, 5).replace(f"[Rank {r}]", f"[Rank {r - 91}]").splitlines()
            )
        },
        set(),
    ),
]
"""Logs that once led to a rank that was not at fault: the ranks that may be named."""

WENT_ON = [
    "[W1127 socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n",
    "Skipping batch 17: CUDA out of memory. Tried to allocate 2.00 GiB\n",
    "wandb: ERROR [Errno 28] No space left on device\n",
    "wandb: Network error (ConnectionError), entering retry loop: Temporary failure in name resolution\n",
    "n0:1:1 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'\n",
    'prompt: "How do I fix CUDA out of memory. Tried to allocate 2.00 GiB?"\n',
    "Nov 20 03:12:55 node7 kernel: Out of memory: Killed process 99 (jupyter-lab) total-vm:1kB\n",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=42.extern. Some of the step tasks have been OOM Killed.\n",
    "Nov 20 01:00:00 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
    "Nov 20 02:00:00 node7 kernel: Linux version 5.15.0\n",
    "[Fri] NVRM: Xid (PCI:0000:cb:00): 13, Graphics SM Warp Exception\n"
    "[Fri] NVRM: Xid (PCI:0000:cb:00): 109, pid=17, name=pt_main_thread, CTX SWITCH TIMEOUT\n",
]
"""Lines of jobs that went on: none of them is why a job ended."""
