"""Where the collector of a job is: the handshake of its encryption tells it from any other."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

_PATIENCE_MS = 5000


def first_that_answers(addresses: Sequence[str], server_key: str, public_key: str, private_key: str) -> str | None:
    """Where somebody has the private half of `server_key`: the first to answer. Waits some seconds at most."""
    context = zmq.Context()
    poller, probes = zmq.Poller(), {}
    try:
        for address in addresses:
            probe = context.socket(zmq.DEALER)
            probe.linger = 0
            probe.ipv6 = True
            probe.curve_serverkey = server_key.encode()
            probe.curve_publickey, probe.curve_secretkey = public_key.encode(), private_key.encode()
            monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            probes[monitor] = probe, address
            poller.register(monitor, zmq.POLLIN)
            probe.connect(address)
        ready = [monitor for monitor, _ in poller.poll(_PATIENCE_MS)]
        return next((address for monitor, (_, address) in probes.items() if monitor in ready), None)
    finally:
        for probe, _ in probes.values():
            probe.disable_monitor()
            probe.close(linger=0)
        context.destroy(linger=0)
