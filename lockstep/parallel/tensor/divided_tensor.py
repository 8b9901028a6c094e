"""A tensor of which each rank has its parts; operations that do not know it get the whole.

Its shape, dtype and device are the whole tensor's. An operation with a rule (``RULES``) works on
the parts. For any other the parts are gathered, which all ranks do alike, since all run the same
operations.

In place, parts change only while nothing else has a copy of them: what was gathered would not
change with them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.errors import ModelError
from lockstep.parallel.tensor.shard_exchange import ShardExchange, Tensors
from lockstep.parallel.tensor.transfers import gather
from lockstep.plan.splits import Split

# What an operation on the parts returns; NotImplemented if the operation needs the whole.
Rule = Callable[["Owner", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# By function of torch, the rule for divided tensors and weights among its arguments.
RULES: dict[Any, Rule] = {}

_FACTS = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "layout", "itemsize", "is_sparse"),
                *("is_cuda", "is_cpu", "is_meta", "is_nested", "is_quantized", "is_mkldnn"),
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in ("size", "dim", "numel", "nelement", "__len__", "is_floating_point")
        ),
        torch.is_floating_point,
        torch.numel,
    ]
)

# Their answer for one part is that for the whole.
_QUESTIONS = frozenset(
    [
        torch.Tensor.is_contiguous,
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "is_leaf")),
    ]
)

# They get hold of this very tensor, for its gradient or by its memory: all later operations must
# get the same one.
_HOLDS = frozenset(
    [
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
        torch.Tensor.detach_,
        *(vars(torch._C.TensorBase)[name].__set__ for name in ("data", "requires_grad")),
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("data", "grad_fn")),
    ]
)

# They see all of the gradient, also that of earlier uses.
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.retain_grad)


class Use(NamedTuple):
    """How a product takes a weight.

    Attributes:
        columns: its dim of the outputs.
        rows: its dim of the inputs, along which it may be divided, too.
        input: what it is multiplied by.
        by: what a cut of ``columns`` separates; see ``ParameterSplit``.
        unit: columns that must stay together.
    """

    columns: int
    rows: int | None = None
    input: Any = None
    by: str = "columns"
    unit: int = 1


class Owner(ABC):
    """What divided tensors come from.

    Attributes:
        exchange: of their parts.
        divides_time: layers are whole, and take parts of sequences.
    """

    exchange: ShardExchange
    divides_time: bool = False

    @abstractmethod
    def split_of(self, weight: Any, use: Use) -> Split | None:
        """How an argument of a product is divided; None if it is whole, or no weight."""

    @abstractmethod
    def dim_of(self, weight: Any) -> int | None:
        """The dim along which a weight is divided; None if it is not, or not yet."""

    @abstractmethod
    def parts_of(self, weight: torch.Tensor, split: Split, place: int | None = None) -> Tensors:
        """This rank's parts of a weight, or of any whole tensor that is divided like one.

        Args:
            weight: the whole.
            split: of it.
            place: of a matrix, if the weight is a stack and only parts of that are meant.
        """

    @abstractmethod
    def check_pass(self, divided: "DividedTensor") -> None:
        """Check that a pass is running, in which all ranks gather the same.

        Raises:
            ModelError: none is.
        """

    @abstractmethod
    def name_of(self, weight: Any) -> str:
        """The name of a weight; "" if it is none of the model."""

    @abstractmethod
    def may_divide(self, name: str, view: torch.Tensor) -> bool:
        """Whether products may get parts of a view of a weight; False if its gradient has a hook.

        A hook that it gets later is refused.
        """

    @abstractmethod
    def note_cast(self, weight: torch.Tensor, cast: torch.Tensor) -> None:
        """A weight was cast to another dtype: it is divided like the weight."""

    @abstractmethod
    def note_copy(self, view: torch.Tensor, copy: torch.Tensor) -> None:
        """A view of a weight was copied to another order in memory: see ``view_of``."""

    @abstractmethod
    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a weight of which a tensor is an unchanged copy; else the tensor."""

    def note_gather(self, divided: "DividedTensor", func: Any) -> None:
        """A function gets a divided tensor whole."""
        return

    def note_time(self, weight: Any) -> None:
        """A product takes a weight whole, and parts of a sequence."""
        return

    def refine(self, divided: "DividedTensor", sizes: Sequence[int], unit: int) -> None:
        """An operation would work on parts if the dim had blocks of these sizes and this unit."""
        return


class Aliases:
    """Divided tensors that share memory, and copies that were gathered from them."""

    def __init__(self) -> None:
        self.count = 0
        self._copies: list[tuple[torch.Tensor, int]] = []

    def note(self, copy: torch.Tensor) -> None:
        """A whole copy was given out."""
        self._copies.append((copy, copy._version))

    @property
    def has_copies(self) -> bool:
        """Whether copies were given out."""
        return bool(self._copies)

    @property
    def are_changed(self) -> bool:
        """Whether a copy has been changed in place since."""
        return any(copy._version != version for copy, version in self._copies)


class DividedTensor(torch.Tensor):
    """See the module.

    Attributes:
        parts: this rank's.
        division: the dim that is divided, and where.
        owner: what it comes from.
        origin: the name of the weight that it comes from.
        span: elements of the weight's outputs in one element of the divided dim.
        aliases: those with the same memory.
        is_used: whether an operation has used its parts.
    """

    parts: Tensors
    division: Split
    owner: Owner
    origin: str
    span: int
    aliases: Aliases
    _copy: torch.Tensor | None
    is_used: bool = False
    _is_whole: bool = False

    @staticmethod
    def of(
        parts: Tensors,
        split: Split,
        owner: Owner,
        origin: str,
        span: int = 1,
        aliases: Aliases | None = None,
    ) -> "DividedTensor":
        """A divided tensor of these parts; for the arguments see the class."""
        shape = list(parts[0].shape)
        shape[split.dim] = split.size
        made: DividedTensor = torch.Tensor._make_wrapper_subclass(
            DividedTensor, shape, dtype=parts[0].dtype, device=parts[0].device
        )
        made.parts, made.division, made.owner = parts, split, owner
        made.origin, made.span, made._copy = origin, span, None
        made.aliases = Aliases() if aliases is None else aliases
        made.aliases.count += 1
        return made

    def like(
        self,
        parts: Tensors,
        split: Split | None = None,
        span: int | None = None,
        *,
        is_view: bool = False,
    ) -> "DividedTensor":
        """One that comes from this; by default with the same split."""
        return DividedTensor.of(
            parts,
            self.division if split is None else split,
            self.owner,
            self.origin,
            self.span if span is None else span,
            self.aliases if is_view else None,
        )

    def whole(self, func: Any = None) -> torch.Tensor:
        """The whole tensor, which ``func`` needs; every rank calls it."""
        if self._copy is None:
            self.owner.check_pass(self)
            # In the order of dims in memory, in which random numbers are drawn.
            order = _order_in_memory(self)
            shape = [
                self.division.size if dim == self.division.dim else self.parts[0].shape[dim]
                for dim in order
            ]
            parts = [part.permute(order) for part in self.parts]
            split = self.division.at(order.index(self.division.dim))
            copy = gather(self.owner.exchange, parts, split, shape)
            if order != sorted(order):
                copy = copy.permute([order.index(dim) for dim in range(len(order))])
            self._copy = copy
            self.aliases.note(self._copy)
            self.owner.note_gather(self, func)
        return self._copy

    def left_whole(self, func: Any) -> torch.Tensor:
        """The whole tensor, which all later operations get, too.

        A function may keep its arguments for more than backward: checkpoints run on them again.
        """
        settled = self.settled()
        if settled is self:
            settled = self.whole(func)
            self._is_whole = True
        return settled

    def check_unused(self) -> None:
        """Check that a hook of the gradient would see all of it.

        Raises:
            ModelError: operations have used the parts.
        """
        if self.is_used:
            raise hook_refused(self.origin)

    def settled(self) -> torch.Tensor:
        """This tensor; or its copy, if that was changed in place and has the values.

        Raises:
            ModelError: other tensors with the same memory do not have them.
        """
        if not self.aliases.are_changed:
            return self._copy if self._is_whole and self._copy is not None else self
        if self.aliases.count > 1 or self._copy is None:
            raise ModelError(
                "The model changes the output of a divided layer in place, and uses a view of it, "
                "too.",
                received=f"an in-place change of what comes from {self.origin!r}",
                fix="Change a copy: add .clone() after the layer.",
            )
        return self._copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        (owner, *_) = (one.owner for one in divided_in((args, kwargs)))
        return dispatch(owner, func, tuple(args), kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a placeholder
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise _not_seen(func, divided_in((args, kwargs)))


def leave_whole(tensor: torch.Tensor) -> bool:
    """Have all later operations get a tensor whole; returns whether none has used its parts."""
    if not isinstance(tensor, DividedTensor):
        return True
    is_unused = not tensor.is_used or tensor.settled() is not tensor
    tensor.left_whole(leave_whole)
    return is_unused


def is_transformed() -> bool:
    """Whether a transform of ``torch.func``, such as ``vmap`` or ``grad``, is running."""
    return bool(torch._C._are_functorch_transforms_active())


def _not_seen(func: Any, divided: Iterable["DividedTensor"]) -> ModelError:
    names = sorted({one.origin for one in divided})
    return ModelError(
        "A transform of torch.func, or an operation that torch does not show to modes of its "
        "functions, uses the output of a divided layer.",
        received=f"{func} on what comes from {', '.join(names)}",
        fix='Name the layer in `whole`: TensorParallelStrategy(whole=["..."]).',
    )


def dispatch(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the parts of divided tensors and weights, or on the whole ones."""
    if func in _FACTS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_transformed():
        raise _not_seen(func, divided_in((args, kwargs)))
    args, kwargs = _mapped(lambda one: one.settled(), (args, kwargs))
    if func in _QUESTIONS and isinstance(args[0], DividedTensor):
        return func(args[0].parts[0], *args[1:], **kwargs)
    if func in _HOLDS and isinstance(args[0], DividedTensor):
        if func in _HOOKS:
            args[0].check_unused()
        args = (args[0].left_whole(func), *args[1:])
    for one in divided_in((args, kwargs)):
        one.is_used = True
    rule = RULES.get(func)
    if rule is not None and args:
        result = rule(owner, func, args, kwargs)
        if result is not NotImplemented:
            return result
    args, kwargs = _mapped(lambda one: one.whole(func), (args, kwargs))
    return func(*args, **kwargs)


def _order_in_memory(divided: DividedTensor) -> list[int]:
    """The dims, those with the largest strides first; the same on every rank.

    The stride of a dim of size 1 may be anything. So if only some shards have one, no shard's
    strides are asked.
    """
    sizes = {divided.division.size_of(shard) for shard in range(divided.division.num_shards)}
    if len(sizes) > 1 and min(sizes) < 2:
        return list(range(divided.dim()))
    strides = divided.parts[0].stride()
    return sorted(range(divided.dim()), key=lambda dim: (-strides[dim], dim))


def empty_like_whole(divided: DividedTensor) -> torch.Tensor:
    """Memory like the whole tensor's."""
    order = _order_in_memory(divided)
    made = torch.empty(
        [divided.shape[dim] for dim in order], dtype=divided.dtype, device=divided.device
    )
    return made.permute([order.index(dim) for dim in range(len(order))])


def divided_in(arguments: Any) -> Iterator[DividedTensor]:
    """The divided tensors among arguments, also in lists and dicts."""
    if isinstance(arguments, DividedTensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for one in arguments:
            yield from divided_in(one)
    elif isinstance(arguments, dict):
        yield from divided_in(list(arguments.values()))


def has_divided(arguments: Any) -> bool:
    """Whether a divided tensor is among arguments."""
    return next(divided_in(arguments), None) is not None


def _mapped(function: Callable[[DividedTensor], torch.Tensor], arguments: Any) -> Any:
    """Arguments with their divided tensors replaced."""
    if isinstance(arguments, DividedTensor):
        return function(arguments)
    if isinstance(arguments, list | tuple):
        mapped = [_mapped(function, one) for one in arguments]
        if isinstance(arguments, tuple) and hasattr(arguments, "_fields"):
            return type(arguments)(*mapped)
        return type(arguments)(mapped)
    if isinstance(arguments, dict):
        return {key: _mapped(function, one) for key, one in arguments.items()}
    return arguments


def hook_refused(origin: str) -> ModelError:
    """The error of a hook that would see a part of a gradient."""
    return ModelError(
        "The output, or a weight, of a divided layer gets a gradient hook after it was used.",
        received=f"register_hook or retain_grad on what comes from {origin!r}",
        fix="Register it first, on what the forward pass makes; or name the layer in `whole`: "
        'TensorParallelStrategy(whole=["..."]).',
    )


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of; else the tensor."""
    base = None if isinstance(tensor, DividedTensor) else tensor._base
    return tensor if base is None else base


def whole_of(tensor: Any, func: Any) -> Any:
    """A tensor, whole."""
    return tensor.whole(func) if isinstance(tensor, DividedTensor) else tensor


def named(names: str, *owners: Any) -> list[Any]:
    """Functions with these names, of whichever owners have them."""
    return [
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    ]


def register(rule: Rule, functions: Sequence[Any]) -> None:
    """Give functions a rule."""
    RULES.update(dict.fromkeys(functions, rule))
