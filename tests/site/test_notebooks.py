"""The notebooks run, on results and without any, and are stored without output.

All in one kernel, emptied in between: starting one takes longer than the cells. The results are
those of `builders`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.site import builders

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra dev)")

pytestmark = pytest.mark.xdist_group("notebooks")  # which share `outputs`
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
CELLS = 10
SHOWN = {  # a notebook -> what it says of the made-up results
    "acceptance": ("acceptance/length", "auroc", "image/png"),
    "score_drift": ("samples are graded differently", "20 samples, mcnemar exact"),
    "trace_viewer": ("after forward 2", "image/png"),
    "trade_off": ("tpf/emitted", "image/png"),
}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
Outputs = dict[tuple[str, bool], list[str]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """(notebook, with results) -> what its cells gave, as text."""
    full, empty = (tmp_path_factory.mktemp(name) for name in ("full", "empty"))
    builders.fill(full)
    whole = nbformat.v4.new_notebook()
    owners: list[tuple[str, bool]] = []
    for name, path in NOTEBOOKS.items():
        for results in (full, empty):
            begin = f"%reset -f\n%env DLLM_BENCH_RESULTS={results}"
            cells = [nbformat.v4.new_code_cell(begin), *code_cells(path)]
            whole.cells += cells
            owners += [(name, results == full)] * len(cells)
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable)))
        client = nbclient.NotebookClient(whole, kernel_name="python3", allow_errors=True)
        client.execute(cwd=str(ROOT / "notebooks"))
    found: Outputs = {owner: [] for owner in owners}
    for owner, cell in zip(owners, whole.cells, strict=True):
        found[owner] += [as_text(output) for output in cell.outputs]
    return found


def code_cells(path: Path) -> list[Any]:
    """The code of a notebook."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def as_text(output: Any) -> str:
    """An output's text, or the kinds of data it has."""
    if output.output_type == "error":
        return f"ERROR {output.ename}: {output.evalue}"
    data = output.get("data", {})
    return COLOUR.sub("", output.get("text", "") + data.get("text/plain", "")) + " ".join(data)


def test_every_notebook_is_known() -> None:
    assert set(NOTEBOOKS) == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_short_and_stored_without_output(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    assert 1 < len(notebook.cells) <= CELLS
    assert notebook.cells[0].cell_type == "markdown"
    for cell in code_cells(NOTEBOOKS[name]):
        assert not cell.outputs and cell.execution_count is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_what_is_there(name: str, outputs: Outputs) -> None:
    text = "\n".join(outputs[name, True])
    assert "ERROR" not in text, text
    for expected in SHOWN[name]:
        assert expected in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_without_results_says_what_to_run(name: str, outputs: Outputs) -> None:
    text = "\n".join(outputs[name, False])
    assert "ERROR" not in text, text
    assert "No " in text and "`dllm-bench " in text
    assert "image/png" not in text
