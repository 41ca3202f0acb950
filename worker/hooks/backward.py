"""The backward: gradients of module outputs, and of parameters before they are reduced over ranks.

A full backward hook on a module changes the order in which gradients are accumulated and forbids in-place operations.
A hook on a tensor (`Tensor.register_hook`) or on a parameter (`register_post_accumulate_grad_hook`) changes neither.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parameter import is_lazy

from ...core.recorder.writer import OpenPage
from ...core.torch_names import NOT_SEEN_OF_BACKWARD, name_in_torch
from ..compile import attach as traced
from ..device.device import StreamKey, without_modes
from ..patches import after_import
from ..record.autograd_graph import GraphCalls, GraphHold, LeftGradients, ReturnedOutputs, next_node
from ..record.frame_writer import FrameWriter
from ..record.given_gradients import GivenGradients
from ..record.loss_rows import LossRows
from ..record.names import OUTPUTS, outputs_of, parameters_of
from ..record.plain_tensor import version_of
from ..record.roots import ModuleInfo, RootInfo
from ..record.skipped_rows import SkippedRows
from .accumulated_gradients import is_offloaded, put_first
from .gradient_frames import GradientFrames
from .native_writer import native_writer_of, trace_hooks_as

_is_compiling = torch.compiler.is_compiling
_running_node = name_in_torch("torch._C._current_autograd_node", lambda: None)
_MOST_PAGES = 64
_MOST_RETURNED = 8
"""Calls of roots before a backward whose outputs a loss may have been computed from, and outputs of each."""
_FEW = 256
"""Entries of freed parameters are purged only when there are more entries than this."""


_OF_OUTPUT = {role: f"grad {role}" for role in ("output", *OUTPUTS)}


def _as_hook(record: Callable[[torch.Tensor], None], is_first: bool = True) -> Any:
    """A function for autograd. An old dynamo (torch 2.5) would compile anew for each object that is called.

    `is_first`: the tensor has no other hook of ours that says that the backward is compiled.
    """

    def hook(tensor: torch.Tensor) -> None:
        if not _is_compiling():
            record(tensor)
        elif is_first:
            traced.in_a_backward(None, tensor)

    hook.record = record  # type: ignore[attr-defined]
    # torch.save of such a tensor does not warn about a hook that the user never saw
    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]
    return hook


@dataclass(slots=True, eq=False)
class _OutputRecord:
    """Records the gradient of one tensor. Keeps neither the tensor nor its module alive."""

    gradients: BackwardHooks
    info: ModuleInfo
    role: str
    page: OpenPage

    def __call__(self, gradient: torch.Tensor) -> None:
        self.gradients.of_output(self.info, self.role, self.page, gradient)


@dataclass(slots=True, eq=False)
class _GraphRecord:
    """Called when a backward reaches the output of a root: from then on the backward's graph is known."""

    gradients: weakref.ref[BackwardHooks]
    """Weak: it may hold the graph that holds this hook."""
    calls: GraphCalls
    page: OpenPage
    place: int
    """Of the output among the tensors that the root has returned."""

    def __call__(self, gradient: torch.Tensor) -> None:
        gradients = self.gradients()
        if gradients is not None:
            gradients.graph_begins(self.calls, self.page, self.place, gradient)


class BackwardHooks(GradientFrames):
    """All gradient hooks of a rank."""

    def __init__(self, frames: FrameWriter, kept: SkippedRows) -> None:
        super().__init__(frames, kept)
        progress = frames.progress
        self.losses = LossRows(frames)
        self._many = _FEW
        self._give_up: Callable[[], None] = lambda: None
        """Waits no longer for torch._dynamo."""
        self.parameters: dict[int, tuple[weakref.ref[torch.Tensor], list[Any]]] = {}
        """id of a parameter -> (weak reference, torch's handles of our hooks on it)."""
        self._skips = progress.settings.every != 1
        self._firsts: dict[int, weakref.ref[torch.Tensor]] = {}
        """id of a root -> its first trained parameter."""
        self.left = LeftGradients()
        self.waits = False
        """Gradients of parameters are read together, when the running backward ends. Nothing else changes them until
        then: with process groups, DDP and FSDP would."""
        self.graphs = GraphHold()
        self._skipped: GraphCalls | None = None
        """The root's call of the last skipped batch, until its backward is over."""
        self.given = GivenGradients()
        self.began_from: tuple[weakref.ref[torch.Tensor], ...] = ()
        """The losses of the last backward that the script has called."""
        self.returned: deque[ReturnedOutputs] = deque(maxlen=_MOST_RETURNED)
        """Of the latest calls of roots, where numbers arrive later from a device."""
        self.kept_loss: Any = None
        """A KeptLoss, until the backward that has begun from it reaches the output of a root."""
        self.after_backward: Callable[[bool], None] = lambda has_arrived: None
        """Called as a backward ends, with whether no number is outstanding."""
        self._stream: StreamKey | None = None
        """On which the last backward has ended."""
        self._backwards: deque[int] = deque(maxlen=_MOST_PAGES)
        """Numbers of the pages whose backward has begun."""
        self.writer: Any = native_writer_of(progress, frames.rows, self)
        """The native frame writer, if there is one. Its hooks call this class for gradients that they cannot record."""
        if self.writer is not None:
            kept.read_plain = self.writer.numbers

    def attach(self) -> None:
        """Register hooks from now on. Hooks that are still registered from before record again."""
        self._attached = True
        self._give_up = after_import("torch._dynamo", self._show_to_dynamo)

    def _show_to_dynamo(self) -> None:
        with self._progress.faults.within("compiled backward"):  # the script's import goes on
            from ..compile.untraced import as_constant, leave_alone

            leave_alone((_as_hook(print),))  # all of its functions have one code
            told = weakref.WeakMethod(self._is_compiled_as_a_whole)  # what dynamo traces outlives the hooks
            traced.backward = as_constant(lambda: (tell_it := told()) and tell_it())
            if trace_hooks_as is not None:
                trace_hooks_as(traced.in_a_backward)

    def _is_compiled_as_a_whole(self) -> None:
        if self._attached:
            self._progress.unseen_in_compiled(self._progress.where(), NOT_SEEN_OF_BACKWARD)

    def detach(self) -> None:
        """Remove the hooks of parameters. Those of outputs do nothing from now on and are freed with their graph."""
        self._attached = False
        self._give_up()
        self._read_waiting()
        self.graphs = GraphHold()
        for _, handles in self.parameters.values():
            for handle in handles:
                handle.remove()
        self.parameters.clear()
        self.local.clear()
        self._accumulated.forget()

    # -- registering hooks --------------------------------------------------------------------------------------

    def watch_output(self, info: ModuleInfo, role: str, tensor: torch.Tensor, page: OpenPage) -> None:
        """Record this tensor's gradient when it is computed. A leaf gets no hook: it would collect one per call."""
        # a leaf outlives the batch, and with it each hook would
        if tensor.is_leaf or tensor.is_inference():
            return
        role = _OF_OUTPUT.get(role) or f"grad {role}"
        # torch starts an empty dictionary when the tensor is changed in place, and leaves the earlier hooks with the
        # earlier node (torch 2.13). So a hook that is found here is about the very value that this call returns.
        hooks: Any = tensor._backward_hooks
        if hooks is not None:
            for hook in hooks.values():
                known = getattr(hook, "record", hook)
                if getattr(known, "gradients", None) is self:  # the script keeps this tensor over several batches
                    known.info, known.role, known.page = info, role, page
                    return
        native = self.writer.hook(info, role, page) if self.writer is not None else None
        new = native or _as_hook(_OutputRecord(self, info, role, page))
        # on the tensor: called once in a backward, with the sum over all that used it
        tensor.register_hook(new)  # type: ignore[no-untyped-call]  # torch has no annotation

    def watch_parameter(self, parameter: torch.Tensor, info: ModuleInfo, name: str) -> None:
        """Record this parameter's local gradient whenever it has been accumulated. A second call changes nothing."""
        # an id may be a new parameter's once the old one is freed: the weak reference says which
        known = self.parameters.get(id(parameter))
        if (known is not None and known[0]() is parameter) or not info.watched or not self._attached:
            return
        if is_lazy(parameter) or is_offloaded(parameter):
            return  # a lazy one gets its shape in its module's first forward
        if parameter.requires_grad and parameter.is_leaf and parameter.device.type != "meta":
            role = f"grad {name}"
            # after accumulation and before DDP's Reducer, whose hooks are on the node: the gradient is still this
            # rank's own
            others = bool(parameter._post_accumulate_grad_hooks)
            # the native hook reads `.grad` alone, and once: not where another hook comes before it
            is_plain = not others and not hasattr(parameter, "main_grad")
            is_first = self._skips and self._is_first(parameter, info.root)
            native = self.writer.hook(info, role) if self.writer is not None and is_plain and not is_first else None
            record = self.of_first_parameter if is_first else self.of_parameter
            hook = native or _as_hook(partial(record, info, role))
            handles = [parameter.register_post_accumulate_grad_hook(hook)]  # type: ignore[no-untyped-call]  # likewise
            if others:
                first = _as_hook(partial(self.note_parameter, info, role), is_first=False)
                handles.append(parameter.register_post_accumulate_grad_hook(first))  # type: ignore[no-untyped-call]  # likewise
                put_first(handles[-1])
            self.parameters[id(parameter)] = (weakref.ref(parameter), handles)
            if parameter.grad is not None and not self._rows.is_capturing:
                self.left.add(parameter)

    def _is_first(self, parameter: torch.Tensor, root: RootInfo) -> bool:
        first = self._firsts.get(root.id)
        if first is None:
            module = root.ref()
            parameters = parameters_of(module) if module is not None else iter(())
            found = next((each for each in parameters if each.requires_grad), parameter)
            first = self._firsts[root.id] = weakref.ref(found)
        return first() is parameter

    def watch_graph(self, calls: GraphCalls, output: Any, page: OpenPage) -> None:
        """Remember the graph of the backward that reaches this output of a root, and read the loss of that backward."""
        tensors = [leaf for _, leaf in outputs_of(output) if isinstance(leaf, torch.Tensor)]
        if self.given.is_on and self._rows.device_buffer is not None and calls.calls:
            _, first, end = calls.calls[-1]
            noted = [(weakref.ref(each), version_of(each)) for each in tensors[:_MOST_RETURNED]]
            self.returned.append(ReturnedOutputs(first, end, noted))
        for place, leaf in enumerate(tensors):
            if not leaf.requires_grad or leaf.is_leaf or leaf.is_inference():
                continue
            for hook in (leaf._backward_hooks or {}).values():
                known = getattr(hook, "record", None)
                if isinstance(known, _GraphRecord) and known.gradients() is self:
                    known.calls, known.page, known.place = calls, page, place
                    break
            else:
                handle = leaf.register_hook(_as_hook(_GraphRecord(weakref.ref(self), calls, page, place)))  # type: ignore[no-untyped-call]  # likewise
                # first: a module that returned this tensor has a hook on it, and an alarm there asks for the graph
                if len(leaf._backward_hooks or ()) > 1:
                    put_first(handle)

    def watch_skipped(self, info: ModuleInfo, output: Any) -> None:
        """The root of a skipped batch has returned this: keep the gradient that it is given, for a second run."""
        page = info.root.page
        if not self.given.is_on or page is None or not torch.is_grad_enabled() or self._rows.device_buffer is not None:
            return
        self._skipped = calls = GraphCalls(page.number, skipped=True)
        calls.calls.append((info, info.first_node, next_node()))
        self.watch_graph(calls, output, page)

    def skipped_batch_ends(self) -> None:
        """The next batch of a root begins: let go of what was kept of a skipped one before it."""
        self.given.forget()
        self._skipped = None

    def find_graph_of(self, page: OpenPage) -> None:  # noqa: D102
        calls, self._skipped = self._skipped, None
        if calls is not None and calls.page == page.number:
            self.graphs.begins(calls)

    @property
    def hooks(self) -> tuple[Callable[..., None], ...]:
        """The functions that autograd calls."""
        return self.graph_begins, self.backward_ends, self.of_output, self.note_parameter, self.of_parameter

    # -- called by the hooks ------------------------------------------------------------------------------------

    # Autograd calls these in the thread that runs the node. For nodes on the host that is the thread which called
    # `backward` (torch/csrc/autograd/graph_task.h, cpu_ready_queue_); for nodes on a device it is a thread of
    # autograd's for that device (engine.h, start_device_threads), while the caller waits. So hooks of two devices may
    # run at once, and each takes the lock before it writes a frame. What a hook raises ends the backward: `backward`
    # raises it in the script.

    def graph_begins(self, calls: GraphCalls, page: OpenPage, place: int, gradient: torch.Tensor | None) -> None:
        """A backward has reached an output of a root, with this gradient."""
        if not self._attached:
            return
        if calls.skipped:
            with self._progress.faults.within("gradient hook"):
                self._keep_given(calls.page, place, gradient)
            return
        with self._progress.faults.within("gradient hook"):
            self.begins(calls.page)
            graph = self.graphs.begins(calls)
            if self.given.is_on:
                if graph is not None:
                    self.given.begins(calls.page)
                self._keep_given(calls.page, place, gradient)
            if graph is not None:
                # Callbacks run in the order in which they were queued, when all nodes have run. DDP queues its own when
                # its last bucket is ready, and so after this one (torch/csrc/distributed/c10d/reducer.cpp,
                # mark_variable_ready).
                Variable._execution_engine.queue_callback(self.backward_ends)
                self.waits = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            elif self.waits and any(graph.within is not None for graph in self.graphs.running):
                self._read_waiting()  # a backward within this one may add to the same gradients
            if graph is not None and self.graphs.is_new(graph):
                kept, self.kept_loss = self.kept_loss, None
                if kept is not None and kept.grad_fn.itself in graph.roots:  # else it is that of another thread
                    self.graphs.keep(kept)
                with self._progress.lock:
                    without_modes(self.losses.record, graph, page, self.mark(page))
        if self._sync:
            self._judging.finish_and_raise("gradient hook")

    def _keep_given(self, page: int, place: int, gradient: torch.Tensor | None) -> None:
        node = _running_node()
        if gradient is not None and node is not None:
            self.given.add(page, place, node, gradient)

    def begins(self, page: int) -> None:
        """A backward has reached the outputs of the root of the page with this number."""
        with self._progress.lock:  # it may raise an alarm, and the hook of another device's gradient as well
            self._backwards.append(page)
            self._judging.held.backward_begins(page)
            self.left.backward_begins(page)

    def backward_ends(self) -> None:
        """Hold the graph until its numbers have arrived. The next batch lets go of it if it keeps memory.

        torch calls this when the backward of all modules is over. A callback that is queued here runs after those that
        torch has queued itself: DDP waits for the gradients of all ranks.
        """
        with self._progress.faults.within("end of the backward"):
            self._read_waiting()
            self._progress.times.backward_ends()
            # queued from a callback: it runs after those that are queued now
            Variable._execution_engine.queue_callback(self._progress.times.reduction_ends)
            # the next batch may run on another one: its graph must not be held across that
            self._stream = self._rows.stream
            has_arrived = self._judging.collect()
            self.after_backward(has_arrived)
            self.graphs.ends(has_arrived)
            self.release()

    def _read_waiting(self) -> None:
        if self.waits:
            self.waits = False
            with self._progress.lock:
                self._rows.read_waiting()

    def has_run(self, page: int) -> bool:
        """Whether a backward has reached the outputs of the root of this page, which is one of the latest."""
        return page in self._backwards

    def release(self) -> None:
        """Let go of the graphs whose numbers have arrived."""
        self.graphs.release(self._judging.waits_for)

    def batch_begins(self) -> None:
        """A root's forward begins: the previous backward has ended."""
        self._page = None
        self._accumulated.forget()
        self.skipped_batch_ends()
        self._read_waiting()  # the backward before has failed
        self.release()
        self.graphs.batch_begins(self._rows.is_capturing or self._rows.stream != self._stream)
        if len(self.local) > 4 * max(64, len(self.parameters)):  # zero_grad(set_to_none=True) makes new ones each step
            for gone in [key for key, known in self.local.items() if known[0]() is None]:
                del self.local[gone]
        if len(self.parameters) > self._many:
            for gone in [key for key, known in self.parameters.items() if known[0]() is None]:
                del self.parameters[gone]
            self._many = 2 * max(_FEW, len(self.parameters))
