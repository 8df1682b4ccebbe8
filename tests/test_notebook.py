"""docs/notebook.ipynb runs from top to bottom in an empty folder, and is stored without what it showed."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"
nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_notebook_runs(notebook, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: pip install -e '.[dev]'")
    done = nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    tables = [output for output in outputs if "text/markdown" in output.get("data", {})]
    assert len(pictures) == 3 and len(tables) == 1
    assert "digits/knn@dino" in tables[0].data["text/markdown"]
    assert (tmp_path / "bench-results/report.html").exists()
