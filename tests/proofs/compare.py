"""What makes two runs the same: the bits of their last checkpoints, numbers and curves logged.

for text in differences(output, reference): print(text)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expbase.checkpoint import layout


def last_checkpoint(output: Path) -> Path:
    """The newest one, by name."""
    return layout.listed(output / layout.FOLDER)[-1]


def logged(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith("speed/")}
        for line in lines
    ]


def ledger(output: Path, event: str) -> list[dict[str, Any]]:
    """The records of one event, oldest first."""
    file = output / "ledger.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if record["event"] == event]


def differences(output: Path, reference: Path) -> list[str]:
    """What is not the same in a finished run and in one that was never interrupted."""
    found = []
    one, other = last_checkpoint(output), last_checkpoint(reference)
    if one.name != other.name:
        return [f"the last checkpoint is {one.name} and not {other.name}"]
    files = {path.name for path in (*one.iterdir(), *other.iterdir())}
    for name in sorted(files - {layout.MANIFEST}):  # which holds the sizes of the logs
        pair = [
            (path / name).read_bytes() if (path / name).exists() else None for path in (one, other)
        ]
        if pair[0] != pair[1]:
            found.append(f"{name} differs")
    pairs = zip(logged(output), logged(reference), strict=False)
    found += [f"logged {a} and not {b}" for a, b in pairs if a != b][:1]
    if len(logged(output)) != len(logged(reference)):
        found.append(f"{len(logged(output))} lines logged and not {len(logged(reference))}")
    if curves(output) != curves(reference):
        found.append("VisualDL shows other curves")
    return found + not_increasing(output)


def curves(output: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of VisualDL's curves by tag, without speeds."""
    from visualdl import LogReader

    reader = LogReader(file_path=str(output / "vdlrecords.run.log"))
    tags = [tag for tag in reader.get_tags()["scalar"] if not tag.startswith("wall_clock/")]
    return {tag: [(p.id, p.value) for p in reader.get_data("scalar", tag)] for tag in tags}


def not_increasing(output: Path) -> list[str]:
    """The metrics whose iterations do not grow from line to line."""
    last: dict[str, int] = {}
    found = []
    for line in logged(output):
        for name in line.keys() - {"iteration", "epoch"}:
            if line["iteration"] <= last.get(name, -1):
                found.append(f"{name}: iteration {line['iteration']} after {last[name]}")
            last[name] = line["iteration"]
    return found
