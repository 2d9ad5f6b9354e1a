"""What the recipe uses of Optuna; the database is a file of JSON, written at each change."""

import enum
import json
import random
import sys
import types
from pathlib import Path


class TrialState(enum.Enum):
    RUNNING = 0
    COMPLETE = 1
    PRUNED = 2
    FAIL = 3


class FrozenTrial(types.SimpleNamespace):
    """number, state, params, value."""


class Trial:
    def __init__(self, study, number):
        self._study = study
        self.number = number

    def suggest_float(self, name, low, high, *, step=None, log=False):
        assert log
        value = low * (high / low) ** random.Random(self.number).random()
        self._study.change(self.number, params={name: value})
        return value


class Study:
    def __init__(self, path):
        self.path = path

    def records(self):
        return json.loads(self.path.read_text())

    def change(self, number, **values):
        records = self.records()
        records[number].update(values)
        self.path.write_text(json.dumps(records))

    def ask(self, fixed_distributions=None):
        records = self.records()
        records.append({"number": len(records), "state": "RUNNING", "params": {}, "value": None})
        self.path.write_text(json.dumps(records))
        return Trial(self, len(records) - 1)

    def tell(self, trial, values=None, state=None, skip_if_finished=False):
        number = trial if isinstance(trial, int) else trial.number
        assert self.records()[number]["state"] == "RUNNING"  # else Optuna raises a ValueError
        assert (values is None) == (state is not None)
        self.change(number, value=values, state=(state or TrialState.COMPLETE).name)

    def get_trials(self, deepcopy=True, states=None):
        trials = [FrozenTrial(**{**r, "state": TrialState[r["state"]]}) for r in self.records()]
        return [trial for trial in trials if states is None or trial.state in states]

    @property
    def best_params(self):
        return max(self.get_trials(states=(TrialState.COMPLETE,)), key=lambda t: t.value).params


def create_study(*, storage, study_name, direction, load_if_exists):
    assert direction == "maximize"
    path = Path(storage.removeprefix("sqlite:///"))
    if path.exists():
        assert load_if_exists
    else:
        path.write_text("[]")
    return Study(path)


trial = types.ModuleType("optuna.trial")
trial.TrialState = TrialState
sys.modules["optuna.trial"] = trial  # for `from optuna.trial import TrialState`
