"""For which modules a graph has run, and whose gradients its backward has written. Several modules may share it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from ...core.signal_errors import from_outside
from ..record.roots import ModuleInfo, RootInfo
from ..record.tensor_stats import TensorReading
from .dynamo import SEEN, forget, is_for_inductor, is_split_by_ddp, on_device, renewed, uses_cuda_graphs
from .region_parts import RegionFrame, RegionGradient, RegionScope

_MOST_UNTAKEN = 64
_OWN = -1
"""Stands for the module that a graph was traced for, where an id of another one may stand."""


class RegionCall:
    """The graph's run for one module: this module's own calls, in places that all modules of its class share."""

    def __init__(self, under: ModuleInfo | None, frames: list[RegionFrame], gradients: list[RegionGradient]) -> None:
        self.under = under
        """None: the module that it was traced for."""
        self.frames = frames
        self.gradients = gradients
        self.modules = {frame.info.id for frame in frames}
        self.last_of = {each.frame.info.id: at for at, each in reversed([*enumerate(gradients)])}
        """Id of a module -> position of the last gradient of its outputs, in the order of the backward."""
        self.next = -1
        """Position of the gradient that the backward writes next; -1 if it has written all."""
        self.is_backward = False
        """The backward of a device has been seen to run, since the last forward."""
        self.page = -1
        """Number of the page of its last forward."""
        self.given: list[torch.Tensor] | None = None
        """The tensors to which its backward writes gradients on a device; None: the places' own tensors."""

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of its modules gets a gradient where its backward runs."""
        modules = [module for frame in self.frames if (module := frame.info.ref()) is not None]
        parameters = [each for module in modules for each in module._parameters.values() if each is not None]
        return any(parameter.requires_grad for parameter in parameters)

    def uses(self, owner: ModuleInfo) -> bool:
        """Whether this module, or one that is tied to it, is called in the graph."""
        module = owner.ref()
        if owner.id in self.modules or module is None:
            return owner.id in self.modules
        tied = {id(each) for each in module._parameters.values() if each is not None}
        modules = [part for frame in self.frames if (part := frame.info.ref()) is not None]
        return any(id(each) in tied for part in modules for each in part._parameters.values())

    def source(self, position: int) -> TensorReading | torch.Tensor | None:
        """The numbers of the gradient at this position, or where they are."""
        place = self.gradients[position].place
        buffer = on_device(place)
        if buffer is None:
            return SEEN[place]
        return self.given[position] if self.given is not None else buffer


class RegionCalls:
    """The runs of one graph: whose they are, and which of their gradients have been taken."""

    def __init__(
        self,
        root: ModuleInfo,
        owner: torch.nn.Module | None,
        opened: RegionScope,
        frames: list[RegionFrame],
        gradients: list[RegionGradient],
    ) -> None:
        """`owner` is the module whose method was compiled. `frames` and `gradients` are those of the graph's trace."""
        self._root = root
        self._frames = frames
        self._gradients = gradients
        self._owner: Callable[[], torch.nn.Module | None] = weakref.ref(owner) if owner is not None else lambda: None
        """The module whose method was compiled."""
        self._owner_type = type(owner) if opened is RegionScope.BY_OWNER else None
        """None: hooks do not see the owner's call."""
        self._path_of = {id(part): path for path, part in owner.named_modules()} if owner is not None else {}
        """Id of a part of the owner -> its path there."""
        self._paths: dict[int, str | None] = {}
        """Id of the info of a module in the graph -> its path in the owner; None if it is no part of it."""
        self._runs: dict[int, RegionCall] = {}
        """Id of the info of a module that shares the graph -> its run."""
        self._live: dict[int, RegionCall] = {}
        """The runs since the batch began, the last one at the end."""
        self._untaken: list[tuple[RegionCall, int]] = []
        """Runs, with their pages, whose gradients were not yet taken when the same module ran again."""
        self._is_split = is_split_by_ddp()
        may_share = owner is not None and not root.root.has_one(owner)
        self._is_renewed = not is_for_inductor() or (self._is_split and may_share and not uses_cuda_graphs())
        """Each run writes gradients to tensors of its own. Otherwise autograd would refuse a backward after a later
        run's backward has changed a tensor that both runs saved. Under inductor such a change is no new version. If DDP
        splits a graph that several modules run, the tensors identify the module of the gradients. A CUDA graph always
        writes to the same tensors."""
        self._given: list[torch.Tensor] | None = None
        """The gradient tensors of the last run."""

    @property
    def owner_info(self) -> ModuleInfo | None:
        """The info of the module whose method was compiled; None if the module is gone or unknown."""
        owner = self._owner()
        return self._root.root.modules.get(id(owner)) if owner is not None else None

    @property
    def is_shared(self) -> bool:
        """Whether other modules of the owner's class may run it."""
        owner = self._owner()
        return self._owner_type is not None and not (owner is not None and self._root.root.has_one(owner))

    def is_of(self, owner: torch.nn.Module | None) -> bool:
        """Whether it is a graph of a method of this module."""
        return owner is not None and self._owner() is owner

    def entered(self, info: ModuleInfo, module: torch.nn.Module) -> None:
        """A module is entered in the trace."""
        self._paths[info.id] = self._path_of.get(id(module))

    def forget(self) -> None:
        """The trace was discarded."""
        self._runs.clear()
        self._live.clear()

    def batch_skipped(self) -> None:
        """Drop the runs of a batch that is not recorded."""
        self._live.clear()

    def ran(self) -> None:
        """Give this run gradient tensors of its own, after its forward."""
        if self._is_renewed:
            self._given = [renewed(gradient.place) for gradient in self._gradients]

    def run_of(
        self, under: ModuleInfo | None, info_of: Callable[[torch.nn.Module, ModuleInfo], ModuleInfo]
    ) -> RegionCall | None:
        """The run that has just ended in the call `under`; None if its module is unknown.

        `info_of` returns the info of a module in that call.
        """
        owner = self._owner()
        module = under.ref() if under is not None else None
        if under is not None and module is not owner and type(module) is self._owner_type:
            run = self._runs.get(under.id)
            if run is None or run.under is not under:  # another module may get the same name
                run = self._translated(under, info_of)
                if run is not None:
                    self._runs[under.id] = run
        elif module is not owner and self.is_shared:
            run = None
        else:
            run = self._runs.setdefault(_OWN, RegionCall(None, self._frames, self._gradients))
        return run

    def begin(self, run: RegionCall, page: int, again: bool) -> None:
        """The graph has run its forward in this page. `again`: within the backward, by an activation checkpoint."""
        key = run.under.id if run.under is not None else _OWN
        earlier = self._live.pop(key, None)
        if earlier is not None and not again:
            self._leave_untaken(earlier)
        self._live[key] = run
        run.next = len(run.gradients) - 1
        run.is_backward = False
        run.page = page
        run.given = self._given

    def _translated(
        self, under: ModuleInfo, info_of: Callable[[torch.nn.Module, ModuleInfo], ModuleInfo]
    ) -> RegionCall | None:
        """The calls of the graph as those of another module of the owner's class."""
        module = under.ref()
        infos: dict[int, ModuleInfo] = {}
        for frame in self._frames:
            path = self._paths.get(frame.info.id)
            try:
                part = module.get_submodule(path) if module is not None and path is not None else None
            except AttributeError as error:
                if from_outside(error):
                    raise
                part = None
            if part is None:
                return None
            infos[frame.info.id] = info_of(part, under)
        frames = {
            id(frame): RegionFrame(
                infos[frame.info.id],
                infos[frame.parent.id] if frame.parent is not None else None,
                frame.depth,
                frame.rows,
            )
            for frame in self._frames
        }
        gradients = [replace(each, frame=frames[id(each.frame)]) for each in self._gradients]
        return RegionCall(under, [*frames.values()], gradients)

    def _leave_untaken(self, run: RegionCall) -> None:
        if run.next >= 0:
            self._untaken = [*self._untaken[1 - _MOST_UNTAKEN :], (run, run.page)]

    def batch_ends(self, root: RootInfo, has_run_backward: Callable[[int], bool]) -> list[RegionCall]:
        """Forget the runs of this root. Returns those whose gradients were made and are not all recorded.

        `has_run_backward` takes a page's number and returns whether its backward has run.
        """
        live = [run for run in self._live.values() if (run.under or self._root).root is root]
        untaken = [run for run, page in self._untaken if has_run_backward(page)]
        self._untaken = [(run, page) for run, page in self._untaken if not has_run_backward(page)]
        if len(self._live) > 1 and any(SEEN[gradient.place] is not None for gradient in self._gradients):
            untaken += [run for run in live if run.next >= 0]
        for run in live if self._gradients else ():
            is_late = on_device(run.gradients[0].place) is not None
            if run.next >= 0 and is_late and has_run_backward(run.page) and not run.is_trained:
                untaken.append(run)
        for run in live:
            if has_run_backward(run.page):  # a place that is not written by now gets no gradient
                run.next = -1
        if len(live) == len(self._live) > 1:
            for run in live:
                self._leave_untaken(run)
            self._live.clear()
            forget([gradient.place for gradient in self._gradients])
        return untaken

    def new_gradients(
        self, owner: ModuleInfo | None, has_run_backward: Callable[[int], bool]
    ) -> tuple[RegionCall | None, list[int]]:
        """The run whose gradients were written since the last call, and their positions, in the order of the backward.

        A parameter of `owner` has just got its gradient. A backward writes gradients from the last to the first, so
        only the next few are checked. If `owner` is None, the backward has ended and all are checked. Gradients on a
        device are not checked, since that would wait for it: the backward has written all of them, or, where DDP splits
        it into several graphs, those down to the outputs of `owner`.

        Where several modules have run the graph, each backward overwrites the gradients of the one before: only a
        parameter identifies the run. Once the parameter has its gradient, its graph's backward is over.

        `has_run_backward` takes a page's number and returns whether its backward has run.
        """
        shared = len(self._live) > 1
        run = self._run_with(owner) if shared else next(iter(self._live.values()), None)
        found: list[int] = []
        if run is None or run.next < 0:
            return None, found
        if any(other is run and has_run_backward(page) for other, page in self._untaken):
            return None, found  # two runs of one module: whose these are is unknown
        if shared and on_device(run.gradients[0].place) is not None:
            if not self._is_split:
                found = [*range(run.next, -1, -1)]
                run.next = -1
                return run, found
            if run.given is None:
                self._leave_untaken(run)
                run.next = -1
                return None, found
        elif shared and self._is_split and not self._are_later_ones_over(run):
            return None, found
        if owner is None:
            reached = 0 if run.is_backward else None
        elif not self._is_split and run.uses(owner):
            reached = 0  # one backward writes all, and then its parameters get theirs
        else:
            reached = run.last_of.get(owner.id)
        position = run.next
        missed = 0
        while position >= 0 and (owner is None or missed < 8):
            place = run.gradients[position].place
            if on_device(place) is not None:
                is_written = reached is not None and position >= reached
                run.is_backward |= is_written
            else:
                is_written = SEEN[place] is not None
            if is_written:
                found.append(position)
                missed = 0
                run.next = position - 1
            else:
                missed += 1
            position -= 1
        return run, found

    def _run_with(self, owner: ModuleInfo | None) -> RegionCall | None:
        return next((run for run in self._live.values() if owner is not None and owner.id in run.modules), None)

    def _are_later_ones_over(self, run: RegionCall) -> bool:
        """Whether all gradients of the later runs have been taken, so that those in memory belong to this run."""
        later = reversed(self._live.values())
        return all(other.next < 0 for other in itertools.takewhile(lambda other: other is not run, later))
