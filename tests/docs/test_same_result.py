"""docs/same_result.md: verify says where its script does not repeat itself; the ways out repeat.

That verify says what the table has: tests/tools/test_repeat_update.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from pages import TEXT, blocks

from expbase.__main__ import main
from expbase.base import device

(SCRIPT,) = blocks("same_result", "python")
(COMMAND,) = blocks("same_result", "bash")
(SAID,) = blocks("same_result", "text")
NOISE = "self.generator.normal(size=x.shape)"


def verified(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> int:
    """The exit code of the page's command for a script."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    python, option, module, *words = shlex.split(COMMAND)
    assert [python, option, module] == ["python", "-m", "expbase"]
    return main([*words, "--iterations", "10", "--kills", "1"])


@pytest.mark.long
def test_what_does_not_repeat_is_named_and_each_way_out_repeats(
    tmp_path: Path,
    forked: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    assert verified(tmp_path / "noisy", monkeypatch, SCRIPT) == 1
    assert capsys.readouterr().out.endswith(SAID)
    for name, old, new in (
        ("run", NOISE, "np.random.normal(size=x.shape)"),
        ("seed", "default_rng()", "default_rng(0)"),
    ):
        assert f"`{new}`" in TEXT["same_result"]
        assert SCRIPT.count(old) == 1
        assert verified(tmp_path / name, monkeypatch, SCRIPT.replace(old, new)) == 0
        assert "\nidentical: " in capsys.readouterr().out


def test_the_page_counts_the_flags_of_repeatable_kernels() -> None:
    flags = device._REPEATABLE
    assert "FLAGS_cudnn_deterministic" in flags
    assert "`training.deterministic=True` sets it, and five more" in TEXT["same_result"]
    assert len(flags) == 1 + 5
