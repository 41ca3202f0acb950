"""A signal's handler that comes while a collective begins: what is counted is what was issued."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.recorder.group_table import GroupPhase
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.worker.hooks.group_hooks import METHODS, GroupHooks
from gpuwatch.worker.hooks.process_groups import CollectivePatches
from gpuwatch.worker.record import group_operations
from gpuwatch.worker.record.group_operations import GroupTable
from gpuwatch.worker.record.group_slots import HeldSlots
from torch import distributed as dist


class Told(Exception):
    """What a handler raises."""


def tell(number=1, frame=None):
    raise Told


@pytest.fixture
def bare_table(tmp_path, alone_in_a_group, monkeypatch):
    """The table of a rank in which nothing is replaced yet, and its reader."""
    monkeypatch.setattr("gpuwatch.worker.hooks.process_groups.from_outside", lambda error: isinstance(error, Told))
    monkeypatch.setattr("gpuwatch.worker.hooks.group_hooks.from_outside", lambda error: isinstance(error, Told))
    recorder = RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0, segments=2)
    reader = RecorderReader(recorder.path)
    yield SimpleNamespace(groups=GroupTable(recorder), reader=reader, faults=[])
    reader.close()
    recorder.close()


@pytest.fixture
def table(bare_table):
    """The same whose methods are those in Python."""
    groups, faults = bare_table.groups, bare_table.faults
    patches = CollectivePatches(groups, lambda part, error: faults.append(error), native=False)
    patches.attach()

    def writer(send_before):
        patches._send_before = send_before
        found = patches._writer(dist.ProcessGroup)
        if found is None:
            pytest.skip("not built")
        found.enter(0, dist.group.WORLD)
        return found

    yield SimpleNamespace(**vars(bare_table), writer=writer)
    patches.detach()


def state(table):
    group = dist.group.WORLD
    (shown,) = table.reader.groups()
    assert table.groups.count_of(group) == shown.begun
    return group._get_sequence_number_for_group(), shown


def places(handler):
    """Runs a collective again and again, interrupted at each place of ours until it is issued."""
    codes = all_of(GroupTable, HeldSlots, group_operations.described)
    codes |= all_of(dist.ProcessGroup.allreduce, CollectivePatches._begin_of)
    for at in range(1000):
        where = interrupt(codes, lambda: dist.all_reduce(torch.ones(2)), handler, at)
        if not where:
            return
        yield where


def test_one_that_was_not_issued_is_not_counted(table):
    issued = seen = 0
    dist.all_reduce(torch.ones(2))
    for at in range(1000):
        codes = all_of(GroupTable, HeldSlots, dist.ProcessGroup.allreduce, CollectivePatches._begin_of)
        before = state(table)[0]
        try:
            where = interrupt(codes, lambda: dist.all_reduce(torch.ones(2)), tell, at)
        except Told:
            where = "raised"
            seen += 1
        counted, shown = state(table)
        issued += counted - before
        assert shown.begun == counted, at
        assert shown.phase == "none" or counted > before, at
        assert not table.groups.threads_inside
        if not where:
            break
    assert seen > 10
    assert issued > 2, "some were interrupted only when they had been issued"
    dist.all_reduce(torch.ones(2))
    counted, shown = state(table)
    assert shown.begun == counted
    assert [each.number for each in shown.recent] == list(range(counted - 7, counted + 1))
    assert table.faults == []


def test_a_handler_may_communicate_itself(table):
    dist.all_reduce(torch.ones(2))
    seen = list(places(lambda: dist.broadcast(torch.ones(3), 0)))
    assert len(seen) > 10
    counted, shown = state(table)
    assert shown.begun == counted == 2 + 2 * len(seen)
    assert [each.number for each in shown.recent] == list(range(counted - 7, counted + 1))
    assert shown.phase == "none"
    assert table.faults == []


@pytest.mark.parametrize("native", [False, True])
def test_torchs_hook_of_a_group_takes_back_what_it_has_counted(table, native):
    """torch 2.14 and later call it before a collective of C++, which does not begin if it raises."""
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(2))
    call = SimpleNamespace(name=SimpleNamespace(value=0), input_tensors=[torch.ones(2)], output_tensors=[], root=-1)
    before = signal.signal(signal.SIGUSR1, tell)
    try:
        if native:
            hook = table.writer(send_before=lambda: signal.raise_signal(signal.SIGUSR1)).hook(group, {0: 1})
        else:
            hooks = GroupHooks(table.groups, table.faults.append, tell)
            hooks._operations = {0: 1}
            hook = hooks._hook(group)
        with pytest.raises(Told):
            hook(call)
    finally:
        signal.signal(signal.SIGUSR1, before)
    counted, shown = state(table)
    assert shown.begun == counted == 1
    assert shown.phase == GroupPhase.NONE.name.lower()
    assert table.faults == []


class OfTheScript(torch.Tensor):
    """What a tensor of a class of the script's holds is read by Python, where a handler may run."""


def interrupted(function, times):
    """(it, with a signal in its first `times` calls; what it was called with)"""
    calls = []

    def call(*given):
        calls.append(given)
        if len(calls) <= times:
            signal.raise_signal(signal.SIGUSR1)
        return function(*given)

    return call, calls


@contextmanager
def in_c(table):
    """The methods of process groups are those in C, and the handler of a signal raises."""
    patches = CollectivePatches(table.groups, lambda part, error: table.faults.append(error))
    patches.attach()
    before = signal.signal(signal.SIGUSR1, tell)
    try:
        if table.groups.native is None:
            pytest.skip("not built")
        yield patches
    finally:
        signal.signal(signal.SIGUSR1, before)
        patches.detach()
    assert table.faults == []


@pytest.mark.parametrize(("times", "noted"), [(1, 1), (16, 1), (17, 0)])
def test_a_note_in_c_that_a_handler_interrupts_is_begun_again(bare_table, monkeypatch, times, noted):
    """The operation is issued once and counted once, and what the handler has raised comes after it."""
    described, calls = interrupted(group_operations.described, times)
    monkeypatch.setattr("gpuwatch.worker.hooks.process_groups.described", described)
    with in_c(bare_table):
        with pytest.raises(Told):
            dist.all_reduce(torch.ones(2).as_subclass(OfTheScript))
        assert len(calls) == min(times + 1, 17)
        assert dist.group.WORLD._get_sequence_number_for_group() == 1
        assert [(shown.begun, shown.phase) for shown in bare_table.reader.groups()] == [(noted, "none")]
        dist.all_reduce(torch.ones(2))  # what was not noted is counted with the next one
        counted, shown = state(bare_table)
        assert (shown.begun, counted, shown.phase, shown.recent[-1].number) == (2, 2, "none", 2)


@pytest.mark.parametrize(("times", "tries", "counted"), [(1, 2, 2), (16, 17, 2), (17, 17, 1)])
def test_a_message_in_c_that_a_handler_interrupts_is_counted_once(bare_table, monkeypatch, times, tries, counted):
    """The rest of its note is begun again: with which rank it is, and how many there were."""
    messages, sent = bare_table.groups.messages, []
    begun, calls = interrupted(messages.begun, times)
    monkeypatch.setattr(messages, "begun", begun)
    with in_c(bare_table) as patches:
        (of_send,) = (method for method in METHODS if method.name == "send")
        send = patches._instead_of(lambda *given: sent.append(given), of_send)
        with pytest.raises(Told):
            send(dist.group.WORLD, [torch.ones(2)], 0, 5)
        send(dist.group.WORLD, [torch.ones(3)], 0, 5)
        assert (len(calls), len(sent)) == (tries + 1, 2)
        assert [*bare_table.groups.messages_by_peer()[0].values()] == [{0: counted}]
        assert [(shown.begun, shown.phase) for shown in bare_table.reader.groups()] == [(0, "none")]
