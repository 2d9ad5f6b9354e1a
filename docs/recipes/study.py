"""A study of Optuna's over the learning rate: a trial that was killed is continued, not lost."""

import json
import sys
from pathlib import Path

import optuna
from optuna.trial import TrialState
from warmup import WarmUp

from expbase import main

FOLDER = Path("runs/study")
NUM_TRIALS = 20


def accuracy(number, lr):
    """Trains the run of a trial, or continues it: its directory follows from its number."""
    output = FOLDER / f"trial-{number}"
    main(WarmUp, argv=["--output", str(output), f"optim.lr={lr}", *sys.argv[1:]])
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["valid/accuracy"] for line in lines if "valid/accuracy" in line][-1]


def search():
    FOLDER.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{FOLDER}/study.db"
    study = optuna.create_study(
        storage=storage, study_name="digits", load_if_exists=True, direction="maximize"
    )
    # One process works on this study, so what is running was killed.
    for killed in study.get_trials(states=(TrialState.RUNNING,)):
        if "lr" in killed.params:
            finish(study, killed.number, killed.params["lr"])
        else:  # killed before it had one
            study.tell(killed.number, state=TrialState.FAIL)
    while len(study.get_trials(states=(TrialState.COMPLETE,))) < NUM_TRIALS:
        trial = study.ask()
        finish(study, trial.number, trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    print("best:", study.best_params)


def finish(study, number, lr):
    try:
        study.tell(number, accuracy(number, lr))
    except FloatingPointError:  # the loss is not finite: it would not be the next time, either
        study.tell(number, state=TrialState.FAIL)


if __name__ == "__main__":
    search()
