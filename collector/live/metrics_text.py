"""From the picture that `gpuwatch top` shows to what a Prometheus reads. Pure.

    gpuwatch_rank_batches_total{host="node-a",rank="3"} 813.0
    gpuwatch_module_headroom{dtype="float16",module="net.fc2"} 1.1

A rank has four series, and six with a GPU, whatever its model is. Of modules there are the few of the run that are
closest to their limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...core.identity import is_rank, pid_of_number
from ...core.verdicts import VerdictKind
from ...core.wire.view import JobView, RankView
from .own_numbers import OwnNumbers
from .snapshot import STATES, behind_of, state_of

_RANK = ("rank", "host")
_MODULE = ("module", "dtype")


def text_of(view: JobView, own: OwnNumbers) -> bytes:
    """Prometheus's text format, version 0.0.4."""
    return generate_latest(_CollectedMetrics(view, own))


class _CollectedMetrics(Collector):
    def __init__(self, view: JobView, own: OwnNumbers) -> None:
        self._view, self._own = view, own

    def collect(self) -> Iterator[Metric]:
        return families(self._view, self._own)


def families(view: JobView, own: OwnNumbers) -> Iterator[Metric]:
    """All of them; one that nothing is known for has no sample."""
    yield InfoMetricFamily(
        "gpuwatch_run", "The run that this collector watches.", {"run": view.run, "attempt": str(view.attempt)}
    )
    yield _gauge("gpuwatch_view_timestamp_seconds", "When these numbers were taken.", view.time_ns / 1e9)
    yield _gauge("gpuwatch_world_size", "Ranks of the job.", view.world_size)
    yield _gauge("gpuwatch_nodes", "Nodes of the job that were heard.", len(view.nodes))
    silent = sum(node.lost for node in view.nodes)
    yield _gauge("gpuwatch_nodes_silent", "Nodes of the job that are silent now.", silent)
    yield from _ranks(view)
    yield from _modules(view)
    yield from _counts(view)
    kinds = {str(kind): int(kind == view.kind) for kind in VerdictKind}
    yield _by_label(GaugeMetricFamily, "gpuwatch_verdict", "1: the verdict so far.", "kind", kinds)
    yield from _own(own)


def _ranks(view: JobView) -> Iterator[Metric]:
    behind = behind_of(view.ranks)
    states = {rank.rank: state_of(rank, behind) for rank in view.ranks}
    number = Counter(states.values())
    by_state = {str(state): number[state] for state in STATES}
    yield _by_label(GaugeMetricFamily, "gpuwatch_ranks", "Ranks by state.", "state", by_state)
    state = GaugeMetricFamily("gpuwatch_rank_state", "1: the state that the rank is in.", labels=[*_RANK, "state"])
    batches = CounterMetricFamily("gpuwatch_rank_batches", "Batches that the rank has begun.", labels=_RANK)
    steps = CounterMetricFamily("gpuwatch_rank_steps", "Optimizer steps that it has finished.", labels=_RANK)
    still = GaugeMetricFamily("gpuwatch_rank_still_seconds", "Since it last recorded something.", labels=_RANK)
    states.update({process.rank: state_of(process, set()) for process in view.processes})
    for rank in (*view.ranks, *view.processes):
        labels = [_name(rank), rank.host]
        state.add_metric([*labels, states[rank.rank]], 1)
        batches.add_metric(labels, max(0, rank.batch + 1))
        steps.add_metric(labels, max(0, rank.step))
        if not rank.ended:
            still.add_metric(labels, rank.still_s)
    yield from (state, batches, steps, still)
    yield from _gpus(view)
    slow = GaugeMetricFamily(
        "gpuwatch_straggler_share", "Share of the job's time that the others wait for this rank.", labels=_RANK
    )
    if view.slow is not None:
        slow.add_metric([str(view.slow.rank), view.slow.host], view.slow.cost)
    yield slow


def _name(rank: RankView) -> str:
    return str(rank.rank) if is_rank(rank.rank) else f"pid {pid_of_number(rank.rank)}"


def _gpus(view: JobView) -> Iterator[Metric]:
    use = GaugeMetricFamily(
        "gpuwatch_rank_gpu_use_share", "Of the time in which a kernel ran on the rank's GPU.", labels=_RANK
    )
    memory = GaugeMetricFamily("gpuwatch_rank_gpu_memory_share", "Of its GPU's memory in use.", labels=_RANK)
    for family, shares in (
        (use, ((rank, rank.gpu_use) for rank in view.ranks)),
        (memory, ((rank, rank.gpu_memory) for rank in view.ranks)),
    ):
        for rank, share in shares:
            if share >= 0:
                family.add_metric([str(rank.rank), rank.host], share)
        yield family


def _modules(view: JobView) -> Iterator[Metric]:
    left = GaugeMetricFamily(
        "gpuwatch_module_headroom", "Powers of two from its output's abs max to its dtype's limit.", labels=_MODULE
    )
    largest = GaugeMetricFamily("gpuwatch_module_abs_max", "Of its output in the last batch.", labels=_MODULE)
    for hot in view.hot:
        left.add_metric([hot.module, hot.dtype], hot.left)
        largest.add_metric([hot.module, hot.dtype], hot.abs_max)
    yield from (left, largest)
    passing = GaugeMetricFamily(
        "gpuwatch_forecast_batch", "In which its output passes its dtype's limit.", labels=[*_MODULE, "bound"]
    )
    for told in view.passing:
        for bound, batch in (("earliest", told.earliest), ("middle", told.batch), ("latest", told.latest)):
            passing.add_metric([told.module, told.dtype, bound], batch)
    yield passing


def _counts(view: JobView) -> Iterator[Metric]:
    yield _by_label(CounterMetricFamily, "gpuwatch_events", "What happened.", "kind", view.events_by_kind)
    values = {value: view.anomalies_by_value.get(value, 0) for value in ("nan", "+inf", "-inf")}
    yield _by_label(CounterMetricFamily, "gpuwatch_anomalies", "Anomalies.", "value", values)
    yield _by_label(CounterMetricFamily, "gpuwatch_lost", "Dropped for want of room.", "what", view.lost)


def _own(own: OwnNumbers) -> Iterator[Metric]:
    text = "Received, and not on the disk yet."
    yield _gauge("gpuwatch_collector_waiting_messages", text, own.waiting_messages)
    yield _gauge("gpuwatch_collector_waiting_bytes", text, own.waiting_bytes)
    yield _counter("gpuwatch_collector_pages_not_kept", "For want of memory and disk.", own.pages_not_kept)
    turned_away = "Messages and clients that were not let in."
    yield _by_label(CounterMetricFamily, "gpuwatch_collector_turned_away", turned_away, "reason", own.turned_away)
    yield _counter("gpuwatch_metrics_faults", "How often these metrics could not be told.", own.metrics_faults)


def _gauge(name: str, text: str, number: float) -> Metric:
    return GaugeMetricFamily(name, text, value=number)


def _counter(name: str, text: str, number: float) -> Metric:
    return CounterMetricFamily(name, text, value=number)


def _by_label(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, label: str, of: dict[str, int]
) -> Metric:
    found = kind(name, text, labels=[label])
    for value, number in of.items():
        found.add_metric([value], number)
    return found
