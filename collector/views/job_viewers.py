"""Whoever looks on at a running job: `gpuwatch top`, the metrics endpoint, and who is notified."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from msgspec import structs

from ...core.codes import Code, VerdictKind
from ...core.errors import UsageError
from ...core.guest.tell import tell as log
from ...core.wire.beat import NodeBeat
from ...core.wire.keys import KeyPair
from ...core.wire.view import JobView, StacksView
from ..ends.hang_model import HangFinding
from ..facts.fold import FactFold
from ..report.verdict import Verdict
from ..so_far import LiveFindings
from .job_notifier import JobNotification, JobNotifier, NotifiedEvent
from .publisher import ViewPublisher
from .resting_ranks import RestingRanks
from .snapshot import StacksRound, view_of

if TYPE_CHECKING:
    from .metrics_endpoint import MetricsExporter, OwnNumbers  # without --metrics-port, none of it is imported


class JobViewers:
    """What the collector shows while the job runs. Call `begin` once the run is known, then `show` in each turn."""

    _run: str
    _folder: Path
    _folded: FactFold
    _live: LiveFindings
    _started_ns: int
    _found_hang: Callable[[], tuple[int, HangFinding] | None]
    """Arguments of `begin`."""

    def __init__(
        self, context: zmq.Context[Any], address: str, keys: KeyPair, viewer: KeyPair | None, say: Callable[[str], None]
    ) -> None:
        """`viewer`: the keys of viewers; None if nobody can view the job. `say` tells the user a sentence."""
        self.metrics: MetricsExporter | None = None
        """The metrics endpoint; it is closed with the viewers."""
        self.is_looked_at = False
        """Somebody looks on: the agents send what only viewers see."""
        self._say = say
        self._notifier: JobNotifier | None = None
        self._view: ViewPublisher | None = None
        self._stacks = StacksRound()
        self._resting = RestingRanks()
        if viewer is not None:
            try:
                self._view = ViewPublisher(context, address, keys, viewer)
            except zmq.ZMQError as error:  # no port can be had, which costs the view alone
                log(f"viewers cannot connect: {error}")

    def serve_metrics(self, address: str) -> None:
        """Serve at `HOST:PORT` from now on; "" does nothing. Raises UsageError if that fails."""
        if not address:
            return
        try:
            from .metrics_endpoint import MetricsExporter
        except ImportError as error:
            what = f"expected prometheus_client, which writes the metrics, found none ({error})"
            install = "install it with: pip install prometheus_client"
            raise UsageError(Code.NOT_INSTALLED, f"--metrics-port: {what}; {install}") from error
        self.metrics = MetricsExporter(address)
        self.is_looked_at = True

    def notify_at(self, targets: Sequence[str]) -> None:
        """Send the verdict, stalls and forecasts to these addresses and commands, too."""
        self._notifier = JobNotifier(targets, self._say)

    def begin(
        self,
        run: str,
        folder: Path,
        folded: FactFold,
        live: LiveFindings,
        started_ns: int,
        found_hang: Callable[[], tuple[int, HangFinding] | None],
    ) -> None:
        """Show this run from now on. `found_hang`: the last finding about ranks that rest, with its attempt."""
        self._run, self._folder, self._folded, self._live = run, folder, folded, live
        self._started_ns, self._found_hang = started_ns, found_hang
        if self._view is not None:
            self._view.announce(folder)

    def on_message(self, beat: NodeBeat) -> None:
        """Take the looks of a beat."""
        self._stacks.on_message(beat)
        self._resting.on_message(beat)

    def show(
        self,
        now: float,
        numbers: Callable[[], OwnNumbers],
        look: Callable[[], object],
        tell_again: Callable[[], object],
    ) -> None:
        """Update viewers and the metrics endpoint, which also shows the collector's own `numbers`.

        `look` has all agents look at their ranks. `tell_again` tells them that the first viewer has come, or the last
        one has left.
        """
        if self._view is not None:
            self._view.show(lambda: self._shown_picture(now), now)
            if self._view.topics:
                self._show_stacks(self._view, now, look)
            if self._view.has_viewers and self._resting.begins(now):
                look()
            self._resting.conclude(self._folded.as_it_stands(), now)
        if self.metrics is not None:
            self.metrics.show(lambda: (self._picture(), numbers()), now)
        is_looked_at = self.metrics is not None or (self._view is not None and self._view.has_viewers)
        if is_looked_at != self.is_looked_at:
            self.is_looked_at = is_looked_at
            tell_again()

    def _show_stacks(self, view: ViewPublisher, now: float, look: Callable[[], object]) -> None:
        if self._stacks.begins(now):
            look()
        facts = self._folded.as_it_stands()
        running = {rank.rank: facts.host(rank) for rank in facts.of_attempt(facts.last_attempt) if rank.exit is None}
        looks = self._stacks.conclude(set(running), now)
        if looks is not None:
            view.answer(StacksView(time.time_ns(), self._run, facts.announced_ranks, running, looks))

    def _picture(self) -> JobView:
        verdict, facts = self._live.verdict.said, self._folded.as_it_stands()
        kind = VerdictKind.OVERFLOW if verdict else ""
        slow, hang = self._live.stragglers.slow, self._resting.found or self._found_hang()
        return view_of(facts, self._run, time.time_ns(), verdict, kind, slow, self._started_ns, hang)

    def _shown_picture(self, now: float) -> JobView:
        picture = self._picture()
        self._resting.see(picture)
        return structs.replace(picture, asks=True) if self._resting.asks(now) else picture

    def notify(self, event: NotifiedEvent, sentence: str, **of_verdict: Any) -> None:
        """Send a sentence to whoever is notified."""
        if self._notifier is not None:
            text = f"gpuwatch, run {self._run}: {sentence}"
            self._notifier.put(JobNotification(text, event, self._run, str(self._folder), **of_verdict))

    def notify_verdict(self, verdict: Verdict, exit_code: int) -> None:
        """Send the verdict to whoever is notified."""
        kind, certainty = str(verdict.kind), str(verdict.certainty)
        fields = {"verdict": kind, "certainty": certainty, "rank": verdict.rank, "module": verdict.module}
        self.notify("verdict", f"{kind}, {certainty}: {' '.join(verdict.headlines)}", exit_code=exit_code, **fields)

    def close(self) -> None:
        """Let the last notifications out, then close everything."""
        if self._notifier is not None:
            self._notifier.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._view is not None:
            self._view.close()
