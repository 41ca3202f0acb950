"""Collectives with a deadline, on gloo and on NCCL alike.

Since torch 2.8 a blocking collective of NCCL returns no Work. It runs in the current stream, and reading the result
then waits for the device without a timeout. So every collective here is asynchronous, and its Work is awaited with a
timeout.
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
"""Tolerance: torch counts a timeout in whole milliseconds, from a slightly different start."""
_WATCHDOG = 10
"""Factor on the remaining time: torch's own watchdog, which ends the process, must not fire before our deadline."""
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def left_s(deadline: float) -> float:
    """Seconds until a deadline on the monotonic clock, at least 0.1."""
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
    """Make the process group of this process. NCCL connects at once, since it is given the device.

    Raises ProbeFailure, with the ranks that do not come, or with no ranks if the group is not up at the deadline.
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
            torch.cuda.set_device(device)  # every thread has its own current device
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
    """Have NCCL's errors raised where we wait. Otherwise torch's watchdog ends the process and names no rank.

    TORCH_NCCL_BLOCKING_WAIT would also do that, but then every wait polls once a millisecond, which distorts the times.
    """
    for name in _BLOCKING_WAIT:
        os.environ.pop(name, None)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def _wait_for_all(store: Store, ranks: Sequence[int], rank: int, deadline: float) -> None:
    """Wait for all ranks. A rank whose device hangs does not come; without this, NCCL would only fail to connect."""
    store.set(str(rank), "")
    try:
        store.wait([str(one) for one in ranks], timedelta(seconds=left_s(deadline)))
    except RuntimeError as error:
        absent = [one for one in ranks if not store.check([str(one)])]
        if not absent:
            raise
        raise ProbeFailure(f"{ranks_text(absent)} did not come to the process group", peers=absent) from error


def _in_time(call: Callable[[], None], timeout_s: float, otherwise: str) -> None:
    """Call in a thread that is abandoned if it hangs, since ncclCommInitRank has no timeout. The process ends soon."""
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
    """Collectives of the group that this process has joined. Raises ProbeFailure at the deadline."""

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
        """Reduce in place."""
        self.wait(dist.all_reduce(total, op=op, group=group, async_op=True), "all_reduce")

    def all_gather(self, gathered: list[torch.Tensor], mine: torch.Tensor) -> None:
        """Gather the tensors of all ranks into `gathered`."""
        self.wait(dist.all_gather(gathered, mine, async_op=True), "all_gather")

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast from `src`, a rank within the group."""
        self.wait(dist.broadcast(tensor, src=src, async_op=True), "broadcast")

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        self.wait(dist.barrier(device_ids=device_ids, async_op=True), "barrier")

    def wait(self, work: dist.Work | None, name: str) -> None:
        """Wait until the work has ended, also on the device."""
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=left_s(self._deadline)))
        except RuntimeError as error:
            if time.monotonic() < self._deadline - _ROUNDING_S:
                raise
            raise self.too_late(name) from error

    def too_late(self, name: str) -> ProbeFailure:
        """The failure at the deadline. It names no rank: a waiting rank does not know for which one it waits."""
        return ProbeFailure(
            f"{name} did not end within {self._limit_s:.0f} s: some rank took no part in it, or did not answer",
            peers=[],
            next="Look for the rank that hangs, or for packets that are dropped on the way to it.",
        )
