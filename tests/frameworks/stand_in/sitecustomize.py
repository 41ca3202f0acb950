"""Gives a process of a script what this machine has not. Ray's own processes need nothing, and would import torch."""

import sys

if not any("/ray/" in word and not word.endswith("/default_worker.py") for word in sys.orig_argv[1:3]):
    import on_the_cpu  # noqa: F401
