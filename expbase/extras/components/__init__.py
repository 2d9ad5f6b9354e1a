"""Readers, backbones and heads that declare what they take and what they return.

Thin classes over paddle.io and paddle.nn. A declaration is a list of `paddle.static.InputSpec`
with names; -1 or None is a size that varies. One declaration says what the reader yields, is
compared with each batch, and serves the export. Several heads share one backbone; `MultiHead`
trains one of them with each update. Source: PALM (seed 001).

    class Lines(Reader): outputs_attr = [InputSpec([-1, 16], "int64", "tokens"), …]
    class Encoder(Backbone): inputs_attr, outputs_attr = [...], [...]
    class Tags(Head): inputs_attrs = {"reader": [...], "backbone": [...]}
    model = Composed(Encoder(), {"tags": Tags()})
    reader.register_with(model)                         # which yields what the model takes
    outputs = model(batch, "tags")
"""

from expbase.extras.components.layers import Backbone, Composed, Head, Reader
from expbase.extras.components.multi_head import MultiHead, Task

__all__ = ["Backbone", "Composed", "Head", "MultiHead", "Reader", "Task"]
