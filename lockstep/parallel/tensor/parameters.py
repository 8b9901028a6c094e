"""A model's divided parameters on one rank, and functions that give products its parts of them.

A part is a view of the parameter, and a leaf of autograd. So a parameter may be divided in one use,
and whole in another: its gradient is the sum of what both give.
"""

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import lockstep.parallel.tensor.attention_rules
import lockstep.parallel.tensor.einsum_rules
import lockstep.parallel.tensor.loss_rules
import lockstep.parallel.tensor.rules
import lockstep.parallel.tensor.shape_rules  # noqa: F401  # they fill the table of rules
from lockstep.capture.calls import scripts_as_python
from lockstep.errors import ModelError
from lockstep.parallel.data_parallel.functional_patch import Redirection
from lockstep.parallel.tensor.divided_tensor import (
    DividedTensor,
    Owner,
    Use,
    base_of,
    dispatch,
    hook_refused,
    is_transformed,
    named,
)
from lockstep.parallel.tensor.shard_exchange import ShardExchange, Tensors
from lockstep.parallel.tensor.transfers import cut_own, gather
from lockstep.plan.splits import Split


class DividedParameters(Owner):
    """See the module.

    Args:
        parameters: of the model, by name.
        splits: of those that are divided.
        exchange: of their shards.
        divides_time: see ``Owner``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        splits: Mapping[str, Split],
        exchange: ShardExchange,
        *,
        divides_time: bool = False,
    ) -> None:
        self.exchange = exchange
        self.divides_time = divides_time
        self._names = {id(one): name for name, one in parameters.items()}
        self._parameters = dict(parameters)  # an id is valid only while its object lives
        self._splits = dict(splits)
        self._parts: dict[str, list[_Shard]] = {
            name: [_Shard(parameters[name], split, shard) for shard in exchange.own]
            for name, split in splits.items()
        }
        self._of_whole_uses: dict[str, torch.Tensor] = {}
        # By the id of what a parameter was cast to: it, its version, the parameter's name.
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        # By the id of a copy of a parameter's view: it, its version, the view.
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        # What gets gradients of views of weights, and views that products have divided, each by the
        # weight's name and the view's place in its memory.
        self._hooked: set[tuple[str, int]] = set()
        self._divided_views: set[tuple[str, int]] = set()
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block this thread computes on parts."""
        before, self._is_running = self._is_running, True
        try:
            with ExitStack() as stack:
                for one in _REDIRECTIONS:
                    stack.enter_context(one.to(partial(self._call, one)))
                for one in _HOOKS:
                    stack.enter_context(one.to(partial(self._hook, one)))
                stack.enter_context(_BACKWARD.to(self._backward))
                for one in _CHECKPOINTS:
                    stack.enter_context(one.to(partial(_keep_whole, one)))
                stack.enter_context(_whole_in_functions())
                stack.enter_context(scripts_as_python())
                yield
        finally:
            self._is_running = before

    def _call(self, function: Redirection, *args: Any, **kwargs: Any) -> Any:
        """Call a function that may have a weight of the model among its arguments.

        Within a transform of ``torch.func`` weights are whole: ranks exchange nothing there. So
        they are for nested tensors, which have no parts of one size.
        """
        is_inside = getattr(_functions, "is_inside", False) or is_transformed()
        is_whole = is_inside or any(map(_is_nested, args[:12]))
        if not is_whole and any(self._is_ours(one) for one in args[:12]):
            return dispatch(self, function.plain, args, kwargs)
        return function.plain(*args, **kwargs)

    def _hook(self, function: Redirection, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Give a tensor a hook. Products then get what is viewed there, and its views, whole."""
        if isinstance(tensor, DividedTensor):  # else torch would look the function up again
            given = (tensor, *args)
            return tensor.__torch_function__(function.plain, (type(tensor),), given, kwargs)
        name = self.name_of(base_of(tensor))
        place = name, int(tensor.storage_offset())
        is_parameter = isinstance(tensor, nn.Parameter)
        if place in self._divided_views or (is_parameter and self.is_divided(name)):
            raise hook_refused(name)
        if name:
            self._hooked.add(place)
        return function.plain(tensor, *args, **kwargs)

    def _backward(self, outputs: Any, *args: Any, **options: Any) -> Any:
        """Go backward; asked for the gradient of a divided parameter, form it from its shards'."""
        gradients, retains_graph, creates_graph, inputs, *allows = args
        names = [self._names.get(id(one), "") for one in inputs]
        leaves = {name: self._used_leaves(name) for name in names if self.is_divided(name)}
        if not any(leaves.values()) or is_transformed():
            return _BACKWARD.plain(outputs, *args, **options)
        every = (*inputs, *(leaf for own in leaves.values() for leaf in own))
        given = gradients, retains_graph, creates_graph, every
        if options.get("accumulate_grad"):
            return _BACKWARD.plain(outputs, *given, *allows, **options)
        found = _BACKWARD.plain(outputs, *given, True, accumulate_grad=False)
        of_leaf = dict(zip(map(id, every), found, strict=True))
        whole = [
            self._formed(name, of_leaf, gradient) if leaves.get(name) else gradient
            for name, gradient in zip(names, found, strict=False)
        ]
        if not all(allows) and any(gradient is None for gradient in whole):
            raise RuntimeError("One of the differentiated Tensors was not used in the graph.")
        return tuple(whole)

    def _used_leaves(self, name: str) -> list[torch.Tensor]:
        """This rank's parts of a parameter that backward can come to."""
        parts = self._parts.get(name, [])  # an observer has none yet
        return [leaf for part in parts for leaf in part.leaves if leaf.requires_grad]

    def _formed(
        self, name: str, of_leaf: Mapping[int, torch.Tensor | None], rest: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The gradient of a parameter from those of its leaves, and of its uses as a whole."""
        own = [[of_leaf.get(id(leaf)) for leaf in part.leaves] for part in self._parts[name]]
        if not any(gradient is not None for gradients in own for gradient in gradients):
            return rest
        split = self._splits[name]
        parts = [
            torch.cat(
                [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(part.leaves, gradients, strict=True)
                ],
                split.dim,
            )
            for part, gradients in zip(self._parts[name], own, strict=True)
        ]
        whole = gather(self.exchange, parts, split, self._parameters[name].shape)
        return whole if rest is None else whole + rest

    def may_divide(self, name: str, view: torch.Tensor) -> bool:
        place = name, int(view.storage_offset())
        if place in self._hooked:
            return False
        if view.grad_fn is not None:
            self._divided_views.add(place)
        return True

    def _is_ours(self, argument: Any) -> bool:
        """Whether an argument is a divided tensor, a parameter, or a view of one."""
        if isinstance(argument, nn.Parameter | DividedTensor):
            return True
        if not isinstance(argument, torch.Tensor):
            return False
        return bool(self.name_of(base_of(self.view_of(argument))))

    def check_pass(self, divided: DividedTensor) -> None:
        if not self._is_running:
            layer = divided.origin.rpartition(".")[0] or "..."
            raise ModelError(
                "The output of a divided layer was kept after the pass, by the model or by a hook: "
                "each process has its part.",
                received=f"what comes from {divided.origin!r}",
                fix=f"Name the layer in `whole`: TensorParallelStrategy(whole=[{layer!r}]).",
            )

    def name_of(self, weight: Any) -> str:
        name = self._names.get(id(weight), "")
        if name or id(weight) not in self._casts:
            return name
        reference, version, name = self._casts[id(weight)]
        has_gradient = self._parameters[name].requires_grad and torch.is_grad_enabled()
        is_same = _is_unchanged(weight, reference, version)
        return name if is_same and weight.requires_grad >= has_gradient else ""

    def note_cast(self, weight: torch.Tensor, cast: torch.Tensor) -> None:
        name = self.name_of(weight)
        if name and cast is not weight and cast.is_floating_point():
            self._casts[id(cast)] = weakref.ref(cast), cast._version, name

    def note_copy(self, view: torch.Tensor, copy: torch.Tensor) -> None:
        if copy is not view:
            self._copies[id(copy)] = weakref.ref(copy), copy._version, view

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        reference, version, view = self._copies.get(id(tensor), (None, 0, tensor))
        if reference is None or not _is_unchanged(tensor, reference, version):
            return tensor
        return view if tensor.requires_grad == view.requires_grad else tensor

    def is_divided(self, name: str) -> bool:
        """Whether a parameter is divided."""
        return name in self._splits

    def split_of(self, weight: Any, use: Use) -> Split | None:
        split = self._splits.get(self.name_of(weight))
        return split if split is not None and split.dim in (use.columns, use.rows) else None

    def dim_of(self, weight: Any) -> int | None:
        split = self._splits.get(self.name_of(weight))
        return None if split is None else split.dim

    def parts_of(self, weight: torch.Tensor, split: Split, place: int | None = None) -> Tensors:
        name = self.name_of(weight)
        own = self._splits.get(name)
        if own is not None and own.dim == split.dim and own.is_like(split):
            return [part.tensor(place).to(weight.dtype) for part in self._parts[name]]
        if place is not None:
            weight, split = weight[place], split.at(split.dim - 1)
        return cut_own(self.exchange, weight, split)

    # --- gradients -------------------------------------------------------------------------------

    def keep(self, name: str, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of a divided parameter's uses as a whole."""
        if gradient is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            before = self._of_whole_uses.get(name)
            self._of_whole_uses[name] = gradient if before is None else before + gradient

    @torch.no_grad()
    def take_gradient(self, name: str) -> dict[int, list[torch.Tensor]] | None:
        """This rank's parts of a divided parameter's gradient, by shard; None if it has none.

        The gradients are gone then. A part has a tensor for each block.
        """
        whole, parts = self._of_whole_uses.pop(name, None), self._parts[name]
        if whole is None and not any(part.has_gradient for part in parts):
            return None
        return {
            shard: part.take_gradient(None if whole is None else self.blocks(name, whole, shard))
            for shard, part in zip(self.exchange.own, parts, strict=True)
        }

    def blocks(self, name: str, whole: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Views of a shard's blocks of what is divided like a parameter."""
        split = self._splits[name]
        return [whole.narrow(split.dim, start, end - start) for start, end in split.cuts[shard]]

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Around trials of the model: afterwards parts have the gradients that they had."""
        leaves = [leaf for parts in self._parts.values() for part in parts for leaf in part.leaves]
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient

    def clear(self) -> None:
        """Drop all gradients."""
        self._of_whole_uses.clear()
        self._casts.clear()
        self._copies.clear()
        self._hooked.clear()
        self._divided_views.clear()
        for parts in self._parts.values():
            for part in parts:
                part.clear()


def _is_nested(argument: Any) -> bool:
    is_plain = isinstance(argument, torch.Tensor) and not isinstance(argument, DividedTensor)
    return is_plain and argument.is_nested


def _is_unchanged(tensor: torch.Tensor, reference: weakref.ref[torch.Tensor], version: int) -> bool:
    """Whether a tensor is the one that was noted, and was not changed or hooked since."""
    is_same = reference() is tensor and tensor._version == version
    return is_same and not (tensor._backward_hooks or tensor.retains_grad)


class _Shard:
    """One shard of a parameter: a leaf for each block."""

    def __init__(self, parameter: nn.Parameter, split: Split, shard: int) -> None:
        self._parameter, self._dim = parameter, split.dim
        self.leaves = [
            parameter.detach().narrow(split.dim, start, stop - start)
            for start, stop in split.cuts[shard]
        ]
        self._matrices: list[tuple[torch.Tensor, ...]] = []  # by leaf

    def tensor(self, place: int | None = None) -> torch.Tensor:
        """The shard; of a stack, one matrix of it."""
        leaves, dim = self.leaves, self._dim
        if leaves[0].requires_grad is not self._parameter.requires_grad:
            for leaf in leaves:  # it may change between steps
                leaf.requires_grad_(self._parameter.requires_grad)
            self._matrices = []
        if place is not None:
            leaves, dim = self._of_stack(place), dim - 1
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, dim)

    def _of_stack(self, place: int) -> list[torch.Tensor]:
        """A matrix of each leaf. All come from one operation, whose gradient is formed once."""
        if not torch.is_grad_enabled():
            return [leaf[place] for leaf in self.leaves]
        if not self._matrices:
            self._matrices = [leaf.unbind() for leaf in self.leaves]
        return [matrices[place] for matrices in self._matrices]

    @property
    def has_gradient(self) -> bool:
        """Whether it was used."""
        return any(leaf.grad is not None for leaf in self.leaves)

    def take_gradient(self, rest: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The gradient of each leaf, with its part of the gradient of other uses."""
        found = []
        for number, leaf in enumerate(self.leaves):
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if rest is not None:
                gradient = rest[number] if leaf.grad is None else gradient + rest[number]
            found.append(gradient)
        self.clear()
        return found

    def clear(self) -> None:
        """Drop its gradient."""
        self._matrices = []
        for leaf in self.leaves:
            leaf.grad = None


# The functions with a rule for weights. Layers look them up at every call, also in backward.
_REDIRECTIONS = [
    *(Redirection(name) for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")),
    Redirection("multi_head_attention_forward"),
    *(Redirection(name, torch) for name in ("matmul", "mm", "addmm", "einsum", "bmm", "baddbmm")),
    *(
        Redirection(name, torch.Tensor)
        for name in ("matmul", "mm", "__matmul__", "bmm", "to", "contiguous")
    ),
    *(Redirection("grouped_mm") for _ in named("grouped_mm", F)),
]


_HOOKS = [Redirection(name, torch.Tensor) for name in ("register_hook", "retain_grad")]

# What ``torch.autograd.grad`` and ``backward`` call, whatever names users have for them.
_BACKWARD = Redirection("_engine_run_backward", torch.autograd)

# Torch's checkpoints keep their arguments by it, and are computed again from these.
_CHECKPOINTS = [
    Redirection("save_inputs", kind)
    for kind in named("_CheckpointFrame", torch.utils.checkpoint)
    if hasattr(kind, "save_inputs")
]


def _keep_whole(function: Redirection, frame: Any, *args: Any) -> None:
    """Keep whole tensors, which the checkpoint gets in the forward pass, too."""
    asking = torch.utils.checkpoint.checkpoint
    plain = [one.left_whole(asking) if isinstance(one, DividedTensor) else one for one in args]
    function.plain(frame, *plain)


_apply = torch.autograd.Function.__dict__["apply"]
_functions = threading.local()  # ``is_inside`` one's forward, whose results autograd records
_count = 0
_lock = threading.Lock()  # Trainers may train in several threads


@contextmanager
def _whole_in_functions() -> Iterator[None]:
    """Within the block, functions with a backward of their own get whole tensors."""
    global _count
    with _lock:
        if _count == 0:
            torch.autograd.Function.apply = classmethod(_apply_whole)  # type: ignore[assignment]
        _count += 1
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                torch.autograd.Function.apply = _apply  # type: ignore[method-assign]


def _apply_whole(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply`` with whole tensors; divided ones may be in lists, too."""
    plain = [one.left_whole(cls) if isinstance(one, DividedTensor) else one for one in args]
    was_inside, _functions.is_inside = getattr(_functions, "is_inside", False), True
    try:
        return _apply.__get__(None, cls)(*plain, **kwargs)
    finally:
        _functions.is_inside = was_inside
