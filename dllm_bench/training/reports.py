"""What a training reports: lines while it runs, and a model card when it is done.

A card is a template in `cards`; those of embedded models are made by `scripts/embedded/card.py`.
Cards contain measurements of training; scores of decoding come from runs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dllm_bench.runs.progress import duration
from dllm_bench.store.files import write_atomic

Report = Callable[[str], None]
"""Receives a progress line, for example `print`."""

LINE_EVERY_S = 5.0


class Countdown:
    """Time left of a loop of `total` steps, at the pace since the countdown was made.

    `first` steps were done by an earlier, interrupted call and do not count for the pace.
    """

    def __init__(self, total: int, first: int = 0) -> None:
        self.total, self.first = total, first
        self._started = self._last_line = time.monotonic()

    def due(self, done: int) -> bool:
        """Return whether the next line should be printed: after five seconds, and at the end."""
        now = time.monotonic()
        if now - self._last_line <= LINE_EVERY_S and done < self.total:
            return False
        self._last_line = now
        return True

    def eta(self, done: int) -> str:
        """Return the time left after `done` steps, as `ETA 0:31`."""
        pace_s = (time.monotonic() - self._started) / (done - self.first)
        return f"ETA {duration(pace_s * (self.total - done))}"

    def line(self, point: Mapping[str, float]) -> str:
        """Return `step 200 of 2000: loss 1.2, ETA 0:31`; the first entry of the point is its
        step."""
        (unit, done), *rest = point.items()
        numbers = ", ".join(f"{name} {value:g}" for name, value in rest)
        return f"{unit} {done:g} of {self.total}: {numbers}, {self.eta(int(done))}"


# --- model cards ----------------------------------------------------------------------------------


def card(kind: str, title: str, parts: Mapping[str, Any]) -> str:
    """Return a model card: the template of `cards` for this kind, filled with `parts`.

    What decoding with the model gives is measured by runs.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["f"] = format
    return templates.get_template(f"{kind}.md").render(title=title, **parts)


def changed(job: Any, usual: Any) -> dict[str, Any]:
    """Return the options that make a job of the usual one; a folder of FLAN is called DIR."""
    options = {
        ("benchmark" if name == "benchmarks" else name): value
        for name, value in vars(job).items()
        if value != getattr(usual, name)
    }
    return options | ({"flan": "DIR"} if "flan" in options else {})


def command(start: str, options: Mapping[str, Any]) -> str:
    """Return a command line: `start`, then `--name value` for every option.

    A tuple repeats its option for each value; True gives an option without a value.
    """
    words = [start]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, tuple) else (value,)
        words += [flag if item is True else f"{flag} {item}" for item in values]
    return " ".join(words)


def plot_losses(file: Path, curve: Sequence[Mapping[str, float]], kept_epoch: int) -> None:
    """Draw training and validation loss by epoch; a line marks the epoch whose weights are kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    epochs = [point["epoch"] for point in curve]
    for name in ("train", "validation"):
        axes.plot(epochs, [point[name] for point in curve], label=name)
    axes.axvline(kept_epoch, color="0.6", linewidth=0.8, label=f"kept: epoch {kept_epoch}")
    axes.set(xlabel="epoch", ylabel="binary cross-entropy (nats)")
    axes.legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    write_atomic(file, content.getvalue())
