"""Collectives that end: each is waited for until a deadline, on gloo and on NCCL alike.

Since torch 2.8 a blocking collective of NCCL returns no Work: it runs in the current stream, and whoever then reads the
result waits for the device without an end. So every collective here is asynchronous, and its Work gets a timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ....core.text.ranks_text import ranks_text
from .failure import ProbeFailure

_LEAST_S = 0.1
_ROUNDING_S = 0.05
"""torch counts a timeout in whole milliseconds, from a little before or after us."""
_WATCHDOG = 10
"""Times the time that is left: torch's own watchdog, which ends the process, must not come before us."""
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def left_s(deadline: float) -> float:
    """Seconds until a deadline on the monotonic clock, at least a tenth."""
    return max(_LEAST_S, deadline - time.monotonic())


def join(
    store: Store,
    device: torch.device,
    backend: str,
    ranks: Sequence[int],
    rank: int,
    deadline: float,
    say: Callable[[str], None],
) -> Collectives:
    """Make the process group of this process. NCCL connects here, as it is told the device.

    Raises ProbeFailure with the ranks that do not come, and with nobody's name if the group is not up at the deadline.
    """
    say("init")
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
        _set_up_nccl()
    _wait_for_all(PrefixStore("ready", store), ranks, rank, deadline)
    timeout_s = left_s(deadline)

    def make() -> None:
        if on_cuda:
            torch.cuda.set_device(device)  # the current device is a thread's own
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=list(ranks).index(rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout_s * _WATCHDOG if on_cuda else timeout_s),
            device_id=device if on_cuda else None,
        )

    _in_time(make, timeout_s, f"{backend} had not connected {len(ranks)} ranks")
    return Collectives(device, deadline)


def _set_up_nccl() -> None:
    """An error is to be raised where we wait; else torch's watchdog ends the process, which names nobody.

    TORCH_NCCL_BLOCKING_WAIT would do so, too, but every wait then polls once a millisecond, and time is measured here.
    """
    for name in _BLOCKING_WAIT:
        os.environ.pop(name, None)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def _wait_for_all(store: Store, ranks: Sequence[int], rank: int, deadline: float) -> None:
    """A rank whose device hangs never comes here; the others would only know that NCCL does not connect."""
    store.set(str(rank), "")
    try:
        store.wait([str(one) for one in ranks], timedelta(seconds=left_s(deadline)))
    except RuntimeError as error:
        absent = [one for one in ranks if not store.check([str(one)])]
        if not absent:
            raise
        raise ProbeFailure(f"{ranks_text(absent)} did not come to the process group", peers=absent) from error


def _in_time(call: Callable[[], None], timeout_s: float, otherwise: str) -> None:
    """Call in a thread that is left behind if it hangs: ncclCommInitRank has no timeout. The process ends soon."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="gpuwatch-init")
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ProbeFailure(f"{otherwise} within {timeout_s:.0f} s", peers=[])
    if errors:
        raise errors[0]


class Collectives:
    """Of the group that this process has joined. Raises ProbeFailure at the deadline, and what torch raises before."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self._device = device
        self._deadline = deadline
        self._limit_s = left_s(deadline)

    def all_reduce(
        self,
        total: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """In place."""
        self.wait(dist.all_reduce(total, op=op, group=group, async_op=True), "all_reduce")

    def all_gather(self, gathered: list[torch.Tensor], mine: torch.Tensor) -> None:
        """Everybody's into `gathered`."""
        self.wait(dist.all_gather(gathered, mine, async_op=True), "all_gather")

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """`src` is a place in the group."""
        self.wait(dist.broadcast(tensor, src=src, async_op=True), "broadcast")

    def barrier(self) -> None:
        """Until everybody is here."""
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        self.wait(dist.barrier(device_ids=device_ids, async_op=True), "barrier")

    def wait(self, work: dist.Work | None, name: str) -> None:
        """Until it has ended, on the device, too."""
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=left_s(self._deadline)))
        except RuntimeError as error:
            if time.monotonic() < self._deadline - _ROUNDING_S:
                raise
            raise self.too_late(name) from error

    def too_late(self, name: str) -> ProbeFailure:
        """Nobody is named: who waits does not know for whom."""
        return ProbeFailure(
            f"{name} did not end within {self._limit_s:.0f} s: some rank took no part in it, or did not answer",
            peers=[],
            next="Look for the rank that hangs, or for packets that are dropped on the way to it.",
        )
