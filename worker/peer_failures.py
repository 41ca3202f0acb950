"""Error messages of a rank that failed only because another rank had ended."""

from __future__ import annotations

_WORDS = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket Timeout",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    # torch's store
    "wait timeout",
    # NCCL
    "remote process exited or there was a network error",
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def is_peer_failure(message: str) -> bool:
    """Whether an error message only says that another rank has ended or does not answer."""
    return any(words in message for words in _WORDS)
