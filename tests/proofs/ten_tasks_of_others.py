"""The ten tasks of ten_tasks.py as users of three other libraries write them.

    for library in LIBRARIES:
        library.first, library.changes["validation"], library.falls_short.get("resume")

Lightning's, Fabric's (2.5) and paddle.Model.fit's. This is text, written by their pages: nothing
here runs Lightning or Fabric, which are no dependencies. It is counted by the rule of ours. A
keyword or a dict's key of theirs counts, as a config key of ours does; what may as well be torch's,
paddle's or the user's does not. Data, net, loss and sizes are those of our scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Library:
    """One other library.

    `changes` has of each task what it changes in the script before, or None: it cannot be done.
    `falls_short` says of a task what its version does not do and ours does.
    """

    name: str
    names: frozenset[str]  # those of the library, in these scripts
    first: str
    changes: Mapping[str, Mapping[str, str] | None]
    falls_short: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)  # of a task that needs another one


LIGHTNING = Library(
    "Lightning",
    frozenset(
        "LightningModule Trainer training_step validation_step configure_optimizers log fit "
        "seed_everything callbacks ModelCheckpoint dirpath save_last ckpt_path devices logger "
        "experiment global_step EarlyStopping monitor mode validate dataloaders "
        "accumulate_grad_batches lr_scheduler scheduler interval".split()
    ),
    '''
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning import LightningModule, Trainer


class Sides(LightningModule):
    """On which side of a line does a point lie?"""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        points, sides = batch
        loss = torch.nn.functional.cross_entropy(self.net(points), sides)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 0.1)


if __name__ == "__main__":
    points = torch.rand(40, 2) * 2 - 1
    sides = (points.sum(dim=1) > 0).long()
    data = TensorDataset(points, sides)
    train_loader = DataLoader(data, batch_size=5, shuffle=True)
    trainer = Trainer()
    trainer.fit(Sides(), train_loader)
''',
    {
        "validation": {
            "        return loss\n": """\
        return loss

    def validation_step(self, batch, batch_idx):
        points, sides = batch
        right = self.net(points).argmax(dim=1) == sides
        self.log("accuracy", right.float().mean())
""",
            "    trainer = Trainer()\n": """\
    valid_loader = DataLoader(data, batch_size=8)
    trainer = Trainer()
""",
            "fit(Sides(), train_loader)": "fit(Sides(), train_loader, valid_loader)",
        },
        "resume": {
            "import LightningModule, Trainer\n": """\
import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
""",
            "    points = torch.rand": "    seed_everything(1)\n    points = torch.rand",
            "    trainer = Trainer()\n": """\
    checkpoints = ModelCheckpoint(dirpath="checkpoints", save_last=True)
    trainer = Trainer(callbacks=[checkpoints])
""",
            "fit(Sides(), train_loader)": 'fit(Sides(), train_loader, ckpt_path="last")',
        },
        "two processes": {
            "import LightningModule, Trainer": "import LightningModule, Trainer, seed_everything",
            "    points = torch.rand": "    seed_everything(1)\n    points = torch.rand",
            "Trainer()": "Trainer(devices=2)",
        },
        "an image": {
            "        return loss\n": """\
        weights = torch.sigmoid(self.net.weight)[None]
        self.logger.experiment.add_image("weights", weights, self.global_step)
        return loss
""",
        },
        "early stopping": {
            "import LightningModule, Trainer\n": """\
import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
""",
            "Trainer()": 'Trainer(callbacks=[EarlyStopping("accuracy", mode="max")])',
        },
        "best checkpoint": {
            "import LightningModule, Trainer\n": """\
import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
""",
            "Trainer()": 'Trainer(callbacks=[ModelCheckpoint(monitor="accuracy", mode="max")])',
            "train_loader, valid_loader)\n": """\
train_loader, valid_loader)
    trainer.validate(dataloaders=valid_loader, ckpt_path="best")
""",
        },
        "accumulation": {"Trainer()": "Trainer(accumulate_grad_batches=4)"},
        "warm-up": {
            "        return torch.optim.Adam(self.net.parameters(), 0.1)\n": """\
        adam = torch.optim.Adam(self.net.parameters(), 0.1)
        rate = torch.optim.lr_scheduler.LinearLR(adam, 0.01, total_iters=5)
        schedule = {"scheduler": rate, "interval": "step"}
        return {"optimizer": adam, "lr_scheduler": schedule}
""",
        },
        "a loop of one's own": None,
    },
    {
        "resume": "from an epoch's end, and its order is drawn anew: not the same bits",
        "a loop of one's own": "the Trainer has the loop; Fabric is its way out",
    },
)

FABRIC = Library(
    "Fabric",
    frozenset(
        "Fabric loggers TensorBoardLogger launch setup_dataloaders setup log save load "
        "backward seed_everything devices logger experiment no_backward_sync enabled".split()
    ),
    """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger

if __name__ == "__main__":
    fabric = Fabric(loggers=TensorBoardLogger("runs"))
    fabric.launch()
    points = torch.rand(40, 2) * 2 - 1
    sides = (points.sum(dim=1) > 0).long()
    data = TensorDataset(points, sides)
    train_loader = fabric.setup_dataloaders(DataLoader(data, batch_size=5, shuffle=True))
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters(), 0.1)
    net, adam = fabric.setup(net, adam)
    state = {"net": net, "adam": adam, "epoch": 0, "iteration": 0}
    while state["epoch"] < 1000:
        for points, sides in train_loader:
            state["iteration"] += 1
            loss = torch.nn.functional.cross_entropy(net(points), sides)
            fabric.backward(loss)
            adam.step()
            adam.zero_grad()
            fabric.log("loss", loss, state["iteration"])
        state["epoch"] += 1
        fabric.save("last.ckpt", state)
""",
    {
        "validation": {
            'if __name__ == "__main__":\n': """\
def accuracy_of(net, loader):
    net.eval()
    with torch.no_grad():
        right = torch.cat([net(points).argmax(dim=1) == sides for points, sides in loader])
    net.train()
    return right.float().mean()


if __name__ == "__main__":
""",
            "    net = torch.nn.Linear(2, 2)\n": """\
    valid_loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    net = torch.nn.Linear(2, 2)
""",
            '        state["epoch"] += 1\n': """\
        accuracy = accuracy_of(net, valid_loader)
        fabric.log("accuracy", accuracy, state["iteration"])
        state["epoch"] += 1
""",
        },
        "resume": {
            "import torch\n": "import os\nimport torch\n",
            "    points = torch.rand": "    fabric.seed_everything(1)\n    points = torch.rand",
            '    while state["epoch"] < 1000:\n': """\
    if os.path.exists("last.ckpt"):
        fabric.load("last.ckpt", state)
    while state["epoch"] < 1000:
""",
        },
        "two processes": {
            "    points = torch.rand": "    fabric.seed_everything(1)\n    points = torch.rand",
            "Fabric(loggers=": "Fabric(devices=2, loggers=",
        },
        "an image": {
            '            fabric.log("loss", loss, state["iteration"])\n': """\
            fabric.log("loss", loss, state["iteration"])
            weights = torch.sigmoid(net.weight)[None]
            fabric.logger.experiment.add_image("weights", weights, state["iteration"])
""",
        },
        "early stopping": {
            '"iteration": 0}\n': '"iteration": 0, "best": 0.0, "worse": 0}\n',
            '        state["epoch"] += 1\n': """\
        is_better = accuracy > state["best"]
        state["best"] = max(accuracy, state["best"])
        state["worse"] = 0 if is_better else state["worse"] + 1
        if state["worse"] == 3:
            break
        state["epoch"] += 1
""",
        },
        "best checkpoint": {
            '"iteration": 0}\n': '"iteration": 0, "best": 0.0}\n',
            '        state["epoch"] += 1\n': """\
        if accuracy > state["best"]:
            state["best"] = accuracy
            fabric.save("best.ckpt", state)
        state["epoch"] += 1
""",
            '        fabric.save("last.ckpt", state)\n': """\
        fabric.save("last.ckpt", state)
    fabric.load("best.ckpt", state)
    print(accuracy_of(net, valid_loader))
""",
        },
        "accumulation": {
            """\
            loss = torch.nn.functional.cross_entropy(net(points), sides)
            fabric.backward(loss)
            adam.step()
            adam.zero_grad()
""": """\
            is_accumulating = state["iteration"] % 4 != 0
            with fabric.no_backward_sync(net, enabled=is_accumulating):
                loss = torch.nn.functional.cross_entropy(net(points), sides)
                fabric.backward(loss / 4)
            if not is_accumulating:
                adam.step()
                adam.zero_grad()
""",
        },
        "warm-up": {
            "    net, adam = fabric.setup(net, adam)\n": """\
    rate = torch.optim.lr_scheduler.LinearLR(adam, 0.01, total_iters=5)
    net, adam = fabric.setup(net, adam)
""",
            "            adam.zero_grad()\n": """\
            adam.zero_grad()
            rate.step()
""",
        },
        "a loop of one's own": {},
    },
    {"resume": "from an epoch's end, and its order is drawn anew: not the same bits"},
)

MODEL_FIT = Library(
    "Model.fit",
    frozenset(
        "Model prepare fit batch_size save_dir callbacks VisualDL metrics eval_data load Callback "
        "on_train_begin on_train_batch_end network EarlyStopping patience evaluate "
        "accumulate_grad_batches train_batch".split()
    ),
    """
import paddle
from paddle.io import TensorDataset

if __name__ == "__main__":
    points = paddle.uniform([40, 2], min=-1)
    sides = (points.sum(axis=1) > 0).astype("int64")
    data = TensorDataset([points, sides])
    net = paddle.nn.Linear(2, 2)
    adam = paddle.optimizer.Adam(0.1, parameters=net.parameters())
    model = paddle.Model(net)
    model.prepare(adam, paddle.nn.CrossEntropyLoss())
    callbacks = [paddle.callbacks.VisualDL("runs")]
    model.fit(data, batch_size=5, save_dir="runs", callbacks=callbacks)
""",
    {
        "validation": {
            "CrossEntropyLoss())": "CrossEntropyLoss(), metrics=paddle.metric.Accuracy())",
            "fit(data, ": "fit(data, eval_data=data, ",
        },
        "resume": {
            "import paddle\n": "import os\nimport paddle\n",
            "    points = paddle.uniform": "    paddle.seed(1)\n    points = paddle.uniform",
            "    callbacks = ": """\
    if os.path.exists("runs/0.pdparams"):
        saved = [name for name in os.listdir("runs") if name[0].isdigit()]
        last = max(int(name.split(".")[0]) for name in saved)
        model.load(f"runs/{last}")
    callbacks = """,
        },
        "two processes": {
            "    points = paddle.uniform": "    paddle.seed(1)\n    points = paddle.uniform",
        },
        "an image": {
            "from paddle.io import TensorDataset\n": """\
from paddle.io import TensorDataset
from visualdl import LogWriter


class Pictures(paddle.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.writer, self.steps = LogWriter("runs/pictures"), 0

    def on_train_batch_end(self, step, logs=None):
        weights = paddle.nn.functional.sigmoid(self.model.network.weight)
        self.steps += 1
        self.writer.add_image("weights", weights.numpy()[..., None], self.steps)

""",
            'VisualDL("runs")]': 'VisualDL("runs"), Pictures()]',
        },
        "early stopping": {
            '    callbacks = [paddle.callbacks.VisualDL("runs")]\n': """\
    stopping = paddle.callbacks.EarlyStopping("acc", patience=3)
    callbacks = [paddle.callbacks.VisualDL("runs"), stopping]
""",
        },
        "best checkpoint": {
            '    callbacks = [paddle.callbacks.VisualDL("runs")]\n': """\
    best = paddle.callbacks.EarlyStopping("acc", patience=10**6)
    callbacks = [paddle.callbacks.VisualDL("runs"), best]
""",
            'save_dir="runs", callbacks=callbacks)\n': """\
save_dir="runs", callbacks=callbacks)
    model.load("runs/best_model")
    print(model.evaluate(data, batch_size=8))
""",
        },
        "accumulation": {"batch_size=5, ": "batch_size=5, accumulate_grad_batches=4, "},
        "warm-up": {
            "    adam = paddle.optimizer.Adam(0.1, ": """\
    rate = paddle.optimizer.lr.LinearWarmup(0.1, 5, start_lr=0.0, end_lr=0.1)
    adam = paddle.optimizer.Adam(rate, """,
        },
        "a loop of one's own": {
            "import TensorDataset": "import DataLoader, TensorDataset",
            """\
    callbacks = [paddle.callbacks.VisualDL("runs")]
    model.fit(data, batch_size=5, save_dir="runs", callbacks=callbacks)
""": """\
    for points, sides in DataLoader(data, batch_size=5, shuffle=True):
        print(model.train_batch([points], [sides]))
""",
        },
    },
    {
        "resume": "weights and optimizer alone; epochs are counted anew: not the same bits",
        "accumulation": "adds the gradients up, and does not divide them by 4",
        "a loop of one's own": "nothing is due in it: no curve, no checkpoint",
    },
    {"two processes": "python -m paddle.distributed.launch --nproc_per_node 2 train.py"},
)

LIBRARIES = [LIGHTNING, FABRIC, MODEL_FIT]
