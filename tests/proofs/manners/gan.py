"""Two models and a pool of old pictures, in the manner of CycleGAN's scripts."""

import random

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from expbase import ExperimentBase, main


class ImagePool:
    """Gives a picture of now, or one of before in exchange."""

    def __init__(self, pool_size):
        self.pool_size, self.num_imgs, self.images = pool_size, 0, []

    def query(self, images):
        given = []
        for image in images:
            if self.num_imgs < self.pool_size:
                self.num_imgs += 1
                self.images.append(image)
                given.append(image)
            elif random.uniform(0, 1) > 0.5:
                place = random.randint(0, self.pool_size - 1)
                given.append(self.images[place].clone())
                self.images[place] = image
            else:
                given.append(image)
        return paddle.stack(given)


class Gan(ExperimentBase):
    def setup_dataloader(self):
        pictures = np.random.RandomState(3).randn(30, 9).astype("float32")
        self.train_loader = DataLoader(
            TensorDataset([paddle.to_tensor(pictures)]), batch_size=4, shuffle=True
        )

    def setup_model(self):
        self.nets = {
            "G": nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Linear(16, 9)),
            "D": nn.Sequential(
                nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1)
            ),
        }
        self.optimizers = {
            name: paddle.optimizer.Adam(2e-3, beta1=0.5, parameters=net.parameters())
            for name, net in self.nets.items()
        }
        self.fake_pool = ImagePool(10)
        self.loss_G = self.loss_D = None
        self.current_visuals = {}

    def set_requires_grad(self, net, requires_grad):
        for parameter in net.parameters():
            parameter.trainable = requires_grad

    def backward_D(self, real, fake):
        judged = self.nets["D"](self.fake_pool.query(fake.detach()))
        self.loss_D = (F.softplus(-self.nets["D"](real)) + F.softplus(judged)).mean()
        self.loss_D.backward()

    def train_batch(self):
        (real,) = self.read_batch()
        fake = self.nets["G"](paddle.randn([len(real), 5]))
        self.set_requires_grad(self.nets["D"], False)
        self.loss_G = F.softplus(-self.nets["D"](fake)).mean()
        self.loss_G.backward()
        self.optimizers["G"].step()
        self.optimizers["G"].clear_grad()
        self.set_requires_grad(self.nets["D"], True)
        self.backward_D(real, fake)
        self.optimizers["D"].step()
        self.optimizers["D"].clear_grad()
        self.current_visuals = {"real": real, "fake": fake.detach()}
        self.log(G=self.loss_G, D=self.loss_D)

    def valid(self):
        with paddle.no_grad():
            return {"fake": float(self.nets["G"](paddle.randn([4, 5])).mean())}


if __name__ == "__main__":
    main(Gan)
