"""The package's own files, each parsed once in a process: a dozen of tests read all of them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Not to be changed."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file, in the order of `ast.walk`.

    They are kept for good: a million objects, at which no later look for garbage has to look.
    """
    nodes = tuple(ast.walk(tree_of(path)))
    gc.freeze()
    return nodes
