"""From the options of a launch or a check to what its workers are told."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec.structs import replace

from ...core.settings import WorkerSettings


def worker_settings(args: argparse.Namespace, scratch: Path, logs: Path) -> WorkerSettings:
    """`scratch` holds the recorders of this launch, `logs` the files of `--nccl-debug`."""
    shared = WorkerSettings(
        recorder_dir=str(scratch),
        preflight_timeout_s=args.preflight_timeout,
        alloc=args.alloc or "",
        bandwidth_size=args.bandwidth_size,
        min_busbw=args.min_busbw,
        slow_factor=args.slow_factor,
        nccl_debug=str(logs) if args.nccl_debug else "",
        health_thresholds=args.health_thresholds or "",
    )
    if args.check_only:
        return replace(shared, check_only=True, preflight="quick" if args.quick else "full")
    return replace(
        shared,
        preflight=args.preflight,
        on_preflight_failure=args.on_preflight_failure,
        on_overflow=args.on_overflow,
        trace_batches=args.trace_batches,
        abort_after_batch=args.abort_after_batch,
        watch=args.watch,
        modules=args.modules,
        every=args.every,
        sync=args.sync,
        guard_optimizer=args.guard_optimizer,
        ignore=args.ignore,
        near_overflow=args.near_overflow,
        underflow_share=args.underflow_share,
        scaler_skips=args.scaler_skips,
        state_every=args.state_every,
        measure_cost=args.measure_cost,
    )
