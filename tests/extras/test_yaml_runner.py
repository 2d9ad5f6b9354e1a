"""Runs from YAML: runners one after the other, stages in their places, mistakes by their keys."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from tiny import DEVICE, TESTS, Tiny, metrics, same_bits, trained

from expbase import ConfigError
from expbase.__main__ import main
from expbase.checkpoint.model_files import WeightsError
from expbase.extras import yaml_runner

TRAIN = """
import paddle
from tiny import TESTS, Tiny
from expbase import Config
from shape import SIZE

class Experiment(Tiny):
    size = SIZE

    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.update({"max_iteration": 4, "valid_interval": 2, "save_interval": 2})
        config.data = Config({"path": "", "more": [""]})
        return config
"""
DOCS = (Path(__file__).parents[2] / "experiments/ctr/README.md").read_text(encoding="utf-8")
STAGES = {
    "instance": "from tiny import TESTS, Notes\nclass Instance:\n    def instance(self, context):\n"
    "        context['trail'] = Notes(['instance'])\n",
    "network": "from tiny import TESTS, Tiny\n"
    "class Network:\n    def build_network(self, context):\n"
    "        context['trail'].append('network')\n        super().setup_model()\n"
    "        assert context['model'] is self.model\n",
    "startup": "class Startup:\n    def startup(self, context):\n"
    "        context['trail'].append('startup')\n"
    "        for parameter in context['model'].parameters():\n"
    "            parameter.set_value(parameter * 0)\n",
    "runner": "class Runner:\n    def run(self, context):\n"
    "        context['trail'].append('runner')\n        super().train()\n",
    "terminal": "class Terminal:\n    def terminal(self, context):\n"
    "        print('terminal after', *context['trail'])\n",
}
YAML = """
experiment: "{workspace}/train.py:Experiment"
runner:
- name: first
  class: single_train
  device: DEVICE
""".replace("DEVICE", DEVICE)


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports from its folder leaves with it: the next one has files of these names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with an experiment and the five stages."""
    return make_workspace(tmp_path)


def make_workspace(folder: Path, size: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "shape.py").write_text(f"SIZE = {size}\n")
    for name, text in STAGES.items():
        (folder / f"my_{name}.py").write_text(text)
    (folder / "c.yaml").write_text(YAML)
    return folder


def describe(workspace: Path, text: str) -> list[yaml_runner.ReadyRunner]:
    (workspace / "c.yaml").write_text(text)
    return yaml_runner.read(workspace / "c.yaml")


def stage_lines(*names: str) -> str:
    return "".join(f'  {name}_class_path: "{{workspace}}/my_{name}.py"\n' for name in names)


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.long
def test_runners_run_one_after_the_other_each_in_its_folder(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
experiment: train.py:Experiment
mode: [first, warm, look]
config:
  training: {log_interval: 1}
runner:
- {name: look, class: infer, init_model_path: "{output}/first", checkpoints: all}
- {name: first, class: train, epochs: 1, save_checkpoint_interval: 1, save_interval: 4}
- {name: warm, class: train, max_iteration: 2, init_model_path: runs/first, print_interval: 2,
   config: {training: {seed: 5}}}
"""
    (workspace / "c.yaml").write_text(text)
    assert main(["run", str(workspace / "c.yaml")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["runner"], line["iteration"]) for line in printed] == [
        ("look", 4), ("look", 8), ("look", 10),
    ]  # fmt: skip
    lines = (workspace / "runs/look/results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == printed
    logged = metrics(workspace / "runs/first")
    assert printed[-1]["accuracy"] == next(
        line["valid/accuracy"] for line in reversed(logged) if "valid/accuracy" in line
    )
    assert "loaded model from" in (workspace / "runs/warm/worker_0.log").read_text()
    config = (workspace / "runs/warm/config.yaml").read_text()
    assert "seed: 5" in config
    assert "log_interval: 2" in config
    # The same command continues: everything is finished.
    assert main(["run", str(workspace / "c.yaml")]) == 0
    assert (workspace / "runs/first/worker_0.log").read_text().count("FINISHED already") == 1


def test_a_run_from_yaml_is_the_run_of_the_class(workspace: Path) -> None:
    assert main(["run", str(workspace / "c.yaml")]) == 0
    experiment = importlib.import_module("train").Experiment
    trained(experiment, workspace / "by_class", max_iteration=4, valid_interval=2)
    step = "checkpoints/step-00000004"
    same_bits(workspace / "by_class" / step, workspace / "runs/first" / step)


def test_placeholders_are_filled_in_strings_lists_and_mappings(workspace: Path) -> None:
    (run,) = describe(
        workspace,
        YAML + 'config:\n  data: {path: "{workspace}/a", more: ["{output}/b", "{text}"]}\n'
        'workspace: .\noutput: "{workspace}/out"\n',
    )
    assert run.config.data.path == f"{workspace}/a"
    assert run.config.data.more == [f"{workspace}/out/b", "{text}"]
    assert run.args.output == f"{workspace}/out/first"


def test_what_comes_later_counts_and_epochs_alone_are_no_limit_of_iterations(
    workspace: Path,
) -> None:
    text = YAML + "  epochs: 1\n  config: {training: {max_epoch: 2}}\n"
    (run,) = describe(workspace, text)
    assert (run.config.training.max_epoch, run.config.training.max_iteration) == (2, 0)
    (run,) = describe(workspace, text + "  max_iteration: 3\n")
    assert run.config.training.max_iteration == 3


def test_only_names_one_runner_of_the_file_whatever_its_mode_is(workspace: Path) -> None:
    (workspace / "c.yaml").write_text(YAML + "- {name: other, class: train}\nmode: first\n")
    (run,) = yaml_runner.read(workspace / "c.yaml", only="other")
    assert run.runner.name == "other"
    with pytest.raises(ConfigError, match=r"no runner 'othre'\. Did you mean 'other'"):
        yaml_runner.read(workspace / "c.yaml", only="othre")


def test_the_output_may_be_given(workspace: Path) -> None:
    (run,) = yaml_runner.read(workspace / "c.yaml", output="elsewhere")
    assert run.args.output == str(Path("elsewhere/first").absolute())


@pytest.mark.parametrize("values", ["--opts training.seed=7", "training.seed=7"])
def test_the_options_of_the_tool_are_those_of_every_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, values: str
) -> None:
    found: list[yaml_runner.ReadyRunner] = []
    monkeypatch.setattr(yaml_runner, "execute", found.extend)
    (workspace / "c.yaml").write_text(YAML + "- {name: second, class: train}\n")
    words = ["--device", "gpu", "--fresh", "--force", *values.split()]
    assert main(["run", str(workspace / "c.yaml"), *words]) == 0
    assert [run.args.device for run in found] == [DEVICE, "gpu"]  # the runner's own comes first
    assert all(run.args.fresh and run.args.force for run in found)
    assert [run.config.training.seed for run in found] == [7, 7]


def test_an_infer_runner_takes_the_test_data_and_of_a_file_what_fits(workspace: Path) -> None:
    trained(Tiny, workspace / "run", max_iteration=1, valid_interval=0).save_model(
        workspace / "some.safetensors"
    )
    (workspace / "train.py").write_text(
        TRAIN + "\n    def setup_dataloader(self):\n        super().setup_dataloader()\n"
        "        self.test_loader = [(paddle.zeros([7, 4]), paddle.zeros([7], 'int64'))]\n\n"
        "    def valid(self):\n"
        "        return {'size': sum(len(y) for _, y in self.valid_batches())}\n\n"
        "    def setup_model(self):\n        super().setup_model()\n"
        "        self.model.add_sublayer('more', paddle.nn.Linear(2, 2))\n"
    )
    text = "\nexperiment: train.py:Experiment\nrunner:\n- {name: look, class: infer, device: cpu, "
    text += "init_model_path: some.safetensors, init_partial: "
    yaml_runner.execute(describe(workspace, text + "true}"))
    (line,) = (workspace / "runs/look/results.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "runner": "look", "checkpoint": f"{workspace}/some.safetensors", "iteration": 0, "size": 7,
    }  # fmt: skip
    with pytest.raises(WeightsError, match="more"):
        yaml_runner.execute(describe(workspace, text + "false}"))


def test_all_checkpoints_of_a_checkpoint_are_that_one(workspace: Path) -> None:
    look = "- {name: look, class: infer, checkpoints: all, init_model_path: "
    path = "{output}/first/checkpoints/step-00000002"
    (workspace / "c.yaml").write_text(f'{YAML}{look}"{path}"}}\n')
    assert main(["run", str(workspace / "c.yaml")]) == 0
    (line,) = (workspace / "runs/look/results.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 2


def test_nprocs_starts_the_file_in_so_many_processes(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def spawn(*words: Any) -> int:
        started.append(pickle.loads(pickle.dumps(words)))
        return 7

    monkeypatch.setattr(yaml_runner, "spawn", spawn)
    words = ["run", str(workspace / "c.yaml"), "--nprocs", "2", "--device", "cpu"]
    assert main(words) == 7  # the exit code of the processes
    [(function, (args,), nprocs, device)] = started
    assert (nprocs, device) == (2, "cpu")
    function(args)
    assert (workspace / "runs/first/checkpoints/step-00000004").exists()
    (workspace / "c.yaml").write_text(YAML + "mode: frist")
    with pytest.raises(SystemExit) as ended:
        function(args)
    assert ended.value.code == 78


def test_a_run_that_was_stopped_ends_the_others(workspace: Path) -> None:
    text = YAML + "- {name: second, class: train}\n"
    (workspace / "c.yaml").write_text(text)
    (workspace / "runs/first").mkdir(parents=True)
    (workspace / "runs/first/STOP").touch()
    assert main(["run", str(workspace / "c.yaml")]) == 0
    assert not (workspace / "runs/second").exists()


CHAIN = """
experiment: "{workspace}/train.py:Experiment"
runner:
- {name: first, class: train, device: cpu}
- {name: second, class: train, device: cpu}
- {name: third, class: train, device: cpu}
"""


@pytest.mark.long
def test_a_chain_that_is_given_again_goes_on_where_it_was_killed(workspace: Path) -> None:
    (workspace / "chain.yaml").write_text(CHAIN)
    script = (
        "import os, sys; from expbase.__main__ import main; from tiny import TESTS, Tiny\n"
        "update = Tiny.train_batch\n"
        "def train_batch(self):\n"
        "    if self.output_dir.name == 'second' and self.iteration == 3:\n"
        "        self._ExperimentBase__run.checkpointer.close()\n"  # until it is written
        "        os._exit(9)\n"
        "    update(self)\n"
        "Tiny.train_batch = train_batch\n"
        "main(['run', 'chain.yaml'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    killed = forks.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=workspace, env=environment
    )
    assert killed.returncode == 9, killed.stderr
    assert not (workspace / "runs/third").exists()
    for _ in range(2):
        yaml_runner.execute(yaml_runner.read(workspace / "chain.yaml"))
        for name in ("first", "second", "third"):
            assert (workspace / "runs" / name / "checkpoints/step-00000004").exists()
    log = (workspace / "runs/second/worker_0.log").read_text()
    assert "resumed step-00000002" in log
    assert log.count("FINISHED already") == 1


# --- stages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["network", "runner", "terminal"])
def test_each_stage_alone_replaces_its_step_and_is_seen_once(
    workspace: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ("instance", stage)
    (workspace / "c.yaml").write_text(YAML + stage_lines(*needed))
    assert main(["run", str(workspace / "c.yaml")]) == 0
    log = (workspace / "runs/first/worker_0.log").read_text()
    for name in needed:
        assert log.count(f"stage {name}: ") == 1, log
    assert "[4] FINISHED" in log
    assert ("terminal after instance\n" in capsys.readouterr().out) == (stage == "terminal")


def test_all_stages_together_come_in_order_and_a_resume_overrides_the_startup(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = YAML + stage_lines(*STAGES)
    (workspace / "c.yaml").write_text(text)
    for end in ("2", "4"):
        assert (
            main(["run", str(workspace / "c.yaml"), "--opts", "training.max_iteration", end]) == 0
        )
    assert main(["run", str(workspace / "c.yaml"), "--output", str(workspace / "whole")]) == 0
    line = "terminal after instance network startup runner"
    assert capsys.readouterr().out.splitlines() == [line] * 3
    log = (workspace / "runs/first/worker_0.log").read_text()
    assert re.findall(r"stage (\w+):", log) == [*STAGES, *STAGES]
    step = "first/checkpoints/step-00000004"
    same_bits(workspace / "runs" / step, workspace / "whole" / step)


def test_terminal_comes_after_a_failure_too(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "my_runner.py").write_text(
        "class Runner:\n    def run(self):\n        raise ArithmeticError('the original')\n"
    )
    (workspace / "c.yaml").write_text(YAML + stage_lines("instance", "runner", "terminal"))
    with pytest.raises(ArithmeticError, match="the original"):
        main(["run", str(workspace / "c.yaml")])
    assert capsys.readouterr().out == "terminal after instance\n"


def test_an_init_of_the_seeds_shape_is_not_called(workspace: Path) -> None:
    (workspace / "my_startup.py").write_text(
        "class Startup:\n    def __init__(self, context):\n        raise SystemError\n"
        "    def startup(self, context):\n        context['status'] = 'train_pass'\n"
    )
    (workspace / "c.yaml").write_text(YAML + stage_lines("startup"))
    assert main(["run", str(workspace / "c.yaml")]) == 0


def test_the_walk_of_tdm_fill_from_a_file_save_and_warm_start_later(workspace: Path) -> None:
    np.save(workspace / "table.npy", np.full([4, 8], 0.5, "float32"))
    (workspace / "tdm_startup.py").write_text(
        "import numpy as np\n"
        "class Startup:\n"
        "    def startup(self, context):\n"
        "        self._fill(context)\n"
        "    def _fill(self, context):\n"
        "        table = np.load(context['config'].data.path)\n"
        "        context['model'][0].weight.set_value(table)\n"
        "        context['status'] = 'train_pass'\n"
    )
    runs = describe(
        workspace,
        """
experiment: "{workspace}/train.py:Experiment"
config: {data: {path: "{workspace}/table.npy"}}
runner:
- {name: runner1, class: single_train, max_iteration: 2, device: cpu,
   startup_class_path: "{workspace}/tdm_startup.py"}
- {name: later, class: single_train, max_iteration: 1, device: cpu,
   init_model_path: "{output}/runner1"}
""",
    )
    filled: list[Any] = []
    for run in runs:
        base: Any = run.experiment

        class Looking(base):
            def on_train_begin(self) -> None:
                filled.append(self.model[0].weight.numpy())

        run.experiment = Looking
    yaml_runner.execute(runs)
    assert (filled[0] == 0.5).all()
    assert not (filled[1] == 0.5).any()
    assert abs(filled[1] - 0.5).max() < 0.1


def test_stages_of_paddlerecs_form_read_its_context_and_call_its_save(workspace: Path) -> None:
    (workspace / "my_startup.py").write_text(
        "from expbase.extras.stage_classes import EngineMode\n"
        "class Startup:\n"
        "    def startup(self, context):\n"
        "        if context['engine'] == EngineMode.SINGLE:\n"
        "            self._single_startup(context)\n"
        "        context['status'] = 'train_pass'\n"
        "    def _single_startup(self, context):\n"
        "        names = ['runner_name', 'is_infer', 'is_fleet', 'device', 'status', 'engine']\n"
        "        print(*[context.get(name) for name in names], 'engine' in context)\n"
    )
    (workspace / "my_runner.py").write_text(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[1])
    (workspace / "my_terminal.py").write_text(
        "class Terminal:\n    def terminal(self, context):\n        context['exe'].close()\n"
    )
    text = YAML + "  epochs: 2\n  save_interval: 0\n"
    (workspace / "c.yaml").write_text(text + stage_lines("startup", "runner", "terminal"))
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(
            KeyError, match=r"context\['exe'\]: no attribute of the experiment, and none"
        ),
    ):
        main(["run", str(workspace / "c.yaml")])
    assert printed.getvalue() == "first False False CPU None 1 True\n"
    saved = sorted(path.name for path in (workspace / "runs/first/checkpoints").iterdir())
    assert saved == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "self.load(context, main_program=None)",
            "load: PaddleRec's stages had it; a runner's init",
        ),
        (
            "self._run(context, {})",
            "_run: PaddleRec's stages had it; expected `while self.going_on()",
        ),
        ("self._run()\n    def _run(self):\n        print('mine')", ""),
    ],
)
def test_what_the_bases_of_paddlerecs_stages_had_says_what_to_do(
    workspace: Path, call: str, message: str
) -> None:
    (workspace / "my_startup.py").write_text(
        f"class Startup:\n    def startup(self, context):\n        {call}\n"
    )
    (workspace / "c.yaml").write_text(YAML + stage_lines("startup"))
    if not message:
        assert main(["run", str(workspace / "c.yaml")]) == 0
        return
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        main(["run", str(workspace / "c.yaml")])


def test_a_file_that_another_one_imports_is_executed_once(workspace: Path) -> None:
    (workspace / "shape.py").write_text("print('executed')\nSIZE = 40\n")
    (workspace / "my_startup.py").write_text(
        "from train import Experiment\n\nclass Startup:\n    def startup(self):\n"
        "        from shape import SIZE  # while it runs\n"
        "        assert isinstance(self, Experiment)\n"
    )
    (workspace / "c.yaml").write_text(YAML + stage_lines("startup"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["run", str(workspace / "c.yaml")]) == 0
    assert printed.getvalue() == "executed\n"


def test_a_file_with_the_name_of_a_module_is_refused(workspace: Path) -> None:
    (workspace / "json.py").write_text("class Experiment: ...\n")
    with pytest.raises(ConfigError, match=r"json\.py has the name of a module .*json/__init__\.py"):
        describe(workspace, YAML.replace("train.py", "json.py"))


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runner: []", "experiment: '' names no class; expected file.py:Class"),
        ("experiment: train.py:Experiment", "runner: expected a list of `- name: …` sections"),
        (YAML + "mode: frist", "mode: no runner 'frist'. Did you mean 'first'?"),
        (YAML + "moed: first", "unknown key 'moed'. Did you mean 'mode'?"),
        (YAML + "  epohcs: 2", "runner[0]: unknown key 'epohcs'. Did you mean 'epochs'?"),
        (YAML + "phase: [{name: a}]", "c.yaml: unknown key 'phase'. Expected one of config, exp"),
        (
            YAML.replace("single_train", "cluster_train"),
            "runner[0].class: 'cluster_train' given",
        ),
        (YAML.replace("train.py", "trian.py"), "experiment: {w}/trian.py does not exist"),
        (YAML.replace(":Experiment", ":Exp"), "train.py has no class 'Exp'."),
        (YAML.replace(":Experiment", ""), "names no class; expected"),
        (
            YAML + "  startup_class_path: no.py",
            "runner first: startup_class_path: no.py does not exist ({w}/no.py)",
        ),
        (YAML + "  startup_class_path: my_terminal.py", "has no class 'Startup'."),
        (
            YAML + "  startup_class_path: my_terminal.py:Terminal",
            "Terminal has no method 'startup'",
        ),
        (YAML + "config: {optim: {lr: 1}}", "config: unknown key 'optim.lr'"),
        (YAML + "  epochs: many", "runner first: training.max_epoch: 'many' given"),
        (YAML + "  epochs: 0", "runner first: epochs: 0 given; expected 1 or more"),
        (
            YAML + "  epochs: 1\n  config: {training: 2}",
            "runner first: config: training: 2 given; expected",
        ),
        (YAML + "- {name: b, class: infer}", "runner[1].init_model_path: not given"),
        (YAML + "  init_model_path: {output}", "unknown key 'init_model_path.output'"),
        (YAML + "  init_model_path: {output}/a", "not YAML: while parsing a block mapping"),
        (YAML + "- {name: first, class: infer}", "runner[1].name: 'first' given; expected"),
        (YAML.replace("name: first", "name: a/b"), "name: 'a/b' given; expected a name for a"),
        (
            YAML.replace("{workspace}/train.py", "no.such"),
            "experiment: no.such cannot be imported",
        ),
        (
            YAML.replace("{workspace}/train.py:Experiment", "json:JSONDecoder"),
            "is no ExperimentBase",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(
    workspace: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(workspace, text)
    assert message.replace("{w}", str(workspace)) in str(caught.value)


def test_a_syntax_error_in_a_stage_comes_as_it_is(workspace: Path) -> None:
    (workspace / "my_startup.py").write_text("class Startup:\n    def startup(self) return\n")
    with pytest.raises(SyntaxError, match=r"my_startup\.py, line 2"):
        describe(workspace, YAML + stage_lines("startup"))


def test_an_import_of_a_stage_that_fails_is_named_with_its_key(workspace: Path) -> None:
    text = "from paddlerec.core.model import ModelBase\nclass Network(ModelBase):\n    pass\n"
    (workspace / "my_network.py").write_text(text)
    (workspace / "c.yaml").write_text(YAML + "  network_class_path: my_network.py\n")
    with pytest.raises(ConfigError, match=r"network_class_path: .* No module named 'paddlerec'"):
        yaml_runner.read(workspace / "c.yaml")


def test_a_stage_that_hides_something_is_refused(workspace: Path) -> None:
    (workspace / "my_startup.py").write_text(STAGES["startup"] + "    def close(self): ...\n")
    with pytest.raises(ConfigError, match=r"Startup\.close would hide what the experiment has"):
        describe(workspace, YAML + stage_lines("startup"))


def test_stages_that_hide_something_of_each_other_are_refused(workspace: Path) -> None:
    for name in ("startup", "instance"):
        text = f"{STAGES[name]}    def helper(self): ...\n"
        (workspace / f"my_{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=r"Instance\.helper and Startup\.helper would hide each"):
        describe(workspace, YAML + stage_lines("startup", "instance"))


def test_the_tool_says_a_mistake_in_a_line_and_answers_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "no.yaml"])
    assert str(ended.value).startswith("python -m expbase run: error: no.yaml: cannot be read")
    assert "Traceback" not in capsys.readouterr().err


def test_the_example_of_the_docs_runs(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "c.yaml").write_text(re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)[0])
    (workspace / "my_startup.py").write_text(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[0])
    assert main(["run", str(workspace / "c.yaml")]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["checkpoint"] for line in found] == ["2", "4"]


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_the_docs_start_two_processes(workspace: Path, number: int) -> None:
    command = re.findall(r"^.*nproc.* 2.*$", DOCS, re.MULTILINE)[number]
    (workspace / "config.yaml").write_text(YAML)
    python = workspace / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, *shlex.split(command)[1:]]
    result = forks.run(words, cwd=workspace, env=environment)
    assert result.returncode == 0, result.stderr
    log = workspace / "runs/first/worker_0.log"
    assert "ranks: 2" in log.read_text()
    assert "[4] FINISHED" in log.read_text()


def test_the_docs_name_every_key_of_a_runner() -> None:
    for key in yaml_runner.RUNNER_KEYS:
        assert key in DOCS or key in ("data", "init_partial", "checkpoint_path"), key
