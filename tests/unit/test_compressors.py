"""Compressors by themselves: what all understand, what is left, and how much is sent."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.cluster.topology import Cluster
from lockstep.comm.compression.compressors import Understood, conversation, first_basis, orthonormal
from lockstep.errors import DeviceError, OptionError, PlanError
from lockstep.parallel.storage.store import tensor_spec
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers.compressed import Compressing
from lockstep.plan.makers.data_parallel import LocalSteps
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.program.compression import (
    BFloat16,
    Compression,
    Int8,
    PowerSGD,
    TopK,
    compression_of,
    num_bytes,
)
from lockstep.plan.spec import Plan
from lockstep.train.optim.error_feedback import ErrorFeedback
from tests.unit.test_many_hosts import make_cluster, make_graph

WARM = PowerSGD(2, warm_up=5)
EVERY = (BFloat16(), Int8(), PowerSGD(2), TopK(0.1))

SHAPES = [(40, 30), (12, 5, 3, 3), (2100,)]
PAIRS = [(how, shape) for how in EVERY for shape in SHAPES if compression_of(how, shape)]


def exchange(
    how: Compression, tensors: Sequence[Tensor], bases: Sequence[Tensor | None] = ()
) -> tuple[list[Understood], int]:
    """What each domain understands; and how many bytes each has sent."""
    held = [conversation(how, one, each) for one, each in zip(tensors, bases, strict=True)]
    ended: list[Understood] = []
    said, sent = [next(one) for one in held], 0
    while not ended:
        sent += sum(each.nbytes for each in said[0])
        heard, said = said, []
        for one in held:
            try:
                said.append(one.send(heard))
            except StopIteration as end:
                ended.append(end.value)
    return ended, sent


def bases_for(how: Compression, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [first_basis(how, one) for one in tensors]


def drawn(shape: Sequence[int], count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize(("how", "shape"), PAIRS)
def test_all_understand_the_same_and_no_more_is_sent_than_the_plan_says(
    how: Compression, shape: tuple[int, ...]
) -> None:
    tensors = drawn(shape, 3)
    before = [one.clone() for one in tensors]
    found, sent = exchange(how, tensors, bases_for(how, tensors))
    padding = 1024 if isinstance(how, Int8) else 0  # of the last block
    assert num_bytes(how, shape) <= sent <= num_bytes(how, shape) + padding
    for own, whole in found:
        assert whole.shape == own.shape == shape
        assert torch.equal(whole, found[0][1])
    torch.testing.assert_close(torch.stack([own for own, _ in found]).sum(0), found[0][1])
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_with_error_feedback_the_sum_over_steps_is_the_one_that_was_wanted(
    how: Compression,
) -> None:
    wanted = drawn((40, 30), 2, torch.float64)
    errors = [torch.zeros_like(one) for one in wanted]
    bases, told, steps = bases_for(how, wanted), torch.zeros(40, 30, dtype=torch.float64), 200
    for _ in range(steps):
        tensors = [one + error for one, error in zip(wanted, errors, strict=True)]
        found, _ = exchange(how, tensors, bases)
        errors = [one - own for one, (own, _) in zip(tensors, found, strict=True)]
        told += found[0][1]
    total = wanted[0] + wanted[1]
    torch.testing.assert_close(told + errors[0] + errors[1], steps * total)
    assert float((told / steps - total).norm() / total.norm()) < 0.12


@pytest.mark.parametrize("how", EVERY, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_understood_as_such(how: Compression, bad: float) -> None:
    tensors = drawn((40, 30), 2)
    tensors[1][3, 4] = bad
    for _, whole in exchange(how, tensors, bases_for(how, tensors))[0]:
        assert not whole.isfinite().all()


def test_a_matrix_of_less_rank_than_asked_for_is_understood_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(size, 1, generator=generator).double() for size in (40, 30))
    tensors = [rows @ columns.t(), torch.zeros(40, 30, dtype=torch.float64)]
    bases = bases_for(PowerSGD(3), tensors)
    for _ in range(3):
        found, _ = exchange(PowerSGD(3), tensors, bases)
        torch.testing.assert_close(found[0][1], tensors[0])
        assert all(basis is not None and (basis != 0).any(0).all() for basis in bases)


def test_columns_become_orthonormal() -> None:
    columns = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    columns[:, 2] = columns[:, 0] - 2 * columns[:, 1]
    found = orthonormal(columns)
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(found.t() @ found, expected, rtol=0, atol=1e-6)


# --- Plans ----------------------------------------------------------------------------------------


def plan_of(how: Compression, cluster: Cluster, every: int | None = None) -> Plan:
    maker = MirroredHosts(gbit_per_second=0.1)
    update = AveragedUpdate(every=every or 1)
    inner = maker if every is None else LocalSteps(maker=maker, update=update)
    return Compressing(maker=inner, compression=how)(make_graph(), cluster, 64)


def test_the_plan_says_what_travels_and_that_the_result_is_not_exact() -> None:
    plan = plan_of(PowerSGD(4), make_cluster(1, 1))
    assert Plan.from_json(plan.to_json()) == plan
    assert not any(layer.row_limit for layer in plan.layers)
    shown = " ".join(str(plan).split())
    assert "PowerSGD of rank 4, 32.0 KiB to each other host for a step; " in shown
    assert "uncompressed 4.0 MiB" in shown
    assert "no longer that of one device" in shown
    apart = plan_of(Int8(), make_cluster(1, 1, 1, 1), every=16)
    assert "int8, 1.0 MiB to each other host for an average; uncompressed 2.0 MiB" in " ".join(
        str(apart).split()
    )


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(OptionError, match="Compression needs"):
        plan_of(Int8(), make_cluster(2))
    with pytest.raises(DeviceError, match="the same processor"):
        plan_of(Int8(), make_cluster(1, 1, alike=False))


@pytest.mark.parametrize("asked", ["fp8", "", 8, BFloat16, ["int8"]])
def test_unknown_compressions_are_refused(asked: Any) -> None:
    for strategy in (
        lockstep.MultiWorkerMirroredStrategy,
        lockstep.HybridStrategy,
        lambda **options: lockstep.LocalSGDStrategy(4, **options),
    ):
        with pytest.raises(OptionError, match='`compression` must be "bf16"'):
            strategy(compression=asked)


def test_numbers_are_checked() -> None:
    for rank in (0, -1, 2.0, True, None):
        with pytest.raises(OptionError, match="`rank` of PowerSGD"):
            PowerSGD(rank)  # type: ignore[arg-type]
    for steps in (-1, 2.0, True, None):
        with pytest.raises(OptionError, match="`warm_up` of PowerSGD"):
            PowerSGD(warm_up=steps)  # type: ignore[arg-type]
    for fraction in (0, -0.1, 1.5, math.nan, "all"):
        with pytest.raises(OptionError, match="`fraction` of TopK"):
            TopK(fraction)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Leave `engine` out"):
        lockstep.MultiWorkerMirroredStrategy(compression="int8", engine="gloo")


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan = plan_of(Int8(), make_cluster(1, 1))
    with pytest.raises(PlanError, match="Lockstep's own channels"):
        msgspec.structs.replace(plan, hosts=(), compression=Int8())
    layers = tuple(msgspec.structs.replace(layer, row_limit=8) for layer in plan.layers)
    with pytest.raises(PlanError, match="no layer can exchange"):
        msgspec.structs.replace(plan, layers=layers)


# --- what is left ---------------------------------------------------------------------------------


def residuals_of(number: int) -> ErrorFeedback:
    found = ErrorFeedback()
    found.fit([(tensor_spec("weight", torch.zeros(40, 30)), PowerSGD(2))])
    found.tensors["weight: error"] += number
    return found


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_what_is_left_is_sent_by_another_number_of_hosts(num_hosts: int) -> None:
    told = {
        key: one for host in range(3) for key, one in residuals_of(host + 1).state(host).items()
    }
    total = torch.zeros(40, 30)
    for host in range(num_hosts):
        found = ErrorFeedback()
        found.load(told, host, num_hosts)
        found.fit([(tensor_spec("weight", torch.zeros(40, 30)), PowerSGD(2))])
        total += found.by_parameter()["weight"].error
        basis = found.by_parameter()["weight"].basis
        assert basis is not None
        assert torch.equal(basis, told["0"]["weight: basis"])
    assert torch.equal(total, torch.full((40, 30), 6.0))
    assert torch.equal(told["0"]["weight: error"], torch.full((40, 30), 1.0))


def test_a_host_that_is_new_has_warmed_up_as_long_as_all_others() -> None:
    found, specs = residuals_of(0), [(tensor_spec("weight", torch.zeros(40, 30)), WARM)]
    found.fit(specs)
    found.tensors["weight: count"] += 3
    for host in (0, 1):
        again = ErrorFeedback()
        again.load(found.state(0), host, 2)
        again.fit(specs)
        count = again.by_parameter()["weight"].count
        assert count is not None
        assert count.tolist() == [3]


def test_what_does_not_fit_begins_anew() -> None:
    found = residuals_of(1)
    found.fit([(tensor_spec("weight", torch.zeros(40, 30)), Int8())])
    assert found.tensors.keys() == {"weight: error"}
    assert float(found.tensors["weight: error"].sum()) == 1200
    found.fit([(tensor_spec("weight", torch.zeros(40, 31)), Int8())])
    assert not found.tensors["weight: error"].any()
