"""The notebooks run from their first cell to their last, and are kept without what they showed."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert len(NOTEBOOKS) == 3


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path):
    book = read(path)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code and not [cell.id for cell in code if cell.outputs or cell.execution_count is not None]
    assert set(book.metadata) == {"kernelspec", "language_info"}, "a version or a name of one machine"
    assert not [cell.id for cell in book.cells if cell.metadata]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_tells_what_to_look_at(path: Path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert text.count("**Look at**") >= 3
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and not [link for link in links if not (path.parent / link).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # the user's own stay as they are
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where notebooks put their runs
    book = read(path)
    NotebookClient(book, timeout=250, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = [(cell, output) for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    for cell, output in shown:
        assert output.output_type in ("display_data", "execute_result", "stream"), cell.source
        assert len(str(output.get("data", {}).get("text/html", ""))) < 700_000
    trained = [output for cell, output in shown if "mae.pretrain(" in cell.source and "data" in output]
    assert any("of the steps" in output.data.get("text/html", "") for output in trained)
    assert "image/png" in str([list(output.get("data", {})) for _, output in shown])
