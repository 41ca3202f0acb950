"""Keeps what --notify hands to a command."""

import sys
from pathlib import Path

Path(__file__).with_name("told.json").write_text(sys.stdin.read() + "\n")
