"""Where the ranks of a `gpuwatch run` meet for their preflight: a separate store, which rank 0 serves meanwhile.

On one host the store listens on any free port of the loopback, and a file in the run's scratch folder has the number.
On several hosts it uses the run's port, next to the collector's, on the host at which the script's own ranks meet.
Strangers can connect there, too, so each message of a rank carries a seal (core/preflight.py). Rank 0 decides whether
all ranks have arrived, and the others read the list from the store:

    came                number of ranks that have arrived
    came/0 ... came/511 one rank: its host, and its place there according to its launcher
    go                  all ranks, in order; or why there will be no preflight
    left                number of ranks that have read all that they wait for
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ..core.host import boot_id, host_name, loopback
from ..core.identity import RankIdentity
from ..core.preflight import SealBroken, WordSeal
from ..core.recorder.run_folder import read_meeting_key
from ..core.signal_errors import from_outside, suppress_own
from ..core.text import first_line, ranks_text

_TICK_S = 0.05
_TICK_OF_RANK_S = 0.0005
"""Added to the interval for each rank of the job: all of them poll one store."""
_MARGIN_S = 10.0
"""The other ranks wait this much longer than rank 0, which decides."""
_LEAVE_S = 10.0
_ANSWER_S = 20.0


class LeftOut(Exception):
    """There can be no preflight; the message is the reason, as the end of a sentence."""


@dataclass(frozen=True)
class GroupEntry:
    """A rank that is about to join its default process group."""

    rank: int
    world_size: int
    meets: str
    """Where the script's own ranks meet: the same for all of one group, as far as the call says."""
    host: str = ""
    """Rank 0's; "" if the call does not say it."""
    device: int | None = None
    """The index of the GPU that the call names."""


class RankMeetingPlace(msgspec.Struct, frozen=True):
    """The host of one rank, and its place there."""

    host: str
    local_rank: int | None = None
    """None if its launcher does not say it."""


_Decision = list[RankMeetingPlace] | str
"""All ranks' places, or why there will be no preflight."""


class MeetingPlace:
    """`with MeetingPlace(...) as identity`: all ranks are there. Raises LeftOut if they cannot meet in time."""

    def __init__(
        self, entry: GroupEntry, local_rank: int | None, folder: Path, meets_at: str, timeout_s: float
    ) -> None:
        """`meets_at` is HOST:PORT for a run of several hosts, "" for one whose ranks share `folder`."""
        self._entry = entry
        self._mine = RankMeetingPlace(f"{host_name()} {boot_id()}", local_rank)
        key = hashlib.sha256(f"{entry.meets} {entry.world_size}".encode()).hexdigest()[:16]
        self._file = folder / f"preflight-{key}"
        host, _, port = meets_at.rpartition(":")
        self._head, self._port = host.strip("[]"), int(port or 0)
        self._timeout_s = timeout_s
        self._seal = WordSeal(read_meeting_key(folder))
        self._tick_s = _TICK_S + _TICK_OF_RANK_S * entry.world_size
        self._prefix = f"gpuwatch/{key}"
        self._store: Any = None
        self._wrote = False
        self._came = entry.world_size

    def __enter__(self) -> RankIdentity:
        try:
            return self._meet()
        except LeftOut:
            self._leave(0.0)
            raise
        except (RuntimeError, OSError) as error:  # torch raises DistNetworkError, older versions RuntimeError
            if from_outside(error):
                raise
            self._store = None
            self._leave(0.0)
            raise LeftOut(f"the ranks' meeting failed: {first_line(error)}") from error

    def __exit__(self, *_: object) -> None:
        self._leave(_LEAVE_S)

    # -- coming -------------------------------------------------------------------------------------------------

    def _meet(self) -> RankIdentity:
        entry = self._entry
        deadline = time.monotonic() + self._timeout_s
        host = self._host_it() if entry.rank == 0 else self._find_it(deadline)
        if self._add(f"claims/{entry.rank}", 1) > 1:
            raise LeftOut(f"two processes are rank {entry.rank} of the same group")
        self._set(f"came/{entry.rank}", msgspec.json.encode(self._mine))
        self._add("came", 1)
        if entry.rank == 0:
            self._set("go", msgspec.json.encode(self._decide(deadline)))
        elif not self._until(lambda: self._store.check([f"{self._prefix}/go"]), deadline + _MARGIN_S):
            raise LeftOut(f"rank 0 did not answer within {self._timeout_s:.0f} s")
        try:
            go = self._seal.open(f"{self._prefix}/go", self._store.get(f"{self._prefix}/go"))
        except SealBroken as error:
            raise LeftOut(_foreign(error)) from error
        decision = msgspec.json.decode(go, type=_Decision)
        if isinstance(decision, str):
            self._leave(_LEAVE_S)
            raise LeftOut(decision if entry.rank == 0 else "")
        return identity_of(entry, decision, host, self._store.port)

    def _decide(self, deadline: float) -> _Decision:
        size = self._entry.world_size
        if not self._until(lambda: self._add("came", 0) >= size, deadline):
            self._came = self._add("came", 0)
            missing = [rank for rank in range(size) if not self._store.check([f"{self._prefix}/came/{rank}"])]
            return (
                f"{ranks_text(missing)} of {size} did not reach init_process_group within {self._timeout_s:.0f} s of "
                "rank 0; to wait longer: --preflight-timeout"
            )
        names = [f"{self._prefix}/came/{rank}" for rank in range(size)]
        try:
            values = [self._seal.open(*pair) for pair in zip(names, self._store.multi_get(names), strict=True)]
        except SealBroken as error:
            return _foreign(error)
        return [msgspec.json.decode(value, type=RankMeetingPlace) for value in values]

    def _host_it(self) -> str:
        """As rank 0. Returns the host at which it reaches the store itself."""
        host = loopback()
        if not self._port:
            self._claim_the_file()
        try:
            self._store = self._open(host, self._port, is_master=True)
        except (RuntimeError, OSError) as error:
            if from_outside(error):
                raise
            raise LeftOut(
                f"port {self._port} of rank 0's host is taken; it is the next after the collector's: choose another "
                f"one with --collector-port ({first_line(error)})"
            ) from error
        if not self._port:
            new = self._file.with_suffix(".new")
            new.write_text(f"{os.getpid()} {self._store.port}")
            new.replace(self._file)
        return host

    def _claim_the_file(self) -> None:
        """It is that of a killed rank 0 only if its process has ended."""
        with suppress_own(OSError, ValueError, IndexError):
            pid = int(self._file.read_text().split()[0])
            if pid != os.getpid() and Path(f"/proc/{pid}").exists():
                raise LeftOut("another process is rank 0 of such a group at the same time")
        self._file.write_text(f"{os.getpid()}")
        self._wrote = True

    def _find_it(self, deadline: float) -> str:
        """As another rank. Returns the host at which it is."""
        found: list[tuple[str, int]] = []

        def answers() -> bool:
            for host, port in self._addresses():
                with suppress_own(OSError), socket.create_connection((host, port), timeout=1.0):
                    found.append((host, port))
                    return True
            return False

        if not self._until(answers, deadline):
            raise LeftOut(f"rank 0 did not reach init_process_group within {self._timeout_s:.0f} s")
        host, port = found[0]
        self._store = self._open(host, port, is_master=False)
        return host

    def _addresses(self) -> list[tuple[str, int]]:
        if self._port:
            return [(host, self._port) for host in dict.fromkeys((self._entry.host, self._head)) if host]
        with suppress_own(OSError, ValueError, IndexError):
            return [(loopback(), int(self._file.read_text().split()[1]))]
        return []

    def _open(self, host: str, port: int, *, is_master: bool) -> Any:
        import torch.distributed as dist

        alone: dict[str, Any] = {}
        if is_master and not port:  # of one host: torch would listen on all its addresses
            listens = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            port = listens.getsockname()[1]
            has_late_libuv = hasattr(dist.TCPStore, "list_keys")  # type: ignore[attr-defined]  # as below
            alone = {
                "master_listen_fd": listens.detach(),
                "use_libuv": has_late_libuv,
            }  # torch 2.7 has one or the other
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
            host,
            port,
            world_size=None,
            is_master=is_master,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
            **alone,
        )

    # -- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, patience_s: float) -> None:
        """The store ends with rank 0's hold on it: it waits a moment for the others."""
        store, self._store = self._store, None
        if self._wrote:
            self._file.unlink(missing_ok=True)
            self._wrote = False
        if store is None:
            return
        name = f"{self._prefix}/left"
        with suppress_own(RuntimeError, OSError):  # rank 0 has ended, and its store with it
            store.add(name, 1)
            if self._entry.rank == 0:
                self._until(lambda: store.add(name, 0) >= self._came, time.monotonic() + patience_s)

    # -- the store ----------------------------------------------------------------------------------------------

    def _set(self, name: str, value: bytes) -> None:
        full = f"{self._prefix}/{name}"
        self._store.set(full, self._seal.close(full, value.decode()))

    def _add(self, name: str, number: int) -> int:
        return int(self._store.add(f"{self._prefix}/{name}", number))

    def _until(self, happened: Callable[[], bool], deadline: float) -> bool:
        """Looks again and again, so that Python hears signals: torch's own wait does not let it."""
        while not happened():
            if time.monotonic() >= deadline:
                return False
            time.sleep(self._tick_s)
        return True


def identity_of(entry: GroupEntry, places: list[RankMeetingPlace], store_host: str, store_port: int) -> RankIdentity:
    """Who the rank is, from where all are. Without a word of the launcher, ranks of a host count in their order."""
    host = places[entry.rank].host
    here = [rank for rank, place in enumerate(places) if place.host == host]
    told = places[entry.rank].local_rank
    local_rank = here.index(entry.rank) if told is None else told
    return RankIdentity(
        entry.rank,
        local_rank,
        entry.world_size,
        len(here),
        store_host,
        store_port,
        True,
        node=list(dict.fromkeys(place.host for place in places)).index(host),
        device=entry.device,
    )


def _foreign(error: SealBroken) -> str:
    return f"{error}; check who can reach the port at which the ranks meet"
