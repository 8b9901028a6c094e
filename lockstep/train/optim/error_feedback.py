"""What a host keeps of compressed tensors from step to step, and from call to call.

It is a part of a training's state: without it, what goes on from a checkpoint would be another
training. Each host has its own (``TrainingState.residuals``, by the number of the host).
"""

from collections.abc import Mapping, Sequence

import torch

from lockstep.checkpoint.trees import Tensors
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.compression.compressed_sums import Residual
from lockstep.comm.compression.compressors import first_basis
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.storage.store import TensorStore, tensor_spec
from lockstep.parallel.worker import Worker
from lockstep.plan.program.compression import Compression, warm_up
from lockstep.train.checkpointing.training_state import copied

_ERROR, _BASIS, _COUNT = ": error", ": basis", ": count"


class ErrorFeedback:
    """Those of one host.

    Attributes:
        tensors: by the name of the parameter, and what it is of it.
    """

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def fit(self, compressed: Sequence[tuple[TensorSpec, Compression]]) -> None:
        """Have what these tensors need, and nothing else; what is there and fits stays."""
        new: Tensors = {}
        for spec, compression in compressed:
            # What bfloat16 has no digits for would be lost for good.
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
        """Have them lie where all ranks of this host see them: in a store, if it fits this one."""
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

    def told(self, host: int) -> dict[str, Tensors]:
        """Those of this host, as a part of a state."""
        return {str(host): self.tensors} if self.tensors else {}

    def load(self, told: Mapping[str, Tensors], host: int, num_hosts: int) -> None:
        """Take up what those of all hosts were.

        Args:
            told: by the number of the host.
            host: the number of this one.
            num_hosts: that there are now. What was left on others is the first host's to send.
        """
        own = {name: one.clone() for name, one in told.get(str(host), {}).items()}
        gone = [one for key, one in told.items() if int(key) >= num_hosts]
        for tensors in gone if host == 0 else ():
            for name, one in tensors.items():
                if name.endswith(_ERROR) and name in own:
                    own[name] += one
        for name, one in told.get("0", {}).items():
            if not name.endswith(_ERROR):  # the same on all hosts, and so on those that are new
                own.setdefault(name, one.clone())
        self.tensors = own


def residuals_of_all(worker: Worker, control: Control) -> dict[str, Tensors] | None:
    """What all hosts have now, as a part of a state, on rank 0; all ranks call it."""
    plan, rank = worker.plan, worker.rank
    host = plan.host_of(rank)
    leads = rank == plan.ranks_of_host(host).start
    own = _named(worker.exchange.residuals) if leads else {}
    gathered = control.gather({str(host): own} if own else {})
    if control.rank != 0:
        return None
    return {name: copied(one) for each in gathered for name, one in each.items()}


def _named(residuals: Mapping[str, Residual]) -> Tensors:
    """What ``ErrorFeedback.by_parameter`` was given."""
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
