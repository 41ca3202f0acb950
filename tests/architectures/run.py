"""Trains every architecture, or those named, and prints the table of docs/architectures.md."""

from __future__ import annotations

import sys
import time
import warnings

import torch
import transformers
from models import ARCHITECTURES
from trial import Result, attempt


def main() -> int:
    """0 when nothing is wrong."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words = sys.argv[1:]  # names; `+name` starts at that name
    names = [architecture.name for architecture in ARCHITECTURES]
    if words and words[0].startswith("+"):
        words = names[names.index(words[0][1:]) :]
    wrong = 0
    for architecture in ARCHITECTURES:
        if words and architecture.name not in words:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            began = time.monotonic()
            result: Result = attempt(architecture, dtype)
            wrong += bool(result.wrong)
            print(f"{architecture.name:20} {str(dtype)[6:]:9} {result}  {time.monotonic() - began:.0f} s", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
