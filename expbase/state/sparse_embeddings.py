"""Embeddings whose gradients have few rows, and those that an Adam updates, not lazily.

sparse_embeddings(found)       # {"model.words": Embedding}
sparse_under_adam(found)       # those whose update does not repeat on the CPU
"""

from __future__ import annotations

from typing import Any

from paddle.nn import Embedding
from paddle.optimizer import Adam

from expbase.state import optimizers
from expbase.state.parts import StatefulObjects, parameters_of


def sparse_embeddings(found: StatefulObjects) -> dict[str, Any]:
    """Returns the Embeddings whose gradients have few rows, by path."""
    embeddings = {path: one for path, one in found.sublayers() if isinstance(one, Embedding)}
    return {path: one for path, one in embeddings.items() if one._sparse}


def sparse_under_adam(found: StatefulObjects) -> dict[str, Any]:
    """Returns those whose weights an Adam updates, and not lazily."""
    # On the CPU that does not repeat: of five runs of bare paddle 3.3.1 the moments differed, and
    # reached 3e28. SGD, Adagrad and lazy_mode=True repeat.
    steps = map(optimizers.innermost, found.optimizers.values())
    rough = [one for one in steps if isinstance(one, Adam) and not one._lazy_mode]
    updated = {id(parameter) for one in rough for parameter in parameters_of(one)}
    return {path: e for path, e in sparse_embeddings(found).items() if id(e.weight) in updated}
