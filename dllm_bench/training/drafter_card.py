"""Card of a trained drafter, from its job and its training curve.

Nothing is measured here; what it saves in decoding is a run's business.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dllm_bench.training.drafters import DrafterJob, Run

NAMES = {"": "DFlash", "vanilla": "DSpark, Markov head", "gated": "DSpark, gated head"}
NAMES |= {"rnn": "DSpark, RNN head"}


def render(name: str, run: Run) -> str:
    """The card as markdown."""
    job, facts = run.job, run.network.facts
    kind = "EAGLE-3 chain" if job.chain else NAMES[job.head]
    learned = sum(w.numel() for w in run.network.parameters() if w.requires_grad)
    about = (
        f"A drafter for speculative decoding ({kind}): {job.layers} layers, {job.slots} tokens,\n"
        f"{learned:,} trained parameters; embedding and head are the target's. It reads layers\n"
        f"{', '.join(map(str, facts.feature_layers))} of the {facts.target_layers} of {run.model}. "
        f"Made by this project with\n`{command(run.model, job)}`.\nMIT licence, as the package."
    )
    sections = {"Data": _data(job), "Recipe": _recipe(run), "Measured": _measured(run)}
    parts = [f"# {name}", about]
    return "\n\n".join(parts + [f"## {title}\n\n{text}" for title, text in sections.items()]) + "\n"


def command(model: str, job: DrafterJob) -> str:
    """The command that trains the drafter; what its kind has anyway is left out."""
    from dllm_bench.training.drafters import KINDS

    given = {f.name: getattr(job, f.name) for f in fields(job)}
    changed = {n: v for n, v in given.items() if v != getattr(KINDS[job.kind], n)}
    if "shares" in changed:
        changed["shares"] = f"{job.shares.ce:g} {job.shares.l1:g}"
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in changed.items()]
    return " ".join(["dllm-bench train drafter", model, job.kind, *flags])


def _data(job: DrafterJob) -> str:
    own = f"the target's own answers at temperature {job.temperature:g}"
    answers = {"target": own, "gold": "gold answers"}[job.texts]
    return (
        f"{job.prompts:,} prompts of the train splits of minigsm and minicode, in turn, with\n"
        f"{answers}. Target features are computed in the same step."
    )


def _recipe(run: Run) -> str:
    job, shares = run.job, run.job.shares
    terms = f"{shares.ce:g} CE + {shares.l1:g} L1 + {shares.confidence:g} confidence, "
    loss = "Soft cross-entropy of the unrolled steps, each counting 0.8 of the one before.\n"
    if not job.chain:
        loss = f"Loss {terms}decay {shares.decay:g};\nup to {job.anchors} anchors a row.\n"
    return (
        f"{loss}AdamW, float32, peak rate {job.lr:g}, 4 % warm-up, cosine to 0; {job.rows} rows a "
        f"step, {run.step:,} of\n{job.steps:,} steps, seed {job.seed}, "
        f"{run.seconds / 60:.1f} minutes on {run.target.device.type}."
    )


def _measured(run: Run) -> str:
    if not run.curve:
        return "Nothing yet."
    point = run.curve[-1]
    lines = [f"| {name} | {value:g} |" for name, value in point.items()]
    note = "Last point of `curve.jsonl`; length: expected tokens of a round at temperature 1, the\n"
    return (
        note
        + "target's own included, over held-out train texts.\n\n| | |\n|---|---|\n"
        + "\n".join(lines)
    )
