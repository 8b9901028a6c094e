"""The accelerators in ``lockstep doctor``: their models, their backend, and the speed of copies."""

import time
from itertools import permutations
from typing import Any

from lockstep.cluster.devices import described, discover
from lockstep.cluster.topology import Device
from lockstep.plan.engines import NATIVE_BACKENDS
from lockstep.units import format_bytes

_COPIED_BYTES = 1 << 28
_NUM_COPIES = 4


def accelerators() -> tuple[Device, ...]:
    """This host's accelerators."""
    return discover().hosts[0].accelerators


def accelerator_lines() -> tuple[str, ...]:
    """The accelerators' names, models and memory."""
    return tuple(
        " ".join(filter(None, (one.name, one.model, format_bytes(one.memory_bytes))))
        for one in map(described, accelerators())
    )


def backend_line() -> str:
    """The backend that moves tensors between accelerators, with its version."""
    found = accelerators()
    if not found:
        return ""
    from torch import distributed

    name = NATIVE_BACKENDS.get(found[0].kind, "gloo")
    if not distributed.is_backend_available(name):
        return f"gloo, through host memory: this torch has no {name}"
    return f"{name} {_version(found[0].kind)}".strip()


def _version(kind: str) -> str:
    if kind != "cuda":
        return ""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def link_lines() -> tuple[str, ...]:
    """The speed of copies between each two accelerators, and whether they are direct."""
    return tuple(_link(one.name, other.name) for one, other in permutations(accelerators(), 2))


def _link(source: str, target: str) -> str:
    import torch

    sent = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=source)
    received = torch.empty_like(sent, device=target)
    seconds = min(_seconds_to_copy(sent, received) for _ in range(_NUM_COPIES))
    path = "directly" if _is_peer(source, target) else "through host memory"
    return f"{source} to {target} {format_bytes(_COPIED_BYTES / seconds)}/s, {path}"


def _seconds_to_copy(sent: Any, received: Any) -> float:
    import torch

    began = time.perf_counter()
    received.copy_(sent)
    for one in (sent, received):
        torch.accelerator.synchronize(one.device)
    return time.perf_counter() - began


def _is_peer(source: str, target: str) -> bool:
    import torch

    one, other = torch.device(source), torch.device(target)
    ask = getattr(torch.get_device_module(one), "can_device_access_peer", None)
    return ask is not None and bool(ask(one, other))
