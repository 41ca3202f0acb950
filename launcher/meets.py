"""Whether the collector at an address is that of a job: the handshake of its encryption tells."""

from __future__ import annotations

import zmq

_PATIENCE_MS = 5000


def answers_with_its_key(address: str, server_key: str, public_key: str, private_key: str) -> bool:
    """Whether who listens at `address` has the private half of `server_key`. Waits some seconds at most."""
    context = zmq.Context()
    probe = context.socket(zmq.DEALER)
    try:
        probe.linger = 0
        probe.ipv6 = True
        probe.curve_serverkey = server_key.encode()
        probe.curve_publickey, probe.curve_secretkey = public_key.encode(), private_key.encode()
        monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        probe.connect(address)
        return bool(monitor.poll(_PATIENCE_MS))
    finally:
        probe.disable_monitor()
        probe.close(linger=0)
        context.destroy(linger=0)
