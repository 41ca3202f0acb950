"""What the part in C has borrowed it gives back: nothing grows with the number of calls."""

from __future__ import annotations

import array
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.compile.dynamo import TensorReading
from gpuwatch.worker.device import kernel_launcher
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.grouped_readings import ENTRY, KnownWeight, PackedRows, WaitingTensors
from gpuwatch.worker.device.kernel_launcher import LAUNCHED_KERNEL
from gpuwatch.worker.device.kernel_variants import read_key
from gpuwatch.worker.device.torch_reader import TorchReader
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record.tensor_stats import TensorStats
from torch import nn

from ..conftest import Watched
from ..device.native_reads import NativeReads

core = pytest.importorskip("gpuwatch.worker.native.core", reason="worker/native was not built")
recursion = pytest.importorskip("gpuwatch.worker.native.recursion", reason="recursion.c was not built")
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
pytestmark = [pytest.mark.quick_here(16), pytest.mark.skipif(EXCHANGE is None, reason="this torch lends C no tensors")]

CALLS = 200
MOST = CALLS // 2
"""Python itself keeps more memory now and then, for what it has freed. What is lost in a call is lost in each."""
SHARED = (None, True, False, (), *range(-5, 257), torch.Tensor, nn.Parameter, torch.float32, TensorStats)
"""What many own at a time: one reference too many to it is seen in no count of objects."""


def counts(objects: tuple[Any, ...], into: array.array[int]) -> None:
    """Objects that gc knows, blocks of memory, and the references to each object. An array needs no more of them."""
    while gc.collect():
        pass
    into[0], into[1] = len(gc.get_objects()), sys.getallocatedblocks()
    for at, each in enumerate(objects, 2):
        into[at] = sys.getrefcount(each)


def check(call: Callable[[], Any], *arguments: Any) -> None:
    """Raises AssertionError if something grows, or shrinks, with the number of calls."""
    objects = (*arguments, *SHARED)
    names = ("objects that gc knows", "blocks of memory", *objects)
    before, after = (array.array("q", bytes(8 * len(names))) for _ in range(2))
    for _ in range(3):  # what is made once is made in the first of them
        for _ in range(CALLS):
            call()
        counts(objects, before)
        for _ in range(CALLS):
            call()
        counts(objects, after)
        grown = [(at, is_now - was) for at, (was, is_now) in enumerate(zip(before, after, strict=True))]
        found = [(number, names[at]) for at, number in grown if abs(number) > MOST]
        if not found:
            return
    assert found == []


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """None but before each count. What is there before the test is left alone: to look at all of torch takes long."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def test_a_reference_too_many_is_seen() -> None:
    kept, tensor = [], torch.ones(1)
    check(lambda: tensor.shape, tensor)
    leaks = [lambda: kept.append(tensor), lambda: kept.append([]), lambda: kept.append(None)]
    if sys.getallocatedblocks():  # 0: Python gets its memory from malloc, as under `make sanitize`
        leaks.append(lambda: kept.append(object()))
    for leak in leaks:
        with pytest.raises(AssertionError):
            check(leak, tensor)


# -- frames ---------------------------------------------------------------------------------------------------------


class Call:
    """A module call that a FrameWriter writes as often as it is asked to."""

    def __init__(self, watched: Watched) -> None:
        self.watched, hooks = watched, watched.hooks
        self.module = nn.Linear(4, 4)
        self.x, self.mask = torch.ones(2, 4), torch.zeros(3)
        for _ in range(2):
            out = self.module(self.x)
            out.sum().backward()
        self.out = out
        self.info = hooks._roots.enter(self.module)[0]
        self.page = self.info.root.page
        watched.recorder.resume_page(self.page)
        hooks._gradients._page = self.page
        self.gradients, self.rows = hooks._gradients, hooks.rows
        self.writer = self.gradients.writer
        self.tables = [self.rows.seen, self.rows.by_memory, self.rows.weights]

    def forget(self) -> None:
        """As in the next batch: all tensors are new."""
        for table in self.tables:
            table.clear()

    def frame(self, output: Any = None, x: Any = None, **kwargs: Any) -> bool:
        out = self.out if output is None else output
        given = (self.x if x is None else x,)
        return self.writer.frame(self.info, self.module, given, kwargs, out, self.page, 0, 1, 0, 0, 0)

    @property
    def objects(self) -> tuple[Any, ...]:
        held = (self.info, self.module, self.x, self.out, self.page, self.writer, self.gradients)
        return (*held, *self.tables, *self.module.parameters(), self.info.slots, *self.info.slots)


@pytest.fixture
def call(tmp_path) -> Iterator[Call]:
    watched = Watched(tmp_path / "x.recorder")
    yield Call(watched)
    assert watched.faults == []
    watched.close()


def test_a_frame_of_tensors_that_were_seen(call):
    assert call.frame()
    check(call.frame, *call.objects)


def test_a_frame_of_new_tensors(call):
    def frame() -> None:
        call.forget()
        assert call.frame(output=call.out.detach())

    check(frame, *call.objects)


def test_a_frame_whose_output_gets_a_hook(call):
    def frame() -> None:
        call.forget()
        out = call.x @ call.module.weight
        assert call.frame(output=out)
        (hook,) = out._backward_hooks.values()
        assert type(hook).__module__ == core.__name__

    check(frame, *call.objects)


@pytest.mark.parametrize("kind", ["not finite", "sparse", "another class", "an argument without a name"])
def test_a_frame_that_is_left_to_python(call, kind):
    output = {
        "not finite": torch.tensor(float("inf")),
        "sparse": torch.ones(2, 2).to_sparse(),
        "another class": torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
    }.get(kind)
    named = {"never heard of it": call.x} if output is None else {}

    def frame() -> None:
        call.forget()
        assert not call.frame(output=output, **named)

    check(frame, *call.objects, output)


def test_a_frame_of_a_container(call):
    more = [call.x, None, 3]
    call.module.register_forward_hook(lambda module, args, output: [output, *more])
    out = call.module(call.x)  # Python names its leaves
    check(lambda: (call.forget(), call.frame(output=out)), *call.objects, more, out)


def test_weights_after_a_step(call):
    named = list(call.module.named_parameters())
    assert call.writer.weights(call.info, named, 1)

    def weights() -> None:
        call.forget()
        assert call.writer.weights(call.info, named, 1)

    check(lambda: call.writer.weights(call.info, named, 1), *call.objects, named)
    check(weights, *call.objects, named)
    check(lambda: call.writer.weights(call.info, [("no such weight", call.x)], 1), *call.objects)


def test_whether_gradients_are_local(call):
    named = list(call.module.named_parameters())
    hook = call.writer.hook(call.info, "grad weight")
    hook(call.module.weight)
    assert call.writer.all_local(named[:1])
    check(lambda: call.writer.all_local(named[:1]), *call.objects, named, call.module.weight.grad)
    check(lambda: call.writer.all_local([("x", nn.Parameter(call.x))]), *call.objects)


@pytest.mark.parametrize("kind", ["ordinary", "not attached", "no tensor of ours"])
def test_the_hook_of_an_output(call, kind, monkeypatch):
    gradient = torch.ones(2, 4)
    if kind == "not attached":
        monkeypatch.setattr(call.gradients, "_attached", False)
    if kind == "no tensor of ours":
        gradient = gradient.to_sparse()
        monkeypatch.setattr(call.gradients, "of_output", lambda *arguments: None)

    def hooked() -> None:
        hook = call.writer.hook(call.info, "grad output", call.page)
        assert hook(gradient) is None

    check(hooked, *call.objects, gradient)


def test_the_hook_of_a_parameter(call):
    hook, weight = call.writer.hook(call.info, "grad weight"), call.module.weight

    def hooked() -> None:
        weight.grad = torch.ones(4, 4)
        hook(weight)
        call.gradients.local.clear()  # as the next batch does: it has an entry for each gradient's address

    check(hooked, *call.objects, hook, weight)
    check(lambda: call.writer.hook(call.info, "grad weight"), *call.objects)


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [Interrupt, ZeroDivisionError])
def test_what_a_function_that_c_calls_has_raised(call, monkeypatch, error):
    """Ctrl-C is kept and raised again; an error of ours ends."""

    def modes() -> int:
        raise error

    given = {}
    monkeypatch.setattr(native_writer, "NativeFrameWriter", lambda **parts: given.update(parts))
    native_writer.native_writer_of(call.watched.hooks.progress, call.rows, call.gradients)
    call.writer = core.NativeFrameWriter(**{**given, "modes": modes})

    def frame() -> None:
        try:
            assert not call.frame()
        except Interrupt as interrupt:
            assert interrupt.__context__ is None

    check(frame, *call.objects, error, modes)


def test_a_writer(call, monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(native_writer, "NativeFrameWriter", lambda **parts: given.update(parts))
    native_writer.native_writer_of(call.watched.hooks.progress, call.rows, call.gradients)
    check(lambda: core.NativeFrameWriter(**given), *given.values())

    def refused(name: str) -> None:
        with pytest.raises((TypeError, ValueError)):
            core.NativeFrameWriter(**{**given, name: 1.5})

    for name in ("seen", "numbers", "near", "exchange", "memory", "cursor", "version"):
        check(lambda name=name: refused(name), *given.values())


# -- tensors on a device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_frame_of_tensors_on_a_device(tmp_path, together):
    recorder = RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)
    pages = DeviceStatsBuffer(recorder, torch.device("cpu"), driver=LateDevice(), reader=TorchReader())
    reads = NativeReads(recorder, pages)
    tensors, weights = [torch.ones(3), torch.ones(3)], [nn.Parameter(torch.ones(3))]

    def page() -> None:
        reads.rows.late_pages.clear()
        opened = recorder.begin_page(0, 0, 0)
        with pages.together() if together else contextmanager(lambda: iter([None]))():
            assert reads.read(tensors, weights) is not None
        pages.flush()
        assert reads.read(tensors, weights) is not None
        recorder.end_page(opened)
        pages.finish()

    page()
    check(page, recorder, pages, reads, *pages._buffers.values(), *tensors, *weights)


def known(weight: nn.Parameter) -> KnownWeight:
    row = SimpleNamespace(packed=(PackedRows(weight, 64), 7), place=(weight.data_ptr(), weight.nbytes))
    return KnownWeight(weakref.ref(weight), weight._version, 0, row)


@pytest.mark.parametrize("kind", ["ordinary", "left to Python"])
def test_readings(kind):
    weight = nn.Parameter(torch.ones(4))
    tensors = [torch.ones(3), torch.ones(2) if kind == "ordinary" else torch.ones(2, 2).t()]
    waiting = [WaitingTensors([known(weight), *tensors], 5, True)]
    types = (torch.Tensor, nn.Parameter)

    def read() -> None:
        found, earlier = [], []
        assert core.readings(EXCHANGE, types, waiting, 0, found, earlier, 1, 0)[1] == (kind == "ordinary")

    check(read, EXCHANGE, weight, waiting, waiting[0], waiting[0][0], waiting[0][0][0], types, *tensors)


def test_tables():
    entries = b"".join(ENTRY.pack(code, 0, code, 16, 5, 5, 0, 0) for code in range(1, 9))
    check(lambda: core.tables(entries, lambda variant: 64, 3, 256), entries)

    def refused() -> None:
        with pytest.raises(ZeroDivisionError):
            core.tables(entries, lambda variant: 1 // 0, 3, 256)

    check(refused, entries)


def test_launches():
    launched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda function: 0)  # it looks at nothing else
    core.use_driver(ctypes.cast(launched, ctypes.c_void_p).value)
    try:
        tensor, rows, sizes = torch.ones(30), torch.zeros(4, 3, dtype=torch.int64), bytes((8, 8, 4, 4, 4, 4))
        kernel = LAUNCHED_KERNEL.pack(1, 128, 0, 6, sizes)
        key = read_key(torch.float32, False, -1, tensor.data_ptr(), rows.data_ptr(), 30, 30, 0)
        kernels, elements = {key: (kernel, 1024, 8)}, [30]
        held = (kernel, tensor, rows, key, kernels, kernels[key], elements)

        def reads(known: Any) -> Any:
            return core.launch_reads(known, lambda device: 0, [tensor], elements, 0, 0, 0, rows, 0, False)

        assert reads(kernels) is None
        check(lambda: reads(kernels), *held)
        check(lambda: reads({}), *held)
        check(lambda: core.launch(kernel, 1, 0, *range(6)), *held)
    finally:
        if kernel_launcher.use_driver is not None:
            core.use_driver(0)


# -- the others -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("history", ["as before", "another number"])
def test_the_number_of_what_was_issued(history):
    group = torch.distributed.group.WORLD
    seq = int(group._get_sequence_number_for_group())
    received = Group()
    received.messages = SimpleNamespace(received=0)
    found = SimpleNamespace(seq=seq, groups=1, silent={}, table=weakref.ref(received))
    if history == "another number":
        found.seq += 1
    count = [0].count
    counter = core.IssuedCounter(found, lambda: count(0))
    assert counter() == (seq if history == "as before" else 1)
    check(counter, counter, group, found, received, found.table, found.silent)
    check(lambda: core.IssuedCounter(found, count), found, count)


@pytest.mark.parametrize("kind", ["ordinary", "left to Python"])
def test_a_look_from_a_graph(kind):
    seen: list[Any] = [None]
    tensor = torch.ones(3) if kind == "ordinary" else torch.tensor([float("nan")])
    left: list[Any] = []
    look = core.Look(
        exchange=EXCHANGE,
        seen=seen,
        cls=TensorReading,
        numbers=TensorStats,
        tensor=torch.Tensor,
        otherwise=lambda *arguments: left.append(None),
    )
    check(lambda: (look(tensor, tensor, 0), left.clear()), look, tensor, seen, left)
    assert (seen[0] is None) == (kind != "ordinary")


def test_readers_of_memory():
    tensor = torch.ones(64)
    at, count = tensor.data_ptr(), tensor.numel()
    values, limits = array.array("q", [0, 1, 2 << 8] * 9), array.array("q", [1 << 40] * 256)
    check(lambda: core.read_floats(at, count, 1), tensor)
    check(lambda: core.below(at, count, 4, 1 << 30), tensor)
    check(lambda: core.may_be_notable(values, limits), values, limits)

    def refused() -> None:
        with pytest.raises(TypeError):
            core.may_be_notable(values, values)

    check(refused, values)


def test_a_lock():
    cursor = array.array("q", [-1, 0, 0])
    lock = core.WriterLock(cursor)

    def taken() -> None:
        with lock:
            pass

    check(taken, lock, cursor, lock.mutex)
    check(lambda: core.WriterLock(cursor), cursor)
    assert cursor.tolist() == [-1, 0, 0]


def test_a_lock_that_is_gone_has_given_the_cursor_back():
    cursor = array.array("q", [-1, 0, 0])
    lock = core.WriterLock(cursor)
    with pytest.raises(BufferError):
        cursor.append(0)
    del lock
    cursor.append(0)


def test_frames_of_the_recursion_limit():
    def calls() -> None:
        recursion.call_begins()
        recursion.work_ends()
        recursion.work_begins()
        recursion.call_ends()

    check(calls)


# -- process groups ---------------------------------------------------------------------------------------------------


class Group:
    """As torch's, as far as a GroupWriter asks it."""

    def __init__(self) -> None:
        self.issued = 0

    def rank(self) -> int:
        return 0

    def _get_sequence_number_for_group(self) -> int:
        return self.issued


class Work:
    def wait(self) -> bool:
        return True


class Noted:
    """A GroupWriter, and a group in its first slot."""

    def __init__(self, **parts: Any) -> None:
        self.memory = bytearray(layout.SEGMENT_BYTES * 4)
        self.group, self.told = Group(), []
        self.parts = {
            "memory": self.memory,
            "tensor": torch.Tensor,
            "parameter": nn.Parameter,
            "group": Group,
            "counter": Group._get_sequence_number_for_group,
            "describe": lambda tensor: (1, 1),
            "find_slot": lambda group: None,
            "message_begun": lambda *arguments: 5,
            "message_received": lambda *arguments: None,
            "message_taken_back": lambda *arguments: None,
            "passed": lambda *arguments: None,
            "late": None,
            "send_before": None,
            "on_fault": self.told.append,
            "exchange": EXCHANGE,
            "is_host_late": False,
            **parts,
        }
        self.writer = core.GroupWriter(**self.parts)
        self.writer.enter(0, self.group)

    def method(self, before: Callable[..., Any], call: int = 0, tensors: int = 0) -> Any:
        """`tensors`: the position of the argument that has them."""
        return self.writer.method("name", before, call, 1, tensors, -1, False, -1, tensors, tensors, False, False)

    @property
    def objects(self) -> tuple[Any, ...]:
        return (self.writer, self.group, *self.parts.values())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", [1.0, float("inf")])
def test_a_collective_and_its_wait(late, number):
    noted = Noted(is_host_late=late, late=(lambda *arguments: arguments) if late else None)
    tensor = torch.full((4,), number)
    tensors = [tensor]
    issue = type("Issues", (), {"name": noted.method(lambda group, tensors: Work())})
    wait = noted.method(Work.wait, call=3, tensors=-1)
    waits = type("Waits", (), {"wait": wait})

    def collective() -> None:
        work = issue.name(noted.group, tensors)
        assert waits.wait(work) is True

    def nobody_waits() -> None:
        issue.name(noted.group, tensors)
        noted.writer.forget()  # it knows a thousand of them

    held = (tensor, tensors, weakref.ref(tensor), issue, wait, wait.__func__.__self__)  # a tensor has one such ref
    check(collective, *noted.objects, *held)
    check(nobody_waits, *noted.objects, *held)
    check(lambda: noted.method(Work.wait), *noted.objects)
    assert noted.told == []


def test_a_message():
    noted, tensors = Noted(), [torch.ones(4)]
    send = type("Sends", (), {"name": noted.method(lambda group, tensors: Work(), call=1)})
    check(lambda: (send.name(noted.group, tensors), noted.writer.forget()), *noted.objects, tensors)
    assert noted.told == []


def test_a_collective_that_fails_and_a_fault_of_our_own():
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError

    noted = Noted(passed=fails)
    call = type("Fails", (), {"name": noted.method(fails)})
    tensors = [torch.tensor(float("inf"))]

    def collective() -> None:
        with pytest.raises(ZeroDivisionError):
            call.name(noted.group, tensors)
        assert type(noted.told.pop()) is ZeroDivisionError
        assert noted.told == []

    check(collective, *noted.objects, tensors)


def test_the_hook_of_a_group_and_the_table():
    noted = Noted()
    tensors = [torch.ones(4)]
    operation = SimpleNamespace(name=SimpleNamespace(value=3), input_tensors=[], output_tensors=tensors, root=0)
    other = SimpleNamespace(name=SimpleNamespace(value=4))
    operations = {3: 1}
    hook = noted.writer.hook(noted.group, operations)
    check(lambda: hook(operation), *noted.objects, hook, operation, tensors)
    check(lambda: hook(other), *noted.objects, hook, other)
    check(lambda: noted.writer.hook(noted.group, operations), *noted.objects, operations)
    check(lambda: noted.writer.enter(0, noted.group), *noted.objects)

    def remembered() -> None:
        noted.writer.remember(0, Work(), 1, -1)
        noted.writer.forget()

    check(remembered, *noted.objects)
    assert noted.told == []
