"""A process's use of its accelerator, of any vendor.

torch supports one kind of accelerator at a time (``torch.accelerator``), and a process of Lockstep
uses one device of it. So the current device is this rank's, and the functions here are about its
random stream and memory. They never initialise an accelerator that the process does not use yet:
training on CPUs does not touch it.

Apple GPUs are not supported: several cannot be joined, and they have no float64.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

import torch

# How long a host sleeps between two polls of its device: far less than a step.
_NAP_SECONDS = 50e-6
_LOOK_AROUND_SECONDS = 0.02


@cache
def kind() -> str | None:
    """Torch's name of the accelerators it was built for ("cuda", "xpu"); None for CPUs only."""
    device = torch.accelerator.current_accelerator(check_available=False)
    return None if device is None or device.type == "mps" else device.type


def in_use() -> Any:
    """Torch's module of the accelerator that this process has initialised; None for none."""
    name = kind()
    if name is None:
        return None
    module = torch.get_device_module(name)
    is_initialized = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if is_initialized() else None


def use(device: torch.device) -> None:
    """Make an accelerator this thread's current device; does nothing for a CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


@contextmanager
def kept_device() -> Iterator[None]:
    """After the block restore this thread's current device, if it had one."""
    before = None if in_use() is None else torch.accelerator.current_device_index()
    try:
        yield
    finally:
        if before is not None:
            torch.accelerator.set_device_index(before)


def rank_device(devices: Sequence[str], rank: int) -> torch.device:
    """A rank's device in torch, where all cores are one."""
    device = torch.device(devices[rank])
    return torch.device("cpu") if device.type == "cpu" else device


def identity(device: torch.device) -> str:
    """Tells a device from the others of its host, whatever number a process has for it.

    Launchers may show each process one device, which is number 0 for all of them.
    """
    module = torch.get_device_module(device.type)
    try:
        return str(module.get_device_properties(device).uuid)
    except (AttributeError, NotImplementedError, RuntimeError):  # a kind without such properties
        return str(device)


def current(kind_: str) -> torch.device:
    """This thread's current device, of a kind."""
    return torch.device(kind_, torch.accelerator.current_device_index())


# --- random numbers -------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed the device's own random stream, if it is in use."""
    module = in_use()
    if module is not None:
        module.manual_seed(number)


def random_state() -> torch.Tensor | None:
    """The state of the device's random stream; None if no device is in use."""
    module = in_use()
    state: torch.Tensor | None = None if module is None else module.get_rng_state()
    return state


def set_random_state(state: torch.Tensor | None) -> None:
    """Set the state of the device's random stream."""
    if state is not None:
        torch.get_device_module(kind()).set_rng_state(state)


# --- waiting --------------------------------------------------------------------------------------


def await_device(device: torch.device, look_around: Callable[[float], None]) -> None:
    """Wait until a device has finished this thread's work.

    Args:
        device: an accelerator.
        look_around: see ``await_event``.
    """
    done = torch.Event(device.type)
    done.record()
    await_event(done, look_around)


def await_event(event: torch.Event, look_around: Callable[[float], None]) -> None:
    """Wait for an event on a device.

    torch's own waits end when the device has finished, which may be never if it waits for another
    process. This one can be ended by ``look_around``.

    Args:
        event: that was recorded.
        look_around: called every 20 ms with the seconds waited so far; it raises to give up.
    """
    begun = looked = time.monotonic()
    while not event.query():
        now = time.monotonic()
        if now - looked > _LOOK_AROUND_SECONDS:
            looked = now
            look_around(now - begun)
        time.sleep(_NAP_SECONDS)


def synchronize() -> None:
    """Wait for the device, if one is in use. For timings, where no other process is involved."""
    if in_use() is not None:
        torch.accelerator.synchronize()


# --- between a device and the host ----------------------------------------------------------------


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor copied to a device without waiting; the tensor itself on a CPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def computes(number: torch.Tensor | float) -> TypeGuard[torch.Tensor]:
    """True if a number is on an accelerator, so that reading it waits for the device."""
    return isinstance(number, torch.Tensor) and number.device.type != "cpu"


class Fetch:
    """An asynchronous copy of a device's tensor to host memory.

    A plain assignment to host memory would wait for the device.

    Args:
        tensor: on this thread's current device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = pinned(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.Event(tensor.device.type)
        self._copied.record()

    def wait(self, look_around: Callable[[float], None]) -> torch.Tensor:
        """The copy, once it is complete; for ``look_around`` see ``await_event``."""
        await_event(self._copied, look_around)
        return self._copy


def fetched(tensor: torch.Tensor, look_around: Callable[[float], None]) -> torch.Tensor:
    """A tensor in host memory: itself, or a copy for which this waits."""
    return Fetch(tensor).wait(look_around) if computes(tensor) else tensor


# --- memory ---------------------------------------------------------------------------------------


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Pinned host memory, for asynchronous copies; plain memory for a CPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def peak_bytes() -> int | None:
    """The peak memory of tensors on this process's device; None without one."""
    return None if in_use() is None else int(torch.accelerator.max_memory_allocated())


def forget_peak() -> None:
    """Reset ``peak_bytes``."""
    if in_use() is not None:
        torch.accelerator.reset_peak_memory_stats()


def limit_bytes() -> int | None:
    """The memory of the device that this process's tensors can have in total.

    None without a device, and before torch 2.10, which does not report it.
    """
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if ask is None or in_use() is None:
        return None
    free, _ = ask()
    return int(free) + int(torch.accelerator.memory_reserved())
