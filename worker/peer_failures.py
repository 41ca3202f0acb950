"""What a rank says that failed only because another one went away."""

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
    """Whether an error only says that another rank is gone, or gives no answer."""
    return any(words in message for words in _WORDS)
