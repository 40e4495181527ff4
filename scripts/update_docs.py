"""Write stored results into the documents that quote them: README.md and the model cards.

    .venv/bin/python -m scripts.update_docs [RESULTS_OF_THE_CARDS]

The README quotes one section of the committed Table 4 and where it was measured; a card quotes the
sealed runs of its model found in the given results directory (cards are left alone without one).
"""

from __future__ import annotations

import sys
from pathlib import Path

from dllm_bench.paths import assets_dir
from dllm_bench.store.store import RunState, Store, read_record
from scripts.embedded.card import measured

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "results" / "reference" / "tables" / "lopa" / "table4.md"
MODEL, SECTION = "## D2F-Dream-Instruct", "### GSM8K 4-shot"
SYSTEM, COLUMNS = 1, (0, 2, 3, 4, 7, 8, 11)  # of the rendered section: BP, τ, mean TPS and score
BEGIN, END = "<!-- table4:begin -->", "<!-- table4:end -->"


def excerpt(table: str) -> str:
    """Speed and score of the settings on one GPU, instruct model on GSM8K, and the hardware."""
    section = table[table.index(MODEL) :]
    section = section[section.index(SECTION) :].split("\n\n")[1]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines()]
    header, rule, *body = rows
    kept = [header, rule, *(row for row in body if row[SYSTEM] == "NV")]
    hardware = table.split("**Measured on**\n\n")[1].split("\n\n")[0]
    shown = (f"| {' | '.join(row[column] for column in COLUMNS)} |" for row in kept)
    return "\n".join(shown) + f"\n\nMeasured on:\n\n{hardware}"


def quote(readme: str, table: str) -> str:
    """The README with the excerpt between its markers."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{excerpt(table)}\n{END}{rest.split(END)[1]}"


def update_cards(results: Path) -> None:
    """Every embedded model's card from the sealed runs below `results`."""
    store = Store(results / "runs")
    records = [read_record(e.path) for e in store.entries() if e.state is RunState.SEALED]
    for card in sorted(assets_dir().glob("*/CARD.md")):
        own = [r for r in records if r is not None and r.spec.model["name"] == card.parent.name]
        if own:
            card.write_text(measured(card.read_text(), own))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(quote(readme.read_text(), TABLE.read_text()))
    if len(sys.argv) > 1:
        update_cards(Path(sys.argv[1]))
