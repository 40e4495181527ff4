"""Card and loss curves of a trained filter, from what its training measured.

Nothing is measured here; what decoding with the filter gives is a run's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dllm_bench.models.filters import LearnedFilter
    from dllm_bench.training.filters import FilterJob, Fitted
    from dllm_bench.training.traces import Traces

SCOPES = {
    "masked": "the positions masked at that step",
    "all": "every position of the block (authors' code)",
}
FLAGS = {"benchmarks": "--benchmark"}
TITLES = (
    "part",
    "loss",
    "false positives at 0.9",
    "right accepted at 0.96",
    "wrong among accepted",
)


def render(name: str, learned: LearnedFilter, job: FilterJob, found: Traces, fitted: Fitted) -> str:
    """The card as markdown."""
    sections = {
        "Data": _data(job, found),
        "Recipe": _recipe(job, fitted),
        "Measured": _measured(fitted),
    }
    parts = [f"# {name}", _about(learned, job)]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def _about(learned: LearnedFilter, job: FilterJob) -> str:
    facts = learned.facts
    several = f"{job.layers} linear layers, {facts.activation} between them"
    layers = several if job.layers > 1 else "One linear layer"
    return (
        "A filter for Learn2PD decoding (arXiv 2509.25188): the confidences of a block of\n"
        f"{job.block} positions give one logit each. {layers}, {learned.parameters:,} parameters.\n"
        f"For the model {facts.model} (weights `{facts.weights[:10]}`); made by this project with\n"
        f"`{command(facts.model, job)}`.\nMIT licence, as the package."
    )


def command(model: str, job: FilterJob) -> str:
    """The command that makes the filter; settings at their defaults are left out."""
    words = ["dllm-bench train filter", model]
    for setting in fields(job):
        value = getattr(job, setting.name)
        if value == setting.default:
            continue
        flag = FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
        values = value if isinstance(value, tuple) else ("DIR" if flag == "--flan" else value,)
        words += [flag if item is True else f"{flag} {item}" for item in values]
    return " ".join(words)


def _data(job: FilterJob, found: Traces) -> str:
    blocks = "all" if job.all_blocks else "those up to the end of the text"
    masked = int(found.masked_RB.sum())
    return (
        f"{found.done:,} prompts ({job.source()}), {job.gen_length} new tokens. The model answers\n"
        "each, one token per forward, and decodes it again under the oracle with that answer;\n"
        "every step is a row of confidences and of candidates that were right.\n"
        f"Blocks: {blocks}. {len(found.prompt_R):,} rows, {masked:,} masked positions, "
        f"{found.stalled:,} steps\nwithout a right candidate."
    )


def _recipe(job: FilterJob, fitted: Fitted) -> str:
    return (
        f"Binary cross-entropy at {SCOPES[job.labels]}; AdamW, rate {job.lr:g},\n"
        f"full batch, {job.epochs:,} epochs, seed {job.seed}; the weights of the best loss on the "
        f"validation part are\nkept (epoch {fitted.epoch:,}). 80/10/10 % of the prompts are for "
        f"training, validation and test.\nFitting took {fitted.seconds:.0f} seconds."
    )


def _measured(fitted: Fitted) -> str:
    rows = [_row(part, fitted.rates[part]) for part in ("train", "validation", "test")]
    rows.append(_row("test, plain confidence instead", fitted.rates["confidence"]))
    table = [f"| {' | '.join(cells)} |" for cells in (TITLES, ("---",) * len(TITLES), *rows)]
    note = "At masked positions; false positives are the wrong candidates above 0.9."
    return "\n".join([note, "", *table])


def _row(part: str, rates: Mapping[str, float]) -> tuple[str, ...]:
    loss = f"{rates['loss']:.4f}" if "loss" in rates else "–"
    shares = (rates[name] for name in ("false_positive", "accepted", "wrong_accepted"))
    return part, loss, *(f"{100 * value:.2f} %" for value in shares)


def plot(file: Path, curve: Sequence[Mapping[str, float]], best: int) -> None:
    """Loss curves as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    epochs = [point["epoch"] for point in curve]
    for name in ("train", "validation"):
        axes.plot(epochs, [point[name] for point in curve], label=name)
    axes.axvline(best, color="0.6", linewidth=0.8, label=f"kept: epoch {best}")
    axes.set(xlabel="epoch", ylabel="binary cross-entropy (nats)")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)
