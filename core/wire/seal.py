"""What ranks write into a store that anybody on the network may write into: sealed with a key that only they have."""

from __future__ import annotations

import hashlib
import hmac

_MAC_CHARACTERS = 2 * hashlib.sha256().digest_size


class SealBroken(Exception):
    """Somebody without the key has written it."""


class WordSeal:
    """HMAC-SHA256 in front of a value, over its name, too: no value passes for another one's. Without a key: nothing.

    seal.close("arrive/3", "{}") -> "5f0c...{}"
    """

    def __init__(self, key: str = "") -> None:
        self._key = key.encode()

    def close(self, name: str, value: str) -> str:
        """The value as it goes into the store."""
        return self._mac(name, value.encode()) + value

    def open(self, name: str, sealed: bytes) -> bytes:
        """What was closed. Raises SealBroken."""
        if not self._key:
            return sealed
        mac, value = sealed[:_MAC_CHARACTERS], sealed[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, self._mac(name, value).encode()):
            raise SealBroken(f"what stands in the store as {name} was not written by this job")
        return value

    def _mac(self, name: str, value: bytes) -> str:
        if not self._key:
            return ""
        return hmac.new(self._key, name.encode() + b"\0" + value, hashlib.sha256).hexdigest()
