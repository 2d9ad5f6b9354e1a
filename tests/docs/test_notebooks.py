"""In a notebook: main returns the experiment, and nothing that goes wrong spoils the next cell.

What takes a kernel is long. The cells of the docs run in this process in any case.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from pages import code_of

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"
OPTIONS = '"--device=cpu", "training.max_iteration=4"'


class Kernel:
    """A kernel that runs cells, one after the other."""

    def __init__(self, client: NotebookClient) -> None:
        self.client = client

    def run(self, source: str) -> str:
        """What a cell shows: its streams, its value, its error."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        with contextlib.suppress(CellExecutionError):
            self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        return "\n".join(shown(output) for output in cell.outputs)


def shown(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))
    return str(output.data["text/plain"])


def test_the_cells_of_the_notebook_of_the_docs_train_continue_and_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = {cell.id: cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    for cell in cells.values():
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        if cell.cell_type == "code" and cell.id != "install":  # which has a line for IPython alone
            exec(cell.source, names)  # the documentation's own
    *_, curves = cells["curves"].source.splitlines()
    assert [*eval(curves, names)] == [*range(50, 401, 50)]
    assert names["exp"].args.evaluate == "last"
    log = Path("runs/line/worker_0.log").read_text()
    assert "CONTINUING the run in runs/line from step-00000200" in log
    assert "[400] FINISHED" in log


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which the notebook of the docs was run; without an error."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbformat.validate(notebook)
        where = {"metadata": {"path": str(folder)}}
        limits = dict.fromkeys(("timeout", "startup_timeout"), int(forks.LONG_SECONDS))
        client = NotebookClient(notebook, kernel_name="python3", resources=where, **limits)
        client.shutdown_kernel = "immediate"
        with client.setup_kernel():
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
            made = Kernel(client)
            # IPython's, of a cell that SystemExit ends: the first, and after a change of filters.
            made.run("import warnings; warnings.filterwarnings('ignore', 'To exit: use')")
            yield made


@pytest.mark.long
def test_the_notebook_of_the_docs_says_what_it_should(kernel: Kernel) -> None:
    outputs = {
        cell.id: "".join(map(shown, cell.outputs)) for cell in kernel.client.nb.cells
        if cell.cell_type == "code"
    }  # fmt: skip
    assert "FINISHED: epoch 20, step-00000200 in runs/line" in outputs["run"]
    assert outputs["look"].startswith("(200, ")
    assert "CONTINUING the run in runs/line from step-00000200" in outputs["again"]
    assert "train/weight=" in outputs["again"]
    assert [*map(int, re.findall(r"(\d+): ", outputs["curves"]))] == [*range(50, 401, 50)]
    assert "loaded step-00000400 (last)" in outputs["evaluate"]


@pytest.mark.long
@pytest.mark.parametrize(("has_paddle", "extra"), [(True, ""), (False, "[cpu]")])
def test_the_first_cell_installs_the_wheel_and_no_other_paddle(
    kernel: Kernel, has_paddle: bool, extra: str
) -> None:
    """Where expbase is not there; the kernel of these tests has it, so that nothing was done."""
    wheel = "paddle_expbase-1.1.0-py3-none-any.whl"
    missing = ("expbase",) if has_paddle else ("expbase", "paddle")
    kernel.run(f"""
import importlib.util, pathlib
from IPython.core.magic import register_line_magic

@register_line_magic
def pip(line):
    print("pip", line)

pathlib.Path("{wheel}").touch()
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in {missing} else find_spec(name)""")
    (cell,) = (cell for cell in kernel.client.nb.cells if cell.get("id") == "install")
    assert cell.outputs == []
    said = kernel.run(cell.source)
    kernel.run(f"importlib.util.find_spec = find_spec; pathlib.Path('{wheel}').unlink()")
    assert said == f"pip install -q ./{wheel}{extra}\n"


@pytest.mark.long
def test_the_code_of_the_page_runs_after_the_notebook(kernel: Kernel) -> None:
    page = (DOCS / "notebooks.md").read_text(encoding="utf-8")
    kernel.run("import shutil; shutil.rmtree('runs/line')")
    first, second = code_of(page, "python")
    assert re.search(r"\n\(40, -?\d+\.\d+\)$", kernel.run(first))
    assert "loaded step-00000040 (last)" in kernel.run(second)


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            'main(Line, argv=["--output", "runs/x", "training.sed=1"])',
            "options: unknown key 'training.sed'. Did you mean 'training.seed'?",
        ),
        ('main(Line, argv=["--outptu", "runs/x"])', "arguments: --outptu. Did you mean --output?"),
    ],
)
def test_a_mistake_is_one_line(kernel: Kernel, call: str, line: str) -> None:
    output = kernel.run(call)
    assert re.search(r"^\S+: error: ", output, re.MULTILINE)
    assert line in output
    assert "Traceback" not in output


@pytest.mark.long
def test_a_cell_that_trains_warns_of_nothing(kernel: Kernel) -> None:
    for name in ("one", "two"):
        words = f'"--output", "runs/{name}", {OPTIONS}, "training.save_interval=1"'
        output = kernel.run(f"exp = main(Line, argv=[{words}])")
        assert "FINISHED" in output
        assert "WARNING" not in output


@pytest.mark.long
def test_a_cell_that_failed_can_be_run_again(kernel: Kernel) -> None:
    failing = f"""
class Failing(Line):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3 and is_wrong:
            raise KeyError("of mine")

is_wrong = True
exp = main(Failing, argv=["--output", "runs/failing", {OPTIONS}, "training.save_interval=2"])"""
    output = kernel.run(failing)
    assert "KeyError: 'of mine'" in output
    assert "raise KeyError" in output  # with the line of the cell
    again = kernel.run(failing.replace("True", "False"))
    assert "CONTINUING the run in runs/failing from step-00000002" in again
    assert kernel.run("exp.finished, exp.iteration") == "(True, 4)"


@pytest.mark.long
def test_an_interrupt_saves_and_ends_the_cell_and_the_next_one_goes_on(kernel: Kernel) -> None:
    interrupted = f"""
import os, signal

class Interrupted(Line):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)  # as the button does

exp = None
exp = main(Interrupted, argv=["--output", "runs/interrupted", {OPTIONS}])
print("not reached")"""
    output = kernel.run(interrupted)
    assert "[3] STOPPED by Ctrl-C; the same command continues" in output
    assert output.rstrip().endswith("SystemExit: 130")
    assert "Traceback" not in output
    assert "not reached" not in output
    restored = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert kernel.run(f"exp, {restored}") == "(None, True)"
    assert "[4] FINISHED" in kernel.run(interrupted)
    assert kernel.run("exp.iteration") == "4"


@pytest.mark.long
def test_a_run_that_stopped_by_itself_ends_the_cell_too(kernel: Kernel) -> None:
    words = '"--output", "runs/limit", "training.time_limit_seconds=1", "--device=cpu"'
    slow = "class Slow(Line):\n    def train_batch(self):\n        import time; time.sleep(0.3)\n"
    output = kernel.run(f"{slow}        super().train_batch()\nmain(Slow, argv=[{words}])")
    assert "STOPPED by training.time_limit_seconds" in output
    assert output.rstrip().endswith("SystemExit: 124")
