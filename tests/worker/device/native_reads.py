"""A native writer in front of a DeviceStatsBuffer, with nothing of the hooks around it."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.worker.device.device_buffer import DeviceRow, DeviceStatsBuffer
from gpuwatch.worker.device.grouped_readings import WaitingTensors
from gpuwatch.worker.hooks import native_writer
from gpuwatch.worker.record.names import leaves_of
from gpuwatch.worker.record.progress import RecorderLock
from gpuwatch.worker.record.tensor_stats import TensorStats
from torch.utils.hooks import RemovableHandle

READS = native_writer.NativeFrameWriter is not None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


class AskedInPython(Exception):
    """`device_frame` was called, as these tensors are not for C."""


class NativeReads:
    """Reads the tensors and weights of frames that it makes up."""

    def __init__(self, recorder: RecorderWriter, buffer: DeviceStatsBuffer, issued: int = 0) -> None:
        self.rows = SimpleNamespace(
            device_buffer=buffer, late_pages={}, _recorder=recorder, _seq=0, _send_after_collectives=None
        )
        self._recorder, self._issued = recorder, issued
        self._shapes: dict[Any, int] = {}
        self._seen: dict[Any, Any] = {}
        self._by_memory: dict[Any, Any] = {}
        self.asked = False
        self._writer = native_writer.NativeFrameWriter(
            memory=recorder.memory,
            cursor=recorder.cursor,
            seen=self._seen,
            by_memory=self._by_memory,
            weights={},
            shapes=self._shapes,
            ignored={},
            watched={},
            local={},
            kwargs={},
            gradients=None,
            progress=None,
            issued=lambda: issued,
            numbers=TensorStats,
            device_row=DeviceRow,
            waiting=WaitingTensors,
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            modes=lambda: 0,
            compiler={"_is_compiling_flag": False},
            hook_dict=OrderedDict,
            handle=RemovableHandle,
            leaves_of=leaves_of,
            next_segment=recorder.continue_segment,
            mutex=RecorderLock(recorder.cursor).mutex,
            exchange=torch.Tensor.__dlpack_c_exchange_api__,
            near={},
            forward=True,
            with_weights=True,
            with_grads=False,
            device_frame=self._ask,
            device_rows=self.rows,
            reads_host=False,
        )

    def _ask(self, *frame: Any) -> None:
        self.asked = True
        raise AskedInPython

    def read(self, tensors: list[torch.Tensor], weights: list[torch.nn.Parameter] = []) -> int | None:  # noqa: B006
        """The index of the frame's first value in the page; None if Python is to read it."""
        for tensor in (*tensors, *weights):
            self._shapes.setdefault(tuple(tensor.shape), len(self._shapes))
        module = torch.nn.Module()
        for number, weight in enumerate(weights):
            module.register_parameter(f"w{number}", weight)
        inputs = (f"input[{number}]" for number in range(len(tensors)))
        roles = ["output", *inputs, *(name for name, _ in module.named_parameters())]
        info = SimpleNamespace(id=0, seq=0, slots={role: number for number, role in enumerate(roles)})
        self._seen.clear()  # as in a new batch
        self._by_memory.clear()
        self.asked = False
        before = self._recorder.value_count
        taken = self._writer.frame(info, module, tuple(tensors), {}, None, None, 0, 1, 0, 0, self._issued)
        assert taken or self.asked
        if taken:
            assert self.rows.late_pages == {self._recorder.page.number: self._recorder.page}
        return before if taken else None
