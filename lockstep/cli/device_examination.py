"""The accelerators in ``lockstep doctor``: their models and their backend."""

from lockstep.cluster.devices import described, discover
from lockstep.cluster.topology import Device
from lockstep.formatting import format_bytes
from lockstep.plan.engines import NATIVE_BACKENDS


def accelerators() -> tuple[Device, ...]:
    """This host's accelerators."""
    return discover().hosts[0].accelerators


def accelerator_lines() -> tuple[str, ...]:
    """The accelerators' names, models and memory, as far as they are known."""
    return tuple(map(_line, map(described, accelerators())))


def _line(one: Device) -> str:
    memory = format_bytes(one.memory_bytes) if one.memory_bytes else ""
    return " ".join(filter(None, (one.name, one.model, memory)))


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
