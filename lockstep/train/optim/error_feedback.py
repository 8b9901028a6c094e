"""Error feedback: what each host has not sent yet of compressed tensors, kept across calls.

It is a part of a training's state: a run that resumes without it gives other weights. Each host has
its own (``TrainingState.residuals``, by the number of the host).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lockstep.checkpoint.trees import Tensors
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.compression.compressed_sums import Residual
from lockstep.comm.compression.compressors import first_basis
from lockstep.parallel.exchange.compressed_tensors import compressed_tensors
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.storage.store import TensorStore, tensor_spec
from lockstep.parallel.worker import Worker
from lockstep.plan.program.compression import Compression, warm_up
from lockstep.plan.spec import Plan
from lockstep.train.checkpointing.training_state import copied

_ERROR, _BASIS, _COUNT = ": error", ": basis", ": count"


class ErrorFeedback:
    """The residuals of one host.

    Attributes:
        tensors: by the parameter's name and a suffix: error, basis or count.
    """

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def fitted(
        self, plan: Plan, model: nn.Module, groups: Sequence[ParameterGroup]
    ) -> "ErrorFeedback | None":
        """This, with what a Plan needs; None if it compresses nothing."""
        if plan.compression is None:
            return None
        self.fit(compressed_tensors(plan, model, groups))
        return self

    def fit(self, compressed: Sequence[tuple[TensorSpec, Compression]]) -> None:
        """Allocate what these tensors need, and drop the rest; what fits keeps its values."""
        new: Tensors = {}
        for spec, compression in compressed:
            # In bfloat16, errors below its precision would be lost for good.
            error = torch.zeros(spec.shape, dtype=torch.promote_types(spec.dtype, torch.float32))
            new[spec.name + _ERROR] = error
            basis = first_basis(compression, error)
            if basis is not None:
                new[spec.name + _BASIS] = basis
            if warm_up(compression):
                new[spec.name + _COUNT] = torch.zeros(1, dtype=torch.int64)
        self.tensors = {
            name: old if (old := self.tensors.get(name)) is not None and _fits(old, one) else one
            for name, one in new.items()
        }

    def stored(self, store: TensorStore | None) -> TensorStore:
        """Move them to memory that all ranks of the host map: this store if it fits."""
        specs = tuple(tensor_spec(name, one) for name, one in self.tensors.items())
        if store is None or store.specs != specs:
            store = TensorStore.create(specs)
        for view, one in zip(store.views, self.tensors.values(), strict=True):
            if view.data_ptr() != one.data_ptr():
                view.copy_(one)
        self.tensors = dict(zip(self.tensors, store.views, strict=True))
        return store

    def by_parameter(self) -> dict[str, Residual]:
        """By the name of the parameter."""
        return {
            name: Residual(
                error=one,
                basis=self.tensors.get(name + _BASIS),
                count=self.tensors.get(name + _COUNT),
            )
            for key, one in self.tensors.items()
            if (name := key.removesuffix(_ERROR)) != key
        }

    def state(self, host: int) -> dict[str, Tensors]:
        """The residuals of this host, as a part of a state."""
        return {str(host): self.tensors} if self.tensors else {}

    def load(self, state: Mapping[str, Tensors], host: int, num_hosts: int) -> None:
        """Load this host's residuals.

        Args:
            state: those of all hosts, by the number of the host.
            host: the number of this one.
            num_hosts: of the job now. Host 0 sends the residuals of hosts that are no longer there.
        """
        own = {name: one.clone() for name, one in state.get(str(host), {}).items()}
        removed = [one for key, one in state.items() if int(key) >= num_hosts]
        for tensors in removed if host == 0 else ():
            for name, one in tensors.items():
                if name.endswith(_ERROR) and name in own:
                    own[name] += one
        for name, one in state.get("0", {}).items():
            if not name.endswith(_ERROR):  # equal on all hosts, so new hosts take those of host 0
                own.setdefault(name, one.clone())
        self.tensors = own


def residuals_of_all(worker: Worker, control: Control) -> dict[str, Tensors] | None:
    """The residuals of all hosts, as a part of a state, on rank 0; all ranks call it."""
    plan, rank = worker.plan, worker.rank
    host = plan.host_of(rank)
    leads = rank == plan.ranks_of_host(host).start
    own = _named(worker.exchange.residuals) if leads else {}
    gathered = control.gather({str(host): own} if own else {})
    if control.rank != 0:
        return None
    return {name: copied(one) for each in gathered for name, one in each.items()}


def _named(residuals: Mapping[str, Residual]) -> Tensors:
    """The inverse of ``ErrorFeedback.by_parameter``."""
    parts = {
        name: {_ERROR: one.error, _BASIS: one.basis, _COUNT: one.count}
        for name, one in residuals.items()
    }
    return {
        name + part: tensor
        for name, each in parts.items()
        for part, tensor in each.items()
        if tensor is not None
    }


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
