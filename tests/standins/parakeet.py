"""What a script of Parakeet's uses; the calls come in the order of its experiment.py."""

import argparse
import logging
from pathlib import Path

import paddle
from visualdl import LogWriter
from yacs.config import CfgNode


class ExperimentBase:
    parallel = False

    def __init__(self, config, args):
        self.config, self.args, self.iteration, self.epoch = config, args, 0, 0

    def setup(self):
        self.checkpoint_dir = Path(self.args.output) / "checkpoints"
        self.visualizer = LogWriter(logdir=self.args.output)
        self.logger = logging.getLogger("parakeet")
        self.setup_dataloader()
        self.setup_model()

    def resume_or_load(self):
        pass

    def read_batch(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.new_epoch()
            return next(self.iterator)

    def new_epoch(self):
        self.epoch += 1
        self.iterator = iter(self.train_loader)

    def run(self):
        training = self.config.training
        self.new_epoch()
        while self.iteration < training.max_iteration:
            self.iteration += 1
            self.train_batch()
            if self.iteration % training.valid_interval == 0:
                self.valid()
            if self.iteration % training.save_interval == 0:
                path = self.checkpoint_dir / f"step-{self.iteration}"
                paddle.save(self.model.state_dict(), f"{path}.pdparams")
                paddle.save(self.optimizer.state_dict(), f"{path}.pdopt")
        self.visualizer.close()


def default_argument_parser():
    parser = argparse.ArgumentParser()
    for option in ("--config", "--output", "--device"):
        parser.add_argument(option)
    parser.add_argument("--opts", nargs=argparse.REMAINDER)
    return parser


def get_default_training_config():
    return CfgNode({"valid_interval": 1000, "save_interval": 10000, "max_iteration": 900000})


def rank_zero_only(function):
    return function  # there is one process


MODULES = {
    "parakeet.training.experiment": ["ExperimentBase"],
    "parakeet.training.cli": ["default_argument_parser"],
    "parakeet.training.default_config": ["get_default_training_config"],
    "parakeet.utils.mp_tools": ["rank_zero_only"],
}
