"""What is checked and said at the end of setup, before the first batch.

check(experiment)       # raises where training would fail, or would lose something
for text in describe(found, feed, 1): logger.info(text)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import paddle

from expbase import state
from expbase.data import Feed, IndexedFeed


def check(found: state.Found, feed: Feed) -> None:
    """Checks that what training needs stands on the experiment.

    Raises:
        ValueError: No batch, no layer, no optimizer, or an optimizer of parameters that nobody
            would save.
    """
    if feed.batches_per_epoch == 0:
        raise feed.no_batch()
    if not found.layers:
        raise ValueError(
            "setup_model: no paddle.nn.Layer on self; expected at least one, self.model say."
        )
    if not found.optimizers and not found.excluded_optimizers:
        raise ValueError(
            "setup_model: no optimizer on self; expected at least one, self.optimizer say."
        )
    for name, optimizer in found.optimizers.items():
        if isinstance(optimizer, paddle.optimizer.LBFGS):
            raise ValueError(
                f"self.{name}: paddle's LBFGS does not continue exactly from its state. To accept "
                f"that, call exclude_from_state({name!r}): a resumed run begins its history anew."
            )
    names = state.parameter_names(found)
    for name, optimizer in found.optimizers.items():
        unknown = [p.name for p in state.parameters_of(optimizer) if p.name not in names]
        if unknown:
            raise ValueError(
                f"self.{name}: updates {len(unknown)} parameters that belong to no layer on "
                f"self ({unknown[0]} …), so they would not be saved. Put their layer on self."
            )


def unsynchronized(attributes: dict[str, Any], found: state.Found) -> list[str]:
    """The layers with trainable parameters that stand in no DataParallel."""
    wrapped = {
        id(state.unwrap(v)) for v in attributes.values() if isinstance(v, paddle.DataParallel)
    }
    return [
        name
        for name, layer in found.layers.items()
        if id(layer) not in wrapped and any(not p.stop_gradient for p in layer.parameters())
    ]


def describe(found: state.Found, feed: Feed, accumulation_steps: int) -> Iterator[str]:
    """What there is, in lines for the log."""
    for name, layer in found.layers.items():
        count = sum(math.prod(p.shape) for p in layer.parameters())
        trainable = sum(math.prod(p.shape) for p in layer.parameters() if not p.stop_gradient)
        yield f"{name}: {count:,} parameters, {trainable:,} trainable"
    ranks = feed.share.world_size
    update = feed.batch_size * ranks * accumulation_steps if feed.batch_size else "unknown"
    yield (
        f"device={paddle.device.get_device()} ranks={ranks} samples_per_update={update} "
        f"batches_per_epoch={feed.batches_per_epoch or 'unknown'}"
    )
    if isinstance(feed, IndexedFeed) and feed.filled:
        yield (
            f"the last round of a pass takes its first {feed.filled} batches again, so that every "
            "rank has one"
        )
