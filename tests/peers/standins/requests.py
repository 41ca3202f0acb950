"""Stands in for requests: nothing is fetched. What is asked for is a drawn graph of papers that cite each other."""

from __future__ import annotations

import io
import random
import tarfile
from typing import Any

PAPERS, WORDS, CITATIONS = 1700, 40, 4000
CLASSES = ("theory", "genes", "cases", "rules")


class GraphReply:
    """Its `raw` is a tar file: cora/cora.content (number, words, class) and cora/cora.cites (two numbers)."""

    def __init__(self) -> None:
        rng = random.Random(0)
        content = "".join(
            f"{paper} {' '.join(str(int(rng.random() < 0.2 or word == paper % WORDS)) for word in range(WORDS))} "
            f"{CLASSES[paper % len(CLASSES)]}\n"
            for paper in range(PAPERS)
        )
        pairs = sorted({(rng.randrange(PAPERS), rng.randrange(PAPERS)) for _ in range(CITATIONS)})
        self.raw = io.BytesIO()
        with tarfile.open(fileobj=self.raw, mode="w:gz") as tar:
            for name, text in (("content", content), ("cites", "".join(f"{a} {b}\n" for a, b in pairs))):
                entry = tarfile.TarInfo(f"cora/cora.{name}")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text.encode()))
        self.raw.seek(0)

    def __enter__(self) -> GraphReply:
        return self

    def __exit__(self, *of: Any) -> None:
        pass


def get(*args: Any, **kwargs: Any) -> GraphReply:
    return GraphReply()
