"""Infers the reduction (mean or sum) of a loss function's scalar from its operations.

Most functions end in one of torch's own losses, or in ``mean()`` or ``sum()``, of values that each
depend on one sample. Their denominator is known, so shares need not exchange outputs. This requires
that every operation since the model's output keeps samples separate: an elementwise operation, one
along other dims than the samples', or a view that keeps the samples in order. Samples may also move
to a later dim (time first), and be flattened with the dims before it; outputs and targets must then
have the same layout. After any other operation (a matrix product, a mask that selects, a number
computed from values or from the number of samples) the reduction is unknown, and the loss is
computed on the whole batch.

Not covered: operations of custom autograd functions and scripted functions without gradients.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lockstep.data.trees import Tree, tensors_of
from lockstep.parallel.loss.sample_dims import (
    Later,
    dims_of,
    is_in_order,
    is_later_dim,
    is_narrower,
    keeps_first,
    new_place_of_first,
    takes_all,
)
from lockstep.parallel.loss.torch_losses import class_weights

_MODULES = (None, "torch", "torch.functional", "torch.nn.functional", "torch._tensor")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME = _names("to float double half bfloat16 detach clone contiguous")
_BY_ELEMENT = _SAME | _names(
    "neg abs exp log log1p expm1 sqrt rsqrt square sign sigmoid logsigmoid tanh relu gelu silu "
    "softplus sin cos clamp clip clamp_min clamp_max add sub mul div divide true_divide rsub "
    "__rsub__ pow "
    "__rpow__ __rdiv__ eq ne lt le gt ge logical_not logical_and logical_or where maximum minimum "
    "masked_fill long int bool zeros_like ones_like full_like"
)
_ALONG = _names("softmax log_softmax sum mean logsumexp amax amin var std argmax gather")
_VIEWS = _names("flatten reshape view unflatten squeeze unsqueeze")
_LINEAR = _names("add sub mul div divide true_divide neg rsub __rsub__")
_HARMLESS = _names(
    "dim ndim dtype device layout requires_grad is_floating_point is_complex is_cuda is_leaf "
    "is_meta grad_fn"
)
_SIZES = _names("shape size numel nelement __len__")
OF_ELEMENTS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
    F.kl_div,
)
OF_CLASSES = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class Known:
    """The reduction of a scalar.

    Attributes:
        weight: the denominator of a mean: number of samples, each with as many values, or weight
            of the targets; None for a sum.
    """

    weight: float | None


class KnownMeans(TorchFunctionMode):
    """Records the operations of a loss function.

    Args:
        trees: its inputs from a share: outputs and targets.
        num_samples: of the share.

    Attributes:
        has_size: the function has read a size that may be the number of samples.
    """

    def __init__(self, trees: Tree, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        # Tensors are kept, or an id might be used again.
        self._separate: dict[int, torch.Tensor] = {}
        self._later: dict[int, tuple[torch.Tensor, Later]] = {}
        self._scalars: dict[int, tuple[torch.Tensor, Known]] = {}
        self._others: dict[int, torch.Tensor] = {}
        self._is_unknown = False
        self.has_size = False
        for tensor in tensors_of(trees):
            has_rows = tensor.dim() > 0 and len(tensor) == num_samples
            is_parameter = tensor.is_leaf and tensor.requires_grad
            (self._separate if has_rows and not is_parameter else self._others)[id(tensor)] = tensor

    def known(self, value: torch.Tensor) -> Known | None:
        """The reduction of the function's result; None if unknown.

        Values with a row for each sample count as a mean: the caller takes their mean.
        """
        if self._is_unknown:
            return None
        if id(value) in self._separate:
            return Known(float(self._num_samples))
        found = self._scalars.get(id(value))
        return None if found is None else found[1]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_unknown:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = _name(func)
        if name in _SIZES:
            self.has_size |= not (name == "size" and is_later_dim(args, kwargs))
        elif name == "__setitem__" or "out" in kwargs or _is_in_place(name):
            self._is_unknown = True
        elif not isinstance(result, torch.Tensor):
            self._note_others(name, args, kwargs, result)
        elif (scalar := self._scalar(func, name, args, kwargs, result)) is not None:
            self._scalars[id(result)] = result, scalar
        elif self._keeps_separate(func, name, args, kwargs, result):
            self._separate[id(result)] = result
        elif (later := self._keeps_later(name, func, args, kwargs, result)) is not None:
            self._later[id(result)] = result, later
        elif not self._makes_constant(name, args, result):
            self._others[id(result)] = result

    def _note_others(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if name in _HARMLESS:
            return
        made = list(tensors_of(result))
        self._others |= {id(tensor): tensor for tensor in made}
        # A number or an array that depends on values.
        self._is_unknown |= not made and any(map(self._is_tracked, tensors_of([args, kwargs])))

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        known: Iterable[Mapping[int, Any]] = (
            self._separate,
            self._later,
            self._scalars,
            self._others,
        )
        return any(id(tensor) in each for each in known)

    def _makes_constant(self, name: str, args: Sequence[Any], result: torch.Tensor) -> bool:
        """True if the result is a constant, or the argument itself."""
        if name in ("as_tensor", "tensor"):
            return type(args[0]) in (int, float) and not self.has_size
        return name in _SAME and (result is args[0] or self._is_constant(args[0]))

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """True if the tensor existed before: class weights, for example."""
        return not self._is_tracked(tensor) and tensor.grad_fn is None

    # --- scalars ---------------------------------------------------------------------------------

    def _scalar(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: torch.Tensor,
    ) -> Known | None:
        if result.dim():
            return None
        if func in OF_ELEMENTS or func in OF_CLASSES:
            return self._loss(func, args, kwargs)
        if getattr(func, "__module__", None) not in _MODULES or not args:
            return None
        is_reduced = name in ("mean", "sum") and "dtype" not in kwargs
        if is_reduced and self._has_samples(args[0]):
            return Known(float(self._num_samples) if name == "mean" else None)
        if is_reduced or name in _SAME:
            found = self._scalars.get(id(args[0]))
            return None if found is None else found[1]
        return self._combined(name, args) if name in _LINEAR and not kwargs else None

    def _combined(self, name: str, args: Sequence[Any]) -> Known | None:
        """A known scalar combined with a number, or with another of the same weight."""
        found = [self._scalars[id(each)][1] for each in args if id(each) in self._scalars]
        numbers = [each for each in args if isinstance(each, int | float)]
        if not found or len(found) + len(numbers) < len(args) or (numbers and self.has_size):
            return None
        if len(found) == 2:
            is_sum = name in ("add", "sub", "rsub", "__rsub__")
            return found[0] if is_sum and found[0] == found[1] else None
        if name in ("div", "divide", "true_divide"):
            return found[0] if id(args[0]) in self._scalars else None
        adds = name not in ("mul", "neg")
        return None if adds and found[0].weight is None and any(numbers) else found[0]

    def _loss(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Known | None:
        """The reduction of one of torch's own losses."""
        options = options_of(func, args, kwargs)
        if not self._is_of_samples(func, options):
            return None
        output, target = options["input"], options["target"]
        match options["reduction"]:
            case "sum":
                return Known(None)
            case "mean" | "batchmean" if func in OF_ELEMENTS:
                return Known(float(self._num_samples))
            case "mean":
                weights = class_weights(output, target, options["weight"], options["ignore_index"])
                return Known(weights.sum(dtype=torch.float64).item())
        return None

    def _is_of_samples(self, func: Any, options: Mapping[str, Any]) -> bool:
        output, target = options["input"], options["target"]
        others = [
            value
            for name, value in options.items()
            if isinstance(value, torch.Tensor) and name not in ("input", "target")
        ]
        if options.get("size_average") is not None or options.get("reduce") is not None:
            return False
        if not (self._has_samples(output) and self._has_samples(target)):
            return False
        if self._place(output) != self._place(target):
            return False
        if self.has_size and _has_numbers(func, options):
            return False
        if not all(map(self._is_constant, others)):
            return False
        later = self._place(output)
        num_dims = 1 if later is None else later.num_dims
        if func in OF_CLASSES:
            return num_dims == 1 and output.dim() > 1 and len(output) == len(target)
        weighs = func in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
        fits = all(weighs and is_narrower(each, output, num_dims) for each in others)
        return fits and output.shape == target.shape

    # --- samples kept separate -------------------------------------------------------------------

    def _keeps_separate(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: torch.Tensor,
    ) -> bool:
        tensors = list(tensors_of([list(args), dict(kwargs)]))
        rows = [tensor for tensor in tensors if id(tensor) in self._separate]
        others = [tensor for tensor in tensors if id(tensor) not in self._separate]
        if not rows or not all(map(self._is_constant, others)) or not result.dim():
            return False
        if func in OF_ELEMENTS or func in OF_CLASSES:
            options = options_of(func, args, kwargs)
            return options["reduction"] == "none" and self._is_of_samples(func, options)
        if func is F.one_hot:
            # Without a number the largest target gives the number of classes.
            return not self.has_size and min([*args[1:], *kwargs.values()], default=-1) > 0
        if getattr(func, "__module__", None) not in _MODULES:
            return False
        if name in _BY_ELEMENT:
            return self._is_by_element(name, args, kwargs, rows, others, result)
        source = rows[0]
        if others or source is not args[0] or (len(rows) > 1 and name != "gather"):
            return False
        if name in _ALONG:
            dims = dims_of(args[1:2], kwargs, source.dim())
            return bool(dims) and 0 not in dims and len(result) == len(source)
        if name == "__getitem__":
            return takes_all(args[1], source.dim())
        if name in ("transpose", "swapaxes", "permute"):
            return keeps_first(name, args[1:], kwargs, source.dim())
        return name in _VIEWS and is_in_order(
            name,
            args[1:],
            kwargs,
            source,
            result,
            num_samples=self._num_samples,
            has_size=self.has_size,
        )

    def _has_samples(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._separate or id(tensor) in self._later

    def _place(self, tensor: torch.Tensor) -> Later | None:
        """The dims of a tensor's samples, if not along the first dim."""
        return self._later[id(tensor)][1] if id(tensor) in self._later else None

    def _keeps_later(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: torch.Tensor,
    ) -> Later | None:
        """The samples' dims after an operation that keeps them separate along a later dim."""
        if kwargs.keys() - {"dim"} or getattr(func, "__module__", None) not in _MODULES:
            return None
        tensors = list(tensors_of([list(args), dict(kwargs)]))
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and id(source) in self._separate and len(tensors) == 1:
            dim = new_place_of_first(name, args[1:], source.dim()) if not kwargs else 0
            return Later(tuple(result.shape[: dim + 1])) if dim else None
        places = {self._place(one) for one in tensors if self._has_samples(one)}
        others = [one for one in tensors if not self._has_samples(one)]
        later = places.pop() if len(places) == 1 else None
        if later is None or not all(map(self._is_constant, others)):
            return None
        if name in _BY_ELEMENT:
            rows = [one for one in tensors if self._has_samples(one)]
            is_kept = self._is_by_element(name, args, kwargs, rows, others, result, later.num_dims)
            return later if is_kept else None
        if source is None or others or len(tensors) > 1:
            return None
        if name in _ALONG:
            dims = dims_of(args[1:2], kwargs, source.dim())
            return later if dims and min(dims) >= later.num_dims else None
        return None if kwargs else later.after(name, args[1:], source, result)

    def _is_by_element(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rows: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        result: torch.Tensor,
        num_dims: int = 1,
    ) -> bool:
        has_number = any(type(each) in (int, float) for each in (*args, *kwargs.values()))
        if self.has_size and has_number and name not in _SAME:
            return False
        is_aligned = all(
            tensor.dim() == result.dim() and tensor.shape[:num_dims] == result.shape[:num_dims]
            for tensor in rows
        )
        return is_aligned and all(is_narrower(tensor, result, num_dims) for tensor in others)


def _name(func: Any) -> str:
    """The name of a function, or of the attribute that is read."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(func.__self__, "__name__", "")) if name == "__get__" else name


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def options_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a loss function, by name."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _has_numbers(func: Any, options: Mapping[str, Any]) -> bool:
    """True if a float argument differs from its default."""
    return any(
        type(options[name]) is float and options[name] != parameter.default
        for name, parameter in _signature(func).parameters.items()
    )


_signature = functools.cache(inspect.signature)
