"""How large the outputs of modules and the loss were, batch by batch: as it is kept, sent and stored. With NumPy.

A number is the upper half of a float32: 2 bytes, 8 bits of precision, and inf and nan as they are. ABSENT is none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy

from ..events.definitions import Definition, SlotDef
from ..recorder.layout import PARTS, TimedStep
from ..recorder.page_tables import PageTables
from ..recorder.slot_table import SlotTable
from ..roles import RoleKind, parse_role
from ..values import ValueEncoding
from .messages import RankHistoryMessage

ABSENT = 0xFFFF
"""A nan with its sign: no absolute value is that."""
NO_NUMBER = -1.0
"""What ABSENT is once it is unpacked: no absolute value is that."""
_NAN, _INF = 0x7FC0, 0x7F80
_FINITE = 0x7F7F
"""The largest finite number."""
_MOST_CELLS = 8 << 20
"""The most cells of one received history."""


class BatchColumns(NamedTuple):
    """One batch: the columns that have a number, the numbers, and their dtypes. `pending`: more are on their way."""

    columns: Any
    codes: Any
    dtypes: Any
    pending: bool


class OutputSlots:
    """Which slots are about what a module returned, in the order in which they were defined."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._columns = SlotTable(-1, numpy.int64)

    def define(self, entries: Iterable[Definition]) -> None:
        """Take new definitions."""
        for entry in entries:
            if (
                isinstance(entry, SlotDef)
                and parse_role(entry.role).kind is RoleKind.OUTPUT
                and entry.id not in self._columns
                and self._columns.put(entry.id, len(self.slots))
            ):
                self.slots.append(entry.id)

    def read(self, page: PageTables) -> BatchColumns:
        """abs max of each output of the page's forward, and of its loss; of several of one place, the larger one."""
        rows = page.rows
        columns = self._columns.of(rows["slot"])
        wanted = (columns >= 0) & page.has_value & page.result_rows
        chosen = wanted & ~page.is_pending
        codes = _codes(page.values["high"][page.positions[chosen]], page.metas[chosen])
        found, inverse = numpy.unique(columns[chosen], return_inverse=True)
        largest = numpy.zeros(len(found), numpy.uint16)
        numpy.maximum.at(largest, inverse, codes)  # nan is above inf, which is above every number
        dtypes = numpy.zeros(len(found), numpy.uint8)
        dtypes[inverse] = rows["dtype"][chosen]
        return BatchColumns(found, largest, dtypes, bool((wanted & page.is_pending).any()))


def _codes(high: Any, meta: Any) -> Any:
    """The largest absolute values as codes."""
    bits, encoding, flags = high.astype(numpy.int64), meta >> 8 & 0xFF, meta & 0xFF
    found = numpy.zeros(len(bits), numpy.float32)
    with numpy.errstate(over="ignore"):
        for code, view in (
            (ValueEncoding.FLOAT32, "<u4"),
            (ValueEncoding.FLOAT16, "<u2"),
            (ValueEncoding.FLOAT64, "<u8"),
        ):
            chosen = encoding == code
            if chosen.any():
                found[chosen] = bits[chosen].astype(view).view(view.replace("u", "f")).astype(numpy.float32)
    chosen = encoding == ValueEncoding.INTEGER
    found[chosen] = bits[chosen]
    codes = (found.view(numpy.uint32) + 0x8000 >> 16).astype(numpy.uint16)  # the nearest one
    chosen = encoding == ValueEncoding.BFLOAT16
    codes[chosen] = bits[chosen]
    codes = numpy.minimum(codes, _FINITE)
    codes[flags != 0] = _INF
    codes[flags & 1 != 0] = _NAN
    return codes.astype(numpy.uint16)


def pack(codes: Any) -> bytes:
    """A table of codes, batches by columns, for the wire."""
    return zlib.compress(codes.astype("<u2").tobytes(), 1)


def unpack(history: RankHistoryMessage) -> Any:
    """The numbers again, float32 of shape (batches, columns); -1 where there is none.

    Raises ValueError for bytes that no agent sends.
    """
    batches, columns = len(history.batches), len(history.slots)
    if batches * columns > _MOST_CELLS or len(history.dtypes) != columns or len(history.steps) != batches:
        raise ValueError(f"a history of {batches} batches and {columns} columns")
    size = 2 * batches * columns
    data, _ = _unpacked(history.codes, size, "a history")
    if len(data) != size:
        raise ValueError(f"a history of {size} bytes that has {len(data)}")
    codes = numpy.frombuffer(data, "<u2").reshape(batches, columns)
    numbers = _numbers(codes)
    return numpy.where(codes == ABSENT, numpy.float32(NO_NUMBER), numbers)


def number_of(code: Any) -> float:
    """One code, which is not ABSENT, as a number."""
    return float(_numbers(numpy.asarray([code]))[0])


def _numbers(codes: Any) -> Any:
    return (codes.astype(numpy.uint32) << 16).view(numpy.float32)


def _unpacked(data: bytes, most: int, what: str) -> tuple[bytes, bool]:
    """(at most one byte more than `most`, whether that is all)"""
    whole = zlib.decompressobj()
    try:
        return whole.decompress(data, most + 1), whole.eof
    except zlib.error as error:
        raise ValueError(f"{what} that cannot be unpacked: {error}") from error


# The steps of a rank as they travel: a table of (step, microseconds of each part), packed into bytes.

MOST_STEPS = 512
"""In one message."""
_COLUMNS = 1 + len(PARTS)
_LARGEST = 0xFFFF_FFFF


def pack_steps(steps: Iterable[TimedStep]) -> bytes:
    """At most MOST_STEPS of them; a part of more than 71 minutes is shown as that long."""
    table = [(step.number, *(min(ns // 1000, _LARGEST) for ns in step.parts)) for step in steps][:MOST_STEPS]
    return zlib.compress(numpy.array(table, "<u4").reshape(-1, _COLUMNS).tobytes(), 1)


def pack_starts(starts_ns: Iterable[int]) -> bytes:
    """When each of these steps began, after the first of all."""
    table = numpy.array([ns // 1000 for ns in starts_ns][:MOST_STEPS], "<u8")
    return zlib.compress(table.tobytes(), 1)


def unpack_starts(data: bytes) -> list[int]:
    """Microseconds. Raises ValueError for bytes that no agent sends."""
    most = 8 * MOST_STEPS
    raw, is_whole = _unpacked(data, most, "starts of steps")
    if not is_whole or len(raw) > most or len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes of starts of steps")
    return [int(start) for start in numpy.frombuffer(raw, "<u8")]


def unpack_steps(data: bytes) -> tuple[list[int], Any]:
    """(numbers of the steps, seconds of each part as float64 of shape (steps, parts)).

    Raises ValueError for bytes that no agent sends.
    """
    most = 4 * _COLUMNS * MOST_STEPS
    raw, is_whole = _unpacked(data, most, "steps")
    if not is_whole or len(raw) > most or len(raw) % (4 * _COLUMNS):
        raise ValueError(f"{len(raw)} bytes of steps")
    table = numpy.frombuffer(raw, "<u4").reshape(-1, _COLUMNS)
    return table[:, 0].tolist(), table[:, 1:].astype(numpy.float64) / 1e6


# Every figure that a node's telemetry may have: what it is, its unit, and what it is called in a sentence.
#
# A `level` is a reading at one moment, such as a temperature. A `count` only grows, such as bytes sent, and is shown as
# its growth per second. So thinning a record loses no count.

HOST = ""
"""What a series of the host itself is of. Others are of a GPU's UUID, `rank 3`, `mlx5_0/1` or `runs-dir`."""


class NodeMetric(NamedTuple):
    """One figure."""

    kind: Literal["level", "count"]
    unit: str
    """A count's is the unit of its growth per second; "" counts things."""
    text: str


METRICS: dict[str, NodeMetric] = {
    # the host
    "cpu": NodeMetric("count", "share", "processor in use"),
    "steal": NodeMetric("count", "share", "processor stolen by other virtual machines"),
    "iowait": NodeMetric("count", "share", "processor idle while it waits for a disk"),
    "memory_used": NodeMetric("level", "bytes", "memory in use"),
    "memory_total": NodeMetric("level", "bytes", "memory"),
    "swap_used": NodeMetric("level", "bytes", "swap in use"),
    "swap_in": NodeMetric("count", "bytes/s", "read from swap"),
    "swap_out": NodeMetric("count", "bytes/s", "written to swap"),
    "net_received": NodeMetric("count", "bytes/s", "received over the network"),
    "net_sent": NodeMetric("count", "bytes/s", "sent over the network"),
    "net_errors": NodeMetric("count", "", "errors of the network interfaces"),
    # the memory cgroup of the job
    "job_memory_used": NodeMetric("level", "bytes", "memory of the job's cgroup in use"),
    "job_memory_limit": NodeMetric("level", "bytes", "memory that the job's cgroup may use"),
    "job_cpu_held": NodeMetric("count", "share", "time in which the job's cgroup was held back by its processor limit"),
    # a port of InfiniBand
    "ib_received": NodeMetric("count", "bytes/s", "received over InfiniBand"),
    "ib_sent": NodeMetric("count", "bytes/s", "sent over InfiniBand"),
    "ib_errors": NodeMetric("count", "", "errors of the InfiniBand port"),
    # a folder's disk
    "disk_free": NodeMetric("level", "bytes", "free on the disk"),
    "disk_size": NodeMetric("level", "bytes", "size of the disk"),
    # a rank
    "rss": NodeMetric("level", "bytes", "resident memory"),
    "rank_cpu": NodeMetric("count", "cores", "processor used"),
    "open_files": NodeMetric("level", "", "open files"),
    "open_files_limit": NodeMetric("level", "", "files that it may open"),
    # a GPU
    "gpu_use": NodeMetric("level", "share", "GPU in use"),
    "gpu_memory_used": NodeMetric("level", "bytes", "GPU memory in use"),
    "gpu_memory_total": NodeMetric("level", "bytes", "GPU memory"),
    "sm_clock": NodeMetric("level", "MHz", "SM clock"),
    "sm_clock_max": NodeMetric("level", "MHz", "highest SM clock"),
    "power": NodeMetric("level", "W", "power"),
    "temperature": NodeMetric("level", "C", "temperature"),
    "clocks_hw_slowdown": NodeMetric("count", "share", "the hardware holds its clocks at half or less"),
    "clocks_sw_thermal": NodeMetric("count", "share", "the driver holds its clocks down because it is hot"),
    "clocks_hw_thermal": NodeMetric("count", "share", "the hardware holds its clocks down because it is hot"),
    "clocks_hw_power_brake": NodeMetric("count", "share", "the power supply holds its clocks down"),
    "clocks_sw_power_cap": NodeMetric(
        "count", "share", "its power limit holds its clocks down, as is usual at full load"
    ),
    "ecc_corrected": NodeMetric("count", "", "corrected ECC errors"),
    "ecc_uncorrected": NodeMetric("count", "", "uncorrectable ECC errors"),
    "nvlink_received": NodeMetric("count", "bytes/s", "received over NVLink"),
    "nvlink_sent": NodeMetric("count", "bytes/s", "sent over NVLink"),
    "pcie_received": NodeMetric("count", "bytes/s", "received over PCIe"),
    "pcie_sent": NodeMetric("count", "bytes/s", "sent over PCIe"),
    "pcie_replays": NodeMetric("count", "", "PCIe replays"),
    "pcie_generation": NodeMetric("level", "", "PCIe generation of its link"),
    "pcie_width": NodeMetric("level", "", "PCIe lanes of its link"),
}


def is_count(what: str) -> bool:
    """Whether a figure only grows. One that a later version has is taken for a level."""
    return what in METRICS and METRICS[what].kind == "count"


# A node's telemetry as it travels: a table of samples by series, packed into bytes.
#
# A count travels as its growth since the last sample that has it, which float32 holds well enough; -1 is where it
# begins, or begins again.

MOST_SAMPLES = 1024
MOST_SERIES = 1024
MOST_BYTES = 4 << 20


def pack_samples(times_ns: Sequence[int], table: Any, whats: Sequence[str]) -> bytes:
    """`times_ns` ascend; `table` is float64 of shape (samples, series): nan is none, a count is as it stood."""
    seconds = (numpy.asarray(times_ns, numpy.float64) - times_ns[0]) / 1e9
    values = numpy.array(table, numpy.float64)
    for column, what in enumerate(whats):
        if is_count(what):
            values[:, column] = _growth(values[:, column])
    with numpy.errstate(over="ignore", invalid="ignore"):
        raw = seconds.astype("<f8").tobytes() + values.astype("<f4").tobytes(order="F")
    return zlib.compress(raw, 6)


def unpack_samples(data: bytes, series: int) -> tuple[Any, Any]:
    """(seconds since the first sample, float64 of shape (samples, series)); a count is what it grew by.

    Raises ValueError for bytes that no agent sends.
    """
    if not 0 < series <= MOST_SERIES:
        raise ValueError(f"telemetry of {series} series")
    raw, is_whole = _unpacked(data, MOST_BYTES, "telemetry")
    samples, rest = divmod(len(raw), 8 + 4 * series)
    if not is_whole or rest or not 0 < samples <= MOST_SAMPLES:
        raise ValueError(f"{len(raw)} bytes of telemetry of {series} series")
    seconds = numpy.frombuffer(raw, "<f8", samples)
    if not numpy.isfinite(seconds).all() or (numpy.diff(seconds) < 0).any():
        raise ValueError("telemetry whose times do not ascend")
    values = numpy.frombuffer(raw, "<f4", offset=8 * samples).reshape(series, samples).T.astype(numpy.float64)
    values[~numpy.isfinite(values)] = numpy.nan
    return seconds, values


def _growth(count: Any) -> Any:
    grown = numpy.full(len(count), numpy.nan)
    known = numpy.flatnonzero(numpy.isfinite(count))
    steps = numpy.diff(count[known])
    grown[known[:1]] = -1
    grown[known[1:]] = numpy.where(steps >= 0, steps, -1)
    return grown
