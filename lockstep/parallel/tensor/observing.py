"""Observes how a model uses its parameters, and divides these so that little must be gathered.

The model runs on a few samples, with all shards in this process. A product's weight is divided by
its outputs when it is first used, or by its inputs where these come divided already. Where an
operation would work on parts if a weight were cut in other places, between heads or by the blocks
of a fused projection, the model runs again with these. Names play no part.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.capture.layers import ties_of
from lockstep.capture.state import left_alone, set_mode
from lockstep.data.trees import map_tensors
from lockstep.errors import OptionError
from lockstep.formatting import first_few
from lockstep.parallel.tensor.divided_tensor import DividedTensor, Use
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.shard_exchange import ShardExchange, Tensors, cut
from lockstep.plan.sharding import is_in
from lockstep.plan.splits import ParameterSplit, Split, TensorSplits

# Cuts that are tried for one weight, one after the other.
_MOST_TRIES = 6


def observed_splits(
    model: nn.Module,
    call: Callable[[], object],
    num_shards: int,
    whole: Sequence[str] = (),
    *,
    dims: Mapping[str, int] | None = None,
    divides_time: bool = False,
) -> TensorSplits:
    """How a model's parameters can be divided, or which of its layers take parts of a sequence.

    Args:
        model: the model; it is left as it was.
        call: runs it on a few samples.
        num_shards: into how many shards.
        whole: names of modules whose parameters are not divided.
        dims: the only parameters that are divided, each along this dim; None divides all that can
            be.
        divides_time: see ``Owner``.

    Raises:
        OptionError: a parameter cannot be divided along its dim.
    """
    cuts: dict[str, tuple[tuple[int, ...], int]] = {}
    tried: dict[str, list[Any]] = {}
    while True:
        observer = Observer(model, num_shards, cuts, whole, dims, divides_time=divides_time)
        with left_alone(model), observer.running():
            for training in (True, False):
                set_mode(model, training=training)
                map_tensors(_whole, call())
                if observer.has_seen_all:
                    break
        asked = {
            name: one
            for name, one in observer.asked.items()
            if one not in tried.setdefault(name, []) and len(tried[name]) < _MOST_TRIES
        }
        if not asked:
            found = observer.result()
            _check_divided(found, dims or {})
            return found
        for name, one in asked.items():
            tried[name].append(one)
        cuts |= asked


def _check_divided(found: TensorSplits, dims: Mapping[str, int]) -> None:
    """Check that parameters are divided as a user has said.

    Raises:
        OptionError: one is not.
    """
    left = [
        f"{name} along dim {dims[name]} ({reason})" for name, reason in found.whole if name in dims
    ]
    if left:
        raise OptionError(
            "Variables cannot be divided along the dims that their layouts name.",
            received=f"{first_few(left)}, into {found.num_shards} shards",
            fix="Leave them whole, with None in place of the axis, or use fewer devices along it.",
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, DividedTensor) else tensor


class Observer(DividedParameters):
    """Decides at the first use of each weight how it is divided.

    Args:
        model: the model.
        num_shards: of each divided dim.
        cuts: by weight, sizes of blocks and the unit of its outputs.
        whole: names of modules whose parameters are not divided.
        dims: see ``observed_splits``.
        divides_time: see ``Owner``.

    Attributes:
        asked: other such cuts, with which operations would work on parts.
    """

    def __init__(
        self,
        model: nn.Module,
        num_shards: int,
        cuts: Mapping[str, tuple[tuple[int, ...], int]],
        whole: Sequence[str],
        dims: Mapping[str, int] | None,
        *,
        divides_time: bool,
    ) -> None:
        parameters = dict(model.named_parameters())
        exchange = ShardExchange(num_shards, range(num_shards))
        super().__init__(parameters, {}, exchange, divides_time=divides_time)
        self._by_time: list[str] = []
        self._cuts = cuts
        self._dims = dims
        self._tied = {names[0] for names in ties_of(model)}
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self._by: dict[str, str] = {}
        self._users: dict[str, str] = {}  # the last function that got a weight
        self._gathered: dict[str, str] = {}
        self._reasons = {
            name: reason
            for name, one in parameters.items()
            if (reason := _reason(name, one, whole, dims))
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), _Uses(self):
            yield

    def split_of(self, weight: Any, use: Use) -> Split | None:
        name, rows = self.name_of(weight), use.rows
        is_decided = self.divides_time or name in self._splits or name in self._reasons
        if name and not is_decided:
            is_cut = isinstance(use.input, DividedTensor) and name not in self._tied
            if self._dims is not None:
                self._decide_by_hand(name, weight, use, self._dims[name])
            elif is_cut and rows is not None:
                by = use.by if rows == use.columns else "rows"
                self._decide(name, use.input.division.at(rows), by)
            else:
                self._decide(name, self._by_outputs(name, weight, use.columns, use.unit), use.by)
        return super().split_of(weight, use)

    def dim_of(self, weight: Any) -> int | None:
        return (self._dims or {}).get(self.name_of(weight), super().dim_of(weight))

    def _decide_by_hand(self, name: str, weight: torch.Tensor, use: Use, dim: int) -> None:
        """Decide to divide a weight along a dim, unless this product cannot."""
        if dim == use.rows:
            own = self._split(dim, (weight.shape[dim],), 1)
            split = use.input.division.at(dim) if isinstance(use.input, DividedTensor) else own
            self._decide(name, split, use.by if use.rows == use.columns else "rows")
        elif dim == use.columns:
            self._decide(name, self._by_outputs(name, weight, dim, use.unit), use.by)

    def _decide(self, name: str, split: Split, by: str) -> None:
        if split.is_possible:
            self._splits[name], self._by[name] = split, by
        else:
            self._reasons[name] = f"{split.size} outputs are fewer than {split.num_shards} shards"

    def _by_outputs(self, name: str, weight: torch.Tensor, columns: int, unit: int) -> Split:
        size = weight.shape[columns]
        sizes, wanted = self._cuts.get(name, ((size,), 1))
        split = self._split(columns, sizes, math.lcm(unit, wanted))
        return split if split.is_possible else self._split(columns, (size,), unit)

    def _split(self, dim: int, sizes: Sequence[int], unit: int) -> Split:
        return Split(dim=dim, sizes=tuple(sizes), unit=unit, num_shards=self.exchange.num_shards)

    def parts_of(self, weight: torch.Tensor, split: Split, place: int | None = None) -> Tensors:
        name = self.name_of(weight)
        is_meant = weight.dim() == 1 if self._dims is None else self._dims.get(name) == split.dim
        if name and is_meant and place is None and name not in self._reasons:
            self._splits.setdefault(name, split)
        if place is not None:
            weight, split = weight[place], split.at(split.dim - 1)
        return [cut(weight, split, shard) for shard in self.exchange.own]

    def refine(self, divided: DividedTensor, sizes: Sequence[int], unit: int) -> None:
        name = divided.origin
        if not (name in self._splits and unit and all(sizes)):
            return
        own = self._splits[name]
        blocks = tuple(sizes) if sum(sizes) == own.size else own.sizes
        if self._split(0, blocks, unit).is_possible:
            self.asked[name] = blocks, unit

    def note_gather(self, divided: DividedTensor, func: Any) -> None:
        self._gathered.setdefault(divided.origin, _name_of(func))

    def note_time(self, weight: Any) -> None:
        name = self.name_of(weight)
        if self.divides_time and name and name not in self._by_time:
            self._by_time.append(name)

    def note_use(self, weight: Any, func: Any) -> None:
        """A function got a weight, in whatever way."""
        name = self.name_of(weight)
        if name:
            self._users[name] = _name_of(func)

    @property
    def has_seen_all(self) -> bool:
        """Whether each parameter was used; training may leave layers out at random."""
        known = {*self._splits, *self._users, *self._reasons, *self._by_time}
        return known >= self._parameters.keys()

    def _use(self, name: str) -> str:
        return f"used by {self._users[name]}" if name in self._users else "not used"

    def result(self) -> TensorSplits:
        """What was decided."""
        return TensorSplits(
            num_shards=self.exchange.num_shards,
            parameters=tuple(
                ParameterSplit(
                    name=name,
                    split=split,
                    by=self._by.get(name, "columns"),
                    gathered_for=self._gathered.get(name, ""),
                )
                for name, split in self._splits.items()
            ),
            whole=tuple(
                (name, self._reasons.get(name) or self._use(name))
                for name in self._parameters
                if name not in self._splits and name not in self._by_time
            ),
            by_time=tuple((name, self._gathered.get(name, "")) for name in self._by_time)
            if self.divides_time
            else None,
        )


class _Uses(TorchFunctionMode):
    """Notes which functions get parameters, after the rules have had their turn."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, bool | int | torch.Size | torch.dtype | torch.device):
            for one in (*args, *(kwargs or {}).values()):
                for each in one if isinstance(one, list | tuple) else (one,):
                    if isinstance(each, nn.Parameter):
                        self._observer.note_use(each, func)
        return result


def has_hooks(parameter: torch.Tensor) -> bool:
    """True if functions of the user get a parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _reason(
    name: str, parameter: nn.Parameter, whole: Sequence[str], dims: Mapping[str, int] | None
) -> str:
    """Why a parameter must be whole; "" if it need not be."""
    if dims is not None and name not in dims:
        return "as its layout says"
    if any(is_in(name, module) for module in whole):
        return "named in `whole`"
    if has_hooks(parameter):
        return "its gradient has a hook"
    return "" if parameter.is_floating_point() else "not of floating point"


def _name_of(func: Any) -> str:
    """A function's name for people."""
    name = getattr(func, "__name__", "") or type(func).__name__
    return name if name != "NoneType" else "the model's output"
