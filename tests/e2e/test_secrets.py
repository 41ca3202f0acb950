"""What a user hides in arguments and variables reaches the script, and nothing that gpuwatch keeps or prints."""

import hashlib
import json
import shlex
import sys

import pytest
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.collector.store import RunStore
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.wire.keys import derive_keys
from gpuwatch.core.wire.messages import AgentHello, EventMessage

from ..waiting import until
from .conftest import scratch_folders

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="secrets")]

ARGUMENTS = "hunter2", "swordfish", "https://me:c0rrecthorse@host/data?token=batterystaple"
VARIABLES = {"HF_TOKEN": "tr0ub4dor", "TORCH_HUB_TOKEN": "xkcd936"}
OWN_SECRET = "the secret of this job, of many characters"
HIDDEN = ["hunter2", "swordfish", "c0rrecthorse", "batterystaple", *VARIABLES.values(), OWN_SECRET]


def script(bench):
    token, key, data = ARGUMENTS
    return (bench.script("with_secrets.py"), f"--token={token}", "--api-key", key, "--data", data, "--told", "told")


def launched(bench):
    return ("launch", "--nproc-per-node", "2", *script(bench))


def below_run(bench):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    return ("run", "--preflight", "quick", "--", *torchrun, *script(bench))


def below_a_shell(bench):
    """Others may join: the settings and keys for them are in a file while it runs."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    line = f"HF_TOKEN={VARIABLES['HF_TOKEN']} {shlex.join([*torchrun, *script(bench)])}"
    return ("run", "--preflight", "quick", "--other-hosts", "--", "bash", "-c", line)


@pytest.mark.parametrize("command", [launched, below_run, below_a_shell])
def test_no_file_and_no_line_has_them(bench, command):
    folder, told = bench.cwd / "gpuwatch-runs", bench.cwd / "told"
    job = bench.start("gpuwatch.cli.main", *command(bench), **VARIABLES, GPUWATCH_SECRET=OWN_SECRET)
    until(lambda: told.exists() or job.poll() is not None, "what the script was given")
    assert job.poll() is None, job.communicate()
    until(lambda: any(b"--api-key" in data for data in kept_in(folder).values()), "the command in the store")
    while_it_runs = {
        **kept_in(folder),
        **{path: data for at in scratch_folders({job.pid}) for path, data in kept_in(at).items()},
    }
    screen = bench.gpuwatch("top", "--once", "--format", "json")
    told.with_name("go").touch()
    run = bench.finish(job)

    assert json.loads(told.read_text()) == [digest(each) for each in (*ARGUMENTS, *VARIABLES.values())]
    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (4, "overflow", 1)
    assert "--token=***" in " ".join(run.report["run"]["command"])
    assert "--token=***" in screen.stdout
    messages = messages_of(folder / "latest")
    events = [body.event for body in messages if isinstance(body, EventMessage)]
    facts = [event.facts for event in events if isinstance(event, RankInventoryEvent) and event.facts is not None]
    assert [known.environment["TORCH_HUB_TOKEN"] for known in facts] == ["***", "***"]

    again = [bench.gpuwatch("report", *more) for more in (["--format", "json"], ["--format", "html"], ["--again"])]
    lines = {index: (each.stdout + each.stderr).encode() for index, each in enumerate([run, screen, *again])}
    assert {"report.json", "report.html", "report.txt", "run.sqlite"} <= {path.name for path in kept_in(folder)}
    keys = derive_keys(OWN_SECRET, next(body.rdzv_id for body in messages if isinstance(body, AgentHello)))
    private = [pair.private.decode() for pair in (keys.agent, keys.collector, keys.viewer)]
    assert having([*HIDDEN, *private], {**lines, **kept_in(folder)}) == []
    assert having(HIDDEN, while_it_runs) == []
    of_others = [path.name for path in having(private, while_it_runs)]
    assert set(of_others) <= {"view.json", "join.json"}, "private to their user, and gone once the run has ended"


def test_the_spool_of_a_node_without_a_collector_has_none(bench, port):
    (bench.cwd / "go").touch()
    run = bench.gpuwatch(
        *("launch", "--preflight", "off", "--collector", f"tcp://127.0.0.1:{port}", "--nproc-per-node", "2"),
        *script(bench),
        **VARIABLES,
    )

    assert run.code == 4
    kept = kept_in(bench.cwd / "gpuwatch-runs")
    (spool,) = (path for path in kept if path.suffix == ".spool")
    assert b"--token=***" in kept[spool]
    assert having(HIDDEN, {**kept, "terminal": (run.stdout + run.stderr).encode()}) == []


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def kept_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def having(values, kept):
    return [name for name, data in kept.items() if any(value.encode() in data for value in values)]


def messages_of(run):
    store = RunStore(RunPaths(run.resolve()).store)
    try:
        return [body for _, _, body in store.messages()]
    finally:
        store.close()
