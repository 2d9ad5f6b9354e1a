"""Whether the samplers of the ranks draw one order, to be dealt out, or each rank's share.

Paddle's own samplers need no look. Of any other one, each rank looks at the first samples; a
sampler that shards by rank is then used as it is.

    is_sharded, warning, batches = compare(order, "self.train_loader", world_size)
"""

from __future__ import annotations

import zlib

from expbase.data.order import BatchOrder
from expbase.distributed import gather_objects, wait_for_all


def compare(order: BatchOrder, name: str, world_size: int) -> tuple[bool, str, int | None]:
    """Looks at this rank's order; all ranks call it together.

    Returns:
        Whether each rank has an order of its own, a warning if that is likely a mistake, and the
        number of batches in this rank's epoch if all of them were seen.
    """
    failure, samples, batches = "", [""], None
    try:
        samples, batches = order.head()
    except Exception as error:  # it may need what a later step makes, or can be read only once
        failure = repr(error)
    wait_for_all(f"the sampler of {name}")  # not all may come, or late
    sums = gather_objects((failure, zlib.crc32("\n".join(samples).encode())))
    failures = [text for text, _ in sums if text]
    if failures:
        return False, _not_asked(name, failures[0], world_size), None
    if len(set(sums)) == 1:
        return False, "", batches
    heads = gather_objects((samples, batches))
    together = [sample for head, _ in heads for sample in head]
    distinct, is_whole = len(set(together)), all(count is not None for _, count in heads)
    # Shares are disjoint, but for a few samples that make them equally long. They may be drawn
    # with repetition, if together they are no more than the data.
    expected, extra = distinct, world_size
    if is_whole:
        expected = max(distinct, order.num_samples or 0)
        extra = world_size * (order.batch_size or 1)
    if len(together) <= expected + extra or (order.length is None and not is_whole):
        return True, "", batches
    return True, _overlapping(name, len(together), distinct, world_size), batches


def _not_asked(name: str, failure: str, world_size: int) -> str:
    return (
        f"{name}: its sampler could not be asked for its order at setup ({failure}), so nobody "
        f"knows whether it gives each of the {world_size} ranks another share; its batches are "
        "dealt out as one order. A sampler that shards should be a DistributedBatchSampler."
    )


def _overlapping(name: str, seen: int, distinct: int, world_size: int) -> str:
    return (
        f"{name}: its sampler draws another order on each of the {world_size} ranks, and they are "
        f"no shares of one: of the first {seen} samples only {distinct} are distinct. Each rank "
        "reads all batches of its own order. Seed it equally on all ranks, and one order is dealt "
        "out over them; or make the ranks' samples disjoint."
    )
