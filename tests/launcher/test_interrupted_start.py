"""torchrun starts one rank after the other: a signal in between must leave none behind."""

from __future__ import annotations

import subprocess
from signal import SIGINT
from types import SimpleNamespace

import pytest
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.launcher.elastic import WatchedElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api


def test_the_ranks_that_were_started_are_ended_and_no_other_child(monkeypatch):
    helper, ranks = subprocess.Popen(["sleep", "3600"]), []

    def start_some(agent, worker_group):
        ranks.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(2))
        raise SignalException("", SIGINT)

    monkeypatch.setattr(api.LocalElasticAgent, "_start_workers", start_some)
    agent = object.__new__(WatchedElasticAgent)
    monkeypatch.setattr(agent, "_gpuwatch_agree", lambda group: WorkerSettings(""), raising=False)
    try:
        with pytest.raises(SignalException):
            agent._start_workers(SimpleNamespace())
        assert all(rank.poll() is not None for rank in ranks)
        assert helper.poll() is None
    finally:
        for process in (helper, *ranks):
            process.kill()
            process.wait()
