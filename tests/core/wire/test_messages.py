from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.events.across_ranks import PassedTensor, ReplicaHashes
from gpuwatch.core.events.agent_events import (
    LimitForecast,
    RankLook,
    RankStall,
    SeenLine,
    SlowRankLooks,
    StepTimes,
    StoppedGradient,
    UnmovedParts,
    UnmovedWeights,
    WorkerExit,
    ZeroedGradients,
)
from gpuwatch.core.events.alarm_evidence import (
    BadOperation,
    BatchInputs,
    BatchSource,
    CaptureFile,
    ForwardCaptured,
    PossibleLine,
    SecondRun,
)
from gpuwatch.core.events.alarms import (
    AbsorbedValue,
    Anomaly,
    IgnoredAlarm,
    IssuedMoment,
    MaskReturned,
    NotedCollective,
    RangeWarning,
    ScalerSkip,
)
from gpuwatch.core.events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.log_entries import Event
from gpuwatch.core.events.node_events import AttemptNodes, GpuCounters, GpuHealth, GpuXid, NodeSignal
from gpuwatch.core.events.own_limits import (
    CompiledUnseen,
    LooseParameters,
    NotLookedInto,
    OwnFault,
    ReplacedFunctions,
    UnmeasuredTensor,
    UnreadStates,
    WatchChoice,
)
from gpuwatch.core.events.preflight_events import (
    BandwidthRows,
    PreflightBegan,
    PreflightResult,
    PreflightStage,
    RankInventoryEvent,
)
from gpuwatch.core.events.rank_standing import GroupState, HeardSignal, IssuedOperation, StackLine, ThreadSeen
from gpuwatch.core.events.read_tensors import OperandNumbers
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import (
    ExitCall,
    GroupTeardown,
    LeftGroup,
    MeshCoordinates,
    OverflowRaised,
    ScriptError,
    ScriptExit,
)
from gpuwatch.core.preflight import BandwidthRow
from gpuwatch.core.wire import messages
from gpuwatch.core.wire.batch_job import SchedulerJob
from gpuwatch.core.wire.beat import NodeBeat, RankState
from gpuwatch.core.wire.messages import AgentHello, AgentMessage, EventMessage, NameDefinitions, NodeBye, WireError
from hypothesis import example, given
from hypothesis import strategies as st

from ...cases import case

HERE = RunPosition(
    rank=3,
    attempt=1,
    step=7,
    batch=9,
    root="Net#2",
    page=11,
    seq=42,
    time_ns=1_700_000_000_000,
    clock={"0": 41, "dp né": 1 << 40},
)
ENTRIES = [
    RootDef(0, "Net", 1),
    ModuleDef(1, 0, "layer.0", "Linear"),
    SlotDef(2, 1, "input[0]"),
    ShapeDef(3, (2, 0, 5)),
]
EVENTS = [
    SecondRun(
        HERE,
        BadOperation(
            "aten.mul.Tensor",
            "layer.0",
            "model.py",
            87,
            "y = x * self.scale",
            [
                OperandNumbers("float16", [2, 3], 3.2e3, "finite"),
                OperandNumbers("number", None, None, "+inf"),
            ],
            OperandNumbers("float16", [2, 3], None, "+inf"),
            "everything",
            "MulBackward0",
            columns=(4, 18),
        ),
        eagerly=True,
        took_s=0.25,
    ),
    SecondRun(
        HERE,
        unknown="an optimizer step has changed the weights since",
        lines=[PossibleLine("model.py", 14, "g = (h * 30).exp()", ["mul", "exp"])],
    ),
    ForwardCaptured(HERE, CaptureFile("/r/overflow.pt", 9, "fc (model.Net)", True, ["a note"])),
    ForwardCaptured(HERE, CaptureFile(refused="it takes 3 GiB, and --capture-max is 2 GiB")),
    Anomaly(
        HERE,
        4,
        "layer.0",
        "Linear",
        "forward",
        "output",
        "+inf",
        "float16",
        [2, 3],
        True,
        False,
        True,
        "why",
        3,
        moments=[IssuedMoment(7, {"0": 5, "fake": -1}, {"0": {1: 2}}, {"0": {3: 4}})],
        collectives_before=[NotedCollective("0", 5, "all_reduce", "float32", True)],
    ),
    PassedTensor(HERE, "recv", "0", "0-3", 5, 1, 7, True, "+inf", "float32", 6, "finite", 1.5),
    RangeWarning(HERE, "underflow", "fc", "Linear", "forward", "output", "float16", 1e-7, 40.5, 0.5, 0.25),
    PassedTensor(HERE, "all_reduce", "0", "0-3", 7, 0, 0, True, "+inf", "float16", 8, "finite", 6e4),
    LooseParameters(HERE, "SGD", 3, 1),
    ReplicaHashes(HERE, 1, b"\x01\x02\x03\x04", b"\x01", ["w fc1.weight float32 [4, 4]"]),
    ScalerSkip(HERE, 65536.0, 2, "fc", "Linear", "grad weight", "+inf"),
    AbsorbedValue(HERE, "attn.softmax", "Softmax", "output", "nan", "float32", "attn"),
    MaskReturned(HERE, "mask", "Mask", "output"),
    NotLookedInto(HERE, "model", "LlamaModel"),
    UnmeasuredTensor(HERE, "fc", "Linear", "output[0]", "float32"),
    CompiledUnseen(HERE, "torch 2.5: compiled modules are not inspected", True),
    WatchChoice(HERE, 8, 0.14, 0.02),
    WatchChoice(HERE, 1, alert="an overflow is forecast"),
    LooseParameters(HERE, "Adam", 2, 1),
    UnreadStates(HERE, "AdamW", 7),
    BatchInputs(HERE, {"input[0]": "516d23b029490e8d"}, rows={"input[0]": [3]}),
    BatchSource(HERE, "data.Images", [201, 14], {"path": ["a", "b"]}, 1, 5, 0, "", [14, 201]),
    IgnoredAlarm(HERE, "mask.*:output", "mask.0", "output", "-inf"),
    ReplacedFunctions(HERE, {"torch.Tensor": ["item", "tolist"]}),
    ScriptError(HERE, "ValueError", "näh\n", "Traceback", "layer.0", True),
    ScriptExit(HERE, 3, handler=15),
    ScriptExit(HERE, 1, message="loss is nan"),
    OverflowRaised(HERE),
    ExitCall(HERE, StackLine("/home/me/train.py", 84, "main")),
    LeftGroup(HERE),
    GroupTeardown(HERE, "SystemExit", "loss is nan", "Traceback", True),
    MeshCoordinates(HERE, {"dp": 0, "tp": 3}),
    PreflightBegan(HERE, "bandwidth", 30.0),
    BandwidthRows(HERE, [BandwidthRow(1 << 20, 12.5, 80.0, 140.0)]),
    PreflightStage(HERE, "all_reduce", 0.25, "ring"),
    PreflightResult(HERE, "failed", "device", "no device", True, "nccl", "H100"),
    RankInventoryEvent(HERE, "cpu", {"torch": "2.13.0"}),
    OwnFault(HERE, "forward hook", "KeyError: 1"),
    WorkerExit(HERE, None, "torchrun", "forward", heard=[HeardSignal(15, 9, 4, 77, 8)]),
    WorkerExit(HERE, None, "torchrun", "forward", "layer.0", "Linear"),
    RankStall(HERE, 300.0),
    RankStall(HERE, 300.0, mismatch_s=10.0),
    StepTimes(HERE, 40, [1.0, 2.0, 3.0, 4.0, 5.0], b"\x78\x01", 7, b"\x78"),
    LimitForecast(HERE, "fc2", "Linear", "float16", 65504.0, 4100.0, 40, 30, 60, 80),
    ZeroedGradients(HERE, 2, 20, 9, "fc1", "Linear", "grad weight", "float32", 3e19, 4e19, 5e19, True),
    UnmovedWeights(HERE, 16, 40, 2, "fc1", "Linear", "weight", "float32", 0.5, 0.001, True),
    StoppedGradient(HERE, 16, 40, "fc1", "Linear", "act", "ReLU", "", "", 102.0, 0.0, 0.0, 0.25),
    UnmovedParts(HERE, 40, 52, 3, ["fc1.weight", "fc1.bias"], "float32", 0.5, 0.01),
    SlowRankLooks(HERE, 46, [SeenLine(StackLine("/t.py", 3, "f", "g()"), 41, "g of h.py")]),
    RankLook(
        HERE,
        2,
        301.5,
        "forward",
        "layer.0",
        "Linear",
        "S",
        0.02,
        [StackLine("/x/train.py", 7, "main", "step()")],
        [GroupState("0", "0-3", 4, 7, 6, "waiting", 7, 1.5, [IssuedOperation(7, "send", "float32", 3, 1)])],
        60.0,
        [StackLine("/x/libc.so.6", 0, "read")],
        [ThreadSeen("loader", "S", "pipe_read", "read", "data.py:7 in load")],
    ),
    NodeSignal(15, 12),
    AttemptNodes(1, "3f1c0a77b2de-1", ["n0", "n1"]),
    GpuXid("GPU-1", 79, 12, "GPU has fallen off the bus", "Restart the node.", "fail", "1/0"),
    GpuCounters("GPU-1", "end", {"pcie_replays": 3}, {"nvlink_crc_errors": "Not Supported"}, 12, ["MIG-2"]),
    GpuHealth("unknown", "no NVML", "580.1", {"GPU-1": "H100"}, {"GPU-1": "Not Supported"}, 12),
]
BODIES = [
    messages.RankHistoryMessage(1, 0, 0, [3, 4], [3, 4], [7], b"\x01", b"\x10\x20"),
    AgentHello(
        "a" * 32,
        "host",
        2,
        1,
        4,
        ["gpuwatch", "launch"],
        {"python": "3.11"},
        "none",
        cwd="/x",
        trace_batches=[0],
        job=SchedulerJob("SLURM", "17", "n1", ["n1", "n2"], "drain {nodes} {reason}", "--exclude={nodes}", "slurmd"),
    ),
    *map(EventMessage, EVENTS),
    NameDefinitions(3, 1, list(ENTRIES)),
    messages.PageMessage(3, 1, 11, 0, 9, 7, False, [messages.PageSegment(0, 0, 0, b"\0" * 32, b"\1" * 16, b"\2" * 24)]),
    messages.RankHistoryMessage(3, 1, 0, [7, 9], [6, 7], [4], b"\2", b"packed"),
    NodeBeat(
        [RankState(3, 1, 1, 99, "forward", 7, 9, 42, "layer.0", "Linear", 2, 3, 0.5, 4, 5, 6, 7)],
        {3: 2},
        5,
        -7,
        9,
    ),
    NodeBye("failed", 15),
    messages.TelemetryMessage(
        12, 15, [messages.SeriesName("GPU-1", "temperature")], b"packed", ["NVML did not answer for 15 s"]
    ),
    messages.AgentLeaving(),
]
ANSWERS = [
    messages.RunWelcome("run"),
    messages.MessageAck(7, resend=True, time_ns=12, echo_ns=5),
    messages.WantedBatch(1, "Net", 1, 9),
    messages.LookAtRanks(2),
    messages.WatchSlowRank(1, 3),
    messages.StopRanks("node b is lost"),
    messages.JobResult(4, VerdictKind.OVERFLOW, "text", "/runs/run/report.json"),
    messages.AgentRefused("no"),
]


def kind(struct) -> str:
    inner = struct.event if isinstance(struct, EventMessage) else struct
    return type(inner).__name__


def test_the_samples_hold_every_struct_of_the_wire():
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(body) for body in BODIES} == set(get_args(messages.AgentBody))
    assert {type(answer) for answer in ANSWERS} == set(get_args(messages.CollectorMessage))
    assert {type(entry) for entry in ENTRIES} == set(get_args(Definition))


def test_what_an_agent_sends_arrives_unchanged():
    for body in BODIES:
        with case(kind(body)):
            message = AgentMessage(5, body, 3)
            assert messages.decode_agent(messages.encode(message)) == message


def test_what_a_collector_sends_arrives_unchanged():
    for answer in ANSWERS:
        with case(kind(answer)):
            assert messages.decode_collector(messages.encode(answer)) == answer


def test_a_body_that_was_encoded_before_its_envelope_is_the_same_message():
    for body in BODIES:
        with case(kind(body)):
            assert messages.envelope(5, 3, messages.encode(body)) == messages.encode(AgentMessage(5, body, 3))


def grow(value):
    """The same message as a later version may send it: a field more in every struct."""
    if isinstance(value, dict):
        grown = {key: grow(item) for key, item in value.items()}
        return {**grown, "a_later_field": [1, {"x": None}]} if "type" in value or "rank" in value else grown
    return [grow(item) for item in value] if isinstance(value, list) else value


def test_fields_of_a_later_version_are_tolerated():
    for body in BODIES:
        with case(kind(body)):
            message = AgentMessage(5, body, 3)
            newer = msgspec.msgpack.encode(grow(msgspec.msgpack.decode(messages.encode(message))) | {"later": 1})
            assert messages.decode_agent(newer) == message


def test_an_operation_without_the_fields_that_were_added_later_is_read():
    """As a recorder or a report of an earlier version has it."""
    operation = EVENTS[0].operation
    plain = msgspec.to_builtins(operation)
    required = {field.encode_name for field in msgspec.structs.fields(operation) if field.required}
    decoded = msgspec.convert({name: plain[name] for name in required}, BadOperation)
    assert decoded == msgspec.structs.replace(operation, node="", columns=None)


def test_fields_that_an_earlier_version_did_not_send_take_their_defaults():
    for body in BODIES:
        with case(kind(body)):
            inner = body.event if isinstance(body, EventMessage) else body
            optional = {
                field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
                for field in msgspec.structs.fields(inner)
                if not field.required
            }
            plain = msgspec.to_builtins(inner, builtin_types=(bytes,))
            stripped = {key: value for key, value in plain.items() if key not in optional}
            whole = {"type": "event", "event": stripped} if isinstance(body, EventMessage) else stripped
            decoded = messages.decode_agent(msgspec.msgpack.encode({"n": 1, "body": whole})).body
            expected = msgspec.structs.replace(inner, **optional)
            assert decoded == (EventMessage(expected) if isinstance(body, EventMessage) else expected)


def decode_or_wire_error(decode, data: bytes) -> None:
    try:
        decode(data)
    except WireError:
        pass


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 100_000)
@example(b"\x81\xa1n" * 5_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
def test_random_bytes_raise_wire_error_and_nothing_else(data):
    with pytest.raises(WireError):
        messages.decode_agent(data)
    with pytest.raises(WireError):
        messages.decode_collector(data)


@given(st.sampled_from(BODIES), st.data())
def test_a_truncated_message_is_a_wire_error(body, data):
    whole = messages.encode(AgentMessage(5, body, 3))
    with pytest.raises(WireError):
        messages.decode_agent(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.sampled_from(BODIES), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_mutated_message_is_read_or_a_wire_error(body, times, dice: random.Random):
    data = bytearray(messages.encode(AgentMessage(5, body, 3)))
    for _ in range(times):
        data[dice.randrange(len(data))] = dice.randrange(256)
    decode_or_wire_error(messages.decode_agent, bytes(data))
    decode_or_wire_error(messages.decode_collector, bytes(data))


def test_a_message_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="over the limit"):
        messages.decode_agent(b"\x00" * (messages.MAX_MESSAGE_BYTES + 1))


@given(st.sampled_from([b"\xff\xfe", b"\xed\xa0\x80"]))
def test_a_name_that_is_no_text_is_a_wire_error(bad):
    whole = messages.encode(AgentMessage(1, NodeBye("failed"), 0))
    with pytest.raises(WireError):
        messages.decode_agent(whole.replace(b"failed", bad.ljust(6, b"a")))
