"""A table of runs in pandas, of what `python -m expbase ls --json` says about each."""

import json
import subprocess
import sys

import pandas


def table(folder="runs"):
    """A row for each run: its state, the config values that not all have, its last validation."""
    command = [sys.executable, "-m", "expbase", "ls", folder, "--json"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    runs = pandas.json_normalize([json.loads(line) for line in listed.splitlines()])
    config = runs.filter(regex=r"^config\.")
    tried = config.columns[config.astype(str).nunique() > 1]
    metrics = runs.filter(regex=r"^metrics\.valid/").astype(float)  # "nan" is a text in JSON
    return runs[["name", "state", "iteration", *tried]].join(metrics)


def means(runs, *keys, metric="valid/accuracy"):
    """The mean and the deviation of a metric, over the runs that agree in these config values."""
    by = [f"config.{key}" for key in keys]
    return runs.groupby(by)[f"metrics.{metric}"].agg(["count", "mean", "std"])


if __name__ == "__main__":
    print(table(*sys.argv[1:]).to_string(index=False))
