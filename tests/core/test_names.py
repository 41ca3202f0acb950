"""A class and a module can be found by their name alone: each stands for one thing in the whole package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from ..parsed import nodes_of
from .test_imports import ROOMS, ROOT, modules

DOMAIN = {"Accelerator", "Anomaly", "Certainty", "Code", "Frame", "Page", "Region", "Role", "Row", "Value", "Verdict"}
"""The nouns of the domain. Every other class is such a noun, or another one, and what it is of it: RegionCall."""


def all_modules() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for room in ROOMS for path in modules(room))]


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for path in all_modules():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert {name for name in places if re.fullmatch("[A-Z][a-z0-9]*", name)} == DOMAIN


def test_no_module_name_stands_twice():
    places = defaultdict(list)
    for path in all_modules():
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
