"""Augmentations with generators of their own, drawn from np.random, in albumentations' manner."""

import random

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class Transform:
    """A chance, the parameters of the last call, and how often it was called."""

    def __init__(self, p=0.5):
        self.p, self.params, self.calls = p, {}, 0

    def get_params(self, image):
        return {}

    def __call__(self, image):
        self.calls += 1
        if not np.random.rand() < self.p:
            return image
        self.params = {**self.get_params(image), "shape": image.shape}
        return self.apply(image, **self.params)


class Cutout(Transform):
    """Makes a generator for each call, and leaves the last one for who wants to look."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.size, self.rng = size, None

    def get_params(self, image):
        self.rng = np.random.default_rng(np.random.randint(2**31))
        return {"corner": tuple(self.rng.integers(0, len(image) - self.size + 1, 2).tolist())}

    def apply(self, image, corner, shape):
        y, x = corner
        image = image.copy()
        image[y : y + self.size, x : x + self.size] = 0
        return image


class Noise(Transform):
    """Seeds its own RandomState anew in each call."""

    def __init__(self, scale, **options):
        super().__init__(**options)
        self.scale, self.state, self.buffer = scale, np.random.RandomState(), None

    def apply(self, image, shape):
        self.state.seed(np.random.randint(2**31))
        self.buffer = self.state.standard_normal(shape).astype(image.dtype) * self.scale
        return image + self.buffer


class OneOf(Transform):
    def __init__(self, transforms, **options):
        super().__init__(**options)
        weights = np.array([t.p for t in transforms])
        self.transforms, self.weights, self.last = transforms, weights / weights.sum(), None

    def apply(self, image, shape):
        self.last = random.choices(self.transforms, self.weights)[0]
        return self.last(image)


class Pictures(Dataset):
    def __init__(self, transform):
        self.transform, self.last_index = transform, -1

    def __getitem__(self, index):
        self.last_index = index
        image = np.random.RandomState(index).rand(6, 6).astype("float32")
        return self.transform(image)[None], image[None]

    def __len__(self):
        return 22


class Inpainting(ExperimentBase):
    def setup_dataloader(self):
        transform = OneOf([Cutout(3, p=0.9), Noise(0.2, p=0.7)], p=0.9)
        self.train_loader = DataLoader(Pictures(transform), batch_size=4, shuffle=True)

    def setup_model(self):
        self.model = nn.Sequential(
            nn.Conv2D(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Swish(), nn.Conv2D(6, 1, 1)
        )
        self.optimizer = paddle.optimizer.NAdam(0.01, parameters=self.model.parameters())

    def train_batch(self):
        altered, images = self.read_batch()
        loss = F.l1_loss(self.model(altered), images)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)

    def valid(self):
        return {"error": float(F.l1_loss(self.model(paddle.ones([1, 1, 6, 6])), paddle.ones([1])))}


if __name__ == "__main__":
    main(Inpainting)
