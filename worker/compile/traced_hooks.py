"""What dynamo traces in place of the hooks: nothing, until attach.py sets these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

before: Callable[[Any], None] | None = None
after: Callable[[Any, Any, Any, Any], None] | None = None
