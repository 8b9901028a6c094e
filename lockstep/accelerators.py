"""What a process does with its accelerator, whoever makes it: nothing here names a vendor.

torch knows one kind of accelerator at a time (``torch.accelerator``), and a process of Lockstep
uses one device of it. So the current device is this rank's, and its random stream and memory are
those meant here. Where a process has not begun to use its accelerator, nothing here begins:
training on cores leaves it alone.

Covers no Apple GPU: nothing joins several, and they compute nothing in float64.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

import torch

# How long a host sleeps between two looks at its device: far less than a step takes.
_NAP_SECONDS = 50e-6
_LOOK_AROUND_SECONDS = 0.02


@cache
def kind() -> str | None:
    """Torch's name of the accelerators it was built for ("cuda", "xpu"); None for cores alone."""
    device = torch.accelerator.current_accelerator(check_available=False)
    return None if device is None or device.type == "mps" else device.type


def in_use() -> Any:
    """The module of the accelerator that this process has begun to use; None for none."""
    name = kind()
    if name is None:
        return None
    module = torch.get_device_module(name)
    is_initialized = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if is_initialized() else None


def use(device: torch.device) -> None:
    """Have this thread work on an accelerator; a core needs no such thing."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


@contextmanager
def kept_device() -> Iterator[None]:
    """After the block this thread works on the device on which it did before, if on any."""
    before = None if in_use() is None else torch.accelerator.current_device_index()
    try:
        yield
    finally:
        if before is not None:
            torch.accelerator.set_device_index(before)


def rank_device(devices: Sequence[str], rank: int) -> torch.device:
    """A rank's device, as torch has it: all cores are one."""
    device = torch.device(devices[rank])
    return torch.device("cpu") if device.type == "cpu" else device


def current(kind_: str) -> torch.device:
    """The device of a kind that this thread works on."""
    return torch.device(kind_, torch.accelerator.current_device_index())


# --- random numbers -------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed the device's own random stream, if it is in use."""
    module = in_use()
    if module is not None:
        module.manual_seed(number)


def random_state() -> torch.Tensor | None:
    """Where the device's random stream stands; None where no device is in use."""
    module = in_use()
    state: torch.Tensor | None = None if module is None else module.get_rng_state()
    return state


def set_random_state(state: torch.Tensor | None) -> None:
    """Put the device's random stream back there."""
    if state is not None:
        torch.get_device_module(kind()).set_rng_state(state)


# --- waiting --------------------------------------------------------------------------------------


def await_device(device: torch.device, look_around: Callable[[float], None]) -> None:
    """Wait until a device has done what this thread has asked of it.

    Args:
        device: an accelerator.
        look_around: see ``await_event``.
    """
    done = torch.Event(device.type)
    done.record()
    await_event(done, look_around)


def await_event(event: torch.Event, look_around: Callable[[float], None]) -> None:
    """Wait until something has happened on a device.

    torch's own waits end when the device is done, which may be never if it waits for another
    process. This one looks around.

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
    """Wait for the device, if one is in use. For what is timed, where nobody else is waited for."""
    if in_use() is not None:
        torch.accelerator.synchronize()


# --- between a device and the host ----------------------------------------------------------------


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, for which nobody waits here; itself where it stays."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def computes(number: torch.Tensor | float) -> TypeGuard[torch.Tensor]:
    """Whether an accelerator computes a number: whoever asks for its value waits for the device."""
    return isinstance(number, torch.Tensor) and number.device.type != "cpu"


class Fetch:
    """A tensor of a device on its way to host memory, for which nobody waits yet.

    Assigned to host memory it would be there when the assignment ends: torch waits for the device.

    Args:
        tensor: on the device, where this thread works.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = pinned(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.Event(tensor.device.type)
        self._copied.record()

    def wait(self, look_around: Callable[[float], None]) -> torch.Tensor:
        """The copy, once it is there; for ``look_around`` see ``await_event``."""
        await_event(self._copied, look_around)
        return self._copy


def fetched(tensor: torch.Tensor, look_around: Callable[[float], None]) -> torch.Tensor:
    """A tensor in host memory: itself, or a copy for which this waits."""
    return Fetch(tensor).wait(look_around) if computes(tensor) else tensor


# --- memory ---------------------------------------------------------------------------------------


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that a device copies from and to by itself; plain memory for a core."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def peak_bytes() -> int | None:
    """The most memory that tensors have had on this process's device; None without one."""
    return None if in_use() is None else int(torch.accelerator.max_memory_allocated())


def forget_peak() -> None:
    """Have ``peak_bytes`` begin anew."""
    if in_use() is not None:
        torch.accelerator.reset_peak_memory_stats()


def limit_bytes() -> int | None:
    """What tensors of this process may take of its device in all, beside what others have there.

    None without a device, and before torch 2.10, which cannot tell.
    """
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if ask is None or in_use() is None:
        return None
    free, _ = ask()
    return int(free) + int(torch.accelerator.memory_reserved())
