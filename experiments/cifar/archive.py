"""CIFAR-10's archive: where it is, and what is in it. Nothing is fetched unless that is asked for.

shapes.py draws an archive in the same format.
"""

import fcntl
import pickle
import tarfile
import zlib
from pathlib import Path

from paddle.dataset.common import DATA_HOME, download
from paddle.vision.datasets import Cifar10, cifar
from paddle.vision.transforms import Compose, RandomCrop, RandomHorizontalFlip, Transpose

from expbase import ConfigError

META = "cifar-10-batches-py/batches.meta"
WHAT = f"CIFAR-10 for Python, {cifar.CIFAR10_URL} (163 MB, MD5 {cifar.CIFAR10_MD5})"
# Numbers from 0 to 255, [3, 32, 32], also of the training images: the net normalizes them.
PLAIN = Transpose()
AUGMENTED = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), Transpose()])


def find_archive(given, *, fetch):
    """Where it is: as `given`, else where paddle keeps it; with `fetch` paddle puts it there.

    Raises:
        ConfigError: It is not there.
    """
    folder = Path(DATA_HOME, "cifar")
    path = Path(given or folder / Path(cifar.CIFAR10_URL).name).expanduser().absolute()
    if fetch and not given:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # every rank comes here: the first one fetches it
            download(cifar.CIFAR10_URL, "cifar", cifar.CIFAR10_MD5)
    if not path.is_file():
        raise ConfigError(
            f"data.archive: there is no {path}; expected {WHAT}. Put it there, name another place "
            "(data.archive=PATH), let paddle fetch it (data.download=true, without data.archive), "
            "or draw a small one of that format (python shapes.py PATH, beside train.py)."
        )
    return path


def read_archive(path):
    """The images for training, augmented and plain, those for the test, and the ten names.

    Raises:
        ConfigError: It is no such archive, or a part of one.
    """
    try:
        augmented = Cifar10(str(path), "train", AUGMENTED, backend="pil")
        plain, test = Cifar10.__new__(Cifar10), Cifar10(str(path), "test", PLAIN, backend="pil")
        plain.__dict__ = augmented.__dict__ | {"transform": PLAIN}  # the images only once
        with tarfile.open(path) as archive:
            meta = pickle.load(archive.extractfile(META), encoding="bytes")
    except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error, pickle.PickleError) as error:
        raise ConfigError(
            f"data.archive: {path} cannot be read ({type(error).__name__}); expected {WHAT}, or "
            "what shapes.py draws. Is it there as a whole?"
        ) from error
    return augmented, plain, test, [name.decode() for name in meta[b"label_names"]]
