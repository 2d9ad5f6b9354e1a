"""The state of an optimizer that paddle.save has written, for who goes on with an old run.

optimizer.set_state_dict(read_pdopt("old/checkpoints/step-24", model))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expbase.checkpoint import pdparams
from expbase.checkpoint.model_files import WeightsError


def read_pdopt(path: str | Path, layer: Any) -> dict[str, Any]:
    """The state in a `.pdopt` of paddle.save, for `optimizer.set_state_dict`; runs nothing.

    Its tensors go by automatic names of parameters, which may be others in this process. The
    `.pdparams` beside it says which they are; the path, `step-24` say, is theirs without a suffix.
    The parameters of the layer are those of the `.pdparams`, and the optimizer's.

    Raises:
        WeightsError: One cannot be read, or the state is not that of the layer's parameters alone.
    """
    try:
        state, _ = pdparams.unpack(Path(f"{path}.pdopt"))
        _, theirs = pdparams.unpack(Path(f"{path}.pdparams"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    parameters = dict(layer.named_parameters())
    ours = {f"{old}_": parameters[n].name for n, old in theirs.items() if n in parameters}
    renamed = {}
    for key, value in state.items():  # linear_0.w_0_moment1_0: the parameter, and what it is
        owner = max((old for old in ours if key.startswith(old)), key=len, default="")
        if not owner and key != "LR_Scheduler":
            raise WeightsError(f"{path}.pdopt: {key!r} is of no parameter of this layer.")
        renamed[f"{ours[owner]}_{key.removeprefix(owner)}" if owner else key] = value
    return renamed
