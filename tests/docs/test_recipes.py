"""docs/recipes: each script keeps what its page says; the pages show only lines that are run.

What the scripts of docs/recipes_around.md are for is in test_recipes_around.py.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.amp import grad_scaler
from pages import code_of
from tiny import curve, run_script, same_bits

from expbase import ExperimentBase, main
from expbase.checkpoint.model_files import read_weights
from expbase.checkpoint.named import find_at
from expbase.extras.all_events import AllEvents

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCRIPTS = sorted((DOCS / "recipes").glob("*.py"))
PAGES = ("recipes.md", "recipes_around.md")
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", DOCS / f"recipes/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def experiment_of(name: str) -> Any:
    classes = vars(module_of(name)).values()
    own = [c for c in classes if getattr(c, "__module__", "") == f"recipe_{name}"]
    return next(c for c in own if isinstance(c, type) and issubclass(c, ExperimentBase))


def run(recipe: Any, output: Path, *words: str) -> Any:
    experiment = experiment_of(recipe) if isinstance(recipe, str) else recipe
    return main(experiment, argv=["--output", str(output), "--device=cpu", *words])


def arrays(layer: Any) -> list[np.ndarray]:
    return [parameter.numpy() for parameter in layer.parameters()]


def told(output: Path) -> str:
    return (output / "worker_0.log").read_text()


# --- the page --------------------------------------------------------------------------------

SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


def test_every_script_has_a_section_and_a_command_line() -> None:
    linked = [re.findall(r"\]\(recipes/(\w+)\.py\)", section) for section in SECTIONS]
    assert sorted(name for name, *_ in linked) == [script.stem for script in SCRIPTS]
    for script in SCRIPTS:
        text = script.read_text()
        assert re.search(r'\nif __name__ == "__main__":\n    .*\)\n$', text), script.name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_the_lines_that_the_page_shows_stand_in_the_script(section: str) -> None:
    name, *_ = re.findall(r"\]\(recipes/(\w+)\.py\)", section)
    text = (DOCS / f"recipes/{name}.py").read_text()
    shown = code_of(section, "python")
    assert shown
    for block in shown:
        for part in block.split("\n\n"):  # between two of them lines may be left out
            mark, *rest = part.splitlines()
            is_mark = re.fullmatch("# in .*|# outside of the class", mark)
            lines = [line.strip() for line in (rest if is_mark else [mark, *rest])]
            of_method = re.fullmatch(r"# in (\w+)", mark)
            place = source_of(text, of_method[1]) if of_method else text
            script = [line.strip() for line in place.splitlines()]
            starts = [i for i, line in enumerate(script) if line == lines[0]]
            assert any(script[i : i + len(lines)] == lines for i in starts), part


def source_of(text: str, name: str) -> str:
    """The last function of this name in a script: of its experiment, or of the script itself."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    last = [n for n in found if n.name == name][-1]
    return "\n".join(text.splitlines()[last.lineno - 1 : last.end_lineno])


def test_the_lines_that_the_page_shows_can_be_pasted() -> None:
    for block in code_of(PAGE, "python"):
        compile(block, block.splitlines()[0], "exec")


def commands() -> list[list[str]]:
    """The words of the page's commands, those of a loop once for each of its values."""
    words = []
    for line in "".join(code_of(PAGE, "bash")).splitlines():
        loop = re.fullmatch(r"for (\w+) in (.*); do (.*); done", line)
        name, values, command = loop.groups() if loop else ("", "-", line)
        words += [shlex.split(command.replace(f"${name}", value)) for value in values.split()]
    return words


def test_the_commands_of_the_page_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """What they do is tested below, with fewer iterations."""
    for python, script, *words in commands():
        assert python == "python"
        if script == "-m":
            assert words == ["expbase", "ls", "runs"]
        elif Path(script).stem in ("folds", "pandas_table", "study", "test_warmup"):
            assert (ROOT / script).exists()  # they are no experiments themselves
            assert not words
        else:
            main(experiment_of(Path(script).stem), argv=[*words, "--print_config"])
    printed = capsys.readouterr().out
    assert "0.1" in re.findall(r"^  lr: (.*)", printed, re.MULTILINE)
    assert re.findall(r"batch_size: (\d+)", printed) == ["20", "40"]


# --- what each promises ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `warmup`, whose model others begin with."""
    output = tmp_path_factory.mktemp("warmed") / "run"
    words = ["training.max_iteration=40", "optim.warmup_iterations=10", "training.log_interval=1"]
    run("warmup", output, *words)
    return output


@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled")
def test_mixed_precision_scales_steps_and_saves_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["training.max_iteration=3", "training.save_interval=3"]
    plain = run("mixed_precision", tmp_path / "plain", *words)
    # A scaler that thinks it is on a GPU; the casts have no effect here, and paddle says so.
    tracer = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: tracer)
    monkeypatch.setattr(grad_scaler.amp_global_state(), "amp_dtype", "float16")
    monkeypatch.setattr(grad_scaler, "float", lambda x: np.asarray(x).item(), raising=False)
    scaled = run("mixed_precision", tmp_path / "scaled", *words)
    assert scaled.scaler.is_enable()
    assert not plain.scaler.is_enable()
    for one, other in zip(arrays(plain.model), arrays(scaled.model), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert '"scaler"' in (find_at(tmp_path / "scaled") / "state.json").read_text()


def test_bfloat16_rounds_factors_and_not_weights(tmp_path: Path) -> None:
    exp = run("bfloat16", tmp_path, "training.max_iteration=40", "training.log_interval=1")
    first, x = exp.model[0], paddle.randn([5, 64])
    assert first.weight.dtype == paddle.float32
    assert (first.weight.numpy() != first.weight.astype("bfloat16").astype("float32").numpy()).any()
    exact = paddle.nn.functional.linear(x, first.weight, first.bias).numpy()
    error = np.abs(first(x).numpy() - exact).max()
    assert 0 < error < 2**-6 * np.abs(exact).max()
    losses = curve(tmp_path, "train/loss")
    assert losses[40] < losses[1] / 1.5


def test_the_rate_goes_up_and_comes_down_to_zero(warmed: Path) -> None:
    rates = [*curve(warmed, "train/lr").values()]  # after each update
    assert rates[:10] == sorted(rates[:10])
    assert rates[9] == max(rates) == 1e-2
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # in paddle's own LBFGS
def test_lbfgs_continues_to_the_same_bits_by_what_it_remembers(tmp_path: Path) -> None:
    class Forgetful(experiment_of("lbfgs")):  # type: ignore[misc]
        def setup_model(self) -> None:
            super().setup_model()
            del self.memory

    words = ["training.save_interval=9", "training.valid_interval=4"]
    ends = {}
    for recipe in (experiment_of("lbfgs"), Forgetful):
        for name, stops in (("straight", [9]), ("again", [4, 9])):
            output = tmp_path / recipe.__name__ / name
            for stop in stops:
                exp = run(recipe, output, *words, f"training.max_iteration={stop}")
            ends[recipe, name] = exp.model[0].weight.numpy()
    assert curve(tmp_path / "Decay/again", "valid/error")[9] < 0.1
    same_bits(*(find_at(tmp_path / "Decay" / name) for name in ("straight", "again")))
    assert (ends[Forgetful, "straight"] != ends[Forgetful, "again"]).any()


@pytest.mark.long
def test_the_second_loader_continues_exactly(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Noting(experiment_of("two_loaders")):  # type: ignore[misc]
        def read_labelled(self) -> Any:
            images, labels = super().read_labelled()
            seen.append([tuple(image) for image in images.tolist()])
            return images, labels

    words = ["training.save_interval=15", "training.valid_interval=0"]
    run(Noting, tmp_path / "straight", *words, "training.max_iteration=15")
    straight = seen.copy()
    for one_pass in (straight[:6], straight[6:12]):  # 6 batches of 16: whole ones of 100 samples
        assert len({image for batch in one_pass for image in batch}) == 96
    assert straight[0] != straight[6]
    del seen[:]
    for stop in (4, 9, 15):  # within a pass, and over the end of one
        run(Noting, tmp_path / "again", *words, f"training.max_iteration={stop}")
    assert seen == straight
    same_bits(*(find_at(tmp_path / name) for name in ("straight", "again")))


WITH_WORKERS = """
import sys
from paddle.io import DataLoader
from expbase import main
sys.path.insert(0, {folder!r})
from two_loaders import SemiSupervised

class WithWorkers(SemiSupervised):
    def setup_dataloader(self):
        super().setup_dataloader()
        data = self.train_loader.dataset
        self.train_loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1)

if __name__ == "__main__":
    main(WithWorkers)
"""


@pytest.mark.long
def test_the_second_loader_has_the_same_bits_on_any_number_of_ranks_and_with_workers(
    tmp_path: Path,
) -> None:
    script = tmp_path / "with_workers.py"
    script.write_text(WITH_WORKERS.format(folder=str(DOCS / "recipes")))
    words = ["training.shares=2", "training.valid_interval=0", "training.save_interval=4"]
    words += ["--device", "cpu"]
    run("two_loaders", tmp_path / "one", *words[:-2], "training.max_iteration=10")
    for stop in (4, 10):  # 8 batches of 16, and over the end of passes of 6
        more = ["--output", "two", "--nprocs", "2", f"training.max_iteration={stop}"]
        assert run_script(script, *words, *more).returncode == 0
    same_bits(*(find_at(tmp_path / name) for name in ("one", "two")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "dies_in", "moments"),
    [
        ("two_optimizers", ["optim.switch_loss=2"], [6, 20], {1: 0, 28: 1}),
        ("curriculum", [], [9, 38], {1: 0.05, 24: 0.05, 25: 0.1}),
        ("growing_batch", ["data.batch_size=128", "data.most=512"], [6, 14], {1: 128, 13: 256}),
        ("freezing", ["optim.frozen_epochs=1"], [22, 34], {}),  # thawed in update 31
    ],
)
def test_what_changes_on_the_way_continues_exactly_after_a_failure_in_mid_epoch(
    name: str, words: list[str], dies_in: list[int], moments: dict[int, float], tmp_path: Path
) -> None:
    class Dying(experiment_of(name)):  # type: ignore[misc]
        moment = 0

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == Dying.moment:
                raise RuntimeError("died")

    words += ["training.save_interval=4", "training.valid_interval=0", "training.log_interval=1"]
    words += ["training.max_iteration=42"]
    run(Dying, tmp_path / "straight", *words)
    for Dying.moment in dies_in:
        with pytest.raises(RuntimeError, match="died"):
            run(Dying, tmp_path / "again", *words)
    Dying.moment = 0
    run(Dying, tmp_path / "again", *words)
    same_bits(*(find_at(tmp_path / run_name) for run_name in ("straight", "again")))
    changing = {"two_optimizers": "uses_sgd", "curriculum": "noise", "growing_batch": "batch_size"}
    values = curve(tmp_path / "again", f"train/{changing.get(name, 'loss')}")
    assert {at: pytest.approx(values[at]) for at in moments} == moments
    assert told(tmp_path / "again").count("resumed step-") == 2
    of_a_container = "/dev/shm has room for"  # curriculum has a worker
    lines = told(tmp_path / "again").splitlines()
    assert not [line for line in lines if "WARNING" in line and of_a_container not in line]


def test_the_parts_learn_at_different_rates(warmed: Path, tmp_path: Path) -> None:
    trained = read_weights(find_at(warmed))["model"]
    options = ["--init_model_path", str(warmed), "--init_partial"]

    class Noting(experiment_of("fine_tuning")):  # type: ignore[misc]
        def on_train_begin(self) -> None:
            self.before = arrays(self.model)

    exp = run(Noting, tmp_path / "run", "training.max_iteration=1", *options)
    weight = trained["0.weight"]
    np.testing.assert_array_equal(exp.before[0].tobytes(), weight.data.tobytes())
    # The first step of Adam moves every weight by its rate.
    moved = [np.abs(a - b).max() for a, b in zip(arrays(exp.model), exp.before, strict=True)]
    np.testing.assert_allclose(moved, [1e-3, 1e-3, 1e-2, 1e-2], rtol=1e-2)


def test_what_is_frozen_stays_and_is_trained_when_it_is_thawed(tmp_path: Path) -> None:
    class Noting(experiment_of("freezing")):  # type: ignore[misc]
        def on_train_batch_end(self) -> None:
            weights = {k: v.numpy() for k, v in self.unwrap(self.model).state_dict().items()}
            noted[self.iteration] = weights

    noted: dict[int, dict[str, np.ndarray]] = {}
    run(Noting, tmp_path, "optim.frozen_epochs=1", "training.max_iteration=31")
    moved = [
        {name for name, there in noted[first].items() if (there != noted[last][name]).any()}
        for first, last in ((1, 30), (30, 31))
    ]
    assert moved == [{"3.weight", "3.bias"}, noted[1].keys()]
    assert {"1._mean", "1._variance"} < moved[1]
    assert "WARNING" not in told(tmp_path)


@pytest.mark.long
def test_what_is_thawed_on_two_ranks_is_averaged_and_continues_exactly(tmp_path: Path) -> None:
    words = ["--nprocs", "2", "--device", "cpu", "optim.frozen_epochs=1"]
    for name, stops in (("straight", [30]), ("again", [22, 30])):  # thawed in update 16
        for stop in stops:
            more = ["--output", str(tmp_path / name), f"training.max_iteration={stop}"]
            assert run_script(DOCS / "recipes/freezing.py", *words, *more).returncode == 0
        assert not re.search("WARNING|not exact", told(tmp_path / name))
    same_bits(*(find_at(tmp_path / name) for name in ("straight", "again")))


def test_gradients_are_clipped_as_paddle_clips_them_and_the_norm_is_logged(tmp_path: Path) -> None:
    class ByPaddle(experiment_of("clipping")):  # type: ignore[misc]
        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer._grad_clip = paddle.nn.ClipGradByGlobalNorm(max_norm)

    max_norm = 0.1
    words = ["training.max_iteration=5", "training.log_interval=1"]
    exp = run("clipping", tmp_path / "mixin", *words, f"clipping.max_norm={max_norm}")
    other = run(ByPaddle, tmp_path / "paddle", *words, "clipping.max_norm=0")
    for one, two in zip(arrays(exp.model), arrays(other.model), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    norms = curve(tmp_path / "mixin", "train/grad_norm")
    assert min(norms.values()) > max_norm
    assert curve(tmp_path / "paddle", "train/grad_norm") == pytest.approx(norms, rel=1e-4)


NOTING = """
import sys
import numpy as np
from expbase import main
sys.path.insert(0, {folder!r})
import tokens

class Noting(tokens.{cls}):
    def setup_model(self):
        super().setup_model()
        self.read, self.before = [], [p.numpy() for p in self.model.parameters()]
        self.exclude_from_state("read")

    def read_batch(self):
        batch = super().read_batch()
        self.read += [tensor.numpy() for tensor in batch]
        return batch

    def on_before_optimizers_step(self):
        gradients = [p.grad.numpy() for p in self.model.parameters()]
        np.savez(f"rank{{self.rank}}.npz", *self.before, *gradients, *self.read)

if __name__ == "__main__":
    main(Noting)
"""


def by_hand(table: Any, weight: Any, bias: Any, tokens: Any, labels: Any) -> list[np.ndarray]:
    """The gradients of the mean over these tokens: of an embedding, and of a linear layer."""
    hidden = table[tokens]
    logits = hidden @ weight + bias
    grad = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    grad[np.arange(len(labels)), labels] -= 1
    grad /= len(labels)
    of_table = np.zeros_like(table)
    np.add.at(of_table, tokens, grad @ weight.T)
    return [of_table, hidden.T @ grad, grad.sum(axis=0)]


@pytest.mark.long
@pytest.mark.parametrize(("cls", "nprocs", "words"), [
    ("Tokens", 1, ["training.accumulation_steps=2"]),
    ("Tokens", 2, ["training.accumulation_steps=2"]),
    ("TokensInShares", 2, ["training.accumulation_steps=1", "training.shares=4"]),
])  # fmt: skip
def test_each_token_of_an_update_weighs_the_same_in_whatever_batch_and_rank(
    cls: str, nprocs: int, words: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOTING.format(folder=str(DOCS / "recipes"), cls=cls))
    words = [*words, "--device", "cpu", "training.max_iteration=1", "--nprocs", str(nprocs)]
    done = run_script(script, *words, "--output", "run")
    assert done.returncode == 0, done.stderr
    ranks = [[*np.load(tmp_path / f"rank{rank}.npz").values()] for rank in range(nprocs)]
    before = [array.astype("float64") for array in ranks[0][:3]]
    read = [array for rank in ranks for array in rank[6:]]
    tokens, labels = ([part[y >= 0] for part, y in zip(x, read[1::2], strict=True)]
                      for x in (read[::2], read[1::2]))  # fmt: skip
    assert len({len(part) for part in tokens}) == 2 * nprocs  # uneven batches
    expected = by_hand(*before, np.concatenate(tokens), np.concatenate(labels))
    for gradients in (rank[3:6] for rank in ranks):
        for gradient, there in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(gradient, there, atol=5e-7)


@pytest.mark.long
def test_tokens_in_shares_end_with_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "tokens.py"
    text = (DOCS / "recipes/tokens.py").read_text()
    script.write_text(text.replace("main(Tokens)", "main(TokensInShares)"))
    words = ["--device", "cpu", "training.max_iteration=4", "training.shares=4"]
    words += ["training.accumulation_steps=1"]
    for nprocs in ("1", "2"):
        assert run_script(script, *words, "--output", nprocs, "--nprocs", nprocs).returncode == 0
    same_bits(*(find_at(tmp_path / nprocs) for nprocs in ("1", "2")))
    # Without it the first checkpoint is the error that the page shows.
    script.write_text(text)
    failed = run_script(script, *words, "--output", "plain", "--nprocs", "2")
    [shown] = [t for s in SECTIONS for t in code_of(s, "text") if "recipes/tokens.py" in s]
    assert failed.returncode == 1
    assert " ".join(shown.split()) in failed.stderr


def test_what_is_validated_are_the_averages_and_not_the_weights(tmp_path: Path) -> None:
    class Noting(experiment_of("averaged_weights")):  # type: ignore[misc]
        def valid(self) -> Any:
            self.validated = arrays(self.model)
            return super().valid()

    exp = run(Noting, tmp_path, "training.max_iteration=5")
    for one, other in zip(arrays(exp.model), exp.validated, strict=True):
        assert (one != other).any()
    saved = read_weights(find_at(tmp_path))["model"]["0.weight"]
    assert saved.data.tobytes() == exp.model[0].weight.numpy().tobytes()


@pytest.mark.long
def test_the_mean_is_that_of_the_last_checkpoints(tmp_path: Path) -> None:
    run("mean_weights", tmp_path, "training.max_iteration=120")
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == [f"step-{iteration:08}" for iteration in (40, 60, 80, 100, 120)]
    parts = [read_weights(tmp_path / f"checkpoints/{name}")["model"]["0.weight"] for name in names]
    floats = [np.frombuffer(part.data.tobytes(), "float32") for part in parts]
    (mean,) = read_weights(tmp_path / "mean.safetensors").values()
    found = np.frombuffer(mean["0.weight"].data.tobytes(), "float32")
    np.testing.assert_allclose(found, np.mean(floats, axis=0), rtol=1e-5, atol=1e-8)
    assert (floats[-1] != floats[0]).any()
    assert "evaluated step-00000120 on self.valid_loader (no loader was given" in told(tmp_path)


@pytest.mark.long
def test_utterances_in_batches_by_length_have_little_padding_and_continue_exactly(
    tmp_path: Path,
) -> None:
    recipe = module_of("by_length")
    shapes: list[tuple[int, int]] = []

    class Noting(AllEvents, recipe.Speech):  # type: ignore[misc]
        stops_at = 0

        def read_batch(self) -> Any:
            frames, lengths, labels = super().read_batch()
            shapes.append((frames.shape[0] * frames.shape[1], int(lengths.sum())))
            return frames, lengths, labels

        def on_train_batch_end(self) -> None:
            if self.iteration == self.stops_at:
                self.stop()

    words = ["training.max_iteration=50", "training.save_interval=50"]
    run(Noting, tmp_path / "straight", *words)
    straight = [*shapes]
    assert sum(padded for padded, _ in straight) < 1.1 * sum(frames for _, frames in straight)
    assert sorted(straight[:20]) == sorted(straight[20:40])
    assert straight[:20] != straight[20:40]
    shapes.clear()
    Noting.stops_at = 27  # in the middle of the second epoch
    for _ in range(2):
        run(Noting, tmp_path / "stopped", *words)
    assert shapes == straight
    same_bits(*(find_at(tmp_path / name) for name in ("straight", "stopped")))


@pytest.mark.long
def test_a_run_that_stops_early_stays_stopped_and_ends_with_its_best(tmp_path: Path) -> None:
    exp = run("early_stopping", tmp_path)
    losses = curve(tmp_path, "valid/loss")
    best = min(losses, key=lambda iteration: losses[iteration])
    assert exp.iteration == best + 60 < 10000
    weight = read_weights(tmp_path / f"checkpoints/step-{best:08}")["model"]["0.weight"]
    assert weight.data.tobytes() == exp.model[0].weight.numpy().tobytes()
    assert run("early_stopping", tmp_path).iteration == exp.iteration


@pytest.mark.long
def test_the_queue_is_restored_to_the_same_bits(tmp_path: Path) -> None:
    words = ["moco.queue=128", "training.save_interval=2"]
    straight = run("contrastive", tmp_path / "straight", *words, "training.max_iteration=5")
    half = run("contrastive", tmp_path / "again", *words, "training.max_iteration=2")
    again = run("contrastive", tmp_path / "again", *words, "training.max_iteration=5")
    assert (again.queue.numpy() == straight.queue.numpy()).all()
    assert (again.queue.numpy() != half.queue.numpy()).any(axis=1).all()
    same_bits(*(find_at(tmp_path / name) for name in ("straight", "again")))


@pytest.mark.long
def test_reinforcement_learns_without_data_and_without_a_warning(tmp_path: Path) -> None:
    words = ["training.max_iteration=60", "training.valid_interval=20", "training.log_interval=1"]
    exp = run("reinforcement", tmp_path, *words, "episodes.number=24", "episodes.steps=15")
    rewards = curve(tmp_path, "train/reward")
    assert np.mean([rewards[i] for i in range(51, 61)]) > rewards[1] / 2  # they are negative
    assert (exp.epoch, exp.batches_per_epoch) == (0, None)
    assert "WARNING" not in told(tmp_path)


def test_the_judge_is_neither_trained_nor_in_the_checkpoint(warmed: Path, tmp_path: Path) -> None:
    exp = run("distillation", tmp_path / "run", "--data", str(warmed), "training.max_iteration=3")
    teacher = read_weights(find_at(warmed))["model"]
    for name, parameter in exp.judge.named_parameters():
        assert parameter.numpy().tobytes() == teacher[name].data.tobytes(), name
    checkpoint = find_at(tmp_path / "run")
    assert {path.stem for path in checkpoint.glob("*.safetensors")} == {"model", "optimizer"}
    assert "judge" not in (checkpoint / "state.json").read_text()
    assert "WARNING" not in told(tmp_path / "run")


@pytest.mark.long
def test_each_sample_is_held_out_by_one_fold(tmp_path: Path) -> None:
    held_out = []
    for fold in range(5):
        exp = run("folds", tmp_path / f"{fold}", f"data.fold={fold}", "training.max_iteration=1")
        train, valid = (
            {image.tobytes() for image in loader.dataset.tensors[0].numpy()}
            for loader in (exp.train_loader, exp.valid_loader)
        )
        held_out.append(valid)
        assert not train & valid
    assert sum(map(len, held_out)) == len(set.union(*held_out)) > 1700  # some images are the same


def test_the_best_checkpoint_is_tested_and_can_be_used_afterwards(tmp_path: Path) -> None:
    words = ["training.max_iteration=30", "training.valid_interval=5", "training.save_interval=5"]
    recipe = module_of("best_checkpoint")
    exp = run(recipe.Best, tmp_path, *words)
    accuracies = curve(tmp_path, "valid/accuracy")
    best = max(accuracies, key=lambda iteration: (accuracies[iteration], -iteration))
    weight = read_weights(tmp_path / f"checkpoints/step-{best:08}")["model"]["0.weight"]
    for model in (exp.model, recipe.best_model(str(tmp_path))):
        assert weight.data.tobytes() == model[0].weight.numpy().tobytes()
    assert re.search(rf"test/accuracy=\S+ of step-{best:08}\n", told(tmp_path))
    run(recipe.Best, tmp_path, *words, "--export", "best")
    exported = paddle.jit.load(str(tmp_path / f"export/step-{best:08}/model"))
    images = exp.test_loader.dataset.tensors[0][:5]
    np.testing.assert_allclose(exported(images).numpy(), exp.model(images).numpy(), atol=1e-5)


@pytest.mark.long
def test_another_batch_size_goes_on_with_what_the_epoch_has_not_had_and_more_data_with_the_next(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, int]] = []

    class Noting(experiment_of("mid_run")):  # type: ignore[misc]
        def read_batch(self) -> Any:
            batch = super().read_batch()
            seen.extend((self.epoch, index) for index in self.internals.batch_indices)
            return batch

    run(Noting, tmp_path, "data.num_samples=100", "training.max_iteration=3")
    words = ["data.num_samples=100", "data.batch_size=30", "optim.lr=0.5"]
    exp = run(Noting, tmp_path, "--force", *words, "training.max_iteration=6")
    assert [exp.epoch, exp.optimizer.get_lr()] == [2, 0.5]
    assert sorted(index for epoch, index in seen if epoch == 1) == [*range(100)]
    del seen[:]
    exp = run(Noting, tmp_path, "--force", "data.num_samples=150", "training.max_iteration=14")
    assert sorted(index for epoch, index in seen if epoch == 3) == [*range(150)]
