"""The digits with another metric; --opts training.monitor macro_f1."""

from sklearn.metrics import f1_score
from train import Digits

from expbase import main


class MacroF1(Digits):
    def compute_metrics(self, predicted, labels):
        return {"macro_f1": f1_score(labels, predicted, average="macro")}


if __name__ == "__main__":
    main(MacroF1)
