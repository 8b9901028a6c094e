"""A process's use of its accelerator, of any vendor.

torch supports one kind of accelerator at a time (``torch.accelerator``), and a process of Lockstep
uses one device of it. So the current device is this rank's, and the functions here are about its
random stream and memory. They never initialise an accelerator that the process does not use yet:
training on CPUs does not touch it.

Not every maker's backend has all that CUDA's has. What a device can do is tried here, once, and the
rest of Lockstep asks no more: ``pins_memory``, ``keep_until``, ``has_whole_batch_norm``.

Apple GPUs are not supported: several cannot be joined, and they have no float64.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from lockstep.cluster import tpu
from lockstep.errors import DeviceError

# A host polls its device without pause at first, since a sleep of any length takes 0.1 ms or more.
_EAGER_SECONDS = 1e-3
_NAP_SECONDS = 50e-6
_LOOK_AROUND_SECONDS = 0.02

# CUDA copies so much pageable memory to its own before it returns; pinning it first takes longer.
_MOST_STAGED_BYTES = 1 << 16

# Of float64: what is more comes from arithmetic in less.
_ROUNDING = 1e-12


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
    """The device, in torch, of a rank whose process this is; all cores are one.

    Raises:
        DeviceError: the process cannot have that device any more.
    """
    kind, _, number = devices[rank].partition(":")
    if kind == tpu.KIND:
        return _own_tpu(int(number or 0), is_alone=len(devices) == 1)
    return torch.device("cpu") if kind == "cpu" else torch.device(devices[rank])


# The chip of this process, once it has begun to use it.
_chips: list[int] = []


def take_tpu(chip: int) -> None:
    """Begin to use one of the host's TPUs, unless this process uses TPUs already."""
    if not torch.get_device_module(tpu.KIND).is_initialized():
        _begin_tpu(chip)
        _chips.append(chip)


def _own_tpu(chip: int, *, is_alone: bool) -> torch.device:
    """This process's TPU, whatever its number in torch."""
    take_tpu(chip)
    if _chips != [chip] and (_chips or not is_alone):
        raise DeviceError(
            "A process can use one TPU, and the same one from then on.",
            received=f"{tpu.KIND}:{chip}, in a process that already uses "
            + (f"{tpu.KIND}:{_chips[0]}" if _chips else "TPUs, begun without Lockstep"),
            fix="Call lockstep.initialize_tpu_system(), or make the TPUStrategy, before anything "
            "that begins to use TPUs, such as torch.manual_seed; and name the same devices.",
        )
    return torch.device(tpu.KIND, torch.accelerator.current_device_index())


def _begin_tpu(chip: int) -> None:
    """Begin with a chip alone; the variables for it are not those of processes started later."""
    before = dict(os.environ)
    for name in tpu.LAUNCHERS_VARIABLES:
        os.environ.pop(name, None)
    for name, value in tpu.chip_variables(chip).items():
        os.environ.setdefault(name, value)
    try:
        torch.get_device_module(tpu.KIND).distributed.set_tpu_launch_env(nproc_per_node=1)
        torch.empty(0, device=tpu.KIND)
        torch.accelerator.synchronize()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def identity(device: torch.device) -> str:
    """Tells a device from the others of its host, whatever number a process has for it.

    Launchers may show each process one device, which is number 0 for all of them.
    """
    if device.type == tpu.KIND and _chips:
        return f"{tpu.KIND}:{_chips[0]}"
    module = torch.get_device_module(device.type)
    try:
        return str(module.get_device_properties(device).uuid)
    except (AttributeError, NotImplementedError, RuntimeError):  # a kind without such properties
        return str(device)


def current(kind_: str) -> torch.device:
    """This thread's current device, of a kind."""
    return torch.device(kind_, torch.accelerator.current_device_index())


# --- random numbers -------------------------------------------------------------------------------


def random_state() -> torch.Tensor | None:
    """The state of the device's random stream; None if no device is in use."""
    module = in_use()
    if module is None:
        return None
    generator = _generator(module)
    state: torch.Tensor = module.get_rng_state() if generator is None else generator.get_state()
    return state


def set_random_state(state: torch.Tensor | None) -> None:
    """Set the state of the device's random stream."""
    if state is None:
        return
    module = torch.get_device_module(kind())
    generator = _generator(module)
    if generator is None:
        module.set_rng_state(state)
    else:
        generator.set_state(state)


def _generator(module: Any) -> torch.Generator | None:
    """The current device's, where its module shows it: ``get_rng_state`` may be torch's alone."""
    generators = getattr(module, "default_generators", None)
    return generators[torch.accelerator.current_device_index()] if generators else None


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
        time.sleep(_NAP_SECONDS if now - begun > _EAGER_SECONDS else 0)


def synchronize() -> None:
    """Wait for the device, if one is in use. For timings, where no other process is involved."""
    if in_use() is not None:
        torch.accelerator.synchronize()


# --- between a device and the host ----------------------------------------------------------------


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor copied to a device without waiting; the tensor itself on a CPU."""
    if device.type == "cpu" or not pins_memory():
        return tensor.to(device)
    if device.type == "cuda" and tensor.nbytes <= _MOST_STAGED_BYTES:
        return tensor.to(device, non_blocking=True)  # the driver has copied it when this returns
    return tensor.pin_memory().to(device, non_blocking=True)


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
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins_memory())
        self._copy.copy_(tensor, non_blocking=pins_memory())
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


@cache
def pins_memory() -> bool:
    """Whether host memory can be pinned, for copies that do not wait; this process has a device."""
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory for asynchronous copies, pinned if possible; plain memory for a CPU."""
    is_pinned = device.type != "cpu" and pins_memory()
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def keep_until(stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Keep a device's tensors, made on another stream, until this one has used them."""
    for tensor in tensors:
        if tensor.device.type != "cpu" and _records_streams(tensor.device):
            tensor.record_stream(stream)


@cache
def _records_streams(device: torch.device) -> bool:
    """Whether memory may be reused too soon. Runtimes without this call see to that themselves."""
    try:
        torch.empty(1, device=device).record_stream(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def peak_bytes() -> int | None:
    """The peak memory of tensors on this process's device; None without one, and if unknown."""
    return None if in_use() is None else int(torch.accelerator.max_memory_allocated()) or None


def forget_peak() -> None:
    """Reset ``peak_bytes``."""
    if in_use() is not None:
        torch.accelerator.reset_peak_memory_stats()


def limit_bytes() -> int | None:
    """The memory of the device that this process's tensors can have in total.

    None without a device, if its backend does not know, and before torch 2.10.
    """
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if ask is None or in_use() is None:
        return None
    free, total = ask()
    return int(free) + int(torch.accelerator.memory_reserved()) if total else None


# --- arithmetic -----------------------------------------------------------------------------------


@cache
def has_whole_batch_norm(device: torch.device) -> bool:
    """Whether ``F.batch_norm`` updates running statistics in training.

    A backend that leaves them as they are rounds ``eps`` to float32, too.
    """
    if device.type == "cpu":
        return True
    mean, variance = torch.zeros(1, device=device), torch.ones(1, device=device)
    with torch.no_grad():
        values = torch.ones(2, 1, device=device)
        torch.batch_norm(values, None, None, mean, variance, True, 0.5, 1e-5, False)
    return float(mean) != 0


@cache
def fuses_adam(device: torch.device) -> bool:
    """Whether torch's fused Adam runs on a device, and leaves out an update where it is told to."""
    with torch.no_grad():
        weight, slope, mean, square, count = (torch.ones(1, device=device) for _ in range(5))
        try:
            for refused in (1.0, 0.0):
                before = weight.clone()
                torch._fused_adam_(
                    [weight],
                    [slope],
                    [mean],
                    [square],
                    [],
                    [count[0]],
                    lr=0.5,
                    beta1=0.5,
                    beta2=0.5,
                    weight_decay=0.0,
                    eps=1.0,
                    amsgrad=False,
                    maximize=False,
                    found_inf=torch.full((), refused, device=device),
                )
                if bool(weight == before) != bool(refused):
                    return False
        except (RuntimeError, NotImplementedError):
            return False
    return True


@cache
def rounds_attention(device: torch.device) -> bool:
    """Whether attention in float64 goes backward in less, as fused kernels may."""
    if device.type == "cpu":
        return False
    query = torch.linspace(-1, 1, 8, dtype=torch.float64, device=device).reshape(1, 1, 4, 2)
    query.requires_grad_()
    gradients = [
        torch.autograd.grad(attend(query, query, query)[..., 0].sum(), query)[0]
        for attend in (F.scaled_dot_product_attention, attention_in_steps)
    ]
    return float((gradients[0] - gradients[1]).abs().max()) > _ROUNDING


def attention_in_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,  # as F.scaled_dot_product_attention names it
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` by products and a softmax, without a fused kernel."""
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]
    return output
