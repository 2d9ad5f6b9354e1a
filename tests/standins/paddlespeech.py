"""What a script of PaddleSpeech's t2s uses; calls and counters as in its training/."""

import random

import numpy as np
import paddle


def report(name, value):
    pass


def seed_everything(seed):
    paddle.seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class StandardUpdater:
    def __init__(self, model, optimizer, dataloader):
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.iteration = self.epoch = 0
        self.train_iterator = iter(dataloader)

    def update(self):
        self.model.train()
        try:
            batch = next(self.train_iterator)
        except StopIteration:
            self.dataloader.batch_sampler.set_epoch(self.epoch)
            self.train_iterator = iter(self.dataloader)
            batch = next(self.train_iterator)
        self.update_core(batch)
        self.iteration += 1
        self.epoch += self.iteration % len(self.dataloader) == 0


class StandardEvaluator:
    def __init__(self, model, dataloader):
        self.model, self.dataloader = model, dataloader

    def __call__(self, trainer):
        self.model.eval()
        with paddle.no_grad():
            for batch in self.dataloader:
                self.evaluate_core(batch)


class Snapshot:
    def __init__(self, max_size):
        pass

    def __call__(self, trainer):
        updater = trainer.updater
        state = {"epoch": updater.epoch, "iteration": updater.iteration}
        state["main_params"] = updater.model.state_dict()
        state["main_optimizer"] = updater.optimizer.state_dict()
        paddle.save(state, f"{trainer.out}/checkpoints/snapshot_iter_{updater.iteration}.pdz")


def VisualDL(logdir):
    return lambda trainer: None


class Trainer:
    def __init__(self, updater, stop_trigger, out):
        self.updater, self.out, self.extensions = updater, out, []
        self.max_epoch, _ = stop_trigger

    def extend(self, extension, trigger):
        self.extensions.append((extension, trigger))

    def run(self):
        while self.updater.epoch < self.max_epoch:
            epoch = self.updater.epoch
            self.updater.update()
            for extension, (_, unit) in self.extensions:
                if unit == "iteration" or self.updater.epoch > epoch:
                    extension(self)
        self.updater.filehandler.close()


TRAINING = "paddlespeech.t2s.training"
MODULES = {
    f"{TRAINING}.extensions.evaluator": ["StandardEvaluator"],
    f"{TRAINING}.extensions.snapshot": ["Snapshot"],
    f"{TRAINING}.extensions.visualizer": ["VisualDL"],
    f"{TRAINING}.reporter": ["report"],
    f"{TRAINING}.seeding": ["seed_everything"],
    f"{TRAINING}.trainer": ["Trainer"],
    f"{TRAINING}.updaters.standard_updater": ["StandardUpdater"],
}
