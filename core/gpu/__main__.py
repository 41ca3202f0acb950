"""The child process that talks to NVML. A driver that hangs blocks only this process.

A hung driver can keep this process from being killed. So its parent waits for its lines, never for its end.
"""

from __future__ import annotations

import argparse
import sys

from .lines import NvmlAnswer, NvmlFinished, NvmlQuestion, NvmlTrouble
from .nvml_child import say, start


def read(devices: list[str], loaded: bool) -> None:
    """One reading, as lines."""
    say(NvmlQuestion("its start"))
    begun = start()
    say(begun)
    if isinstance(begun, NvmlTrouble):
        return
    from .nvml import NotKnown, handle_of, handles, uuid_of
    from .questions import ask_group, introduce, questions

    say(NvmlQuestion("its devices"))
    found = {}
    try:
        wanted = devices or [uuid_of(handle) for handle in handles()[0]]
    except NotKnown as error:
        say(NvmlTrouble(f"NVML does not list its devices: {error}"))
        return
    for uuid in wanted:
        say(NvmlQuestion("its name", uuid))
        try:
            found[uuid] = handle_of(uuid)
            say(introduce(uuid, found[uuid]))
        except NotKnown as error:
            lost = {"lost": 1} if error.gpu_is_lost else {}
            say(NvmlAnswer(uuid, lost, {} if lost else {"lost": f"NVML has no such device: {error}"}))
    for uuid, handle in found.items():
        for what, group in questions(loaded):
            say(NvmlQuestion(what, uuid))
            say(ask_group(uuid, handle, group))
    say(NvmlFinished())


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", action="append", default=[], help="UUID; default: all")
    parser.add_argument(
        "--loaded", action="store_true", help="the GPU is at work: look at its clocks and its PCIe link, and only there"
    )
    parser.add_argument("--watch", action="store_true", help="tell XIDs as they come, and counters when asked on stdin")
    options = parser.parse_args()
    if options.watch:
        from .nvml_child import watch

        watch()
    else:
        read(options.device, options.loaded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
