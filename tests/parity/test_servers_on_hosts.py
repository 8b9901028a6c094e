"""Parameter servers whose workers are on several hosts: addresses of the loopback interface."""

import json
import os
import signal
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.launchers import BEGINNING, lines, lines_of_all, on_loopback
from tests.netns import HostProcess
from tests.thorough import core_of, wanted

SECONDS = 250.0

# Tasks of a TF_CONFIG, and the hosts that they are on.
TASKS = {
    "a server": {"chief": [0], "worker": [1], "ps": [2]},
    "servers beside a worker": {"chief": [0], "worker": [1], "ps": [1, 1]},
    "servers of two hosts": {"chief": [0], "ps": [1, 2]},
}

# Each script begins so. Numbers of servers, and of workers of each host, are its first arguments;
# none where TF_CONFIG says them.
START = f"""{BEGINNING}
from functools import partial
from torch.utils.data import TensorDataset
from tests.kept_teams import keep_teams
from tests.parity.test_parameter_servers import (
    SPARSE_OPTIMIZERS, Rated, assert_equal, plain_ratings, ratings)
from tests.zoo import case
servers, workers = (int(number) or None for number in sys.argv[1:3])

def strategy(staleness=0):
    return lockstep.ParameterServerStrategy(servers, workers, staleness, timeout_seconds=60)
"""

# The jobs of a layout's one start. Rows that are touched, and slots, are those of a plain loop; its
# last batch is short. The gradients of `Sums` do not depend on the weights: its result shows
# whether each sample counted.
JOBS = """
from tests.parity.test_parameter_servers import EPOCHS, Sums, plain, trained

def prove(name):
    one = case(name)
    job = lockstep.Job(
        model=one.make_model(), loss=one.loss, optimizer=one.optimizer,
        data=(one.inputs, one.targets), batch_size=one.batch_size)
    report = lockstep.verify(job, strategy(), steps=5)
    tell(["models", name, report.passed, str(report), strategy().num_replicas_in_sync])

def rate(name):
    optimizer_of, has_dense = SPARSE_OPTIMIZERS[name], name != "SparseAdam"
    expected, other = plain_ratings(optimizer_of, has_dense=has_dense)
    model = Rated(has_dense=has_dense).double()
    trainer = lockstep.Trainer(
        model, loss=nn.MSELoss(), optimizer=optimizer_of, strategy=strategy(), precision="fp64")
    for _ in range(2):
        trainer.fit(ratings(), batch_size=13, shuffle=False, verbose=0)
    assert_equal(model, expected)
    for slots, found in zip(other.state.values(), trainer.optimizer.state.values()):
        for slot, value in slots.items():
            gap = torch.as_tensor(found[slot] - value, dtype=torch.float64).norm()
            assert gap <= 1e-12 * max(torch.as_tensor(value).double().norm(), 1), slot
    tell(["ranks", name, trainer.plan.hosts])

def add_up(staleness):
    model = Sums(seconds=0.005)
    history = trained(strategy(staleness), model)
    assert_equal(model, plain(EPOCHS))
    tell(["staleness", history.history["staleness"]])

wanted = json.loads(sys.argv[3])
with keep_teams():
    for models in wanted["models"]:
        for name in models:
            prove(name)
    if wanted["ranks"]:
        for name in SPARSE_OPTIMIZERS:
            rate(name)
    for staleness in wanted["staleness"]:
        add_up(staleness)
"""

# Hosts or tasks, servers, and workers of each host.
LAYOUTS: dict[str, tuple[int | str, int, int]] = {
    "2 hosts, a server": (2, 1, 1),
    "2 hosts of 2, 2 servers": (2, 2, 2),
    "3 hosts, 2 servers": (3, 2, 1),
    "3 hosts of 2, 2 servers": (3, 2, 2),
    **{tasks: (tasks, 0, 0) for tasks in ("a server", "servers of two hosts")},
}

# By the name of a job's argument, what the process of a host has told.
Told = dict[str, list[Any]]


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> tuple[str, list[Told]]:
    """A layout, and what its one start has told for all tests."""
    jobs = {each: wanted(request, each) for each in ("models", "ranks", "staleness")}
    return request.param, started(request.param, json.dumps(jobs))


@cache
def started(layout: str, jobs: str) -> list[Told]:
    hosts, servers, workers = LAYOUTS[layout]
    found: list[Told] = []
    with TemporaryDirectory() as folder:
        for told in told_by_all(Path(folder), JOBS, hosts, [servers, workers, jobs]):
            found.append({each: [] for each in json.loads(jobs)})
            for kind, *values in told:
                found[-1][kind].append(values)
    return found


def told_by_all(
    folder: Path, script: str, hosts: int | str, arguments: list[Any]
) -> list[list[Any]]:
    """What the process of each host has told: of so many, or those of ``TASKS``."""
    path = folder / "script.py"
    path.write_text(START + script)
    with on_hosts(hosts, [str(path), *map(str, arguments)]) as processes:
        return lines_of_all(processes, SECONDS)


def on_hosts(hosts: int | str, script: list[str]) -> AbstractContextManager[list[HostProcess]]:
    if isinstance(hosts, str):
        return on_loopback(script, roles=TASKS[hosts])
    return on_loopback(script, num_hosts=hosts)


@pytest.mark.parametrize(
    ("layout", "models"),
    core_of(
        [
            ("2 hosts, a server", ("mlp", "gpt_tied")),
            ("a server", ("mlp",)),
            ("servers of two hosts", ("cnn_batch_norm",)),
            ("2 hosts of 2, 2 servers", ("unused_branch", "wide")),
            ("3 hosts, 2 servers", ("resnet",)),
        ],
        lambda layout, _: layout == "2 hosts, a server",
        lambda layout, _: layout == "2 hosts of 2, 2 servers",
    ),
    indirect=["layout"],
)
def test_workers_that_wait_train_as_one_device(
    layout: tuple[str, list[Told]], models: tuple[str, ...]
) -> None:
    name, everywhere = layout
    for told in everywhere:
        assert [name for name, *_ in told["models"]] == list(models)
        for _, passed, report, num_workers in told["models"]:
            assert passed, report
            assert num_workers == num_workers_of(name)


def num_workers_of(layout: str) -> int:
    hosts, _, workers = LAYOUTS[layout]
    if isinstance(hosts, int):
        return hosts * workers
    return sum(len(tasks) for role, tasks in TASKS[hosts].items() if role != "ps")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "ranks"),
    core_of(
        [
            ("2 hosts, a server", (1, 2)),
            ("a server", (1, 1, 1)),
            ("servers of two hosts", (1, 1, 1)),
            ("3 hosts of 2, 2 servers", (2, 2, 4)),
        ],
        lambda layout, _: layout == "a server",
        [],
    ),
    indirect=["layout"],
)
def test_rows_of_embeddings_are_those_of_one_device(
    layout: tuple[str, list[Told]], ranks: tuple[int, ...]
) -> None:
    for told in layout[1]:
        assert told["ranks"] == [[name, list(ranks)] for name in ("SGD", "Adagrad", "SparseAdam")]


COUNT = """
from lockstep.comm import transport
from lockstep.comm.transports import tensor_channels
moved = []
transfer = tensor_channels.TensorChannels.transfer
def counting(self, sends, receives):
    for tensors in (*sends.values(), *receives.values()):
        moved.extend(tensor.nbytes for tensor in tensors)
    transfer(self, sends, receives)
tensor_channels.TensorChannels.transfer = counting

class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20_000, 64, sparse=True)
    def forward(self, numbers):
        return self.rows(numbers).mean(1)

class Clear(lockstep.Callback):
    def on_epoch_end(self, epoch, logs=None):
        told.append(sum(moved))
        moved.clear()

told = []
numbers = torch.arange(256) * 70
trainer = lockstep.Trainer(
    Lookups(), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
    strategy=strategy(), callbacks=[Clear()])
trainer.fit((numbers, torch.randn(256)), batch_size=128, epochs=3, shuffle=False, verbose=0)
tell(told)
"""


@pytest.mark.thorough
def test_only_rows_that_are_touched_travel(tmp_path: Path) -> None:
    """A host sends the rows of its half of a batch, and gets all that have changed."""
    (first,), _ = told_by_all(tmp_path, COUNT, 2, [1, 1])
    row_bytes, num_steps = 64 * 4, 2
    least = num_steps * (64 + 128) * row_bytes
    assert len(first) == 3
    for num_bytes in first:
        assert least < num_bytes <= 1.2 * least


# --- workers that do not wait ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "staleness"),
    core_of(
        [
            ("2 hosts, a server", 4),
            ("3 hosts, 2 servers", 2),
            ("2 hosts of 2, 2 servers", None),
            ("a server", 2),
        ],
        lambda layout, _: layout == "2 hosts, a server",
    ),
    indirect=["layout"],
)
def test_every_sample_counts_once_and_no_worker_is_too_far_ahead(
    layout: tuple[str, list[Told]], staleness: int | None
) -> None:
    first, *others = (told["staleness"] for told in layout[1])
    ((leads,),) = first
    assert len(others) >= 1
    assert all(each == first for each in others)
    assert max(leads) >= 1  # somebody was ahead
    assert staleness is None or max(leads) <= staleness


# What host 0's worker asks, is granted and computes; and the bytes that it sends and receives. The
# worker of host 1 is slow, so that it does not take most of the work where host 0 is slow to start.
WATCH = """
from lockstep.parallel.parameter_server import remote_worker
from lockstep.parallel.parameter_server import worker_messages
from lockstep.comm.p2p.tcp_p2p import MailChannels
told = {"ahead": [], "bytes": 0, "rows": 0}
open_asks = 0  # that are not answered

def watch(cls, name, note):
    method = getattr(cls, name)
    def watched(self, *arguments, **options):
        result = method(self, *arguments, **options)
        note(result, *arguments)
        return result
    setattr(cls, name, watched)

def note_ask(result, message):
    global open_asks
    open_asks |= isinstance(message, worker_messages.Ask)
    if isinstance(message, worker_messages.HandedIn):
        told["rows"] += sum(len(one.numbers) for one in message.gradients)

def note_grant(message, *kinds):
    global open_asks
    open_asks = 0  # the worker asks one thing at a time
    told["rows"] += sum(len(one.numbers) for fresh in message.weights for one in fresh.rows)

def note_sent(result, box, number, payload, *rest):
    told["bytes"] += len(payload)

def note_received(payload, *rest):
    told["bytes"] += len(payload)

watch(worker_messages.Outbox, "put", note_ask)
watch(worker_messages.Inbox, "take", note_grant)
watch(MailChannels, "put", note_sent)
watch(MailChannels, "take", note_received)
watch(remote_worker.RemoteWorker, "_wait_for_row", lambda _: told["ahead"].append(open_asks))

class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20_000, 64, sparse=True)
        nn.init.zeros_(self.rows.weight)
    def forward(self, numbers):
        time.sleep(0.1 * int(sys.argv[3]))
        return self.rows(numbers).sum(1)

numbers, weights = torch.arange(1024) * 17, torch.rand(1024)
model = Lookups()
trainer = lockstep.Trainer(
    model, loss=lambda outputs, weights: (outputs * weights).mean(), strategy=strategy(4),
    optimizer=partial(torch.optim.SGD, lr=1.0))
trainer.fit((numbers, weights), batch_size=128, epochs=2, shuffle=False, verbose=0)
expected = torch.zeros(20_000, 64)
expected[numbers] = -2 / 128 * weights[:, None]
assert torch.allclose(model.rows.weight, expected, atol=1e-6)
tell(told)
"""


@pytest.mark.thorough
def test_a_worker_asks_before_it_computes_and_only_touched_rows_travel(tmp_path: Path) -> None:
    (first,), _ = told_by_all(tmp_path, WATCH, 2, [1, 1, "{host}"])
    ahead = first["ahead"]
    assert len(ahead) >= 4
    assert sum(ahead) > len(ahead) / 2
    row_bytes = 64 * 4
    assert 2 * len(ahead) * 64 / 2 <= first["rows"] <= len(ahead) * 64 + 2 * 1024
    assert first["rows"] * row_bytes < first["bytes"] <= 1.2 * first["rows"] * row_bytes


# The process that leads host `dying` kills itself, or presses Ctrl-C, in its fifth forward pass.
END = """
import signal
from itertools import count
from tests.parity.test_parameter_servers import Sums, trained
signal_number, dying = int(sys.argv[3]), sys.argv[4] == sys.argv[5]

class Ending(Sums):
    def __init__(self):
        super().__init__(seconds=0.005)
        self.calls, self.is_ending = count(1), dying
    def forward(self, inputs):
        if self.is_ending and self.training and next(self.calls) == 8:
            os.kill(os.getpid(), signal_number)
        return super().forward(inputs)
    def __getstate__(self):
        return {**vars(self), "is_ending": False, "first": 0}
try:
    trained(strategy(4), Ending())
except lockstep.LockstepError as error:
    tell(str(error))
except KeyboardInterrupt:
    tell("Ctrl-C")
"""


@pytest.mark.parametrize("dying", core_of([0, 1], [0], []))
def test_a_host_that_dies_is_named(dying: int, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(START + END)
    arguments = [str(path), "1", "1", str(int(signal.SIGKILL)), str(dying), "{host}"]
    with on_loopback(arguments) as processes:
        status, *_ = processes[dying].finish(SECONDS)
        assert status == -signal.SIGKILL
        (told,) = lines(processes[1 - dying], SECONDS)
    assert told.startswith(f"Host {dying} (")


# It ends with the error of whoever is killed after the first epoch.
LOSE = """
from tests.parity.test_parameter_servers import Sums, trained
class Begun(lockstep.Callback):
    def on_epoch_end(self, epoch, logs=None):
        tell("begun")
try:
    trained(strategy(json.loads(sys.argv[3])), Sums(seconds=0.2), callbacks=[Begun()])
except lockstep.LockstepError as error:
    tell(str(error))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tasks", "dying", "staleness", "name"),
    core_of(
        [
            *(("a server", 2, 2, "Host 2 ("), ("a server", 1, 0, "Host 1 (")),
            ("servers beside a worker", 3, 2, "Rank 3 "),
        ],
        [("servers beside a worker", 3, 2, "Rank 3 ")],
        [],
    ),
)
def test_a_task_that_dies_is_named(
    tasks: str, dying: int, staleness: int, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(START + LOSE)
    with on_hosts(tasks, [str(path), "0", "0", str(staleness)]) as processes:
        processes[0].wait_for_line('"begun"', SECONDS)
        os.kill(processes[dying].pid, signal.SIGKILL)
        assert processes.pop(dying).finish(SECONDS)[0] == -signal.SIGKILL
        for process in processes:
            status, out, _ = process.finish(SECONDS)
            assert status == 0
            assert name in json.loads(out.splitlines()[-1])


@pytest.mark.thorough
def test_ctrl_c_ends_workers_of_all_hosts(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(START + END)
    arguments = [str(path), "1", "1", str(int(signal.SIGINT)), "0", "{host}"]
    with on_loopback(arguments) as processes:
        told = lines_of_all(processes, SECONDS)
    assert told[0] == ["Ctrl-C"]


# Whatever the Trainer is asked for beside, and in a second call; buffers are the first worker's.
ALIKE = """
import hashlib
from torchmetrics.classification import MulticlassAccuracy
from lockstep.checkpoint.trees import flattened
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
inputs = torch.randn(400, 6)
data = inputs, inputs[:, :3].argmax(1)
trainer = lockstep.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.Adam, lr=0.01),
    metrics={"accuracy": MulticlassAccuracy(num_classes=3)}, strategy=strategy(4))
for call in "12":
    history = trainer.fit(
        data, batch_size=40, epochs=3, validation_data=data, verbose=0,
        checkpoint=lockstep.Checkpoint(sys.argv[3] + call))
def digest(tree):
    tensors, _ = flattened(tree)
    return {name: hashlib.sha1(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()}
logs = trainer.evaluate(data, batch_size=40)
tell([digest(dict(model.state_dict())), digest(trainer.optimizer.state_dict()), logs])
tell(history.history)
"""


@pytest.mark.exhaustive
def test_hosts_end_alike_and_have_learned(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (state, history), (other, _) = told_by_all(tmp_path, ALIKE, 2, [2, 1, folder])
    assert state == other
    assert state[2]["accuracy"] > 0.9
    assert history["val_accuracy"][-1] == pytest.approx(state[2]["accuracy"])
    assert max(history["staleness"]) <= 4
    assert all(list((tmp_path / f"checkpoints{call}").iterdir()) for call in "12")


REFUSED = """
from tests.parity.test_parameter_servers import Sums, trained
for options, fit in (({"replicas": 2}, {}), ({"staleness": 4}, {"restarts": 1})):
    try:
        refused = lockstep.ParameterServerStrategy(1, 1, **options, timeout_seconds=60)
        trained(refused, Sums(), **fit)
    except lockstep.LockstepError as error:
        tell(str(error))
"""


@pytest.mark.thorough
def test_what_is_for_one_host_is_refused_on_several(tmp_path: Path) -> None:
    for copies, restarts in told_by_all(tmp_path, REFUSED, 2, [1, 1]):
        assert "replicas=2" in copies
        assert "restarted on one host only" in restarts
