"""What arrives is what was sent: tensors through shared memory, the rest by pickle."""

import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.hooks import RemovableHandle

from lockstep.data.trees import tensors_of
from lockstep.parallel.storage.store import ParameterStore
from lockstep.parallel.transfer.serialization import pack, unpack
from tests.zoo import Case, case, cases

LARGE = 1 << 16


def sent(obj: Any, parameters: list[nn.Parameter] | None = None) -> Any:
    """The object after its journey; the receiver has equal parameters of its own."""
    own = list(parameters or [])
    theirs = [nn.Parameter(one.detach(), requires_grad=False) for one in own]
    serialized = pack(obj, own)
    return unpack(serialized.payload, serialized.region, theirs)


def test_constants_of_torch_are_found_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the first module that has imported it, as the script may have."""
    here = types.ModuleType("here")
    vars(here)["torch"] = torch
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "modules", {"here": here, **before})
    payload = pack([torch.channels_last, torch.strided]).payload
    assert b"here" not in payload
    found = unpack(payload, None)
    assert found[0] is torch.channels_last
    assert found[1] is torch.strided
    assert b"lockstep" not in pickle.dumps(torch.strided)  # for others it is what it was


def test_what_is_deep_arrives() -> None:
    depth = 20_000
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    limit = sys.getrecursionlimit()
    found, levels = sent(deep), 0
    while found:
        (found,), levels = found, levels + 1
    assert levels == depth
    assert sys.getrecursionlimit() == limit


def assert_equal(left: Tensor, right: Tensor) -> None:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.requires_grad == right.requires_grad
    assert torch.equal(left.resolve_conj(), right.resolve_conj())


# --- tensors and arrays -----------------------------------------------------------------------

TENSORS: dict[str, Callable[[], Tensor]] = {
    "floats": lambda: torch.randn(3, 4),
    "no dims": lambda: torch.tensor(3.5, dtype=torch.float64),
    "no elements": lambda: torch.empty(0, 4),
    "integers": lambda: torch.arange(5),
    "flags": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "sixteen bits": lambda: torch.randn(3).bfloat16(),
    "every second": lambda: torch.arange(10)[::2],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "with a gradient": lambda: torch.randn(3, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.randn(3)),
    "a frozen parameter": lambda: nn.Parameter(torch.arange(3), requires_grad=False),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name: str) -> None:
    tensor = TENSORS[name]()
    arrived = sent([tensor])[0]
    assert type(arrived) is type(tensor)
    if tensor.is_sparse:
        arrived, tensor = arrived.to_dense(), tensor.to_dense()
    assert_equal(arrived, tensor)


def test_a_dense_layout_is_kept_so_that_computing_gives_the_same_bits() -> None:
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert sent(images).stride() == images.stride()
    assert sent(torch.randn(4, 5).t()).stride() == (1, 5)


def test_large_tensors_are_not_in_the_pickle() -> None:
    data = {"tensor": torch.zeros(LARGE), "array": np.zeros(LARGE), "module": nn.Linear(300, 300)}
    serialized = pack(data)
    assert len(serialized.payload) < 10_000
    assert serialized.region is not None
    assert serialized.region.num_bytes >= LARGE * (4 + 8) + 300 * 300 * 4


def test_tensors_of_one_serialized_are_shared_by_all_who_open_it() -> None:
    serialized = pack([torch.zeros(3), np.zeros(LARGE)])
    first, second = (unpack(serialized.payload, serialized.region) for _ in range(2))
    first[0].fill_(7)
    first[1][-1] = 9
    assert second[0].tolist() == [7.0] * 3
    assert second[1][-1] == 9


def test_small_tensors_are_sent_and_lie_where_torch_has_tensors() -> None:
    serialized = pack([torch.arange(3), torch.ones(2, 2).t(), nn.Linear(5, 5)])
    assert serialized.region is None
    first, second = (unpack(serialized.payload, None) for _ in range(2))
    first[0].fill_(7)
    assert second[0].tolist() == [0, 1, 2]
    assert [one.data_ptr() % 64 for one in tensors_of(first[:2])] == [0, 0]
    assert second[2](torch.ones(5)).equal(first[2](torch.ones(5)))


def test_a_serialized_does_not_share_memory_with_what_was_packed() -> None:
    tensor = torch.zeros(3)
    arrived = sent(tensor)
    tensor.fill_(7)
    assert arrived.tolist() == [0.0] * 3


ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "large": lambda: np.arange(LARGE),
    "small": lambda: np.arange(3),
    "read-only": lambda: np.broadcast_to(np.float32(1), (LARGE,)),
    "reversed": lambda: np.arange(LARGE)[::-1],
    "columns first": lambda: np.asfortranarray(np.random.rand(100, 100)),
    "a field of records": lambda: np.zeros(LARGE, [("x", "f8"), ("y", "u1")])["x"],
    "records": lambda: np.zeros(LARGE, [("x", "f8"), ("y", "u1")]),
    "from another machine": lambda: np.arange(LARGE, dtype=">i4"),
    "complex": lambda: np.ones(LARGE, np.complex128),
    "sixteen bytes": lambda: np.ones(LARGE, np.longdouble),
    "unsigned": lambda: np.arange(LARGE, dtype=np.uint32),
    "words": lambda: np.array(["some", "words"] * 1000),
    "objects": lambda: np.array([None, {}] * 1000),
    "dates": lambda: np.zeros(LARGE, "datetime64[s]"),
    "no elements": lambda: np.empty((0, LARGE)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_they_were(name: str) -> None:
    array = ARRAYS[name]()
    arrived = sent([array])[0]
    assert type(arrived) is np.ndarray
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert np.array_equal(arrived, array)


def test_what_is_one_object_stays_one() -> None:
    tensor, array = torch.zeros(3), np.zeros(LARGE)
    arrived = sent([tensor, {"again": tensor}, array, array])
    assert arrived[0] is arrived[1]["again"]
    assert arrived[2] is arrived[3]


def test_tensors_that_come_and_go_are_not_mistaken_for_one_another() -> None:
    class Rows:
        """Makes its tensors while it is pickled."""

        def __init__(self, first: int) -> None:
            self.first = first

        def __reduce__(self) -> Any:
            rows = (torch.tensor(float(self.first + row)) for row in range(50))
            return list, (), None, rows

    arrived = sent([Rows(first) for first in range(0, 500, 50)])
    assert [row.item() for rows in arrived for row in rows] == [*range(500)]


# --- modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("job", cases(), ids=lambda job: job.name)
def test_a_model_arrives_on_the_receivers_own_parameters(job: Case) -> None:
    model = job.make_model()
    parameters = [*model.parameters()]
    ParameterStore.adopt(list(model.named_parameters()))
    theirs = [nn.Parameter(one.detach(), requires_grad=False) for one in parameters]
    serialized = pack(model, parameters)
    arrived = unpack(serialized.payload, serialized.region, theirs)
    assert [id(one) for one in arrived.parameters()] == [id(one) for one in theirs]
    for (name, left), (other, right) in zip(
        arrived.named_parameters(), model.named_parameters(), strict=True
    ):
        assert (name, left.data_ptr()) == (other, right.data_ptr())
        assert left.requires_grad == right.requires_grad
    assert arrived.state_dict().keys() == model.state_dict().keys()


def test_tied_parameters_arrive_tied() -> None:
    model = case("gpt_tied").make_model()
    for parameters in ([*model.parameters()], []):
        arrived = sent(model, parameters)
        assert arrived.head.weight is arrived.embedding.weight


def test_buffers_are_each_receivers_own() -> None:
    model = case("cnn_batch_norm").make_model()
    arrived = sent(model, [*model.parameters()])
    for name, buffer in model.named_buffers():
        assert_equal(arrived.get_buffer(name), buffer)
        assert arrived.get_buffer(name).data_ptr() != buffer.data_ptr()


def test_a_parameter_in_two_parts_of_a_job_is_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    arrived_model, arrived = sent((model, optimizer), [*model.parameters()])
    assert arrived.param_groups[0]["params"][0] is arrived_model.weight


def test_parametrized_layers_arrive() -> None:
    """Their classes are made when they are parametrized, and torch refuses to pickle them."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 2), "weight"),
    ).eval()
    parameters = [*model.parameters()]
    arrived = sent(model, parameters)
    inputs = torch.randn(5, 3)
    assert torch.equal(arrived(inputs), model(inputs))
    assert arrived.state_dict().keys() == model.state_dict().keys()
    parametrize.remove_parametrizations(arrived[0], "weight")
    assert type(arrived[0]) is nn.Linear


def test_hooks_that_arrived_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch numbers hooks for each process; the receiver may have registered fewer."""
    monkeypatch.setattr(RemovableHandle, "next_id", 5)
    model = nn.Identity()
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    serialized = pack(model)
    for registered_before in (5, 9):
        monkeypatch.setattr(RemovableHandle, "next_id", registered_before)
        arrived = unpack(serialized.payload, None)
        added = arrived.register_forward_hook(lambda module, inputs, output: output * 5)
        assert arrived(torch.ones(1)).item() == 10
        added.remove()
        assert arrived(torch.ones(1)).item() == 2
        assert RemovableHandle.next_id == max(registered_before, 6) + 1


# --- optimizers -------------------------------------------------------------------------------


class Named(Adam):
    """A subclass whose constructor and attributes are its own."""

    def __init__(self, parameters: Any, *, title: str) -> None:
        super().__init__(parameters, lr=0.5)
        self.title = title
        self.my_hooks = ["kept"]


class Scheduled(Adam):
    """An optimizer and its scheduler know each other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.itself = self
        self.scheduler = StepLR(self, 1)


class Outer(Optimizer):
    """Wraps another optimizer, whose groups it shares."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def stepped(make: Callable[[Any], Optimizer]) -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=0.1, amsgrad=True),
    "with groups": lambda parameters: torch.optim.SGD(
        [{"params": [one], "lr": lr} for one, lr in zip(parameters, (0.1, 0.2), strict=True)],
        momentum=0.9,
    ),
    "a subclass": lambda parameters: Named(parameters, title="mine"),
    "one that knows itself": Scheduled,
    "one that wraps another": lambda parameters: Outer(Adam(parameters)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_where_it_was(name: str) -> None:
    model, optimizer = stepped(OPTIMIZERS[name])
    arrived_model, arrived = sent((model, optimizer))
    assert type(arrived) is type(optimizer)
    for one, step in ((model, optimizer.step), (arrived_model, arrived.step)):
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        step()
    assert all(map(torch.equal, arrived_model.parameters(), model.parameters()))


def test_attributes_of_a_subclass_arrive() -> None:
    _, arrived = sent(stepped(lambda parameters: Named(parameters, title="mine")))
    assert (arrived.title, arrived.my_hooks) == ("mine", ["kept"])


def test_an_optimizer_that_knows_itself_arrives_as_one() -> None:
    _, arrived = sent(stepped(Scheduled))
    assert arrived.itself is arrived
    assert arrived.scheduler.base_lrs == [1e-3]


def test_slots_go_with_their_parameters() -> None:
    model, optimizer = stepped(Adam)
    arrived = sent((model, optimizer), [*model.parameters()])[1]
    (weight, _) = arrived.param_groups[0]["params"]
    assert arrived.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert_equal(arrived.state[weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_schedulers_wrapper_and_hooks_stay_behind() -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    LambdaLR(optimizer, lambda epoch: 0.5)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook has travelled"))
    arrived = sent(optimizer)
    assert "step" not in vars(arrived)
    assert arrived.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5e-3
    arrived.step()


# --- code -------------------------------------------------------------------------------------


def test_lambdas_closures_and_local_classes_arrive() -> None:
    factor = 3

    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * factor

    double, model = sent((lambda x: 2 * x, Local()))
    assert double(4) == 8
    assert model(torch.ones(2)).tolist() == [3.0, 3.0]


MAIN = """
import sys
import torch
from torch import nn
from lockstep.parallel.transfer.serialization import pack

SCALE = 5.0

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE

def loss(output, target):
    return (output - target).abs().mean()

model = Scaled(2, 2, bias=False)
nn.init.ones_(model.weight)
serialized = pack((model, loss, lambda x: x + SCALE))
with open(sys.argv[1], "wb") as file:
    file.write(serialized.payload)
"""


def test_what_main_defines_goes_by_value(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    subprocess.run([sys.executable, "-c", MAIN, payload], check=True, timeout=60)
    model, loss, shift = unpack(payload.read_bytes(), None)
    assert type(model).__name__ == "Scaled"
    output = model(torch.ones(1, 2))
    assert output.tolist() == [[10.0, 10.0]]
    assert loss(output, torch.zeros(1, 2)).item() == 10.0
    assert shift(1) == 6.0


def test_what_cannot_be_sent_raises_and_says_what() -> None:
    with pytest.raises(TypeError, match="generator"):
        pack({"data": (index for index in range(3))})


def test_nothing_is_left_open(tmp_path: Path) -> None:
    serialized = pack([torch.zeros(LARGE)])
    arrived = unpack(serialized.payload, serialized.region)
    serialized.close()
    assert serialized.region is not None
    assert serialized.region.descriptor == -1
    assert [one.sum().item() for one in tensors_of(arrived)] == [0.0]  # the memory lives on


def test_what_module_compile_has_left_as_it_is_can_be_sent() -> None:
    """As it does with TORCHDYNAMO_DISABLE=1."""
    model = nn.Linear(3, 2)
    model._compiled_call_impl = model._call_impl
    found = sent(model)
    assert torch.equal(found(torch.ones(1, 3)), model(torch.ones(1, 3)))
