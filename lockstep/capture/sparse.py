"""Sparse buffers: constants, such as the adjacency of a graph.

Many places copy, compare and send buffers by their address in memory, and a sparse tensor has no
single address. So while ranks run a model its sparse buffers are plain attributes, which every
rank gets with the model, and keeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.errors import ModelError


@contextmanager
def sparse_buffers_aside(model: nn.Module) -> Iterator[None]:
    """Within the block a model's sparse buffers are attributes of its modules.

    Raises:
        ModelError: the model has changed one.
    """
    held = [
        (f"{path}.{name}".lstrip("."), module, name, buffer, list(module._buffers), buffer._version)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.layout != torch.strided
    ]
    for _, module, name, buffer, _, _ in held:
        del module._buffers[name]
        vars(module)[name] = buffer
    try:
        yield
    finally:
        now = [vars(module).pop(name) for _, module, name, *_ in held]
        for _, module, name, buffer, order, _ in held:
            found = {**module._buffers, name: buffer}
            module._buffers.clear()
            module._buffers.update({key: found[key] for key in order if key in found})
    for one, (path, _, _, buffer, _, version) in zip(now, held, strict=True):
        if one is not buffer or one._version != version:
            raise ModelError(
                "A sparse buffer must stay constant: only one device would have the change.",
                received=f"a change of {path!r}",
                fix="Keep values that change in a dense buffer.",
            )
