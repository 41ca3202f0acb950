"""What a rank shows of its communication: real gloo groups of two processes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from gpuwatch.core.recorder.layout import GROUPS
from gpuwatch.worker.device.device import LATE_DEVICE
from gpuwatch.worker.hooks import process_groups as hooks

from ...forks import Forks

ADJUSTED_NS = 10_000_000
"""How far a host's own clock may be adjusted during a test."""
BOTH = pytest.mark.parametrize("both", ["native", "python"], indirect=True)

RANK = """
import json, os, sys
from pathlib import Path
import msgspec, torch, torch.distributed as dist
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.worker.hooks.process_groups import CollectivePatches
from gpuwatch.tests.waiting import until
from gpuwatch.worker.record.group_operations import GroupTable

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
faults = []
path = folder / f"recorder-{rank}"
table = GroupTable(RecorderWriter(path, rank=rank, local_rank=rank, world_size=2, attempt=0))
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
methods = {name: getattr(dist.ProcessGroup, name) for name in ("allreduce", "barrier", "send")}
collectives = CollectivePatches(table, lambda part, error: faults.append(repr(error)), native=sys.argv[3] == "native")
collectives.attach()
reader = RecorderReader(path)
x = torch.ones(4)
shown = {}

def show(name):
    shown[name] = [msgspec.to_builtins(group) for group in reader.groups()]

"""
LOOKS = """
from gpuwatch.core.judge import WarningLimits
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.record.late_masks import LateMasks
from gpuwatch.worker.record.passed import LatePassed
from gpuwatch.worker.record.passed import PassedValues
from gpuwatch.worker.record.progress import RunProgress
from gpuwatch.worker.record.rows import RowWriter
from gpuwatch.worker.record.names import ModuleSelection
from gpuwatch.worker.record.notable import NotableFilter

collectives.detach()
recorder = RecorderWriter(folder / f"passed-{rank}", rank=rank, local_rank=rank, world_size=2, attempt=0)
progress = RunProgress(recorder, WorkerSettings(""), rank)
on_fault = lambda part, error: faults.append(repr(error))
rows = RowWriter(recorder, NotableFilter(WarningLimits()), on_fault, ModuleSelection((), ()), progress.where)
passed = PassedValues(progress)
late = LatePassed(passed, rows, progress, LateMasks(rows))
collectives = CollectivePatches(progress.groups, on_fault, native=sys.argv[3] == "native", passed=passed, late=late)
collectives.attach()
told = RecorderReader(folder / f"passed-{rank}")

def all_told():
    until(late.settle, "all numbers of the collectives", look_s=0)
    return [
        [e.operation, e.number, e.peer, e.tag, e.came_out, e.value, e.dtype, e.elements, e.given, e.given_max]
        for e in told.new_entries()[1]
    ]
"""
END = """
collectives.detach()
assert all(getattr(dist.ProcessGroup, name) is method for name, method in methods.items())
(folder / f"shown-{rank}").write_text(json.dumps([shown, faults]))
dist.destroy_process_group()
os._exit(0)  # the destructors of gloo abort a process now and then
"""


@pytest.fixture(scope="module")
def forks():
    with Forks(
        "torch.distributed", "gpuwatch.worker.hooks.process_groups", "gpuwatch.worker.record.rows", "pytest"
    ) as forks:
        yield forks


@pytest.fixture
def both(tmp_path, request, forks):
    """Runs a body on two ranks, by default with the compiled writer."""
    writer = getattr(request, "param", "native")
    if writer == "native" and hooks.GroupWriter is None:
        pytest.skip("worker/native was not built where gpuwatch was installed")

    def run(body: str, faulty: list[str] = []) -> list[dict]:  # noqa: B006  # it is read only
        said = [tmp_path / f"said-{rank}" for rank in range(2)]
        code = RANK + body + END
        ranks = [
            forks.start(["-c", code, str(rank), str(tmp_path), writer], env=dict(os.environ), log=str(said[rank]))
            for rank in range(2)
        ]
        try:
            for process, log in zip(ranks, said, strict=True):
                assert forks.code(process, 200.0) == 0, log.read_text()
        finally:
            for process in ranks:
                if forks.code(process) is None:
                    os.kill(process, signal.SIGKILL)
        found = [json.loads((Path(tmp_path) / f"shown-{rank}").read_text()) for rank in range(2)]
        assert [faults for _, faults in found] == [faulty, faulty]
        return [shown for shown, _ in found]

    return run


@pytest.mark.slow
@BOTH
@pytest.mark.quick(1)
def test_the_last_collective_of_each_group(both):
    shown = both(
        """
dist.all_reduce(x)
second = dist.new_group([1])
dist.broadcast(torch.zeros(3, dtype=torch.float64), src=1)
show("after")
"""
    )
    for rank, found in enumerate(shown):
        default = found["after"][0]
        assert (default["members"], default["size"], default["begun"], default["ended"]) == ("0-1", 2, 2, 2)
        assert default["phase"] == "none"
        assert [
            (op["number"], op["operation"], op["dtype"], op["elements"], op["peer"]) for op in default["recent"]
        ] == [
            (1, "all_reduce", "float32", 4, -1),
            (2, "broadcast", "float64", 3, 1),
        ]
        assert len(found["after"]) == 1, "a group that has issued nothing is entered at the next batch"
        assert rank in (0, 1)


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_an_operation_has_the_time_of_its_beginning_and_of_its_end(both):
    """By the host's own clock. No end is seen of what nobody has waited for."""
    shown = both(
        """
import time
shown["clock"] = [time.time_ns()]
first = dist.all_reduce(x, async_op=True)
second = dist.all_reduce(x, async_op=True)
shown["clock"].append(time.time_ns())
second.wait()
show("waited")
dist.barrier()
shown["clock"].append(time.time_ns())
show("after")
"""
    )
    for found in shown:
        begun, issued, ended = found["clock"]
        first, second = found["waited"][0]["recent"]
        assert begun - ADJUSTED_NS <= first["began_ns"] <= second["began_ns"] <= issued + ADJUSTED_NS
        assert first["took_ns"] == 0 < second["took_ns"]
        barrier = found["after"][0]["recent"][2]
        assert second["began_ns"] + second["took_ns"] <= barrier["began_ns"] + ADJUSTED_NS
        assert barrier["began_ns"] + barrier["took_ns"] <= ended + ADJUSTED_NS
        assert barrier["began_ns"] >= issued - ADJUSTED_NS


@pytest.mark.slow
def test_a_group_without_a_collective_is_entered_at_a_batch(both):
    shown = both("second = dist.new_group([1]); table.notice(); show('batch')")

    assert [group["members"] for group in shown[0]["batch"]] == ["0-1"]
    assert [group["members"] for group in shown[1]["batch"]] == ["0-1", "1"]


@BOTH
@pytest.mark.slow
def test_a_wait_is_shown_while_it_lasts_and_a_failed_one_stays(both):
    """Rank 1 looks into its own recorder from another thread while it waits for rank 0."""
    shown = both(
        """
import datetime, threading, time
def look():
    until(lambda: any(group.phase == "waiting" for group in reader.groups()), "a group that waits", reader.groups)
    show("waiting")
    (folder / "seen").touch()
if rank == 1:
    thread = threading.Thread(target=look); thread.start()
    dist.all_reduce(x)
    thread.join()
else:
    until((folder / "seen").exists, "rank 1 has seen that it waits")
    dist.all_reduce(x)
short = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
if rank == 1:
    try:
        dist.all_reduce(x, group=short)
    except RuntimeError:
        show("failed")
"""
    )
    waiting, failed = shown[1]["waiting"][0], shown[1]["failed"][1]
    assert (waiting["begun"], waiting["ended"], waiting["at"]) == (1, 0, 1)
    assert (failed["phase"], failed["begun"], failed["ended"]) == ("failed", 1, 0)


@BOTH
@pytest.mark.slow
def test_all_ranks_count_alike_whatever_was_sent_between(both):
    """The group's own counter counts sends and receives, and `monitored_barrier` by its messages."""
    shown = both(
        """
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x)
dist.monitored_barrier()
work = dist.all_reduce(x, async_op=True)
show("begun")
work.wait()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
net(x).sum().backward()
dist.barrier()
show("after")
"""
    )
    begun = [found["begun"][0] for found in shown]
    assert [(group["begun"], group["ended"]) for group in begun] == [(2, 1), (2, 1)]
    assert [op["operation"] for op in begun[0]["recent"]] == ["send", "monitored_barrier", "all_reduce"]
    assert [op["operation"] for op in begun[1]["recent"]] == ["recv", "monitored_barrier", "all_reduce"]
    after = [found["after"][0] for found in shown]
    assert after[0]["begun"] == after[1]["begun"] > 3, "DDP's own were counted"
    assert all(group["recent"][-1]["operation"] == "barrier" for group in after)


OWN_HOOKS = hasattr(torch.distributed.ProcessGroup, "register_pre_hook")
"""Whether torch calls hooks for what C++ issues by itself: from 2.14 on."""


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_what_cpp_issues_is_described_once_where_torch_has_hooks_and_else_counted(both):
    """DDP's own collectives, those of functional and compiled code, and calls with keywords."""
    shown = both(
        """
import torch.distributed._functional_collectives as functional
group = dist.new_group([0, 1])
net = torch.nn.Linear(4, 3, dtype=torch.float64)
net = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
table.notice(); show("made")
net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
table.notice(); show("reduced")
dist.all_reduce(x, group=group)
show("python")
torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(torch.ones(6), 1, group.group_name))
table.notice(); show("functional")
torch.compile(lambda x: functional.all_reduce(x + 1, "sum", group) * 2, backend="aot_eager")(torch.ones(7))
table.notice(); show("compiled")
group.allreduce(tensors=[torch.ones(8)]).wait()
table.notice(); show("keywords")
collectives.detach()
dist.all_reduce(x, group=group)
collectives.attach()
dist.all_reduce(x, group=group)
show("again")
"""
    )
    for found in shown:
        groups = {name: next(g for g in all_ if g["name"] == "1") for name, all_ in found.items()}
        after = {
            name: [(op["operation"], op["dtype"], op["elements"], op["peer"]) for op in group["recent"]]
            for name, group in groups.items()
        }
        begun = [groups[name]["begun"] for name in ("reduced", "python", "functional", "compiled", "keywords")]
        assert begun == [*range(begun[0], begun[0] + 5)] and begun[0] == groups["made"]["begun"] + 1 > 2
        assert after["python"][-1] == ("all_reduce", "float32", 4, -1)
        assert groups["python"]["ended"] == groups["python"]["begun"]
        assert after["again"] == [("all_reduce", "float32", 4, -1)]
        if not OWN_HOOKS:
            assert {name: len(ops) for name, ops in after.items() if name != "again"} == dict.fromkeys(
                ("made", "reduced"), 0
            ) | dict.fromkeys(("python", "functional", "compiled", "keywords"), 1)
            continue
        numbers = [op["number"] for op in groups["keywords"]["recent"]]
        assert numbers == [*range(numbers[-1] - 7, numbers[-1] + 1)], "none is left out"
        assert ("broadcast", "float64", 15, 0) in after["made"], "the parameters of the first rank"
        assert after["reduced"][-1] == ("all_reduce", "float64", 15, -1)
        assert after["functional"][-1] == ("broadcast", "float32", 6, 1)
        assert after["compiled"][-1] == ("all_reduce", "float32", 7, -1)
        assert after["keywords"][-1] == ("all_reduce", "float32", 8, -1)
        assert groups["reduced"]["phase"] == groups["compiled"]["phase"] == "issued"
        assert groups["made"]["ended"] == 0, "nobody in Python has waited for it"


@BOTH
@pytest.mark.slow
def test_more_groups_than_there_is_room_for_are_counted(both):
    shown = both(
        """
from gpuwatch.core.recorder.layout import HeadField
groups = [dist.new_group([0, 1]) for _ in range(40)]
for group in groups:
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group)
show("all")
shown["lost"] = reader[HeadField.GROUPS_NOT_SHOWN]
"""
    )
    assert len(shown[0]["all"]) == GROUPS
    assert shown[0]["lost"] == 40 - GROUPS


@BOTH
@pytest.mark.slow
def test_a_subclass_in_python_is_called_as_before(both):
    """pybind11 must not take our function for an override of the subclass: it would call itself for ever."""
    both(
        """
class Own(dist.ProcessGroup):
    def size(self):
        return 1
own = Own(0, 1)
for name, arguments in (("allreduce", ([x], dist.AllreduceOptions())), ("barrier", (dist.BarrierOptions(),))):
    for around in (True, False):
        if not around:
            collectives.detach()
        try:
            getattr(own, name)(*arguments)
        except RecursionError:
            raise
        except RuntimeError as error:
            shown.setdefault(name, []).append(str(error)[:80])
    collectives.attach()
faults.clear()
"""
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_calls_with_names_and_without_options_are_counted_and_no_fault(both):
    shown = both(
        """
group = dist.group.WORLD
dist.all_reduce(x)
group.allreduce(tensors=[x]).wait()
group.broadcast(x, 0).wait()
table.notice()
show("all")
"""
    )
    assert [found["all"][0]["begun"] for found in shown] == [3, 3]


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_an_error_of_ours_goes_no_further_and_nothing_half_true_is_shown(both):
    """A new group is entered by Python, whoever writes its operations."""
    shown = both(
        """
def broken(*args):
    raise KeyError("ours")
table._write_slot = broken
dist.all_reduce(x)
dist.all_reduce(x)
dist.all_reduce(x)
assert x[0] == 8
show("after")
""",
        ["KeyError('ours')"],
    )
    assert [found["after"] for found in shown] == [[], []]


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_forked_process_shows_nothing_and_leaves_its_parents_table(both):
    shown = both(
        """
dist.all_reduce(x)
pid = os.fork()
if pid == 0:
    collectives.detach()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
show("after")
collectives.detach()
show("detached")
"""
    )
    assert [group["begun"] for group in shown[0]["after"]] == [1]
    assert shown[0]["detached"] == []


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_traceback_of_a_collective_has_no_line_of_ours(both):
    shown = both(
        """
import traceback
dist.all_reduce(x)
try:
    dist.all_reduce(x, group=dist.group.WORLD, op=dist.ReduceOp.BAND)
except RuntimeError:
    shown["files"] = [frame.filename for frame in traceback.extract_tb(sys.exc_info()[2])]
show("after")
"""
    )
    assert not [name for name in shown[0]["files"] if "hooks/collectives" in name]
    assert shown[0]["files"][-1].endswith("distributed_c10d.py")
    assert [(group["phase"], group["begun"], group["ended"]) for group in shown[0]["after"]] == [("failed", 2, 1)]


@pytest.mark.slow
@BOTH
@pytest.mark.quick(1)
def test_what_torch_refuses_is_not_counted(both):
    """The other ranks do not count it either: a number that is one ahead would name a wrong operation in a hang."""
    shown = both(
        """
import pytest
group = dist.group.WORLD
dist.all_reduce(x)
if rank == 0:
    dist.send(x, 1)
    for tensors, tag in (([x, x], 0), ([torch.ones(4, 4).t()], 0), ([x], -1), ([], 0)):
        with pytest.raises(RuntimeError):
            group.send(tensors, 1, tag)
    with pytest.raises(RuntimeError):
        group.recv([x, x], 1, 0)
    with pytest.raises(RuntimeError):
        group.recv_anysource([x, x], 0)
    with pytest.raises(RuntimeError):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4, 4).t(), 1)])
    with pytest.raises(RuntimeError):
        group.allreduce([x, x.double()])
    show("refused")
    dist.send(x, 1)
else:
    dist.recv(x, 0)
    dist.recv(x, 0)
dist.all_reduce(x)
show("end")
shown["sent"] = table.messages_by_peer()[0]
shown["messages"] = [each for each in sorted(table.messages._begun.items()) if each[1]]
shown["counted"] = table.count_of(group)
"""
    )
    (refused,) = shown[0]["refused"]
    assert [each["number"] for each in refused["recent"]] == [-1, 1, 2]  # the last one is that which was refused
    assert (refused["begun"], refused["phase"]) == (1, "failed")
    for one in shown:
        (end,) = one["end"]
        assert (end["begun"], one["counted"]) == (2, 2)
        assert [each["number"] for each in end["recent"]] == [-2, 1, 2]
        assert end["recent"][0]["elements"] == 4
    assert list(shown[0]["sent"].values()) == [{"1": 2}]
    assert shown[0]["messages"] == [[[0, 1, 0, True], 2]]


@pytest.mark.slow
def test_the_compiled_method_looks_like_the_one_that_it_replaces(both):
    """Its name and its help are torch's. It notes tensors of any kind, and keeps none of them or of their works."""
    shown = both(
        """
import gc, weakref
assert dist.ProcessGroup.allreduce.__name__ == "allreduce"
assert dist.ProcessGroup.allreduce.__doc__ == methods["allreduce"].__doc__
class Own(torch.Tensor):
    pass
own = torch.zeros(2, 3).as_subclass(Own)
dist.all_reduce(own)
dist.all_reduce(torch.zeros(5, dtype=torch.int64))
dist.all_reduce(torch.nn.Parameter(torch.zeros(2, 2)).data)
dist.all_reduce(torch.tensor(1.0, dtype=torch.bfloat16))
works = [dist.all_reduce(torch.zeros(7), async_op=True) for _ in range(3000)]
for work in works:
    work.wait()
show("after")
kept = [weakref.ref(works[-1])]
del work, works
gc.collect()
assert kept[0]() is None
"""
    )
    group = shown[0]["after"][0]
    assert (group["begun"], group["ended"]) == (3004, 3004)
    assert group["recent"][-1]["elements"] == 7


@pytest.mark.slow
def test_a_closed_recorder_is_a_fault_and_the_collectives_go_on(both):
    both(
        """
collectives.detach()
table = GroupTable(RecorderWriter(folder / f"closed-{rank}", rank=rank, local_rank=rank, world_size=2, attempt=0))
collectives = CollectivePatches(table, lambda part, error: faults.append(repr(error)), native=sys.argv[3] == "native")
collectives.attach()
dist.all_reduce(x)
table._fields.release(); table._header.release(); table._view.release()
table.memory.close()
assert table.memory.closed
dist.all_reduce(x)
assert x[0] == 4
assert len(faults) == 1 and "closed" in faults.pop(), faults
"""
    )


@pytest.mark.slow
@pytest.mark.sample(1)
def test_dtypes_and_sizes_are_the_same_from_c_and_from_python(both):
    shown = both(
        """
for native in (True, False):
    collectives.detach()
    collectives = CollectivePatches(table, lambda part, error: faults.append(repr(error)), native=native)
    collectives.attach()
    for tensor in (torch.ones(3, 0), torch.tensor(1.0), torch.ones(2, 3).t(), torch.ones(4, dtype=torch.float64),
                   torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.bfloat16)):
        dist.broadcast(tensor, src=1)
    show(str(native))
"""
    )
    native, python = (
        [(op["operation"], op["dtype"], op["elements"], op["peer"]) for op in found["recent"]]
        for found in (shown[0]["True"][0], shown[0]["False"][0])
    )
    assert native == python
    assert native[-1] == ("broadcast", "bfloat16", 2, 1)


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="torch before 2.8 has no such recorder"
)
@pytest.mark.slow
def test_torchs_own_flight_recorder_has_the_same_operations_under_the_same_numbers(both, monkeypatch):
    """Also of what C++ issues: our table counts those, and from 2.14 on describes them as well."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    shown = both(
        """
from torch._C._distributed_c10d import _dump_fr_trace_json
second = dist.new_group([0, 1])
dist.all_reduce(x)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(3):
    net(x).sum().backward()
    dist.broadcast(torch.zeros(3, dtype=torch.float64), src=1)
    dist.all_reduce(torch.zeros(2, 5, dtype=torch.bfloat16), group=second)
dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2))
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
dist.barrier()
table.notice()
show("ours")
shown["torchs"] = json.loads(_dump_fr_trace_json())["entries"]
"""
    )
    dtypes = {"Float": "float32", "Double": "float64", "BFloat16": "bfloat16", "Int": "int32", "Long": "int64"}
    for found in shown:
        entries = [entry for entry in found["torchs"] if not entry["is_p2p"]]
        for group in found["ours"]:
            of_group = {e["collective_seq_id"]: e for e in entries if e["process_group"][0] == group["name"]}
            assert group["begun"] == len(of_group) == max(of_group)
            ours = [op for op in group["recent"] if op["number"] > 0]
            assert len(ours) >= 3
            for op in ours:
                torchs = of_group[op["number"]]
                assert torchs["profiling_name"].removeprefix("gloo:") == op["operation"]
                assert [dtypes[dtype] for dtype in torchs["input_dtypes"][:1]] == [op["dtype"]] * bool(op["dtype"])
                assert [math.prod(size) for size in torchs["input_sizes"][:1]] == [op["elements"]] * bool(op["dtype"])


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
def test_the_clock_of_a_frame_counts_collectives_and_messages_apart(both):
    """A receive counts when it has reached its end. A group that counts nothing is left out, and blinds no other."""
    shown = both(
        """
from gpuwatch.worker.record.collectives import issued, moment
from torch.testing._internal.distributed import fake_pg
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
other = 1 - rank
def note(name):
    shown[name] = msgspec.to_builtins(moment(issued()))
note("start")
fake = dist.new_group(backend="fake")
note("fake")
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
if rank == 0:
    work = dist.irecv(x, 1, tag=3)
    note("waits")
    work.wait()
else:
    dist.send(x, 0, tag=3)
note("received")
net(x).sum().backward()
note("reduced")
collectives.detach()
note("detached")
collectives.attach()
"""
    )
    for rank, found in enumerate(shown):
        before, after = found["start"]["clock"]["0"], found["reduced"]["clock"]["0"]
        assert found["fake"]["clock"] == {"0": before, "1": -1}
        assert found["received"]["clock"] == {"0": before, "1": -1}, "messages are no collectives"
        assert found["received"]["sent"] == found["received"]["received"] == {"0": {str(1 - rank): 1}}
        assert after > before, "DDP's own were counted"
        assert found["detached"]["clock"] == found["reduced"]["clock"]
    assert shown[0]["waits"]["received"] == {}
    assert shown[0]["waits"]["seq"] < shown[0]["received"]["seq"]
    assert shown[0]["reduced"]["clock"] == shown[1]["reduced"]["clock"]


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("memory", ["host", "device"])
def test_what_passes_and_is_not_finite_is_told_and_nothing_else(both, memory, monkeypatch):
    """Also from DDP's own hooks that are written in Python, from lists of tensors, and by root."""
    monkeypatch.setenv(LATE_DEVICE, "7" if memory == "device" else "")
    shown = both(
        LOOKS
        + """
inf, nan = float("inf"), float("nan")

def after(name, call):
    call()
    shown[name] = all_told()

mine = lambda bad, good=1.0: torch.full((3,), bad if rank == 1 else good)
after("finite", lambda: dist.all_reduce(torch.ones(3)))
after("sum", lambda: dist.all_reduce(torch.full((3,), 2e38)))
after("one", lambda: dist.all_reduce(mine(nan)))
after("broadcast", lambda: dist.broadcast(mine(-inf, inf), src=1))
after("gather", lambda: dist.all_gather([torch.empty(3, dtype=torch.float64) for _ in range(2)], mine(inf).double()))
after("single", lambda: dist.all_gather_into_tensor(torch.empty(6), mine(inf)))
def exchange():
    parts = [torch.ones(2), torch.full((2,), nan if rank == 1 else 1.0)]
    dist.all_to_all_single(torch.empty(4), torch.cat(parts[::-1]))
after("exchange", exchange)
def messages():
    for tag in (4, 4, 5):
        tensor = torch.full((2, 2), inf if tag == 4 else 0.0)
        if rank == 1:
            dist.send(tensor, 0, tag=tag)
        else:
            work = dist.irecv(tensor := torch.empty(2, 2), 1, tag=tag)
            work.wait()
after("messages", messages)
after("integers", lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64)))
def freed():
    gone = torch.full((4,), inf)
    work = dist.all_gather_into_tensor(gone, torch.full((2,), inf if rank else 0.0), async_op=True)
    until(work.is_completed, "all_gather_into_tensor")
    gone.untyped_storage().resize_(0)
    work.wait()
after("freed", freed)
def many():
    for _ in range(50):
        dist.all_reduce(mine(nan))
after("many", many)
"""
    )
    nothing = ["", None]
    for rank, found in enumerate(shown):
        assert found["finite"] == found["integers"] == []
        (total,) = found["sum"]
        assert total[:9] == ["all_reduce", 2, -1, 0, True, "+inf", "float32", 3, "finite"]
        assert total[9] == pytest.approx(2e38)
        put = ["all_reduce", 3, -1, 0, False, "nan", "float32", 3, "not finite", None]
        out = ["all_reduce", 3, -1, 0, True, "nan", "float32", 3, *(["not finite", None] if rank else ["finite", 1.0])]
        assert found["one"] == ([put, out] if rank else [out])
        sent = ["broadcast", 4, 1, 0, False, "-inf", "float32", 3, "not finite", None]
        got = ["broadcast", 4, 1, 0, True, "-inf", "float32", 3, *(["not finite", None] if rank else nothing)]
        assert found["broadcast"] == ([sent, got] if rank else [got]), "what is there before it comes is not looked at"
        assert [each[:5] for each in found["gather"]][-1] == ["all_gather", 5, -1, 0, True]
        assert found["gather"][-1][6] == "float64"
        assert [each[4] for each in found["single"]] == ([False, True] if rank else [True])
        assert [each[4] for each in found["freed"]] == ([False] if rank else [])
        assert len(found["many"]) == (31 + 30 if rank else 30), "a metric leaves room for others"
    assert [each[:6] for each in shown[1]["exchange"]] == [["all_to_all", 7, -1, 0, False, "nan"]]
    assert [each[:6] for each in shown[0]["exchange"]] == [["all_to_all", 7, -1, 0, True, "nan"]]
    assert [each[:6] for each in shown[1]["messages"]] == [["send", n, 0, 4, False, "+inf"] for n in (1, 2)]
    assert [each[:6] for each in shown[0]["messages"]] == [["recv", n, 1, 4, True, "+inf"] for n in (1, 2)]
    assert [each[8:] for each in shown[0]["messages"]] == [nothing, nothing]


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
def test_messages_with_one_work_for_all_of_them_count_when_that_was_waited_for(both):
    """As those of `batch_isend_irecv` on NCCL. Gloo has no bundles: here its last receive stands for one."""
    shown = both(
        """
from gpuwatch.worker.record.collectives import issued, moment
collectives.detach()
other, works, group = 1 - rank, [], dist.group.WORLD
dist.ProcessGroup._start_coalescing = lambda self, device: works.clear()
dist.ProcessGroup._end_coalescing = lambda self, device: works[-1]
collectives.attach()
def note(name):
    shown[name] = msgspec.to_builtins(moment(issued()))
alone = dist.irecv(torch.empty(4), other, tag=9)
group._start_coalescing(torch.device("cpu"))
works += [dist.isend(x, other, tag=1), dist.isend(x, other, tag=2)]
works += [dist.irecv(torch.empty(4), other, tag=1), dist.irecv(torch.empty(4), other, tag=2)]
work = group._end_coalescing(torch.device("cpu"))
note("issued")
work.wait()
note("waited")
dist.isend(x, other, tag=9).wait()
alone.wait()
note("alone")
for each in works[:-1]:
    each.wait()
note("again")
"""
    )
    for rank, found in enumerate(shown):
        assert found["issued"]["received"] == {}
        assert found["issued"]["sent"] == {"0": {str(1 - rank): 2}}
        assert found["waited"]["received"] == {"0": {str(1 - rank): 2}}
        assert found["alone"]["received"] == found["again"]["received"] == {"0": {str(1 - rank): 3}}


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_stream_that_waits_brings_the_output_and_no_end(both, monkeypatch):
    """`Work.block_current_stream`; that of gloo needs a GPU."""
    monkeypatch.setenv(LATE_DEVICE, "7")
    shown = both(
        LOOKS
        + """
collectives.detach()
dist.Work.block_current_stream = lambda self: None
collectives.attach()
work = dist.all_reduce(bad := torch.full((3,), float("nan") if rank else 1.0), async_op=True)
until(work.is_completed, "all_reduce")
shown["issued"] = all_told()
work.block_current_stream()
shown["blocked"] = all_told()
shown["groups"] = [msgspec.to_builtins(group) for group in told.groups()]
"""
    )
    assert [[each[4] for each in rank["issued"]] for rank in shown] == [[], [False]]
    assert [[each[:6] for each in rank["blocked"]] for rank in shown] == [[["all_reduce", 1, -1, 0, True, "nan"]]] * 2
    for rank in shown:
        assert [(group["begun"], group["ended"], group["phase"]) for group in rank["groups"]] == [(1, 0, "none")]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "new_window"), reason="torch has no windows")
def test_a_window_is_a_collective_of_all_members(both):
    """That of gloo raises."""
    shown = both(
        """
try:
    dist.group.WORLD.new_window(x)
except RuntimeError:
    show("window")
dist.all_reduce(x)
show("after")
"""
    )
    for found in shown:
        (window,), (after,) = found["window"], found["after"]
        assert (window["phase"], window["begun"], window["recent"][0]["operation"]) == ("failed", 1, "new_window")
        assert [op["number"] for op in after["recent"]] == [1, 2]


def test_every_operation_of_this_torchs_process_groups_is_known():
    """A new release adds some, as 2.15 has added gather_single."""
    kinds = re.compile(r"^_?(all|broadcast|reduce|gather|scatter|send|recv|barrier|monitored|new_window)")
    found = {name for name in vars(torch.distributed.ProcessGroup) if kinds.match(name) and "sequence" not in name}
    assert found <= {method.name for method in hooks.METHODS}


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
def test_what_a_bundle_or_a_backend_that_waits_itself_has_brought_is_looked_at(both, monkeypatch):
    """As NCCL does both: one work for a bundle of messages, and none where the stream waits by itself."""
    monkeypatch.setenv(LATE_DEVICE, "7")
    shown = both(
        LOOKS
        + """
collectives.detach()
other, works, group = 1 - rank, [], dist.group.WORLD
dist.ProcessGroup._start_coalescing = lambda self, device: works.clear()
dist.ProcessGroup._end_coalescing = lambda self, device: works[-1]
reduce = dist.ProcessGroup.allreduce
dist.ProcessGroup.allreduce = lambda self, *args: reduce(self, *args).wait() and None
methods["allreduce"] = dist.ProcessGroup.allreduce
collectives.attach()
bad = torch.full((3,), float("nan") if rank else 1.0)
got = [torch.empty(4), torch.empty(3)]
group._start_coalescing(torch.device("cpu"))
works += [dist.isend(x, other, tag=1), dist.isend(bad, other, tag=2)]
works += [dist.irecv(tensor, other, tag=tag) for tag, tensor in enumerate(got, 1)]
work = group._end_coalescing(torch.device("cpu"))
shown["issued"] = all_told()
work.wait()
shown["waited"] = all_told()
dist.all_reduce(bad)
shown["no work"] = all_told()
from gpuwatch.core.recorder.layout import HeadField, unseal
shown["unseen"] = unseal(recorder.fields[HeadField.PASSED_UNSEEN])
"""
    )
    sent = ["send", 1, 0, 2, False, "nan", "float32", 3, "not finite", None]
    got = ["recv", 1, 1, 2, True, "nan", "float32", 3, "", None]
    assert [rank["issued"] for rank in shown] == [[], [sent]]
    assert [rank["waited"] for rank in shown] == [[got], []]
    assert [each[4] for each in shown[0]["no work"]] == [True]
    assert [each[4] for each in shown[1]["no work"]] == [False, True]
    assert [rank["unseen"] for rank in shown] == [0, 0]


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_a_host_that_has_waited_for_nccl_knows_of_no_end(both):
    """It makes its stream wait, and goes on. The group is of gloo, and called one of NCCL."""
    for shown in both("""
other = dist.new_group([0, 1])
groups = dist.distributed_c10d._world.pg_map
groups[other] = "cpu:gloo,cuda:nccl", groups[other][1]
for group in (dist.group.WORLD, other):
    dist.all_reduce(x, group=group)
show("after")
"""):
        assert [(group["begun"], group["ended"]) for group in shown["after"]] == [(1, 1), (1, 0)]


@BOTH
@pytest.mark.slow
@pytest.mark.sample(1)
def test_an_alarm_lists_what_was_issued_last_and_whether_what_came_out_was_read(both):
    """A view's output is read as well, although the script keeps no name for it."""
    body = (
        LOOKS
        + """
whole = torch.full((2, 3), float("nan") if rank else 1.0)
dist.all_reduce(whole[0], async_op=True).wait()
work = dist.broadcast(x, src=0, async_op=True)
shown["listed"] = [msgspec.to_builtins(each) for each in progress.groups.last_collectives()]
shown["told"] = [each[4] for each in all_told()]
work.wait()
shown["in the end"] = [each.was_read for each in progress.groups.last_collectives()]
"""
    )
    for rank, shown in enumerate(both(body)):
        assert shown["listed"] == [
            {"group": "0", "number": 1, "operation": "all_reduce", "dtype": "float32", "was_read": True},
            {"group": "0", "number": 2, "operation": "broadcast", "dtype": "float32", "was_read": False},
        ]
        assert shown["told"] == ([False, True] if rank else [True])
        assert shown["in the end"] == [True, True]
