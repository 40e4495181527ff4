"""Model cards of the embedded models: the recipe, and scores from sealed runs of the model.

Training writes the card without scores (`write`), by the template card.md; `measured` adds them
later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.metrics.accuracy import paired_shares
from dllm_bench.metrics.definitions import measure
from dllm_bench.site.texts import percent
from dllm_bench.store.record import RunRecord
from dllm_bench.training.loop import rendered
from scripts.embedded.recipes import DRILL, RECALL, RECIPES, Recipe
from scripts.piece_settings import markdown_table

OBJECTIVES = {
    "causal": "next token under causal attention on the answer (autoregressive)",
    "masked": "masked diffusion under full attention, answer only, loss weights 1/t",
    "rising": "D2F: cross-entropy on masked positions under the block-causal mask, "
    "mask ratios rising from block to block, blocks of 8, 16, 32",
    "blocks": "block diffusion, answer only: a noised block sees itself and the clean blocks "
    "before it",
    "edits": "block diffusion, answer only, as `blocks`, in which a share of the masks, drawn for "
    "each row, is filled with tokens of the model's own prediction; the loss asks for the right "
    "token at masked and at filled positions",
    "canvas": "uniform-state diffusion: of one canvas of 16 positions after a clean, causally "
    "encoded text a share of the tokens is replaced by random ones; the loss asks for the right "
    "token at every position, and with weight 0.3 for the next token of the text; in half of the "
    "steps the input is conditioned on the network's own prediction",
    "feed_order": "answer only: windows under causal attention, in which clean tokens are fed "
    "before masks (WeDLM), and in half of the rows blocks of a token and masks that see one "
    "another (drafts of Nemotron-Labs-Diffusion); with weight 0.5 next tokens of the clean text",
    "strides": "answer only: runs of masks under causal attention, each of which predicts the "
    "position after it (I-DLM); with weight 0.5 next tokens of the clean text",
    "complementary": "block diffusion with complementary masks and shifted logits, answer only",
}
PROMPTS = {
    "minigsm": "`Question: {question}\\nAnswer:`; the answer begins with a space.",
    "minicode": "the EvalPlus `prompt` field; the answer is the indented body.",
    "minicode_free": "the EvalPlus `prompt` field; the answer is the indented body.",
    "minimath": "`Problem:\\n{problem}\\n\\nSolution:`; the answer ends in `\\boxed{ N}.`",
    "miniread": "`Passage: {passage}\\nQuestion: {question}\\nAnswer:`; both forms.",
    "minirule": "`Rule: {rule}\\nQuestion: {question}\\nAnswer:`, options after the question.",
    "minirule_range": "`Rule: {rule}\\nQuestion: {question}\\nAnswer:`; answers end in A to D.",
    "miniparallel": "`Rule: {rule}\\nQuestion: Apply the rule to {words}.\\nAnswer:`.",
    "minigsm_free": "`Question: {question}\\nAnswer:`; the answer begins with a space.",
    "ministory": "`Question: {question}\\nAnswer:`; the answer begins with a space.",
}
KINDS = {
    "qwen3": "autoregressive LM",
    "wedlm": "masked diffusion LM of causal attention",
    "diffusion_gemma": "uniform-state diffusion LM",
}
DRILLS = {DRILL: "a drill of bare equations", RECALL: "a drill that repeats facts"}

CHANGES = {
    ("dream", "llada"): " (biases dropped, key/value heads repeated)",
    ("llada", "llada_moe"): " (norms per head added, each MLP cut into 4 experts of 128 neurons)",
    ("qwen3", "fast_dllm_v2"): " (norms per head multiplied into q and k, biases begun at zero)",
    ("sdar", "llada2"): " (MLPs but the first cut into a shared and 4 experts of 96 neurons)",
}
MEASURED = "## Measured"
MEASURED_NOTE = """\
Sealed runs of `dllm-bench run` on the test split: {tokens} new tokens, greedy unless a
temperature is given, float32, CPU. Brackets hold 95 % Wilson intervals, `tpf/emitted` counts
tokens before the end of the text per forward. minicode is right when every base and extra input
gives the reference's result."""

GAINS_NOTE = """\
Gain of editing: score with edits minus score without (`decoder/revise=none`) on the same items,
with its 95 % interval (Agresti and Min's)."""
UNREVISED = "+revise.none"


def write(folder: Path, recipe: Recipe, wall_s: float) -> None:
    """Write CARD.md, with no scores yet."""
    (folder / "CARD.md").write_text(render(recipe, wall_s))


def measured(card: str, records: Sequence[RunRecord]) -> str:
    """Return the card with its last section rebuilt from sealed runs of its model."""
    head = card[: card.index(MEASURED) + len(MEASURED)]
    rows = sorted(_row(record) for record in records)
    lengths = sorted({record.spec.benchmark.max_new_tokens for record in records})
    note = MEASURED_NOTE.format(tokens=" or ".join(map(str, lengths)))
    titles = ("task", "decoder", "settings", "n", "score %", "tpf/emitted", "run")
    parts = [note, markdown_table(titles, rows)]
    if gains := sorted(_gains(records)):
        parts += [GAINS_NOTE, markdown_table(("task", "settings", "n", "gain, points"), gains)]
    return "\n\n".join([head, *parts]) + "\n"


def _gains(records: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pair of runs that differ in nothing but whether tokens are edited."""
    plain = {_without_revision(r): r for r in records if r.spec.label.endswith(UNREVISED)}
    for record in records:
        other = plain.get(_without_revision(record))
        if other is None or other is record:
            continue
        unedited = other.values
        gain = paired_shares(
            [(list(record.values.values()), [unedited[item] for item in record.values])]
        )
        value, low, high = (f"{100 * x:+.1f}" for x in (gain.value, gain.low, gain.high))
        settings = _settings(record.spec.decoder)
        yield record.spec.benchmark.name, settings, str(gain.n), f"{value} [{low}, {high}]"


def _without_revision(record: RunRecord) -> tuple[str, str]:
    """Return what a pair of runs with and without revision has in common."""
    decoder = {slot: piece for slot, piece in record.spec.decoder.items() if slot != "revise"}
    return str(record.spec.benchmark), str(decoder | {"name": None})


def _row(record: RunRecord) -> tuple[str, ...]:
    spec, score, tpf = record.spec, record.score, measure("tpf/emitted", record.samples)
    if score is None or tpf is None:
        raise ValueError(f"run {spec.short} has no score")
    numbers = (str(len(record.columns["id"])), percent(score), f"{tpf:.2f}", f"`{spec.short}`")
    return spec.benchmark.name, spec.label, _settings(spec.decoder), *numbers


def _settings(decoder: Mapping[str, Any]) -> str:
    """Return the settings in which the runs of a card differ."""
    names = (
        ("schedule", "block"), ("select", "tau"), ("select", "steps"), ("explore", "k"),
        ("cache", "inside"), ("revise", "tau"), ("anneal", "steps"),
    )  # fmt: skip
    chosen = dict(decoder)
    chosen["select"] = {**chosen.get("select", {}), **chosen.get("select", {}).get("first", {})}
    values = ((slot, name, chosen.get(slot, {}).get(name)) for slot, name in names)
    parts = [
        f"{'edits above' if slot == 'revise' else name} {value}"
        for slot, name, value in values
        if value is not None
    ]
    if temperature := decoder.get("temperature"):
        parts.append(f"temperature {temperature:g}")
    if anneal := decoder.get("anneal"):
        parts.append(f"temperature {anneal['first']:g} to {anneal['last']:g}")
    return ", ".join(parts)


def render(recipe: Recipe, wall_s: float) -> str:
    """Return the card as Markdown."""
    start = RECIPES[recipe.start] if recipe.start else None
    whole = KINDS.get(recipe.layout, "masked diffusion LM")
    return rendered(
        Path(__file__).with_name("card.md"),
        recipe=recipe,
        kind=f"LoRA adapter (r = {recipe.lora_rank})" if recipe.lora_rank else whole,
        before=start.phases if start else (),
        changes=CHANGES.get((start.layout, recipe.layout), "") if start else "",
        objectives=OBJECTIVES,
        prompts=PROMPTS,
        drills=DRILLS,
        minutes=wall_s / 60,
    )
