"""The meaning of failure lines beside NCCL's own: torch, torchrun, gloo's groups, SLURM, the kernel, scripts.

Two tables for core/known_errors.py, in its form: a pattern -> the cause, and what to try next. The lines are from torch
(csrc/distributed/c10d: ProcessGroupNCCL, ProcessGroupWrapper, socket, TCPStore; nn/parallel; utils/data; its CUDA
kernels), gloo (transport/tcp), slurmd and srun, and Linux (mm/oom_kill.c).
"""

from __future__ import annotations

OF_THE_WRITER: dict[str, tuple[str, str]] = {
    # -- the device ---------------------------------------------------------------------------------------------------
    (
        r"Assertion `(?P<check>(?:srcIndex|t >= 0|cur_target|-sizes|index >= |idx >= |target_val|label)[^`'\n]*)['`] "
        r"failed|device-side assert triggered"
    ): (
        "a kernel checked an index and found it outside of its tensor, most often a label or a token",
        "Run again with CUDA_LAUNCH_BLOCKING=1 for its line, or on the CPU; compare labels and tokens with the sizes "
        "of the model.",
    ),
    (
        r"CUDA out of memory\. Tried to allocate|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
        r"|HIP out of memory"
    ): (
        "the GPU's memory is full",
        "The GPU's memory is full: a smaller batch, gradient accumulation or activation checkpointing; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved and free.",
    ),
    r"CU(?:BLAS|DNN)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)": (
        "cuBLAS or cuDNN could not be set up, most often as the GPU's memory is full",
        "Look at the GPU's memory at that time (nvidia-smi); leave more of it free.",
    ),
    r"no kernel image is available for execution on the device": (
        "this torch, or an extension, was not built for this kind of GPU",
        "Install a build for this GPU: torch.cuda.get_arch_list() shows what this one has.",
    ),
    r"Found no NVIDIA driver on your system|No CUDA GPUs are available": (
        "this process sees no GPU",
        "Look at CUDA_VISIBLE_DEVICES, at --gres of the job, and run nvidia-smi in the same container.",
    ),
    r"fallen off the bus": (
        "a GPU has fallen off the bus",
        "Leave this node out, and have it restarted: the GPU does not come back by itself.",
    ),
    r"libnccl\.so[.\d]*: cannot open shared object file|undefined symbol: nccl\w+": (
        "torch does not find the NCCL that it was built for",
        "Look at LD_LIBRARY_PATH and LD_PRELOAD for another libnccl; install torch again with its nvidia-nccl wheel.",
    ),
    # -- the host -----------------------------------------------------------------------------------------------------
    (
        r"DataLoader worker \(pid[^)]*\) is killed by signal: (?:Bus error|Killed)"
        r"|unexpected bus error encountered in worker"
    ): (
        "a worker of the DataLoader ran out of memory",
        "A worker of the DataLoader ran out of memory: enlarge /dev/shm (docker run --shm-size), or use fewer workers "
        "(num_workers).",
    ),
    r"received 0 items of ancdata": (
        "the limit of open files is too low for the tensors that workers hand over",
        "Raise the limit of open files (ulimit -n), or torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    (
        r"Detected \d+ oom[_-]kill event|: tasks? [\d,-]+: Out Of Memory"
        r"|[Oo]ut of memory: Killed process|oom-kill:constraint"
    ): (
        "the kernel killed a process of the job for lack of host memory",
        "Give the job more memory (--mem), or let it use less: batch size, data loader workers, what each rank loads.",
    ),
    r"std::bad_alloc|DefaultCPUAllocator: (?:can't allocate|not enough) memory": (
        "the host had no memory left",
        "Give the job more memory, or let it use less: batch size, data loader workers, what each rank loads.",
    ),
    r"No space left on device": (
        "a disk, or /dev/shm, of this host is full",
        "df -h shows which; checkpoints, caches and /tmp fill up first.",
    ),
    r"Stale file handle|\[Errno 5\] Input/output error": (
        "a file system of this host answers with errors",
        "Look at the mount (dmesg, df) on this node, and at what other jobs say of it.",
    ),
    # -- the job ------------------------------------------------------------------------------------------------------
    r"EADDRINUSE|address already in use": (
        "a port is in use",
        "Another job has that port, or the script sets MASTER_PORT itself: leave MASTER_ADDR and MASTER_PORT as the "
        "launcher has set them (torchrun: --master-port), and init_process_group() without an init_method of its own.",
    ),
    (
        r"addresses of \((?P<host>[^,\n]+), \d+\) cannot be retrieved"
        r"|(?:Name or service not known|Temporary failure in name resolution)"
    ): (
        "a host's name is not known on this host",
        "Look at MASTER_ADDR or --rdzv-endpoint, and whether that name resolves here (getent hosts NAME).",
    ),
    (
        r"Expected to have finished reduction in the prior iteration"
        r"(?:[\s\S]*?did not receive grad for rank \d+: (?P<unused>[^\n]+))?"
    ): (
        "parameters of the model took no part in the loss{unused}",
        "Use these parameters, leave them out, or pass find_unused_parameters=True to DistributedDataParallel.",
    ),
    (
        r"DDP expects same model across all ranks, but Rank (?P<a>\d+) has (?P<one>\d+) params, "
        r"while rank (?P<b>\d+) has inconsistent (?P<two>[1-9]\d*) params"
    ): (
        "ranks {a} and {b} have different models ({one} and {two} parameters)",
        "Build the model from the same configuration and seed on all ranks.",
    ),
    r"Trying to backward through the graph a second time": (
        "a tensor of an earlier batch is still part of this loss",
        "A tensor of an earlier batch is still part of this loss: detach() what is kept between batches.",
    ),
    r"one of the variables needed for gradient computation has been modified by an inplace operation": (
        "an operation in place has changed what the backward needs",
        "torch.autograd.set_detect_anomaly(True) shows its line; under DDP try broadcast_buffers=False.",
    ),
    r"Default process group has not been initialized": (
        "a collective was called before init_process_group()",
        "Call torch.distributed.init_process_group() before it; under torchrun it needs no arguments.",
    ),
}
"""The fault is on the rank or host that wrote the line."""

OF_OTHERS: dict[str, tuple[str, str]] = {
    r"CANCELLED AT \S+ DUE TO TIME LIMIT": (
        "the job reached its time limit",
        "Give it more (--time), or have it save and requeue before: --signal=USR1@300 and --requeue.",
    ),
    r"CANCELLED AT \S+ DUE TO PREEMPTION": (
        "the job was preempted by another one",
        "Have it save at SIGTERM, and submit it with --requeue.",
    ),
    r"CANCELLED AT \S+ DUE TO NODE FAILURE|srun: error: Node failure on (?P<node>\S+)": (
        "SLURM lost a node of the job",
        "Look at the node (sinfo -R), and leave it out of the next run: --exclude.",
    ),
    r"Ranks? (?P<who>\d[\d, ]*) failed to pass monitoredBarrier in (?P<ms>\d+) ms": (
        "rank {who} did not reach a monitored barrier within {ms} ms",
        "Look for what rank {who} did at that time.",
    ),
    (
        r"Detected mismatch between collectives on ranks\. Rank (?P<a>\d+) is running"
        r"[\s\S]*?but Rank (?P<b>\d+) is running"
    ): (
        "ranks {a} and {b} were not in the same collective",
        "Every rank must issue the same collectives in the same order: look for a call that only some of them make.",
    ),
    r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes": (
        "two ranks gave tensors of different sizes to a collective, or were not in the same one",
        "Every rank must issue the same collectives in the same order: look for a call that only some of them make.",
    ),
    r"WorkNCCL\([^)\n]*OpType=(?P<op>\w+)[^\n]*timed out in blocking wait": (
        "a collective ({op}) did not end: some rank took no part in it",
        "Look for the rank that was somewhere else at that time.",
    ),
    r"has inconsistent 0 params": (
        "the collective in which DDP compares the models of all ranks did not end",
        "Look for the rank that was somewhere else at that time; if none was, test the links: gpuwatch check.",
    ),
    r"watchdog got stuck for (?P<s>\d+) seconds|Heartbeat monitor timed out": (
        "NCCL's watchdog stood still: a call of CUDA or NCCL does not come back, or a thread holds the GIL",
        "Look at that rank's stacks (py-spy dump --native); a collective that never ends is the usual reason.",
    ),
    r"dump signal due to a collective timeout from +rank (?P<first>\d+)": (
        "a collective in which rank {first} waited did not end; its watchdog told the others",
        "Compare the numbers of all ranks' collectives: gpuwatch explain-log with all ranks' logs.",
    ),
    r"failure detected by watchdog at work sequence id: (?P<number>\d+)": (
        "a collective (number {number}) did not end: some rank took no part in it",
        "Look for the rank that was somewhere else at that time.",
    ),
    r"NCCL communicator was aborted on rank": (
        "the rank's groups were aborted after a failure elsewhere",
        "Look for the first rank that failed.",
    ),
    r"client socket has timed out after (?P<ms>\d+) ?ms while trying to connect to \((?P<peer>[^)\n]+)\)": (
        "nobody answered{to_peer} within {ms} ms: rank 0 is not up yet, has ended, or is not reached from here",
        "Look at rank 0, at MASTER_ADDR, and for a firewall between the two.",
    ),
    r"client socket has failed to connect to any network address of \((?P<peer>[^)\n]+)\)": (
        "nobody accepted a connection{to_peer}: rank 0 is not up yet, has ended, or is not reached from here",
        "Look at rank 0, at MASTER_ADDR, and for a firewall between the two.",
    ),
    r"(?P<joined>\d+)/(?P<all>\d+) clients joined": (
        "only {joined} of {all} ranks or nodes came",
        "Look for the node or rank that was not started, or failed before.",
    ),
    r"connectFullMesh failed with (?P<why>[^\n]+)": (
        "gloo could not connect all ranks with each other ({why})",
        "Set GLOO_SOCKET_IFNAME to the interface between the nodes; look for a firewall, and for a rank that failed.",
    ),
    r"RendezvousTimeoutError|RendezvousConnectionError|connection to the C10d store has failed": (
        "torchrun's nodes did not all meet",
        "Look whether torchrun was started on all nodes with the same --rdzv-endpoint, --rdzv-id and --nnodes.",
    ),
    r"mlx5: \S+: got completion with error|mlx5_\d+.*syndrom": (
        "RDMA: the network card reports a failed transfer",
        "Look at the cable and the port's error counters (ibqueryerrors, ethtool -S) of both hosts.",
    ),
}
"""The fault is that of a peer, of the network or of the job."""
