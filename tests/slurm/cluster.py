#!/usr/bin/env python3
"""A real SLURM of two nodes on one machine: slurmctld, two slurmd, munge. For tests, and to try things out by hand.

    sudo python3 tests/slurm/cluster.py install      # what is missing, with apt-get
    sudo python3 tests/slurm/cluster.py up           # half a second; nothing happens when it is up
    sudo python3 tests/slurm/cluster.py run sbatch --nodes 2 slurm/gpuwatch.sbatch train.py
    sudo python3 tests/slurm/cluster.py status       # exit code 0 when both nodes take jobs
    sudo python3 tests/slurm/cluster.py down         # with all that runs in it; the logs stay

    node-0, node-1    compute nodes: network, host name, shared memory and processes of their own, as on real machines
    node-2            the controller, munge, and where users log in: `run` runs there

The files are common to all, as on a cluster with a shared file system. Everything hangs on the name of the network's
namespaces (see network.py): what runs in them is found there by its pid, and nothing else is ever touched.

What this SLURM does not have: cgroups. No limit on memory or CPUs holds, and at a job's end it kills by process group.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "net"))

import network
from network import Network, Node

NAME = "gpuwatch-slurm"
GPUS = 2
"""That each node claims to have. SLURM never opens them."""
NODE_LOST_S = 60
"""Silence of a slurmd after which the controller takes its node for lost: later than gpuwatch, as on real clusters."""
_PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_CONFIG = """\
ClusterName=gpuwatch
SlurmctldHost={login.host}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
# nothing that needs cgroups, systemd or a database
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
# the nodes have what is written here, whatever the machine has
SlurmdParameters=config_overrides
# a job starts at once, not after seconds
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=50000,batch_sched_delay=0,bf_interval=1
# a lost node is noticed soon and may come back
ReturnToService=2
SlurmdTimeout={lost_s}
MessageTimeout=10
EnforcePartLimits=ALL
MinJobAge=3600
GresTypes=gpu
{nodes}
PartitionName=test Nodes=ALL Default=YES DefaultTime=00:10:00 MaxTime=INFINITE State=UP
"""

_NODE_INIT = """\
mount -t tmpfs tmpfs /dev/shm || exit 1
slurmd -D -f "$1/slurm.conf" -N "$2" &
# Not exec: process 1 has to reap what the jobs leave, and SLURM waits for that. The node stays up without its slurmd.
while true; do wait; sleep 1; done
"""


def why_not() -> str:
    """Why there can be no such cluster here; "" if there can."""
    if reason := network.why_not():
        return reason
    if lacking := _lacking():
        return f"not installed: {', '.join(lacking)} (sudo python3 tests/slurm/cluster.py install)"
    return ""


def _lacking() -> list[str]:
    return [package for tool, package in _PACKAGES.items() if shutil.which(tool, path=_PATH) is None]


def install() -> None:
    """Install the missing packages, without starting their daemons."""
    packages = _lacking()
    if not packages:
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in ("update", "install --yes --no-install-recommends " + " ".join(packages)):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", "--quiet", *command.split()], env=environment, check=True)
    finally:
        if ours:
            policy.unlink()


class Cluster:
    """One cluster, from outside."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name
        self.folder = Path(tempfile.gettempdir(), name)  # short: SLURM's sockets lie below it
        self.log = self.folder / "log"
        self.log.mkdir(parents=True, exist_ok=True)
        self.network = Network(name, 3, self.folder)
        *self.nodes, self.login = self.network.nodes
        self._started: list[subprocess.Popen[bytes]] = []

    # -- up and down ----------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Bring up the parts that are down, undo the faults, and return when both nodes take jobs."""
        with self._alone():
            self.network.up()
            self.network.restore()
            if not self._has_control():
                self._start_control()
            for node in self.nodes:
                if self._running("slurmd", node) is None:
                    self._start_node(node)
            for node in self.nodes:
                if not self.takes_jobs(node):  # a node that has just registered needs none, and SLURM refuses
                    self.run(["scontrol", "update", f"nodename={node.host}", "state=resume"])
            self._until(lambda: all(self.takes_jobs(node) for node in self.nodes), "both nodes take jobs")

    def down(self) -> None:
        """End all that runs in it. The logs stay, and the file of its hosts' names, which the network has made."""
        with self._alone():
            self.network.down()
            while self._started:
                self._started.pop().wait()
            for path in self.folder.iterdir():
                if path.is_dir() and path != self.log:
                    shutil.rmtree(path)
                elif path.name != "lock" and path.suffix != ".hosts" and not path.is_dir():
                    path.unlink()

    def _start_control(self) -> None:
        self._configure()
        socket, key = self.folder / "munge.socket", self.folder / "munge.key"
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._spawn("munged", self.login, ["munged", "--foreground", f"--socket={socket}", f"--key-file={key}", *own])
        self._until(socket.exists, "munged answers")
        self._spawn("slurmctld", self.login, ["slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf")])
        self._until(lambda: "is UP" in self.run(["scontrol", "ping"]).stdout, "slurmctld answers")

    def _configure(self) -> None:
        for folder in ("state", *(f"spool-{node.host}" for node in self.nodes), "dev"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
            (self.folder / folder).mkdir()
        self.folder.chmod(0o755)  # munged wants no folder that others may write to
        key = self.folder / "munge.key"
        key.unlink(missing_ok=True)
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        size = f"CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{GPUS}"
        nodes = "\n".join(f"NodeName={node.host} NodeAddr={node.address} {size}" for node in self.nodes)
        config = _CONFIG.format(login=self.login, folder=self.folder, nodes=nodes, lost_s=NODE_LOST_S)
        (self.folder / "slurm.conf").write_text(config)
        for number in range(GPUS):  # SLURM wants a character device each, with its number at the end of its name
            (self.folder / "dev" / f"nvidia{number}").symlink_to("/dev/null")
        devices = f"{self.folder}/dev/nvidia[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName=node-[0-1] Name=gpu File={devices}\n")
        # slurmd loads such a plugin even where nothing uses it; v1 loads everywhere, `disabled` is new in 24.05
        version = re.search(r"(\d+)\.(\d+)", subprocess.check_output(["slurmctld", "-V"], text=True, env=self._own()))
        assert version is not None
        plugin = "disabled" if (int(version[1]), int(version[2])) >= (24, 5) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def _start_node(self, node: Node) -> None:
        if self.init_of(node) is not None:
            self.kill(node)
            self._until(lambda: self.init_of(node) is None, f"{node.host} is off")
        own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = ["bash", "-c", _NODE_INIT, "node-init", str(self.folder), node.host]
        self._spawn(node.host, node, [*own_processes, *init])
        self._until(lambda: self._running("slurmd", node) is not None, f"the slurmd of {node.host} runs")

    # -- reading its state ----------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What SLURM's commands need, and nothing of a job that this very process may run in."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command where users log in."""
        defaults = {"env": self.environment, "capture_output": True, "text": True}
        return subprocess.run(self.login.inside(command), **{**defaults, **kwargs})  # type: ignore[call-overload]

    def state(self, node: Node) -> str:
        """As `sinfo` has it, in its short form: `idle`, `down*`."""
        return self.run(["sinfo", "--noheader", "--Node", f"--nodes={node.host}", "--format=%t"]).stdout.strip()

    def takes_jobs(self, node: Node) -> bool:
        """Whether its slurmd has told the controller that it does."""
        return self._has_control() and self.state(node) in ("idle", "mix", "alloc", "comp")

    def _has_control(self) -> bool:
        """Without a controller, SLURM's commands try for a minute."""
        up = Path("/run/netns", self.login.namespace).exists()
        return up and all(self._running(daemon, self.login) for daemon in ("munged", "slurmctld"))

    def init_of(self, node: Node) -> int | None:
        """The process that is number 1 inside of a compute node."""
        return next((pid for pid in node.pids() if re.search(r"^NSpid:\t\d+\t1$", _status(pid), re.M)), None)

    def _running(self, daemon: str, node: Node) -> int | None:
        return next((pid for pid in node.pids() if f"Name:\t{daemon}\n" in _status(pid)), None)

    # -- faults ---------------------------------------------------------------------------------------------------

    def power_off(self, node: Node) -> None:
        """Everything on it is gone at once, and it says no goodbye, not even its network. `up` brings it back."""
        self.network.cut_off(node)
        self.kill(node)

    def kill(self, node: Node) -> None:
        """All processes of a node; its kernel, so to speak, closes their connections."""
        pid = self.init_of(node)
        assert pid is not None, f"{node.host} is not up"
        os.kill(pid, signal.SIGKILL)

    def kill_slurmd(self, node: Node) -> None:
        """Only SLURM's daemon; what it has started goes on."""
        pid = self._running("slurmd", node)
        assert pid is not None, f"there is no slurmd on {node.host}"
        os.kill(pid, signal.SIGKILL)

    # -- what jobs leave ------------------------------------------------------------------------------------------

    def left_by_jobs(self) -> list[str]:
        """Processes of jobs that run on the nodes, and gpuwatch's folders in their shared memory."""
        found = []
        for node in self.nodes:
            found += [f"{node.host}: {_command_line(pid)}" for pid in self._job_pids(node)]
            found += [f"{node.host}: {folder.name}" for folder in self._folders(node)]
        return found

    def clear(self) -> None:
        """Away with it."""
        for node in self.nodes:
            for pid in self._job_pids(node):
                os.kill(pid, signal.SIGKILL)
            for folder in self._folders(node):
                shutil.rmtree(folder, ignore_errors=True)

    def _job_pids(self, node: Node) -> list[int]:
        return [pid for pid in node.pids() if b"SLURM_JOB_ID=" in _read(pid, "environ")]

    def _folders(self, node: Node) -> list[Path]:
        return list(Path(f"/proc/{self.init_of(node)}/root/dev/shm").glob("gpuwatch-*"))

    # -- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, node: Node, command: list[str]) -> None:
        with (self.log / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                node.inside(command),
                env=self._own(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)

    def _own(self) -> dict[str, str]:
        return {"PATH": _PATH, "LC_ALL": "C", "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _until(self, happened: Callable[[], bool], what: str, within_s: float = 300.0) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {within_s:.0f} s not yet: {what}; see {self.log}")
            time.sleep(0.02)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def take_down_stale() -> None:
    """What test runs that are gone have left."""
    for path in Path("/run/netns").glob(f"{NAME}*-switch"):
        owner = re.fullmatch(rf"({NAME}(\d+)[a-z]*)-switch", path.name)
        if owner and not Path("/proc", owner[2]).exists():
            Cluster(owner[1]).down()


def _status(pid: int) -> str:
    return _read(pid, "status").decode()


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    """Nothing once the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def main(arguments: list[str]) -> int:
    """The command line."""
    command, *rest = arguments or ["help"]
    if command == "install":
        install()
        return 0
    if command not in ("up", "down", "status", "run"):
        print(__doc__)
        return 2
    if reason := why_not():
        print(f"no SLURM here: {reason}", file=sys.stderr)
        return 1
    cluster = Cluster()
    if command == "up":
        cluster.up()
        print(f"up: sudo python3 {sys.argv[0]} run sinfo")
    elif command == "down":
        cluster.down()
    elif command == "run":
        return cluster.run(rest, capture_output=False).returncode
    else:
        ready = {node.host: cluster.takes_jobs(node) for node in cluster.nodes}
        print(", ".join(f"{host} {'takes' if takes else 'takes no'} jobs" for host, takes in ready.items()))
        return int(not all(ready.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
