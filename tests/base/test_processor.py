"""What is known of the processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expbase.base import processor as module
from expbase.base.processor import processor

OF_X86 = "processor: 0\nmodel name\t: Some 8088\nflags\t\t: fpu avx2 sse4_2 avx512f xyz\n\n"
OF_ARM = "processor\t: 0\nFeatures\t: fp asimd sve\n"


def test_the_processor_its_threads_and_its_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(
        module, "Path", lambda path: file if path == "/proc/cpuinfo" else Path(path)
    )
    for text, model, instructions in (
        (OF_X86 + OF_X86.replace("8088", "8086"), "Some 8088", "sse4_2 avx2 avx512f"),
        (OF_ARM, "", "asimd sve"),
        ("", "", ""),
    ):
        file.write_text(text)
        found = processor()
        assert (found["model"], found["instructions"]) == (model, instructions)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    file.unlink()
    assert (processor()["model"], processor()["threads"]) == ("", "3")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert processor()["threads"] == str(len(os.sched_getaffinity(0)))
    assert set(processor()["blas"]) == {"paddle", "numpy"}
    assert all(processor()["blas"].values())
