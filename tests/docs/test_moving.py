"""Who moves here: the pages of docs/moving, scripts without `main`, runs of Parakeet's."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import Tiny, make, metrics, run_script, trained, training_config

from expbase import (
    Config,
    ConfigError,
    __main__,
    default_argument_parser,
    get_default_training_config,
    main,
)
from expbase.checkpoint.layout import CheckpointError
from expbase.config import load_yaml
from expbase.events import EVENTS, OF_MIXINS
from expbase.extras.mixins import EarlyStopping


class Tuned(Tiny):
    """One with a section of its own."""

    @classmethod
    def default_config(cls) -> Config:
        config = training_config()
        config.optim = Config({"lr": 0.1})
        return config


def by_hand(*words: str, **training: Any) -> Any:
    """What the habit of Parakeet's scripts makes of a command line."""
    args = default_argument_parser().parse_args([*words, "--device", "cpu"])
    config = Tuned.default_config()
    if args.config:
        config.merge_from_file(args.config)
    if args.opts:
        config.merge_from_list(args.opts)
    config.training.update(training)
    exp = Tuned(config, args)
    exp.setup()
    exp.run()
    return exp


# --- the pages ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/moving"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if "." not in page.stem)
HEADINGS = ["Before", "After", "There and here", "Change at once", "What is not here"]
STANDINS = Path(__file__).parents[1] / "standins"
# The library that a page's old script imports, if tests have a stand-in of it.
LIBRARIES = {
    "fastnlp": "fastNLP",
    "paddlehub": "paddlehub",
    "paddlespeech": "paddlespeech",
    "parakeet": "parakeet",
}
IMPORTED = {*LIBRARIES.values(), "paddlenlp", "paddlepalm", "lightning"}
TRAINERS = ("lightning", "paddlenlp")  # whose tables stand first, and whose scripts nobody runs
DISTRIBUTED = ("model_fit", "paddlehub", "paddlespeech")
COMPARED = (*DISTRIBUTED, "fastnlp", "paddlerec", "plain_loop")
CONTINUED = tuple(page for page in COMPARED if page != "fastnlp")
FIRST = ("model_fit", "plain_loop")  # which most people come from; those of the others are long


def with_long(pages: tuple[str, ...]) -> list[Any]:
    """The pages, of which all but the FIRST are for the long tests."""
    return [pytest.param(page, marks=[pytest.mark.long] * (page not in FIRST)) for page in pages]


def section(page: str, heading: str) -> str:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(page: str, heading: str, language: str = "python") -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", section(page, heading), re.DOTALL | re.MULTILINE
    )


@pytest.fixture(autouse=True)
def _read_pdopt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of Parakeet's page, beside the scripts of all pages."""
    file = ModuleType("read_pdopt")
    exec(blocks("parakeet", "Old weights")[0], vars(file))  # the documentation's own
    monkeypatch.setitem(sys.modules, "read_pdopt", file)


@contextlib.contextmanager
def standing_in(library: str) -> Iterator[None]:
    """Puts the stand-in of a library where a script imports it from."""
    standin = runpy.run_path(str(STANDINS / f"{library}.py"))
    with pytest.MonkeyPatch.context() as patch:
        for path, names in standin["MODULES"].items():
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name not in sys.modules:
                    patch.setitem(sys.modules, name, ModuleType(name))
                if depth > 1:
                    parent = sys.modules[".".join(parts[: depth - 1])]
                    setattr(parent, parts[depth - 1], sys.modules[name])
            vars(sys.modules[path]).update({name: standin[name] for name in names})
        yield


def run_before(page: str, code: str, words: str = "") -> Any:
    """Runs a script of a page in this folder; returns its model."""
    names: dict[str, Any] = {"__name__": "__main__"}
    library = LIBRARIES.get(page)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # paddle.Model warns of itself
        if library:
            stack.enter_context(standing_in(library))
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            sys, "argv", ["train.py", *words.split()]
        )
        exec(code, names)  # the documentation's own
    return names["exp"].model if page == "parakeet" else names.get("network", names.get("model"))


def bits(model: Any) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def line_data(folder: Path) -> str:
    """The 200 points as lines of text, in a folder."""
    folder.mkdir(exist_ok=True)
    x = np.linspace(-1, 1, 200, dtype="float32")
    np.savetxt(folder / "part-0", np.stack([x, 3 * x + 1], axis=1), "%.9g")
    return str(folder)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the name of a page: the folder where its old script ran, and the bits of its end."""

    @functools.cache
    def run(page: str) -> tuple[Path, list[bytes]]:
        folder = tmp_path_factory.mktemp(page)
        with pytest.MonkeyPatch.context() as patch, importing_from(folder):
            patch.chdir(folder)
            if page == "paddlerec":
                return folder, bits(run_paddlerec(folder))
            return folder, bits(run_before(page, blocks(page, "Before")[-1]))

    return run


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Imports the modules of a page from a folder; other tests have some of the same name."""
    names = ("reader", "dygraph_model", "train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)


def run_paddlerec(folder: Path) -> Any:
    line_data(folder / "data")
    for heading in ("Before", "After"):
        text = section("paddlerec", heading)
        for name, code in re.findall(
            r"`(\w+\.\w+)`[^`]*:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE
        ):
            (folder / name).write_text(code)
    return runpy.run_path(str(STANDINS / "paddlerec.py"))["main"](folder / "config.yaml")


def after(page: str, *headings: str) -> dict[str, Any]:
    """The names of the new script of a page, and of other sections."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in (*blocks("index", "The same bits as before"), *blocks(page, "After")):
        exec(code, names)  # the documentation's own
    for heading in headings:
        for code in blocks(page, heading):
            exec(code, names)
    return names


def compared(page: str, names: dict[str, Any], experiment: str = "Experiment") -> type[Any]:
    """The experiment with the old first weights and the old order."""
    mixin: type[Any] = names["ComparedDistributed" if page in DISTRIBUTED else "Compared"]
    if page == "paddlerec":  # whose order is that of its files

        class InOrder(mixin):  # type: ignore[misc]
            seed = 12345
            setup_dataloader = names["Experiment"].setup_dataloader

        mixin = InOrder
    return type("Check", (mixin, names[experiment]), {})


def run_after(experiment: type[Any], folder: str, args: dict[str, Any] | None = None) -> Any:
    namespace = argparse.Namespace(output=folder, device="cpu", **(args or {}))
    exp = experiment(experiment.default_config(), namespace)
    exp.setup()
    exp.run()
    return exp


@pytest.mark.parametrize("page", with_long(COMPARED))
def test_before_and_after_end_with_the_same_bits(
    page: str, old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = old(page)
    monkeypatch.chdir(tmp_path)
    with importing_from(folder):
        exp = run_after(compared(page, after(page)), "runs/new", {"data": str(folder / "data")})
    assert exp.iteration == 50
    assert exp.config.training.save_interval == 0  # its page asks for it by epochs
    assert bits(exp.model) == expected
    assert "WARNING" not in Path("runs/new/worker_0.log").read_text()


@pytest.mark.parametrize("page", with_long(CONTINUED))
def test_an_old_run_goes_on_in_its_middle_to_the_same_bits(
    page: str, old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = old(page)
    monkeypatch.chdir(folder)
    with importing_from(folder):
        moved = compared(page, after(page, "Old weights"), "Moved")
        exp = run_after(moved, "runs/moved", {"data": "data"})
    assert metrics(exp.output_dir)[0]["iteration"] == 40
    assert bits(exp.model) == expected


@pytest.mark.long
def test_without_the_old_weights_and_order_the_bits_differ(
    old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = old("plain_loop")
    monkeypatch.chdir(tmp_path)
    names = after("plain_loop")
    check = compared("plain_loop", names)
    first = type("First", (check,), {"setup_dataloader": names["Experiment"].setup_dataloader})
    order = type("Order", (check,), {"setup_model": names["Experiment"].setup_model})
    ends = [bits(run_after(experiment, experiment.__name__).model) for experiment in (first, order)]
    assert expected not in ends


def test_a_metric_of_paddle_s_counts_in_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exp = run_after(after("model_fit", "There and here")["Judged"], "run")
    with exp.internals.evaluating():
        found = [((exp.model(x) > 0) == (y > 0)).numpy() for x, y in exp.valid_loader]
    last = [line["valid/accuracy"] for line in metrics(Path("run")) if "valid/accuracy" in line]
    assert len(last) == 5
    assert last[-1] == pytest.approx(np.concatenate(found).mean())


def changed_imports(code: str) -> str:
    """The old script of Parakeet's page with the lines changed that the page shows."""
    (shown,) = blocks("parakeet", "After", "text")
    lines = shown.splitlines()
    added = "\n".join(line[2:] for line in lines if line.startswith("+ from"))
    for gone in [line[2:] for line in lines if line.startswith("-")]:
        assert f"\n{gone}\n" in code
        new = next((line[2:] for line in lines if line[2:4] == "  " and line[0] == "+"), "")
        code = code.replace(f"\n{gone}\n", f"\n{new}\n" if gone[0] == " " else "\n")
    return code.replace("import numpy as np\n", f"import numpy as np\n{added}\n", 1)


@pytest.mark.long
def test_a_script_of_parakeet_runs_with_other_imports_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "--output old --device cpu --opts training.max_iteration 50 training.valid_interval 10 "
        "training.save_interval 10"
    )
    (before,) = blocks("parakeet", "Before")
    expected = bits(run_before("parakeet", before, words))
    assert len([*Path("old/checkpoints").glob("*.pdopt")]) == 5
    code = changed_imports(before)
    assert "parakeet" not in code
    run_before("none", code, words.replace("old", "script"))  # as it is
    log = Path("script/worker_0.log").read_text()
    assert re.search(r"step: 50, loss: \d\.", log)
    assert "WARNING" not in log  # it draws on the board alone
    for name, script in (("imports", code), ("main", blocks("parakeet", "After")[0])):
        names = after("parakeet")
        exec(script, names)  # the documentation's own
        experiment = compared("parakeet", names)
        experiment.default_config = lambda: training_config(max_iteration=50)  # type: ignore
        assert bits(run_after(experiment, name).model) == expected, name


# The form of Parakeet's five examples: a config of yacs' own in a file of its own, and these lines.
BY_HAND = """
from paddle import distributed as dist
from tiny import Tiny as Experiment
from yacs.config import CfgNode as CN
from expbase import default_argument_parser

_C = CN()
_C.data = CN(dict(batch_size=4, name="ljspeech", sizes=[1, 2]))
_C.training = CN(dict(lr=1e-3, valid_interval=3, save_interval=2, max_iteration=500000))


def main_sp(config, args):
    exp = Experiment(config, args)
    exp.setup()
    exp.run()
    return exp


def main(config, args):
    if args.nprocs > 1 and args.device == "gpu":
        return dist.spawn(main_sp, args=(config, args), nprocs=args.nprocs)
    return main_sp(config, args)


if __name__ == "__main__":
    config = _C.clone()
    args = default_argument_parser().parse_args()
    if args.config:
        config.merge_from_file(args.config)
    if args.opts:
        config.merge_from_list(args.opts)
    config.freeze()
    exp = main(config, args)
    network = exp.model
"""


def test_a_script_with_a_config_of_yacs_by_hand_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf.yaml").write_text("training:\n  max_iteration: 4\ndata: {name: other}\n")
    words = "--config conf.yaml --data data --output run --device cpu --nprocs 1"
    run_before("none", BY_HAND, f"{words} --opts training.lr 0.1 data.batch_size 5")
    assert [line["iteration"] for line in metrics(Path("run"))][-1] == 4
    assert load_yaml("run/config.yaml")["data"] == {
        "batch_size": 5, "name": "other", "sizes": [1, 2],
    }  # fmt: skip
    given = default_argument_parser().parse_args([*words.split(), "--opts", "a.b", "1"])
    theirs = {
        "config": "conf.yaml", "data": "data", "output": "run", "checkpoint_path": None,
        "device": "cpu", "nprocs": 1, "opts": ["a.b", "1"],
    }  # fmt: skip
    assert theirs.items() <= vars(given).items()
    # Of several none is lost: yacs refuses what only a Config takes.
    with pytest.raises(TypeError, match="not list"):
        run_before("none", BY_HAND, f"--config conf.yaml {words}")


def test_the_weights_of_fastnlp_are_read(old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old("fastnlp")[0])
    names = after("fastnlp", "Old weights")
    args = argparse.Namespace(output="new", device="cpu", init_model_path="output/line.pdparams")
    exp = names["Experiment"](names["Experiment"].default_config(), args)
    exp.setup()
    with exp.internals.closing():
        exp.resume_or_load()
    assert bits(exp.model) == [
        tensor.numpy().tobytes() for tensor in paddle.load("output/line.pdparams").values()
    ]


def test_a_folder_with_a_file_for_each_variable_is_read(
    old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(old("paddlehub")[0])
    names = after("paddlehub", "Old weights")
    expected = write_variables(Path(names["FromFolder"].folder))
    args = argparse.Namespace(output="from_folder", device="cpu")
    exp = names["FromFolder"](names["FromFolder"].default_config(), args)
    exp.setup()
    exp.close()
    assert bits(exp.model) == [expected["line_w"].tobytes(), expected["line_b"].tobytes()]
    Path("text").write_text("not a variable")
    with pytest.raises(ValueError, match="text: not a float32 variable"):
        names["read_variable"]("text")


def write_variables(folder: Path) -> dict[str, Any]:
    """What fluid.io.save_persistables wrote, by the function of today that still writes it."""
    paddle.enable_static()
    try:
        program, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(program, startup):
            x = paddle.static.data("x", [None, 1])
            paddle.static.nn.fc(
                x,
                1,
                weight_attr=paddle.ParamAttr(name="line_w"),
                bias_attr=paddle.ParamAttr(name="line_b"),
            )
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        folder.mkdir(parents=True)
        save = paddle.static.io.save_vars
        save(executor, str(folder), program, predicate=lambda variable: variable.persistable)
        scope = paddle.static.global_scope()
        names = ("line_w", "line_b")
        return {name: np.array(scope.find_var(name).get_tensor()) for name in names}
    finally:
        paddle.disable_static()


def test_the_components_of_palm_s_page_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line_data(tmp_path / "data")
    run_after(after("palm")["Experiment"], "run", {"data": "data/part-0"})
    assert "WARNING" not in Path("run/worker_0.log").read_text()
    errors = [line["valid/error"] for line in metrics(Path("run")) if "valid/error" in line]
    assert len(errors) == 5
    assert errors[-1] < errors[0]


@pytest.mark.long
def test_the_runs_of_paddlerec_s_page_train_and_evaluate(
    old: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = old("paddlerec")
    monkeypatch.chdir(folder)
    (command,) = blocks("paddlerec", "After", "bash")
    with importing_from(folder):
        assert __main__.main([*command.split()[3:], "--device", "cpu"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["checkpoint"] for line in found] == ["10", "20", "30", "40", "50"]
    assert found[-1]["error"] < found[0]["error"]


@pytest.mark.parametrize("page", TRAINERS)
@pytest.mark.parametrize("words", [{}, {"max_epoch": 12, "max_iteration": 12}])
@pytest.mark.long
def test_the_experiment_of_a_trainer_s_page_trains_also_for_as_long_as_verify_says(
    page: str, words: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = after(page)["Experiment"]
    config = experiment.default_config()
    config.training.update(words)
    exp = experiment(config, argparse.Namespace(output="run", device="cpu"))
    exp.setup()
    exp.run()
    assert exp.iteration == words.get("max_iteration", 50)
    assert "WARNING" not in Path("run/worker_0.log").read_text()
    if not words:
        assert exp.schedule.get_lr() == pytest.approx(0)  # the curve is as long as the run


@pytest.mark.parametrize("page", TRAINERS)
def test_the_events_and_keys_in_the_table_of_a_trainer_are_there(page: str) -> None:
    rows = re.findall(r"^\| `.*", section(page, "There and here"), re.MULTILINE)
    here = " ".join(row.split(" | ")[1] for row in rows)
    events = {*re.findall(r"\bon_\w+", here)}
    keys = {*re.findall(r"training\.(\w+)", here)}
    assert min(len(events), len(keys)) > 6
    assert events <= {*EVENTS, *OF_MIXINS}
    assert keys <= {*get_default_training_config()}


def test_the_table_of_paddlenlp_names_every_argument_of_its_old_script() -> None:
    calls = [
        n for n in ast.walk(ast.parse(blocks("paddlenlp", "Before")[0])) if isinstance(n, ast.Call)
    ]
    (arguments,) = (c for c in calls if ast.unparse(c.func) == "TrainingArguments")
    given = {keyword.arg for keyword in arguments.keywords}
    assert len(given) > 12
    assert given <= {*re.findall(r"\w+", section("paddlenlp", "There and here"))}


def names_used(code: str, page: str) -> set[str]:
    """What a script imports from a library, its methods, and what it calls of the library's."""
    nodes = [*ast.walk(ast.parse(code))]
    roots, used = {"model"} if page == "model_fit" else set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots |= {n.asname or n.name for n in node.names if n.name in IMPORTED}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in IMPORTED:
            roots |= (names := {alias.asname or alias.name for alias in node.names})
            used |= names
        elif isinstance(node, ast.ClassDef):
            if roots & {ast.unparse(base).split(".")[0] for base in node.bases}:
                roots.add(node.name)
            used |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for node in nodes:  # `trainer = Trainer(…)`: what is called of it is the library's, too
        if isinstance(node, ast.Assign):
            calls = [ast.unparse(n.func) for n in ast.walk(node.value) if isinstance(n, ast.Call)]
            if roots & {call.split(".")[0] for call in calls}:
                roots |= {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
    calls = [ast.unparse(node.func).split(".") for node in nodes if isinstance(node, ast.Call)]
    used |= {call[-1] for call in calls if len(call) > 1 and call[0] in roots}
    return {name for name in used if not name.startswith("__")}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("index", "plain_loop")])
def test_the_table_of_a_page_names_what_its_old_script_uses(page: str) -> None:
    table = " ".join(re.findall(r"`([^`]+)`", section(page, "There and here")))
    named = {*re.findall(r"\w+", table)}
    codes = blocks(page, "Before")
    used = set().union(*(names_used(code, page) for code in codes))
    for text in blocks(page, "Before", "yaml"):
        used |= {*re.findall(r"^ *(\w+):", text, re.MULTILINE)}
    assert len(used) > 5
    assert used - named == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page != "index"])
def test_a_page_says_in_its_order_what_was_and_what_is(page: str) -> None:
    found = re.findall(r"^## (.*)", (FOLDER / f"{page}.md").read_text(), re.MULTILINE)
    short = ["There and here", "Before", "After"]  # the table is what its readers look for
    expected = short if page in TRAINERS else HEADINGS
    assert [heading for heading in found if heading in HEADINGS] == expected
    assert found[-1] == "Old weights"
    assert f"[{page}.md]({page}.md)" in (FOLDER / "index.md").read_text()


# --- from 0.1 ----------------------------------------------------------------------------------


def now_and_then(heading: str) -> Iterator[tuple[list[str], list[str]]]:
    """The names of each row of a table of the changelog: those of before, and those of now."""
    text = (
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n### Upgrading from 0.1\n")[1]
    )
    for row in text.split(f"\n#### {heading}\n")[1].split("\n##")[0].splitlines():
        if row.startswith("| ") and row != "| before | now |":
            before, now = row.strip("| ").split(" | ")
            yield re.findall(r"`([^`]+)`", before), re.findall(r"`([^`]+)`", now)


def test_keys_of_0_1_are_unknown_and_those_that_are_named_instead_are_there() -> None:
    known = get_default_training_config()
    stopping = EarlyStopping.default_config()
    rows = [*now_and_then("Config")]
    assert len(rows) > 4
    for before, now in rows:
        for key in (name for name in before if "." in name):
            section_name, _, key = key.partition(".")
            config = stopping[section_name]
            with pytest.raises(ConfigError, match=f"{key}.*gone|unknown key"):
                Config({section_name: config}).merge_from_list([f"{section_name}.{key}", "1"])
        named = [name.removeprefix("training.") for name in now if name.startswith("training.")]
        assert {*named} <= {*known}


def test_modules_of_0_1_are_where_the_changelog_says() -> None:
    count = 0
    for before, now in now_and_then("Imports and files"):
        names = [name.removeprefix("expbase.") for name in before if " " not in name]
        folders = ("expbase.engine", "expbase.ranks", "expbase.record", "expbase.extras")
        if now and now[0] in folders:
            for name in names:
                importlib.import_module(f"{now[0]}.{name}")
                assert importlib.util.find_spec(f"expbase.{name}") is None
                count += 1
        for statement in (name for name in now if name.startswith("from ")):
            exec(statement, {})
    assert count > 8


def test_a_checkpoint_of_0_1_is_refused_as_the_changelog_says_and_its_weights_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    with monkeypatch.context() as patch:
        patch.setattr("expbase.checkpoint.rank_state.FORMAT", 6)  # what is written
        exp = trained(Tiny, old, max_iteration=4)
    path = sorted((old / "checkpoints").iterdir())[-1]
    with pytest.raises(CheckpointError) as error:
        trained(Tiny, old, max_iteration=8)
    (said,) = (name for _, now in now_and_then("A run that was begun") for name in now
               if name.startswith("has format"))  # fmt: skip
    assert said in str(error.value)
    new = make(Tiny, tmp_path / "new", {"init_model_path": str(path)})
    new.setup()
    new.resume_or_load()
    for name, value in exp.model.state_dict().items():
        assert (new.model.state_dict()[name].numpy() == value.numpy()).all()
    new.close()


# --- a script without main ---------------------------------------------------------------------


def test_options_do_in_a_script_without_main_what_they_do_in_main(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", f"{tmp_path}/lr{{optim.lr}}", "optim.lr=0.3"]
    exp = by_hand(*words, "--opts", "training.seed", "4")
    assert exp.output_dir == tmp_path / "lr0.3"
    assert (exp.config.optim.lr, exp.config.training.seed) == (0.3, 4)
    before = sorted(exp.output_dir.rglob("*"))
    capsys.readouterr()
    looking = by_hand(*words, "training.seed=4", "--evaluate", "step-4")
    assert '"loader": "valid_loader"' in capsys.readouterr().out
    assert looking.iteration == 4
    assert sorted(exp.output_dir.rglob("*")) == before


def test_a_checkpoint_that_is_not_there_is_told_before_the_data_is_built(tmp_path: Path) -> None:
    class Slow(Tiny):
        def setup_dataloader(self) -> None:
            raise AssertionError

    trained(Tiny, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"step-00000077: does not exist; there are"):
        trained(Slow, tmp_path / "run", {"evaluate": "77"})


def test_a_loop_by_hand_does_not_train_what_is_only_looked_at(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run")
    exp = make(Tiny, tmp_path / "run", {"evaluate": "last"})
    exp.setup()
    with pytest.raises(RuntimeError, match=r"--evaluate or --export only look; expected exp.run"):
        exp.going_on()
    exp.resume_or_load()  # as some of Parakeet's scripts have it before run()
    exp.run()
    assert exp.iteration == 6


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nprocs", "2"], r"--nprocs: is done by main\(Experiment\), which this script does not"),
        (["--nprocs", "auto"], r"--nprocs: is done by main\(Experiment\)"),
        (["--evaluate", "last", "--fresh"], "--fresh: given with --evaluate"),
    ],
)
def test_an_option_that_would_have_no_effect_without_main_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        by_hand("--output", "run", *words)
    assert not Path("run").exists()


def test_an_option_of_main_is_unknown_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="78"):
        by_hand("--output", "run", "--smoke")
    assert "unrecognized arguments: --smoke" in capsys.readouterr().err


def test_a_script_may_change_what_it_merged_and_have_options_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("optim: {lr: 0.3}\ntraining: {max_iteration: 9}\n")
    exp = by_hand("--output", "run", "--config", "c.yaml", max_iteration=2)
    assert exp.iteration == 2
    own = {"smoke": True, "opts": "x", "config": "x.json", "evaluate": False}
    assert trained(Tiny, tmp_path / "own", own, max_iteration=2).iteration == 2


@pytest.mark.long
def test_a_script_without_the_guard_whose_ranks_cannot_be_forked_is_told_so(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import threading\nfrom tiny import Tiny\nfrom expbase import main\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\nmain(Tiny)\n"
    )
    result = run_script(script, "--output", "run", "--nprocs", "2", "--device", "cpu")
    assert result.returncode == 78
    assert 'expected `if __name__ == "__main__":` before the last lines of it' in result.stderr


def test_an_error_names_the_option_and_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--output={tmp_path}/run", "--device=cpu", "training.max_iteration=2"]
    main(Tiny, argv=words)
    with pytest.raises(SystemExit, match=r"error: --output: '.*' holds a run of another config"):
        main(Tiny, argv=[*words, "training.seed=1"])
    with pytest.raises(ConfigError, match=r"^--output: '.*' holds a run of another config"):
        trained(Tiny, tmp_path / "run", seed=1)
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"training\.monitor: 'f1' given"):
        main(Tiny, argv=[f"--output={tmp_path}/monitored", *words[1:], "training.monitor=f1"])
    assert "ERROR" not in capsys.readouterr().err  # python prints the line when it ends
    assert "ended by ConfigError" in (tmp_path / "monitored/worker_0.log").read_text()


# --- Parakeet's files --------------------------------------------------------------------------


def step(model: Any, optimizer: Any, x: Any) -> None:
    loss = paddle.nn.functional.mse_loss(model(x), 3 * x + 1)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.step()


def old_run(folder: Path, optimizer_of: Any, layers: int = 1) -> dict[str, Any]:
    """Saves at iteration 24 as Parakeet does; returns the weights at iteration 40."""
    paddle.seed(5)
    model = paddle.nn.Sequential(*(paddle.nn.Linear(1, 1) for _ in range(layers)))
    model = model if layers > 1 else model[0]
    optimizer = optimizer_of(model.parameters())
    x = paddle.linspace(-1, 1, 200).reshape([-1, 1])
    folder.mkdir(parents=True)
    for iteration in range(1, 41):
        step(model, optimizer, x)
        if iteration in (9, 24):
            paddle.save(model.state_dict(), str(folder / f"step-{iteration}.pdparams"))
            paddle.save(optimizer.state_dict(), str(folder / f"step-{iteration}.pdopt"))
    (folder / "checkpoint").write_text("9:step-9\n24:step-24\n")
    (folder.parent / "config.yaml").write_text("training:\n  max_iteration: 40\n")
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def recipe(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The class of the page, on a single batch: the order of the old data is not known."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for code in (*blocks("parakeet", "After"), *blocks("parakeet", "Old weights")):
        exec(code, names)  # the documentation's own

    class Same(names["Moved"]):  # type: ignore[misc]
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            data = self.train_loader.dataset
            self.train_loader = paddle.io.DataLoader(data, batch_size=200)

    return Same


@pytest.mark.parametrize("scheduled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_recipe_of_the_page_goes_on_with_an_old_run_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduled: bool
) -> None:
    def optimizer_of(parameters: Any) -> Any:
        rate = paddle.optimizer.lr.StepDecay(0.02, step_size=5, gamma=0.7) if scheduled else 0.02
        return paddle.optimizer.Adam(rate, parameters=parameters)

    expected = old_run(tmp_path / "runs/old/checkpoints", optimizer_of)

    class Continued(recipe(monkeypatch, tmp_path)):  # type: ignore[misc]
        def setup_model(self) -> None:
            self.judge = paddle.nn.Linear(1, 1)  # automatic names are others than in the old run
            self.model = paddle.nn.Linear(1, 1)
            self.optimizer = optimizer_of(self.model.parameters())
            self.exclude_from_state("judge")

        def train_batch(self) -> None:
            super().train_batch()
            if scheduled:
                self.optimizer._learning_rate.step()

    settings = {"save_interval": 4, "log_interval": 1}
    trained(Continued, Path("runs/new"), max_iteration=30, **settings)
    exp = trained(Continued, Path("runs/new"), max_iteration=40, **settings)  # a start of its own
    assert [line["iteration"] for line in metrics(Path("runs/new")) if "train/loss" in line] == [
        *range(25, 41)
    ]
    for name, tensor in exp.model.state_dict().items():
        assert (tensor.numpy() == expected[name]).all(), name


def test_a_pdopt_that_is_not_the_layer_s_is_an_error(tmp_path: Path) -> None:
    old_run(tmp_path / "old", lambda p: paddle.optimizer.Adam(0.1, parameters=p), layers=2)
    read_pdopt = importlib.import_module("read_pdopt").read_pdopt
    with pytest.raises(ValueError, match=r"pdopt: 'linear_\d+\.w_0_moment1_0' is of no param"):
        read_pdopt(tmp_path / "old/step-24", paddle.nn.Linear(1, 1))


@pytest.mark.long
def test_from_weights_of_parakeet_a_run_begins_in_a_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "runs/old"
    old_run(old / "checkpoints", lambda p: paddle.optimizer.Adam(0.1, parameters=p))
    line = recipe(monkeypatch, tmp_path).__mro__[2]  # the class of the page
    for path in (old, old / "checkpoints"):
        with pytest.raises(CheckpointError, match="no intact checkpoint there"):
            trained(line, tmp_path / "new", {"checkpoint_path": str(path)})
        shutil.rmtree(tmp_path / "new")
    path = str(old / "checkpoints/step-9")
    exp = make(line, tmp_path / "new", {"init_model_path": path})
    exp.setup()
    exp.resume_or_load()
    assert (exp.model.weight.numpy() == paddle.load(f"{path}.pdparams")["weight"].numpy()).all()
    exp.close()
    (command,) = blocks("parakeet", "Old weights", "bash")
    main(line, argv=[*command.split()[2:], "--device=cpu", "training.max_iteration=2"])
    assert "2 fitted" in (tmp_path / "runs/new/worker_0.log").read_text()
