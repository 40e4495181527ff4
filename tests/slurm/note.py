"""A job that imports nothing else, so that it starts at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """Writes down when it ran, or fails."""

    path: Path
    needs: Path | None = None

    def __call__(self) -> None:
        if self.needs and not self.needs.exists():
            raise FileNotFoundError(str(self.needs))
        time.sleep(1.0)
        self.path.touch()
