"""Which modules are watched, and which rows are ignored, by shell patterns on their names."""

from __future__ import annotations

import re
from fnmatch import translate


class Selection:
    """Compiled patterns of `--modules` and `--ignore`."""

    def __init__(self, modules: list[str], ignore: list[str]) -> None:
        self._modules = [re.compile(translate(pattern)) for pattern in modules]
        self._ignore: list[tuple[str, re.Pattern[str], re.Pattern[str] | None]] = []
        for pattern in ignore:
            module, colon, role = pattern.partition(":")
            # brackets of a role such as `output[0]` are literal: only * and ? are wildcards in it
            of_role = re.compile(translate(role.replace("[", "[[]"))) if colon else None
            self._ignore.append((pattern, re.compile(translate(module)), of_role))

    def watches(self, module: str) -> bool:
        """Whether a module gets frames. Without patterns all modules do."""
        return not self._modules or any(pattern.match(module) for pattern in self._modules)

    def ignored_by(self, module: str, role: str) -> str | None:
        """The first rule that covers this row, as the user wrote it; None if there is none."""
        for text, of_module, of_role in self._ignore:
            if of_module.match(module) and (of_role is None or of_role.match(role)):
                return text
        return None
