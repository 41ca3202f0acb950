"""How a child begins: it loads and initialises NVML, or says why not. And how it prints its lines."""

from __future__ import annotations

import sys
import threading

import msgspec

from .facts import Line, Started, Trouble

_TODO = {
    "old": "Update the NVIDIA driver, or install the nvidia-ml-py of its time.",
    "absent": "It comes with the NVIDIA driver; in a container, start it with the `utility` driver capability.",
    "permission": "Ask whoever looks after the node for access to /dev/nvidiactl.",
    "driver": "Load the NVIDIA driver, or look at the kernel log for why it is not (dmesg).",
    "mismatch": "Reboot the node, or reload the driver: its library is of another version than its kernel module.",
}

_lock = threading.Lock()


def say(line: Line) -> None:
    """Print one line for the parent process."""
    with _lock:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()


def start() -> Started | Trouble:
    """Load and initialise NVML."""
    try:
        import pynvml

        from .nvml import NotKnown, ask, text
    except ImportError as error:
        return Trouble(f"nvidia-ml-py cannot be imported: {error}", "Install it: pip install nvidia-ml-py.")
    try:
        ask("nvmlInit")
    except NotKnown as error:
        what, todo = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("NVML is not on this host (libnvidia-ml.so.1)", _TODO["absent"]),
            pynvml.NVML_ERROR_NO_PERMISSION: ("NVML may not be used here (permission denied)", _TODO["permission"]),
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("the NVIDIA driver is not loaded", _TODO["driver"]),
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "NVML is of another version than the driver",
                _TODO["mismatch"],
            ),
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (f"NVML is too old: {error}", _TODO["old"]),
        }.get(error.code or 0, (f"NVML cannot be initialised: {error}", ""))
        return Trouble(what, todo)
    return Started(text("nvmlSystemGetDriverVersion"), text("nvmlSystemGetNVMLVersion"))
