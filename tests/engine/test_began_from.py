"""What a start began from is among its facts: the files of its options, and the first weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import Tiny, curve, ledger, run_script, trained

from expbase.checkpoint import storage
from expbase.ranks import collectives
from expbase.record import origin_digests
from expbase.tools.runs import read_run
from expbase.tools.show import lines_about


def start_of(run: Path) -> dict[str, Any]:
    """The facts of the last start."""
    return [record for record in ledger(run) if record["event"] == "start"][-1]


def began_from(run: Path) -> dict[str, str]:
    return dict(start_of(run)["began_from"])


def sha256(path: Path) -> str:
    data = path.read_bytes()
    return f"sha256 {hashlib.sha256(data).hexdigest()} of {len(data):,} bytes"


def test_a_checkpoint_of_another_run_is_noted_by_its_manifest_and_an_own_one_is_not(
    tmp_path: Path,
) -> None:
    trained(Tiny, tmp_path / "first", max_iteration=1)
    args = {"checkpoint_path": str(tmp_path / "first"), "init_model_path": "none"}
    trained(Tiny, tmp_path / "run", args, max_iteration=2)
    manifest = tmp_path / "first/checkpoints/step-00000001/manifest.json"
    text = f"{sha256(manifest)}, a checkpoint's manifest"
    assert began_from(tmp_path / "run") == {"--checkpoint_path": text}
    trained(Tiny, tmp_path / "run", args, max_iteration=3)  # its own goes before another one's
    assert began_from(tmp_path / "run") == {}
    assert [*curve(tmp_path / "run", "train/loss")] == [2, 3]


@pytest.mark.parametrize("option", ["checkpoint_path", "init_model_path"])
def test_of_a_checkpoint_that_is_noted_each_byte_was_compared(tmp_path: Path, option: str) -> None:
    """So the digest of its manifest is one of all its files."""
    trained(Tiny, tmp_path / "first", max_iteration=1)
    path = tmp_path / "first/checkpoints/step-00000001"
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(storage.CheckpointError, match="its content has changed"):
        trained(Tiny, tmp_path / "run", {option: str(path)})


def test_a_file_of_weights_is_noted_and_not_by_a_start_that_continues(tmp_path: Path) -> None:
    first = trained(Tiny, tmp_path / "first", max_iteration=1)
    first.save_model(tmp_path / "weights.safetensors")
    args = {"init_model_path": str(tmp_path / "weights.safetensors")}
    trained(Tiny, tmp_path / "run", args, max_iteration=2)
    digest = sha256(tmp_path / "weights.safetensors")
    assert began_from(tmp_path / "run") == {"--init_model_path": digest}
    trained(Tiny, tmp_path / "run", args, max_iteration=3)
    assert began_from(tmp_path / "run") == {}


@pytest.mark.parametrize("option", ["checkpoint_path", "init_model_path"])
def test_what_a_run_of_its_own_does_not_begin_from_is_a_warning_unless_it_has_begun_from_it(
    tmp_path: Path, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "other", max_iteration=1)
    args = {option: str(tmp_path / "other")}
    for name, before in (("new", None), ("again", args)):
        trained(Tiny, tmp_path / name, before, max_iteration=2)
        capfd.readouterr()
        trained(Tiny, tmp_path / name, args, max_iteration=3)
        [line] = [line for line in capfd.readouterr().err.splitlines() if "not used" in line]
        assert f"--{option} {tmp_path / 'other'}: not used, because " in line
        assert ("WARNING" in line) == (name == "new")


def in_parts(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = [f'"{name}": "model-1.safetensors"' for name in ("0.weight", "0.bias")]
    text = f'{{"weight_map": {{{", ".join(names)}}}}}'
    (folder / "model.safetensors.index.json").write_text(text)


def test_what_an_initial_model_means_is_noted(tmp_path: Path) -> None:
    def noted(run: str, given: str) -> str:
        args = {"init_model_path": str(tmp_path / given)}
        trained(Tiny, tmp_path / run, args, max_iteration=1)
        return began_from(tmp_path / run)["--init_model_path"]

    first = trained(Tiny, tmp_path / "first", max_iteration=1)
    first.save_model(tmp_path / "folder/model.safetensors")
    manifest = tmp_path / "first/checkpoints/step-00000001/manifest.json"
    assert noted("of a run", "first").startswith(origin_digests.of_path(manifest))
    file = tmp_path / "folder/model.safetensors"
    assert noted("of a file", "folder") == origin_digests.of_path(file)
    in_parts(tmp_path / "folder")
    assert noted("of parts", "folder") == origin_digests.of_path(tmp_path / "folder")


def test_data_are_noted_by_each_start_if_they_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moving(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            (tmp_path / "data/made").touch()  # the first start has made it when it begins
            monkeypatch.chdir(tmp_path / "data")

    (tmp_path / "data").mkdir()
    (tmp_path / "data/points").write_text("1 2 3")
    found = []
    for last in (1, 2):
        monkeypatch.chdir(tmp_path)
        trained(Moving, tmp_path / "run", {"data": "data"}, max_iteration=last)
        found.append(began_from(tmp_path / "run"))
    assert found == [{"--data": origin_digests.of_path(tmp_path / "data")}] * 2


@pytest.mark.parametrize("data", ["https://example.org/points", "", {"of": "a script"}])
def test_data_that_are_no_files_are_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Tiny, tmp_path / "run", {"data": data}, max_iteration=1, save_interval=0)
    assert began_from(tmp_path / "run") == {}


def test_other_ranks_wait_for_slow_data_where_they_may_wait_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective of gloo fails after 30 s."""
    within: list[str] = []
    asked = []
    on_rank_zero = collectives.on_rank_zero

    def noted(function: Callable[[], Any], doing: str) -> Any:
        within.append(doing)
        try:
            return on_rank_zero(function, doing)
        finally:
            within.pop()

    monkeypatch.setattr(collectives, "on_rank_zero", noted)
    monkeypatch.setattr(origin_digests, "of_path", lambda path: asked.append([*within]) or "")
    trained(Tiny, tmp_path / "run", {"data": str(tmp_path)}, max_iteration=1)
    assert asked == [["the digests of what the run begins from"]]


def test_a_digest_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(origin_digests, "of_path", fail)
    monkeypatch.setattr(origin_digests, "of_tensors", fail)
    trained(Tiny, tmp_path / "run", {"data": str(tmp_path)}, max_iteration=1)
    start = start_of(tmp_path / "run")
    assert start["began_from"] == {"--data": "not known: Permission denied"}
    assert start["model"] == "not known: Permission denied"


def test_data_that_were_not_given_are_not_read_for_their_digest(
    tmp_path: Path, script: Path
) -> None:
    text = script.read_text().replace("main(Tiny)", "main(Failing)")
    body = "class Failing(Tiny):\n    def train_batch(self):\n        raise TypeError('NoneType')\n"
    script.write_text(text.replace("if __name__", f"{body}if __name__"))
    result = run_script(script, "--output", str(tmp_path / "run"), "--device", "cpu")
    assert "NoneType" in result.stderr
    assert "--data was not given" not in result.stderr


def test_two_starts_have_the_same_first_weights_and_another_seed_has_others(
    tmp_path: Path,
) -> None:
    found = {}
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        trained(Tiny, tmp_path / name, seed=seed, max_iteration=1)
        found[name] = start_of(tmp_path / name)["model"]
    assert found["one"].startswith("sha256 ")
    assert found["one"].endswith(" of 8 tensors of 360 bytes")
    assert found["one"] == found["two"] != found["three"]
    trained(Tiny, tmp_path / "one", max_iteration=2)  # noted before the checkpoint is restored
    assert start_of(tmp_path / "one")["model"] == found["one"]


def test_noting_the_first_weights_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(Tiny, tmp_path / "with", max_iteration=2)
    monkeypatch.setattr(origin_digests, "of_tensors", lambda named: "")
    trained(Tiny, tmp_path / "without", max_iteration=2)
    for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
        one, other = (tmp_path / name / "checkpoints/step-00000002" for name in ("with", "without"))
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_a_model_in_bfloat16_and_one_that_is_not_trained_are_among_the_first_weights(
    tmp_path: Path,
) -> None:
    class Judged(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.judge = paddle.nn.Linear(4, 4)
            self.judge.to(dtype="bfloat16")
            self.exclude_from_state("judge")

    trained(Judged, tmp_path / "run", max_iteration=1)
    assert start_of(tmp_path / "run")["model"].endswith(" of 10 tensors of 400 bytes")


def test_show_has_a_line_of_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1 2 3")
    trained(Tiny, tmp_path / "run", {"data": str(tmp_path / "data")}, max_iteration=1)
    lines = [*lines_about(tmp_path / "run", read_run(tmp_path / "run", "run"))]
    assert f"began from --data: {sha256(tmp_path / 'data')}" in lines
