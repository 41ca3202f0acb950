"""The keys of the tests' jobs. They are made once in a process: those of a job take 60 ms of a processor."""

from __future__ import annotations

from gpuwatch.core.wire.keys import derive_keys

KEYS = derive_keys("a secret of the tests", "job")
STRANGER = derive_keys("another secret of somebody", "job")
