"""Loops of one's own in a script that nobody has launched as one of many: one replica."""

import math
import os
from collections import UserDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.cluster.environment import find_place
from lockstep.custom_loops.job import check_accelerators
from lockstep.custom_loops.optimizer import check_embeddings
from lockstep.errors import DataError, DeviceError, ModelError, OptionError


def make(**options: Any) -> tuple[nn.Linear, lockstep.CrossReplicaOptimizer]:
    model = nn.Linear(3, 2).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, lockstep.CrossReplicaOptimizer(optimizer, model, **options)


def job_of(engine: str | None = None, hosts: tuple[int, ...] = (2,)) -> Any:
    return SimpleNamespace(engine=engine, hosts=hosts)


def test_an_accelerator_has_one_replica() -> None:
    """Processes that see one device each call them all number 0."""
    check_accelerators(job_of(), [("cuda:0", "one"), ("cuda:0", "other")])
    check_accelerators(job_of("gloo"), [("cuda:0", "one"), ("cuda:0", "one")])
    with pytest.raises(DeviceError, match="'cuda:0' 2 times"):
        check_accelerators(job_of(), [("cuda:0", "one"), ("cuda:0", "one")])
    with pytest.raises(OptionError, match="one host so far"):
        check_accelerators(job_of(hosts=(1, 1)), [("cuda:0", "one"), ("cuda:0", "other")])


X = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 10


def test_one_replica_does_what_its_optimizer_does() -> None:
    model, optimizer = make()
    reference = nn.Linear(3, 2).double()
    reference.load_state_dict(model.state_dict())
    plain = optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        for net, each in ((model, partial(optimizer.step, weight=4)), (reference, plain.step)):
            net(X).square().mean().backward()
            each()
        if number < 2:
            plain.zero_grad()
    for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, wanted)
        assert own.grad is None, "step takes the gradients"


def test_a_closure_is_called_once() -> None:
    model, optimizer = make()
    calls = []

    def closure() -> float:
        calls.append(1)
        loss = model(X).square().mean()
        loss.backward()
        loss = loss.detach()
        return float(loss)

    assert optimizer.step(closure) > 0
    assert calls == [1]


def test_hooks_run_as_with_the_optimizer_itself() -> None:
    model, optimizer = make()
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda one, args, options: seen.append((one, options)))
    optimizer.register_step_post_hook(lambda one, args, options: seen.append(one))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: seen.append(state["more"]))
    model(X).square().mean().backward()
    optimizer.step(weight=4)
    assert seen == [(optimizer, {"weight": 4}), optimizer]
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    assert seen[2:] == [1]


@pytest.mark.parametrize("wraps_first", [True, False])
def test_a_model_whose_gradients_others_average_too_is_refused(
    wraps_first: bool, tmp_path: Path
) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.Linear(X.shape[1], 2).to(X.dtype)
        first = DistributedDataParallel(model) if wraps_first else None
        optimizer = lockstep.CrossReplicaOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        wrapped: Any = first or DistributedDataParallel(model)
        wrapped(X).square().mean().backward()
        optimizer.step(weight=4)  # it has one process
        optimizer = lockstep.CrossReplicaOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        wrapped(X).square().mean().backward()
        wrapped.process_group = SimpleNamespace(size=lambda: 2)
        with pytest.raises(ModelError, match="in DistributedDataParallel, which averages them"):
            optimizer.step(weight=4)
        wrapped.itself = [wrapped]  # only the garbage collector ends it
        del first, wrapped
        optimizer.step(weight=4)
    finally:
        distributed.destroy_process_group()


@pytest.mark.exhaustive
def test_parameters_without_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ModelError, match=r"0\.weight, a lazy parameter"):
        lockstep.CrossReplicaOptimizer(optim.SGD(model.parameters(), lr=0.1), model)


def test_shares_of_what_a_tokenizer_makes() -> None:
    batch = lockstep.share(UserDict(tokens=X, text="as it is"))
    assert batch == UserDict(tokens=batch["tokens"], text="as it is")
    assert torch.equal(batch["tokens"], X)


def test_means_of_complex_numbers_keep_their_imaginary_part() -> None:
    assert lockstep.all_mean(torch.tensor(1 + 2j)) == torch.tensor(1 + 2j)
    values = torch.tensor([[1 + 2j, 3j]], dtype=torch.complex128)
    assert torch.equal(lockstep.all_mean(values, weight=3), values)
    with pytest.raises(OptionError, match="a number or a tensor"):
        lockstep.all_mean([1.0, 2.0])


def test_embeddings_that_count_rows_of_the_batch_need_one_replica() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True), nn.Linear(2, 2))
    check_embeddings(model, 1)
    check_embeddings(nn.Sequential(nn.Embedding(4, 2)), 2)
    with pytest.raises(ModelError, match="scale_grad_by_freq=True for 0"):
        check_embeddings(model, 2)


def test_nothing_is_updated_where_nobody_has_samples() -> None:
    model, optimizer = make()
    before = model.weight.clone()
    model(X[:0]).square().mean().backward()  # NaN
    optimizer.step(weight=0)
    assert torch.equal(model.weight, before)


def test_share_and_mean_of_one_replica() -> None:
    batch = {"x": X, "pair": (X[:, 0], [X]), "name": "kept"}
    found = lockstep.share(batch)
    assert found["name"] == "kept"
    assert torch.equal(found["pair"][1][0], X)
    assert (lockstep.rank(), lockstep.num_replicas()) == (0, 1)
    assert lockstep.all_mean(2.5, weight=3) == 2.5
    assert lockstep.all_mean(2.0**24 + 1) == 2.0**24 + 1  # float32 has no such number
    assert math.isnan(lockstep.all_mean(2.5, weight=0))
    assert lockstep.all_mean(torch.ones(2, dtype=torch.float32)).dtype == torch.float32
    # More numbers than replicas tell at once.
    long = torch.arange(10_000.0)
    assert torch.equal(lockstep.all_mean(long), long)


@pytest.mark.parametrize("batch", [[], (X, X[:2]), torch.tensor(1.0), {"x": "text"}])
def test_what_is_no_batch(batch: object) -> None:
    with pytest.raises(DataError, match="a row for each sample"):
        lockstep.share(batch)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, True, "4"])
def test_what_is_no_weight(weight: Any) -> None:
    _, optimizer = make()
    for call in (optimizer.step, partial(lockstep.all_mean, 1.0)):
        with pytest.raises(OptionError, match="`weight` must be a number of samples"):
            call(weight=weight)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"clip_norm": 0}, "`clip_norm`"), ({"accumulate": 0}, "`accumulate`")],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make(**options)


def test_optimizers_that_cannot_be() -> None:
    model, optimizer = make()
    wrapped = optim.LBFGS(model.parameters())
    for other in (wrapped, optimizer, "SGD"):
        with pytest.raises(OptionError):
            lockstep.CrossReplicaOptimizer(other)
    with pytest.raises(OptionError, match="the model's own parameters"):
        lockstep.CrossReplicaOptimizer(optim.SGD(model.parameters(), lr=0.1), nn.Linear(1, 1))
    with pytest.raises(OptionError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(X)]})


def test_a_trainer_takes_the_optimizer_itself() -> None:
    model, optimizer = make()
    with pytest.raises(OptionError, match="strategy makes its optimizer step across replicas"):
        lockstep.Trainer(model.float(), loss=nn.MSELoss(), optimizer=optimizer)


def test_what_was_frozen_takes_no_step() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = lockstep.CrossReplicaOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    model.bias.requires_grad_(True)
    model(X.float()).square().mean().backward()
    with pytest.raises(ModelError, match="'bias'"):
        optimizer.step()


def test_weights_are_given_at_all_parts_of_an_update_or_at_none() -> None:
    model, optimizer = make(accumulate=2)
    model(X).square().mean().backward()
    optimizer.step(weight=4)
    model(X).square().mean().backward()
    with pytest.raises(OptionError, match="must have a weight, or none"):
        optimizer.step()


def test_replicas_meet_once() -> None:
    lockstep.init()
    lockstep.init()
    with pytest.raises(OptionError, match="Replicas meet once"):
        lockstep.init(timeout_seconds=5)
    with pytest.raises(OptionError, match="`engine`"):
        lockstep.init(engine="mpi")
    with pytest.raises(OptionError, match="does not move tensors of devices of kind 'cpu'"):
        lockstep.init(engine="nccl")


def test_processes_of_lockstep_run() -> None:
    own = {"LOCKSTEP_HOSTS": "1", "LOCKSTEP_JOB": "j", "LOCKSTEP_PROCESSES": "3"}
    place = find_place({**own, "LOCKSTEP_PROCESS": "2"})
    assert place is not None
    assert (place.process, place.num_processes, place.num_ranks, place.leads) == (2, 3, 3, False)
    for wrong in ({}, {"LOCKSTEP_PROCESS": "3"}, {"LOCKSTEP_PROCESS": "x"}):
        with pytest.raises(OptionError, match="LOCKSTEP_PROCESS"):
            find_place({**own, **wrong})
    assert "LOCKSTEP_PROCESSES" not in os.environ
