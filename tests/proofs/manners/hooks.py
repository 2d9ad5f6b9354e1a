"""Hooks on layers and tensors: activations in a list, norms in a dict, some put on and off."""

import functools

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class FeatureExtractor:
    """Has the outputs of some layers after each forward."""

    def __init__(self, model, names):
        self.features, self.handles = {}, []
        for name, layer in model.named_sublayers():
            if name in names:
                hook = functools.partial(self.save, name)
                self.handles.append(layer.register_forward_post_hook(hook))

    def save(self, name, layer, inputs, output):
        self.features[name] = output


def collect(layers):
    """A list that each forward fills, and what empties it."""
    activations, calls = [], {"forward": 0}

    def before(layer, inputs):
        calls["forward"] = len(activations)

    def after(layer, inputs, output):
        activations.append(output.detach())

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_post_hook(after)

    def take():
        taken = [*activations]
        activations.clear()
        calls["forward"] = 0
        return taken

    return take


class Bottleneck(nn.Layer):
    num_blocks = 0

    def __init__(self, width):
        super().__init__()
        self.number = Bottleneck.num_blocks
        Bottleneck.num_blocks += 1
        self.down, self.norm = nn.Linear(width, width // 2), nn.BatchNorm1D(width // 2)
        self.up = nn.Linear(width // 2, width)
        self.last_input_shape = self.grad_norm = None

    def forward(self, x):
        self.last_input_shape = x.shape
        if not x.stop_gradient:
            x.register_hook(self.note)
        return x + self.up(F.relu(self.norm(self.down(x))))

    def note(self, gradient):
        self.grad_norm = float(gradient.norm())


class Twins(Dataset):
    def __getitem__(self, index):
        point = np.random.RandomState(index).randn(6)
        one, other = (point + np.random.randn(6) / 5 for _ in range(2))
        return one.astype("float32"), other.astype("float32")

    def __len__(self):
        return 22


class Alike(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Twins(), batch_size=4, shuffle=True, drop_last=True)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(6, 8), *(Bottleneck(8) for _ in range(3)))
        self.optimizer = paddle.optimizer.Adam(5e-3, parameters=self.model.parameters())
        self.extractor = FeatureExtractor(self.model, ["1.norm", "3.up"])
        self.take_activations = collect([self.model[0], self.model[2]])
        self.sparsity, self.grad_norms = [], {}
        for name, parameter in self.model.named_parameters():
            if not parameter.stop_gradient:
                parameter.register_hook(functools.partial(self.note, name))

    def note(self, name, gradient):
        self.grad_norms[name] = float(gradient.norm())

    def show(self, layer, inputs, output):
        self.sparsity.append(float((output == 0).astype("float32").mean()))

    def train_batch(self):
        one, other = self.read_batch()
        self.sparsity.clear()
        handle = self.model[1].register_forward_post_hook(self.show)
        loss = F.mse_loss(self.model(one), self.model(other))
        handle.remove()
        spread = F.relu(1 - self.extractor.features["3.up"].std(axis=0)).mean()
        (loss + 0.1 * spread).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        activations = self.take_activations()
        self.log(loss=loss, collected=len(activations), mean=activations[-1].mean())
        self.log(norm=sum(self.grad_norms.values()), last=self.model[3].grad_norm)

    @paddle.no_grad()
    def valid(self):
        self.model(paddle.ones([2, 6]))
        return {"mean": float(self.take_activations()[0].mean()), "blocks": Bottleneck.num_blocks}


if __name__ == "__main__":
    main(Alike)
