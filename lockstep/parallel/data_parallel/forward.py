"""The forward pass of a share: the model called in the Plan's precision and memory format.

Convolutions, pooling and the layers between them run faster on images in the format
``torch.channels_last``. Values and shapes are the same in either format, and so are the operations,
except for those that depend on strides, such as ``view`` across dims that are no longer contiguous:
torch raises an error. A share whose forward pass fails so runs again in torch's own format, from
the same random streams and buffers, and so does everything after that step.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.accelerators import attention_in_steps, has_whole_batch_norm, rounds_attention
from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.order import restore_streams, stream_states
from lockstep.data.trees import Tree, map_tensors
from lockstep.launch.health.failure import add_note
from lockstep.parallel.data_parallel.batch_norm import BatchNorms, updating_statistics
from lockstep.parallel.data_parallel.buffers import Buffers
from lockstep.parallel.data_parallel.functional_patch import Redirection
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.parallel.settings import rounds_float32
from lockstep.parallel.storage.cpu_quirks import (
    breaks_channels_last,
    has_slow_bfloat16_attention,
    lacks_lstm,
)
from lockstep.plan.spec import Plan

# Dtypes of the data and the loss, by the Plan's precision.
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16-mixed": torch.float32,
    "fp16-mixed": torch.float32,
    "bf16": torch.float32,
}

# Dtypes of parameters and buffers.
PARAMETER_DTYPES = {**DTYPES, "bf16": torch.bfloat16}

_attention = Redirection("scaled_dot_product_attention")
_lstm = Redirection("lstm", torch._VF)

_OTHER_FORMAT = (
    "Images had their channels together in memory, which is faster. If that is why, pass "
    "channels_last=False to the strategy: SingleDeviceStrategy(channels_last=False)."
)

_LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class ModelCall:
    """Calls a model in its Plan's precision and memory format.

    Args:
        model: the model.
        plan: precision and memory format.
        device: where the model is.
        dims: of the samples in the model's inputs and outputs.

    Attributes:
        channels_last: the Plan's choice to give the model images in that format.
        is_redirected: passes run within ``applied``, which redirects some functions.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, device: torch.device, dims: BatchDims = SAMPLES_FIRST
    ) -> None:
        self._dims = dims
        self._model = model
        self._called = compiled(model) if plan.compiled else model
        self._plan = plan
        self._device = device
        self._is_low = plan.precision in _LOW_PRECISION or plan.precision == "bf16"
        is_broken = device.type == "cpu" and breaks_channels_last(model)
        self.channels_last = plan.channels_last and not is_broken
        self._converts = False
        self._widens = plan.precision in _LOW_PRECISION and device.type == "cpu"
        self._keeps_statistics = bool(BatchNorms(model)) and not has_whole_batch_norm(device)
        self._attends_in_steps = plan.precision == "fp64" and rounds_attention(device)
        self.is_redirected = self._widens or self._keeps_statistics or self._attends_in_steps
        # The model takes inputs and returns outputs as they are.
        self._is_plain = not (self._is_low or dims)
        self._given_up: set[bool] = set()  # the model's modes, training or not
        self._buffers = Buffers(model)

    def __call__(self, inputs: Tree) -> Any:
        """The model's outputs, in float32 also if it computes in less."""
        if self._is_plain and not self._converts:
            return call_model(self._called, inputs)
        given = self.given(inputs)
        if self._converts:
            given = map_tensors(channels_last, given)
        with self.computing():
            output = self.widened(call_model(self._called, given))
        return self.rows(output, inputs)

    def given(self, inputs: Tree) -> Tree:
        """Inputs in the model's form and precision."""
        turned = self._dims.given_inputs(inputs, DTYPES[self._plan.precision])
        return narrowed(turned, self._plan.precision)

    def rows(self, output: Tree, inputs: Tree) -> Tree:
        """The model's output for inputs, with samples first."""
        return self._dims.output_rows(output, inputs)

    def computing(self) -> AbstractContextManager[Any]:
        """Entered around calls of the model or its parts; sets the Plan's precision."""
        return computing_in(self._plan.precision, self._device.type)

    def widened(self, output: Tree) -> Tree:
        """The model's outputs in the precision of the loss."""
        return map_tensors(_widened, output) if self._is_low else output

    def attempt(self, body: Callable[[], None]) -> bool:
        """Run ``body``, which calls the model; again if the memory format makes it fail.

        Returns:
            True if it failed.
        """
        if not self.channels_last or self._model.training in self._given_up:
            body()
            return False
        kept = stream_states(), self._buffers.keep()
        try:
            self._converts = True
            body()
            return False
        except RuntimeError as error:
            if "stride" not in str(error):
                raise
        finally:
            self._converts = False
        restore_streams(kept[0])
        self._buffers.restore(kept[1])
        body()
        return True

    def go_backward(self, loss: ShareLoss, denominator: Any) -> None:
        """The backward pass of a share's loss; an error says how to leave the memory format."""
        try:
            loss.backward(denominator)
        except RuntimeError as error:
            if self.channels_last and "stride" in str(error):
                add_note(error, _OTHER_FORMAT)
            raise

    def give_up_format(self) -> None:
        """From now on run the model in torch's own format, in its present mode.

        In training every rank does so after the same step, so that the bits do not depend on the
        number of ranks.
        """
        self._given_up.add(self._model.training)

    @property
    def is_low(self) -> bool:
        """True if it computes in less than float32, also if its outputs are float32."""
        is_float32 = DTYPES[self._plan.precision] == torch.float32
        return self._is_low or (is_float32 and rounds_float32(self._device.type))

    def applied(self) -> AbstractContextManager[Any]:
        """Entered around a forward or backward pass that calls the model or parts of it."""
        is_compiled = self._plan.compiled
        stack = ExitStack()
        if self._keeps_statistics:
            stack.enter_context(updating_statistics(is_compiled=is_compiled))
        if self._attends_in_steps:
            stack.enter_context(_attention.to(attention_in_steps, is_compiled=is_compiled))
        if self._widens:
            stack.enter_context(running_lstms(self._plan.precision, is_compiled=is_compiled))
            if has_slow_bfloat16_attention():
                stack.enter_context(_attention.to(attend_in_float32, is_compiled=is_compiled))
        return stack


def attend_in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` under autocast: in float32, with a rounded result."""
    if not torch.is_autocast_enabled("cpu") or query.dtype == torch.float64:
        plain: torch.Tensor = _attention.plain(query, key, value, *args, **kwargs)
        return plain
    dtype = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        attended: torch.Tensor = _attention.plain(
            query.float(),
            key.float(),
            value.float(),
            *map(_widened_mask, args),
            **{name: _widened_mask(value) for name, value in kwargs.items()},
        )
    return attended.to(dtype)


def _widened_mask(argument: Any) -> Any:
    is_mask = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.float() if is_mask else argument


def running_lstms(precision: str, *, is_compiled: bool = False) -> AbstractContextManager[None]:
    """Entered around passes on a CPU: runs LSTMs in float32 if it has none in this precision."""
    dtype = _LOW_PRECISION.get(precision)
    if dtype is None or not lacks_lstm(dtype):
        return nullcontext()
    return _lstm.to(run_lstm_in_float32, is_compiled=is_compiled)


def run_lstm_in_float32(*args: Any) -> tuple[torch.Tensor, ...]:
    """``torch.lstm`` under autocast: in float32, with rounded results."""
    if not torch.is_autocast_enabled("cpu"):
        plain: tuple[torch.Tensor, ...] = _lstm.plain(*args)
        return plain
    dtype = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        results = _lstm.plain(*map_tensors(_widened, args))
    return tuple(result.to(dtype) for result in results)


def computing_in(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Entered around computations of a model in a precision."""
    dtype = _LOW_PRECISION.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def narrowed(inputs: Tree, precision: str) -> Tree:
    """A model's inputs in its own precision, if that is less than the data's."""
    dtype = PARAMETER_DTYPES[precision]
    if dtype == DTYPES[precision]:
        return inputs
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)


def compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """A model, or a part of one, compiled; it draws the random numbers that it draws uncompiled."""
    function: Callable[..., Any] = torch.compile(model, options={"fallback_random": True})
    return function


def call_model(model: Callable[..., Any], inputs: Tree) -> Any:
    """Call a model: a tuple gives positional, a dict keyword arguments, else one argument."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict | UserDict):
        return model(**inputs)
    return model(inputs)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """An image tensor (n, channels, height, width) with its channels last in memory.

    Images with one channel get these strides, too, which torch's own ``contiguous`` does not set:
    convolutions choose by strides.
    """
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    _, channels, height, width = tensor.shape
    strides = (height * width * channels, 1, width * channels, channels)
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    is_low = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_low else tensor


@contextmanager
def modes_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode, and restore the mode of every module.

    In training, a model that is in training mode keeps its modules' modes: modules that the user
    has put in evaluation mode (a frozen backbone's BatchNorm) stay in it.
    """
    if training and model.training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
