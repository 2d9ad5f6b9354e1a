"""experiments/cifar, on a small archive that its shapes.py draws."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import re
import runpy
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import curve
from visualdl import LogReader

from expbase import ConfigError

FOLDER = Path(__file__).parents[1] / "experiments/cifar"
SHORT = ["data.num_valid=20", "data.batch_size=8", "model.width=4"]
SHORT += ["optim.warmup_iterations=5"]
SHORT += ["training.max_epoch=2", "training.valid_every_epoch=1", "training.log_interval=2"]
SHORT += ["training.save_every_epoch=0", "training.save_interval=3"]
UPDATES = 10  # of 80 images in two epochs, two batches of 8 each

Modules = Callable[[str], Any]
Run = Callable[..., None]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Imports a file that lies beside the script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {*sys.modules}
    yield importlib.import_module
    for name in {*sys.modules} - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 120 images, 100 for training."""
    path = tmp_path_factory.mktemp("data") / "shapes.tar.gz"
    runpy.run_path(str(FOLDER / "shapes.py"))["write_archive"](path, 120)
    return path


@pytest.fixture
def run(module: Modules, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(output: Path, *words: str) -> None:
        script = str(FOLDER / "train.py")
        given = ["--config", str(FOLDER / "small.yaml"), "--output", str(output)]
        given += [f"data.archive={shapes}", *SHORT, *words]
        monkeypatch.setattr(sys, "argv", [script, *given, "--device", "cpu"])
        runpy.run_path(script, run_name="__main__")

    return run


@pytest.mark.long
def test_it_trains_is_continued_to_the_same_bits_tested_and_exported(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "straight")
    run(tmp_path / "broken", "training.max_iteration=3")
    run(tmp_path / "broken", "training.max_iteration=0")
    told = capsys.readouterr().err
    assert "CONTINUING" in told
    # Of the best checkpoint, on the test images.
    assert re.search(r"test/accuracy=.* of step-", told)
    files = [*(tmp_path / "straight").glob(f"checkpoints/step-{UPDATES:08}/*.safetensors")]
    assert {"model.safetensors", "optimizer.safetensors", "@values.safetensors"} == {
        file.name for file in files
    }
    for file in files:
        other = tmp_path / "broken" / file.relative_to(tmp_path / "straight")
        assert file.read_bytes() == other.read_bytes(), file.name
    run(tmp_path / "straight", "--export", "last")
    [exported] = (tmp_path / "straight/export").iterdir()
    network = paddle.jit.load(str(exported / "model"))
    network.eval()
    assert network(paddle.zeros([3, 3, 32, 32], "uint8")).shape == [3, 10]
    board = LogReader(file_path=str(tmp_path / "straight/vdlrecords.run.log"))
    pictures = [record.id for record in board.get_data("image", "mistakes")]
    assert pictures == [*curve(tmp_path / "straight", "valid/accuracy")] == [5, UPDATES]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0", "expected 1 to 99, of the 100 training images"),
        ("100", "expected 1 to 99, of"),
        ("-1 training.valid_interval=0 training.valid_every_epoch=0", "expected 0 to 99, of"),
    ],
)
def test_how_many_images_are_held_out_is_checked(
    given: str, expected: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", *f"data.num_valid={given}".split())
    assert end.value.code == 78
    assert f"data.num_valid: {given.split()[0]} given; {expected}" in capsys.readouterr().err


def test_a_missing_archive_says_what_to_get_and_where_to_put_it_and_fetches_nothing(
    module: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = module("archive")
    monkeypatch.setattr(archive, "DATA_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "download", None)
    for given, place in (
        ("", tmp_path / "cifar/cifar-10-python.tar.gz"),
        (f"{tmp_path}/mine.tar.gz", tmp_path / "mine.tar.gz"),
    ):
        with pytest.raises(ConfigError) as error:
            archive.find_archive(given, fetch=bool(given))
        text = str(error.value)
        assert text.startswith(f"data.archive: there is no {place}; expected CIFAR-10 for Python, ")
        assert "cifar-10-python.tar.gz (163 MB, MD5 c58f30108f718f92721af3b95e74349a)" in text
        assert "data.download=true" in text
        assert "shapes.py" in text
    assert [*tmp_path.iterdir()] == []


def test_with_download_paddle_puts_the_archive_where_it_keeps_it(
    module: Modules, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = module("archive")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(paddle.dataset.common, "DATA_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "DATA_HOME", str(tmp_path))
    with serving(shapes.parent) as address:
        monkeypatch.setattr(archive.cifar, "CIFAR10_URL", f"{address}/{shapes.name}")
        md5 = paddle.dataset.common.md5file(str(shapes))
        monkeypatch.setattr(archive.cifar, "CIFAR10_MD5", md5)
        path = archive.find_archive("", fetch=True)
    assert path == tmp_path / "cifar" / shapes.name
    assert path.read_bytes() == shapes.read_bytes()
    assert archive.find_archive("", fetch=True) == path  # no one serves it any more


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("content", ["half", "text", "another"])
def test_what_is_no_such_archive_or_half_of_one_is_named(
    content: str, module: Modules, shapes: Path, tmp_path: Path
) -> None:
    path = tmp_path / "given.tar.gz"
    if content == "another":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(FOLDER / "shapes.py", "shapes.py")
    else:
        path.write_bytes(shapes.read_bytes()[:20000] if content == "half" else b"text")
    with pytest.raises(ConfigError, match=r"data.archive: .*given.tar.gz cannot be read \(.+MD5"):
        module("archive").read_archive(path)


def test_crops_and_flips_are_of_the_training_images_alone(module: Modules, shapes: Path) -> None:
    augmented, plain, test, names = module("archive").read_archive(shapes)
    assert (len(augmented), len(plain), len(test)) == (100, 100, 20)
    assert names == [*module("shapes").SHAPES]
    assert augmented.data is plain.data  # in memory once
    first = plain.data[0][0].reshape(3, 32, 32)
    assert plain[0][0].dtype == np.uint8
    assert (plain[0][0] == first).all()
    assert len({augmented[0][0].tobytes() for _ in range(20)}) > 10
    assert len({test[0][0].tobytes() for _ in range(3)}) == 1


@pytest.mark.long
def test_the_net_is_the_resnet18_of_paddle_but_for_its_first_and_last_layer(
    module: Modules,
) -> None:
    ours = module("resnet").ResNet(width=64, blocks=[2, 2, 2, 2])
    of_ours, of_paddle = (
        {name: tensor.shape for name, tensor in net.state_dict().items()}
        for net in (ours, paddle.vision.models.resnet18())
    )
    assert of_ours.keys() == of_paddle.keys()
    differ = {name for name in of_ours if of_ours[name] != of_paddle[name]}
    assert differ == {"conv1.weight", "fc.weight", "fc.bias"}
    features: list[Any] = []
    ours.avgpool.register_forward_pre_hook(lambda layer, inputs: features.append(inputs[0].shape))
    assert ours(paddle.zeros([2, 3, 32, 32], "uint8")).shape == [2, 10]
    assert features == [[2, 512, 4, 4]]


def test_the_picture_has_the_images_of_largest_loss_in_that_order(module: Modules) -> None:
    data = [(np.full([3, 32, 32], number, "uint8"), number % 2) for number in range(50)]
    losses, predicted = np.zeros(50), np.zeros(50, int)
    losses[[7, 30]] = 2, 3
    figure = module("mistakes").draw_mistakes(data, losses, predicted, ["cat", "dog"])
    left, right = figure.subfigs
    assert [axes.images[0].get_array().max() for axes in left.axes[:3]] == [30, 7, 0]
    assert [axes.get_title() for axes in left.axes[:2]] == ["cat\n(cat) 3.0", "cat\n(dog) 2.0"]
    assert right.axes[0].images[0].get_array().tolist() == [[25, 0], [25, 0]]
