"""The private names of torch that gpuwatch uses: which releases have them, and what the report lacks without each.

torch promises nothing about a private name: a new release may move it. So all stand in one table, and a test compares
the table with the installed torch. A run reports once what it loses with a known release (`notes_on`). A name that is
missing in spite of the table is found when the hooks are attached (`missing`), and is a fault. torch is not imported
here.
"""

from __future__ import annotations

import re
import sys
from functools import reduce
from typing import Any, NamedTuple

OLDEST, NEWEST = (2, 5), (2, 15)
"""The releases of torch that gpuwatch was tried with: docs/versions.md."""

Release = tuple[int, int]


class TorchName(NamedTuple):
    """A name that torch may take away."""

    place: str
    """The module, or the kind of object that has the attribute: `<autograd node>`."""
    name: str
    """Within it; dots lead on."""
    lost: str
    """What the report lacks without it, as the end of a sentence."""
    since: Release = OLDEST
    until: Release | None = None
    """The last release that has it; None: all do."""
    instead: bool = False
    """The other releases have another name of the table in its place: nothing is lost with them."""

    @property
    def path(self) -> str:
        """As a reader would write it."""
        return f"{self.place}.{self.name}"

    def is_in(self, release: Release) -> bool:
        """Whether this release has it, by the table."""
        return self.since <= release and (self.until is None or release <= self.until)


# -- what the report lacks without a name -----------------------------------------------------------------------------

LINE = "the operation that made an overflow is not looked for"
LOSS = "the operation that made a bad loss is not looked for"
BUFFERS = "looking at buffers takes longer"
NOTHING_SEEN = "the training is not recorded"
KWARGS = "keyword arguments are not in the frames"
NATIVE = "Python writes the frames, which takes longer"
TRACING = "calls that torch.jit.trace makes are recorded as training"
GRAPH = "the module whose backward made a gradient is named with less certainty"
FUNCTORCH = "tensors inside torch.func cannot be distinguished from others"
MODES = "a script's own torch modes see gpuwatch's operations"
DEVICE = "numbers of a GPU are not read"
REPLAYS = "replays of CUDA graphs are not read"
"""A run says so where it captures a graph, and no other run does."""
COMMS = "collectives are not seen"
HANGS = "a hang is reported without the collectives"
TIMEOUTS = "a rank that waits is not looked at before the timeout of its process group"
SCALER = "steps that a GradScaler skips are not reported"
SHARDS = "weights that FSDP2 shards are looked up only by name"
RPC = "steps of DistributedOptimizer are not seen"
CHILDREN = "a DataLoader's worker may be taken for a rank"
SAMPLES = "the samples of a batch are not named"
RUN = "gpuwatch run does not learn which process is which rank"
LAUNCH = "gpuwatch launch and check cannot start ranks"
KEYS = "an elastic restart can wait for addresses of the attempt before it"
COMPILED = "compiled modules are not inspected"
MADE_BY_DYNAMO = "functions that compiled code calls are traced with it"

_C10D = "torch.distributed.distributed_c10d"
_GROUP = f"{_C10D}.ProcessGroup"
_MODULES = "torch.nn.modules.module"
_OPTIMIZERS = "torch.optim.optimizer"
_RPC = "torch.distributed.optim.optimizer"
_NODE = "<autograd node>"
_LOADERS = "torch.utils.data.dataloader"
_PASS = "<DataLoader's iterator>"

NAMES = (
    # -- every frame --
    TorchName("torch.nn.Module", "_call_impl", NOTHING_SEEN),
    TorchName(_MODULES, "_global_forward_pre_hooks", NOTHING_SEEN),
    TorchName(_MODULES, "_global_forward_hooks", NOTHING_SEEN),
    TorchName(_MODULES, "_global_forward_hooks_always_called", NOTHING_SEEN),
    TorchName(_MODULES, "_global_forward_hooks_with_kwargs", KWARGS, since=(2, 6)),
    TorchName(_OPTIMIZERS, "_global_optimizer_pre_hooks", NOTHING_SEEN),
    TorchName(_OPTIMIZERS, "_global_optimizer_post_hooks", NOTHING_SEEN),
    TorchName("torch.Tensor", "__dlpack_c_exchange_api__", NATIVE, since=(2, 10)),
    TorchName("torch._C", "_len_torch_function_stack", NATIVE),
    TorchName("torch.compiler", "_is_compiling_flag", NATIVE),
    TorchName("torch._C", "_is_tracing", TRACING),
    TorchName("torch._C", "_get_tracing_state", TRACING),
    TorchName("torch._C._functorch", "is_functorch_wrapped_tensor", FUNCTORCH),
    TorchName("torch._C._functorch", "get_unwrapped", FUNCTORCH),
    TorchName("torch._C", "_are_functorch_transforms_active", FUNCTORCH),
    TorchName("torch._C", "_DisableFuncTorch", FUNCTORCH),
    TorchName("torch._C", "_has_storage", FUNCTORCH),
    TorchName("torch", "_is_functional_tensor", FUNCTORCH),
    TorchName("torch", "_from_functional_tensor", FUNCTORCH),
    TorchName("torch._C", "DisableTorchFunction", NOTHING_SEEN),
    TorchName("torch._C", "_set_grad_enabled", NOTHING_SEEN),
    TorchName("torch._C", "_len_torch_dispatch_stack", MODES),
    TorchName("torch.utils._python_dispatch", "TorchDispatchMode", LINE),
    TorchName("torch.utils._python_dispatch", "_get_current_dispatch_mode", LINE),
    TorchName("torch.overrides", "_get_current_function_mode_stack", LINE),
    TorchName("torch.UntypedStorage", "_cdata", LINE),
    TorchName("torch.UntypedStorage", "_weak_ref", LINE),
    TorchName("torch.UntypedStorage", "_free_weak_ref", LINE),
    TorchName("<operation>", "_schema", LINE),
    TorchName("torch.utils._python_dispatch", "_disable_current_modes", NOTHING_SEEN),
    TorchName("torch.utils._pytree", "tree_flatten", NOTHING_SEEN),
    TorchName("torch.Tensor", "_version", NOTHING_SEEN),
    TorchName("torch.Tensor", "_backward_hooks", GRAPH),
    TorchName("torch.Tensor", "_post_accumulate_grad_hooks", NOTHING_SEEN),
    TorchName("<module>", "_forward_hooks", NOTHING_SEEN),
    TorchName("<module>", "_parameters", NOTHING_SEEN),
    TorchName("<module>", "_backward_hooks", LINE),
    TorchName("<module>", "_backward_pre_hooks", LINE),
    TorchName(_MODULES, "_global_backward_hooks", LINE),
    TorchName(_MODULES, "_global_backward_pre_hooks", LINE),
    TorchName("torch", "_foreach_norm", BUFFERS),
    # -- the backward --
    TorchName("torch.autograd.Variable", "_execution_engine", GRAPH),
    TorchName("torch._C", "_current_graph_task_id", GRAPH),
    TorchName("torch._C", "_current_autograd_node", GRAPH),
    TorchName("torch.autograd", "_get_sequence_nr", GRAPH),
    TorchName("torch.autograd.graph", "_engine_run_backward", GRAPH),
    TorchName("torch.autograd", "_engine_run_backward", LOSS),
    TorchName("torch._C._autograd", "_push_saved_tensors_default_hooks", LOSS),
    TorchName("torch._C._autograd", "_pop_saved_tensors_default_hooks", LOSS),
    TorchName("torch._C._autograd", "_top_saved_tensors_default_hooks", LOSS, since=(2, 8), instead=True),
    TorchName("torch._C._autograd.SavedTensor", "register_hooks", LOSS),
    TorchName("torch._C._autograd.SavedTensor", "unpack_hook", LOSS, since=(2, 10), instead=True),
    TorchName("torch.autograd.function", "BackwardCFunction", GRAPH),
    TorchName(_NODE, "_sequence_nr", GRAPH),
    TorchName(_NODE, "_input_metadata", GRAPH),
    TorchName(_NODE, "_saved_alpha", GRAPH),
    TorchName("torch.amp.grad_scaler.GradScaler", "_get_scale_async", SCALER),
    # -- a device --
    TorchName("torch._C", "_cuda_getCurrentRawStream", DEVICE),
    TorchName("torch._C", "_cuda_getDevice", DEVICE),
    TorchName("torch._C", "_cuda_isCurrentStreamCapturing", DEVICE),
    TorchName("torch._C", "_CudaDeviceProperties", DEVICE),
    TorchName("torch.cuda.graphs", "register_graph_capture_start_hook", REPLAYS, since=(2, 14)),
    TorchName("torch.cuda.graphs", "register_graph_capture_end_hook", REPLAYS, since=(2, 14)),
    # -- several ranks --
    TorchName("torch._C._distributed_c10d.Backend.Options", "_timeout", TIMEOUTS, since=(2, 6)),
    TorchName(_C10D, "_pg_map", COMMS),
    TorchName(_C10D, "_world", COMMS),
    TorchName(_C10D, "_update_default_pg", RUN),
    TorchName(_C10D, "_register_process_group", HANGS),
    TorchName(_GROUP, "_get_sequence_number_for_group", COMMS),
    TorchName(_GROUP, "register_pre_hook", HANGS, since=(2, 14), instead=True),  # before: C++'s own are only counted
    TorchName("torch._C._distributed_c10d", "HookOpName", HANGS, since=(2, 14), instead=True),
    TorchName(_GROUP, "_start_coalescing", HANGS),
    TorchName(_GROUP, "_end_coalescing", HANGS),
    TorchName(_GROUP, "_allgather_base", HANGS),
    TorchName(_GROUP, "_reduce_scatter_base", HANGS),
    TorchName("torch.distributed.TCPStore", "list_keys", KEYS, since=(2, 10)),
    TorchName("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", SHARDS, since=(2, 6)),
    TorchName("torch.distributed.tensor.DTensor", "_local_tensor", SHARDS),
    TorchName(_RPC, "_new_script_local_optimizer", RPC, until=(2, 13), instead=True),
    TorchName(_RPC, "_ScriptLocalOptimizer", RPC, until=(2, 13), instead=True),
    TorchName(_RPC, "_ScriptLocalOptimizerInterface", RPC, until=(2, 13), instead=True),
    TorchName(_RPC, "_FunctionalLocalOptimizer", RPC, since=(2, 14), instead=True),
    TorchName("torch.utils.data._utils.worker", "_worker_info", CHILDREN),
    # -- loaders --
    TorchName(_LOADERS, "_BaseDataLoaderIter.__init__", SAMPLES),
    TorchName(_LOADERS, "_BaseDataLoaderIter.__next__", SAMPLES),
    TorchName(_LOADERS, "_BaseDataLoaderIter._next_index", SAMPLES),
    TorchName(_LOADERS, "_BaseDataLoaderIter._reset", SAMPLES),
    TorchName(_LOADERS, "_SingleProcessDataLoaderIter._next_data", SAMPLES),
    TorchName(_LOADERS, "_MultiProcessingDataLoaderIter._try_put_index", SAMPLES),
    TorchName(_LOADERS, "_MultiProcessingDataLoaderIter._process_data", SAMPLES),
    TorchName(_PASS, "_auto_collation", SAMPLES),
    TorchName(_PASS, "_collate_fn", SAMPLES),
    TorchName(_PASS, "_dataset", SAMPLES),
    TorchName(_PASS, "_dataset_kind", SAMPLES),
    TorchName(_PASS, "_index_sampler", SAMPLES),
    TorchName(_PASS, "_num_workers", SAMPLES),
    TorchName(_PASS, "_send_idx", SAMPLES),
    TorchName(_PASS, "_task_info", SAMPLES),
    # -- torchrun's agent --
    TorchName("torch.distributed.launcher.api", "LocalElasticAgent", LAUNCH),
    TorchName("torch.distributed.launcher.api", "LocalElasticAgent._start_workers", LAUNCH),
    TorchName("torch.distributed.launcher.api", "LocalElasticAgent._shutdown", LAUNCH),
    TorchName("torch.distributed.elastic.rendezvous.utils", "_matches_machine_hostname", LAUNCH),
    # -- compiled code --
    TorchName("torch._guards", "CompileContext", COMPILED),
    TorchName("torch._dynamo", "assume_constant_result", COMPILED),
    TorchName("torch._dynamo", "mark_static_address", COMPILED),
    TorchName("torch._dynamo.eval_frame", "skip_code", MADE_BY_DYNAMO),
    TorchName("torch._dynamo.eval_frame", "set_code_exec_strategy", MADE_BY_DYNAMO, since=(2, 7), instead=True),
    TorchName("torch._dynamo.resume_execution", "ContinueExecutionCache", COMPILED),
    TorchName("torch._dynamo.symbolic_convert", "InstructionTranslator", COMPILED),
    TorchName("torch._higher_order_ops.wrap", "tag_activation_checkpoint", COMPILED),
    TorchName("torch._inductor.config", "triton.cudagraphs", COMPILED),
    TorchName("torch.nn.parallel.DistributedDataParallel", "_active_ddp_module", COMPILED),
)


def name_in_torch(path: str, otherwise: Any = None) -> Any:
    """What torch has under this path of the table; `otherwise` where it has no such name.

    The module is imported already: this imports nothing.
    """
    found = _found(_BY_PATH[path])
    return otherwise if found is _NOTHING else found


def missing(release: Release) -> list[TorchName]:
    """Names that this release should have and that are gone, of those modules that are imported."""
    torch = sys.modules.get("torch")
    builds = getattr(torch, "version", None)
    has_gpus = any(getattr(builds, kind, None) for kind in ("cuda", "hip"))
    found = []
    for one in NAMES:
        if one.place.startswith("<") or not one.is_in(min(release, NEWEST)) or (one.lost == DEVICE and not has_gpus):
            continue
        if _loaded(one.place)[0] is not None and not is_there(one):
            found.append(one)
    return found


def is_there(one: TorchName) -> bool:
    """Whether the torch that is imported has it."""
    return _found(one) is not _NOTHING


def _found(one: TorchName) -> Any:
    where, names = _loaded(one.place)
    return reduce(lambda place, name: getattr(place, name, _NOTHING), (*names, *one.name.split(".")), where)


def _loaded(place: str) -> tuple[Any, list[str]]:
    """(the innermost module of a place that is imported, the names that lead on); None if its own is not."""
    parts = place.split(".")
    for number in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:number]))
        if module is not None:
            rest = parts[number:]
            is_class = rest and rest[0][:1].isupper()
            return (module, rest) if not rest or is_class else (None, [])
    return None, []


_BY_PATH = {one.path: one for one in NAMES}
_NOTHING = object()
"""It has no attribute of the table."""


# What a run says once about its version of torch.
#
# torch 2.5: keyword arguments are not in the frames; Python writes the frames, which takes longer
# torch 2.16 is newer than the newest release that gpuwatch was tested with, 2.15

ROWS_SINCE, GRADIENTS_SINCE = (2, 8), (2, 13)
"""The first releases whose graphs show inputs and outputs, and gradients. Why: worker/compile/attach.py"""


def release_of(version: str) -> Release | None:
    """The release of a version of torch; None if the text is no version.

    >>> release_of("2.13.0+cpu"), release_of("")
    ((2, 13), None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


NOT_SEEN_OF_BACKWARD = "gradients of a backward that compiled autograd runs are not inspected"


def not_seen_of_compiled(release: Release) -> str:
    """What a graph of torch.compile does not show with a release, which may be unknown; "" if it shows all."""
    if not ROWS_SINCE <= release <= NEWEST:
        return COMPILED
    return "gradients inside of compiled modules are not inspected" if release < GRADIENTS_SINCE else ""


def notes_on(version: str) -> list[str]:
    """Sentences without a full stop; none for a version with which all is as usual, or that is not known."""
    release = release_of(version)
    if release is None:
        return []
    name = f"torch {release[0]}.{release[1]}"
    if release > NEWEST:
        return [f"{name} is newer than the newest release that gpuwatch was tested with, {NEWEST[0]}.{NEWEST[1]}"]
    lost = [one.lost for one in NAMES if not one.instead and not one.is_in(release) and one.lost != REPLAYS]
    lost = list(dict.fromkeys(filter(None, [*lost, not_seen_of_compiled(release)])))  # each item once
    return [f"{name}: {'; '.join(lost)}"] if lost else []
