"""What stands beside a slow rank, over made figures."""

from __future__ import annotations

from gpuwatch.collector.assemble.stragglers import beside_slow
from gpuwatch.collector.assemble.timeline import node_series


def node(make, host, *, cpu=0.5, steal=0.0, swap=0.0, gpus=()):
    """`gpus` are (clock, temperature, share of the time in which it is held down because it is hot)."""
    rates = {"cpu": cpu, "steal": steal, "swap_in": swap}
    figures = {("", what): [5 * rate * n for n in range(20)] for what, rate in rates.items()}
    for n, (clock, hot, held) in enumerate(gpus):
        name = f"GPU-{host}-{n}"
        figures |= {(name, "sm_clock"): [clock] * 20, (name, "temperature"): [hot] * 20}
        figures[name, "clocks_sw_thermal"] = [5 * held * n for n in range(20)]
    message = make.telemetry(figures)
    return node_series(host, [message], message.sent_ns)


def test_a_hot_gpu_stands_beside_the_others(make):
    slow = node(make, "h1", gpus=[(1980, 62, 0), (1410, 88, 0.4)])
    others = [node(make, "h0", gpus=[(1980, 60, 0), (1965, 64, 0)])]
    assert beside_slow(slow, "h1-1", others) == [
        "its host h1 over the run: 50% of its processors in use (the others: 50%)",
        "its GPU GPU-h1-1 over the run: SM clock 1410 MHz on average (the others: 1980 MHz), up to 88 C (the others: "
        "62 C), its clocks throttled for 40% of the time because it was hot",
    ]


def test_a_busy_host_without_gpus(make):
    slow = node(make, "h1", cpu=0.93, steal=0.12, swap=2 << 20)
    assert beside_slow(slow, "", [node(make, "h0"), node(make, "h2", cpu=0.6)]) == [
        "its host h1 over the run: 93% of its processors in use (the others: 55%), 12% stolen by other virtual "
        "machines, swapping 2 MiB a second"
    ]


def test_without_figures_there_is_no_line(make):
    assert beside_slow(None, "GPU-0", [node(make, "h0")]) == []
