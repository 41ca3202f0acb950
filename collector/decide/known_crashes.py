"""What to do about exceptions that many scripts meet, by their message. Pure."""

from __future__ import annotations

import re

from ...core.known_errors import explain

_NAMED = re.compile(r"Parameters which did not receive grad for rank \d+: ([^\n]+)")
_STEPS = {
    r"Expected to have finished reduction in the prior iteration": "Parameters of the model took no part in the "
    "loss{unused}: use them, leave them out, or pass find_unused_parameters=True to DistributedDataParallel.",
    r"EADDRINUSE|address already in use": "Another job has that port, or the script sets MASTER_PORT itself: leave "
    "MASTER_ADDR and MASTER_PORT as the launcher has set them (torchrun: --master-port), and init_process_group() "
    "without an init_method of its own.",
    r"CUDA out of memory|torch\.OutOfMemoryError|HIP out of memory": "The GPU's memory is full: a smaller batch, "
    "gradient accumulation or activation checkpointing; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is "
    "reserved and free.",
    r"device-side assert triggered": "A kernel has checked an index and found it outside, most often a label or a "
    "token: run again with CUDA_LAUNCH_BLOCKING=1 for its line, or on the CPU.",
    r"DataLoader worker \(pid[^)]*\) is killed by signal: (?:Bus error|Killed)": "A worker of the DataLoader ran out "
    "of memory: enlarge /dev/shm (docker run --shm-size), or use fewer workers (num_workers).",
    r"Too many open files|received 0 items of ancdata": "Raise the limit of open files (ulimit -n), or "
    "torch.multiprocessing.set_sharing_strategy('file_system').",
    r"Trying to backward through the graph a second time": "A tensor of an earlier batch is still part of this loss: "
    "detach() what is kept between batches.",
    r"one of the variables needed for gradient computation has been modified by an inplace operation": "An operation "
    "in place has changed what the backward needs: torch.autograd.set_detect_anomaly(True) shows its line; under DDP "
    "try broadcast_buffers=False.",
    r"Default process group has not been initialized": "Call torch.distributed.init_process_group() before it; under "
    "torchrun it needs no arguments.",
}
"""A pattern of the message -> the step that mends it."""


def known_steps(message: str) -> list[str]:
    """What mends an exception with this message; [] if it is not known."""
    for pattern, step in _STEPS.items():
        if re.search(pattern, message, re.IGNORECASE):
            named = _NAMED.search(message)
            return [step.format(unused=f" ({named[1].strip()})" if named is not None else "")]
    return [found.next for found in explain(message) if found.own][:1]


def known_lines(message: str) -> list[str]:
    """What the message means, as lines of evidence."""
    return [f"that message means: {found.sentence}" for found in explain(message) if found.own][:1]
