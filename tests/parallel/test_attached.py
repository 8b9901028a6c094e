"""Processes that a launcher has started: one leads, the others serve it in their own scripts."""

import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.processes import Script, run, running, wait_until
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

# Longest for anything that must show at once, on a machine that others use, too.
AT_ONCE_SECONDS = 15.0

# What the leader has the others do.
ROLES = """
import os, signal, sys, time

def converse(context, body, descriptors):
    "Sends what it was sent, and hears more; reads what was passed."
    context.send(body + str(context.rank).encode())
    more, further = context.receive()
    read = [os.pread(descriptor, 100, 0) for descriptor in (*descriptors, *further)]
    for descriptor in (*descriptors, *further):
        os.close(descriptor)
    return more + b"".join(read)

def wander(context, body, descriptors):
    "Goes where the leader is, and sees its modules."
    import elsewhere
    return (os.getcwd() + elsewhere.NAME).encode()

def add_up(context, body, descriptors):
    "Each rank writes its number into a region; past the barrier all are there."
    total = sum_over_ranks(context.rank, int(body), descriptors[0], context.look_around)
    return str(total).encode()

def sum_over_ranks(rank, num_ranks, descriptor, look_around):
    import torch
    from lockstep.comm.shared_memory.status_board import LINE_BYTES, StatusBoard
    from lockstep.comm.shared_memory.shared_region import SharedRegion
    region = SharedRegion(descriptor, os.fstat(descriptor).st_size)
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    values = region.tensor(num_ranks * LINE_BYTES, torch.int64, (num_ranks,), (1,))
    values[rank] = 10**rank
    board.barrier()
    total = int(values.sum())
    region.close()
    return total

def fail(context, body, descriptors):
    "Rank 1 fails, the others wait for what never comes."
    if context.rank == 1:
        raise ValueError("of rank 1")
    context.receive()

def wait(context, body, descriptors):
    "Rank 1 waits for data, rank 2 at the board."
    if context.rank == 2:
        import lockstep.comm.shared_memory.status_board  # which takes a while
    context.send(b"waits")
    if context.rank == 2:
        sum_over_ranks(context.rank, 3, descriptors[0], context.look_around)
    context.receive()

def compute(context, body, descriptors):
    "Looks up only when its work is done."
    context.send(b"computes")
    while not os.path.exists("done"):
        time.sleep(0.01)
    context.send(b"x")
    return b""

def fork(context, body, descriptors):
    "Has a child, as a DataLoader would, which lives longer."
    context.send(b"" if os.fork() else b"child")
    while True:
        time.sleep(0.01)
"""

JOB = """
import faulthandler, gc, os, pickle, signal, sys, threading, time
import roles
from lockstep.cluster.place import Place
from lockstep.errors import WorkerError
from lockstep.launch.workers.external_workers import attach, attach_team

if "TORCHELASTIC_RUN_ID" in os.environ:
    NUMBER, NUM_FOLLOWERS = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    ID = os.environ["TORCHELASTIC_RUN_ID"]
else:
    NUMBER, NUM_FOLLOWERS, ID = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SECRET = b"a secret of this job"
WAIT = 60.0

def make_place(number=NUMBER):
    return Place(launcher="torchrun", job=ID, host=0, num_hosts=1, process=number,
                 num_processes=NUM_FOLLOWERS + 1, rendezvous=())

def say(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # whole: others write there, too

def make_team(**options):
    return attach_team(make_place(), SECRET, num_helpers=NUM_FOLLOWERS,
                       **{"timeout_seconds": WAIT, **options})

def call(team, function, body=b"", descriptors=(), seconds=WAIT):
    team.call(function, body, descriptors, position=lambda rank: f"at {rank}",
              timeout_seconds=seconds)

def make_region():
    descriptor = os.memfd_create("region", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 1 << 16)
    return descriptor

def wait_for_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def traces():
    "What a process must find as it was."
    return (sorted(os.listdir("/proc/self/fd")), threading.active_count(), sys.path, os.getcwd(),
            [signal.getsignal(number) for number in signal.valid_signals()],
            caught_signals(), faulthandler.is_enabled())

def caught_signals():
    "As the kernel has them, but for two that are the C library's own."
    with open("/proc/self/status") as status:
        (caught,) = [line.split()[1] for line in status if line.startswith("SigCgt")]
    return int(caught, 16) & ~(0b11 << 31)

def serve(num_calls=1):
    attachment = attach(make_place(), SECRET, timeout_seconds=WAIT)
    say("attached")
    for _ in range(num_calls):
        say("returned", (attachment.serve_call() or b"").decode())
    return attachment
"""

END = """
if NUMBER == 0:
    lead()
else:
    follow()
say("end")
"""


@contextmanager
def started(
    source: str, directory: Path, *, num_followers: int = 2, pause_seconds: float = 0.0
) -> Iterator[list[Script]]:
    """Run a job of some processes, the leader first; ``source`` has ``lead`` and ``follow``.

    Args:
        source: what makes it differ from others.
        directory: where it runs.
        num_followers: processes but for the leader.
        pause_seconds: the leader is so much later.
    """
    (directory / "roles.py").write_text(ROLES)
    (directory / "job.py").write_text(JOB + source + END)
    job = uuid.uuid4().hex
    with ExitStack() as stack:

        def start(number: int) -> Script:
            command = ["job.py", str(number), str(num_followers), job]
            return stack.enter_context(running("", directory=directory, command=command))

        followers = [start(number) for number in range(1, num_followers + 1)]
        time.sleep(pause_seconds)
        yield [start(0), *followers]


def finish(script: Script) -> tuple[int, str]:
    """The exit status, and all that was written."""
    status, out, err = script.finish()
    return status, out + err


TWO_CALLS = """
def lead():
    before = traces()
    team = make_team(first_rank=5)
    for body in (b"one ", b"two "):
        with open("passed", "w+") as file:
            file.write("read ")
            file.flush()
            call(team, roles.converse, body, (file.fileno(),))
            say("gathered", [payload for payload, _ in team.gather(WAIT)])
            team.broadcast(b"more ", (file.fileno(),))
        team.finish(WAIT)
    team.close()
    assert traces() == before, (traces(), before)

def follow():
    before = traces()
    attachment = serve(2)
    attachment.close()
    assert not attachment.is_open
    del attachment
    assert traces() == before, (traces(), before)
"""


def test_two_calls_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    with started(TWO_CALLS, tmp_path) as (leader, *followers):
        expected = "gathered [b'one 5', b'one 6']\ngathered [b'two 5', b'two 6']\nend\n"
        assert finish(leader) == (0, expected)
        for follower in followers:
            expected = "attached\nreturned more read read \nreturned more read read \nend\n"
            assert finish(follower) == (0, expected)
        for script in (leader, *followers):
            wait_until(lambda script=script: not script.others(), 15)  # type: ignore[misc]


# Says how it came out, as what it raised.
CAUGHT = """
def attempt(function, *arguments):
    try:
        say("done", function(*arguments))
    except BaseException as error:
        say(type(error).__name__, str(error).replace(chr(10), " | "))

def follow():
    attachment = attach(make_place(), SECRET, timeout_seconds=WAIT)
    attempt(attachment.serve_call)
    assert not attachment.is_open or NUMBER == 0
"""


@pytest.mark.exhaustive
def test_memory_is_shared_and_ranks_meet_at_the_board(tmp_path: Path) -> None:
    source = """
def lead():
    team = make_team()
    region = make_region()
    call(team, roles.add_up, b"3", (region,))
    say("sum", roles.sum_over_ranks(0, 3, region, lambda waited: team.look_around()))
    team.finish(WAIT)

def follow():
    serve()
"""
    with started(source, tmp_path) as (leader, *followers):
        assert finish(leader) == (0, "sum 111\nend\n")
        for follower in followers:
            assert finish(follower) == (0, "attached\nreturned 111\nend\n")


def test_the_leaders_folder_and_modules_are_those_of_the_call_only(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "elsewhere.py").write_text("NAME = ' elsewhere'")
    source = """
def lead():
    team = make_team()
    os.chdir("folder")
    sys.path.append(os.getcwd())
    call(team, roles.wander)
    team.finish(WAIT)

def follow():
    before = traces()
    serve().close()
    assert traces() == before
"""
    with started(source, tmp_path, num_followers=1) as (leader, follower):
        assert finish(leader) == (0, "end\n")
        expected = f"attached\nreturned {tmp_path}/folder elsewhere\nend\n"
        assert finish(follower) == (0, expected)


def test_a_follower_may_come_first_and_the_leader_late(tmp_path: Path) -> None:
    with started(TWO_CALLS, tmp_path, pause_seconds=1.0) as scripts:
        assert [finish(script)[0] for script in scripts] == [0, 0, 0]


@pytest.mark.thorough
def test_an_error_in_a_follower_is_raised_in_all_of_them(tmp_path: Path) -> None:
    source = """
def lead():
    team = make_team()
    call(team, roles.fail)
    attempt(team.finish, WAIT)
    assert not team.is_alive
    team.close()
    wait_for_file("over")  # so that the others find it alive
"""
    with started(CAUGHT + source, tmp_path) as (leader, failed, other):
        expected = f"WorkerError Rank 0 of this host (process {leader.process.pid}) has given up"
        assert finish(other)[1].startswith(expected)
        assert finish(failed) == (0, "ValueError of rank 1\nend\n")
        (tmp_path / "over").touch()
        status, said = finish(leader)
        assert status == 0
        assert said.startswith("WorkerError Rank 1 failed (at 1): ValueError: of rank 1 | ")
        assert "in fail | " in said


WAITING = """
def lead():
    team = make_team()
    region = make_region()
    call(team, roles.wait, b"", (region,))
    if AT_BOARD:
        import lockstep.comm.shared_memory.status_board
    team.gather(WAIT)
    say("waits")
    if ONE_IS_STOPPED:
        wait_for_file("stopped")
    if AT_BOARD:
        attempt(roles.sum_over_ranks, 0, 3, region, lambda waited: team.look_around())
    else:
        attempt(team.finish, PATIENCE)
    team.close()

AT_BOARD, ONE_IS_STOPPED, PATIENCE = False, False, WAIT
"""


@pytest.mark.parametrize("number", core_of([1, 2], [2], []))
@pytest.mark.parametrize("where", core_of(["finish", "board"], ["board"], []))
def test_a_killed_follower_is_seen_at_once(where: str, number: int, tmp_path: Path) -> None:
    source = CAUGHT + WAITING + f"\nAT_BOARD = {where == 'board'}\n"
    with started(source, tmp_path) as (leader, *followers):
        leader.wait_for_line("waits")
        time.sleep(0.2)
        victim = followers[number - 1].process
        victim.kill()
        killed = time.monotonic()
        said = leader.wait_for_line("WorkerError ")
        assert time.monotonic() - killed < AT_ONCE_SECONDS
        assert said.startswith(f"Rank {number} (process {victim.pid}) ended (at {number}): its ")
        assert "process has ended" in said
        other = followers[2 - number]
        assert re.search("WorkerError Rank 0 .* has (ended|given up)", finish(other)[1])


def test_a_killed_leader_is_seen_at_once_wherever_one_waits(tmp_path: Path) -> None:
    with started(CAUGHT + WAITING, tmp_path) as (leader, *followers):
        leader.wait_for_line("waits")
        time.sleep(0.2)
        leader.process.kill()
        killed = time.monotonic()
        for follower in followers:
            said = follower.wait_for_line("WorkerError ")
            assert time.monotonic() - killed < AT_ONCE_SECONDS
            expected = f"Rank 0 of this host (process {leader.process.pid}) has ended: its output"
            assert said.startswith(expected)


def test_a_stopped_leader_is_lost(tmp_path: Path) -> None:
    source = (
        "from lockstep.launch.workers import process_state\nprocess_state.STOPPED_SECONDS = 0.5\n"
    )
    with started(CAUGHT + WAITING + source, tmp_path) as (leader, *followers):
        leader.wait_for_line("waits")
        leader.process.send_signal(signal.SIGSTOP)
        for follower in followers:
            said = follower.wait_for_line("WorkerError ")
            assert said == (
                f"Rank 0 of this host (process {leader.process.pid}) is stopped, as by SIGSTOP."
            )
            assert finish(follower)[0] == 0
        leader.process.send_signal(signal.SIGCONT)
        assert re.search("WorkerError Rank [12] ", finish(leader)[1])


def test_a_follower_that_computes_hears_of_it_when_it_looks_up(tmp_path: Path) -> None:
    source = """
def lead():
    team = make_team()
    call(team, roles.compute)
    team.gather(WAIT)
    say("computes")
    team.gather(WAIT)
"""
    with started(CAUGHT + source, tmp_path) as (leader, *followers):
        leader.wait_for_line("computes")
        leader.process.kill()
        leader.process.wait()
        assert [follower.process.poll() for follower in followers] == [None, None]
        (tmp_path / "done").touch()
        for follower in followers:
            assert follower.wait_for_line("WorkerError Rank 0 of this host").endswith("says why.")
            assert finish(follower)[0] == 0


def test_a_fork_of_a_follower_hides_nothing(tmp_path: Path) -> None:
    """It has copies of all descriptors, and would keep the link open."""
    source = """
def lead():
    team = make_team()
    call(team, roles.fork)
    assert team.gather(WAIT) == [(b"", ())]
    say("forked")
    attempt(team.finish, WAIT)
    team.close()
"""
    with started(CAUGHT + source, tmp_path, num_followers=1) as (leader, follower):
        leader.wait_for_line("forked")
        (child,) = follower.others()
        follower.process.kill()
        killed = time.monotonic()
        assert "process has ended" in leader.wait_for_line("WorkerError Rank 1 ")
        assert time.monotonic() - killed < AT_ONCE_SECONDS
        assert finish(leader)[0] == 0
        os.kill(child, signal.SIGKILL)


@pytest.mark.thorough
def test_a_stopped_follower_is_told_from_one_that_waits(tmp_path: Path) -> None:
    source = CAUGHT + WAITING + "ONE_IS_STOPPED, PATIENCE = True, 1.0\n"
    with started(source, tmp_path) as (leader, waiting, stopped):
        leader.wait_for_line("waits")
        stopped.process.send_signal(signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        status, said = finish(leader)
        assert status == 0
        head, _, first, second = said.split("--- rank ")
        assert "Rank 0 has waited 1 s for its helpers (at 0)" in head
        assert first.startswith("1 (at 1)")
        assert re.search(r"roles.py\", line \d+ in wait", first)
        assert "(no answer: the process is stopped" in second
        stopped.process.send_signal(signal.SIGCONT)
        for script in (waiting, stopped):
            assert re.search("WorkerError Rank 0 .* has (ended|given up)", finish(script)[1])


@pytest.mark.thorough
def test_ctrl_c_in_a_follower(tmp_path: Path) -> None:
    with started(CAUGHT + WAITING, tmp_path) as (leader, pressed, other):
        leader.wait_for_line("waits")
        time.sleep(0.2)
        pressed.process.send_signal(signal.SIGINT)
        assert finish(pressed) == (0, "KeyboardInterrupt \nend\n")
        assert "Rank 1 failed (at 1): KeyboardInterrupt: " in finish(leader)[1]
        assert re.search("WorkerError Rank 0 .* has (ended|given up)", finish(other)[1])


@pytest.mark.parametrize(
    ("afterwards", "expected"),
    core_of(
        [
            ("os._exit(0)", "its process has ended"),
            ("time.sleep(WAIT)", "it is not ready after 2 s"),
            ("attachment.close(); time.sleep(WAIT)", "its process runs, but has left the call"),
        ],
        lambda afterwards, _: afterwards == "os._exit(0)",
    ),
)
def test_a_follower_that_does_not_come_to_the_next_call(
    afterwards: str, expected: str, tmp_path: Path
) -> None:
    source = f"""
def lead():
    team = make_team()
    attempt(call, team, roles.wander)
    attempt(team.finish, WAIT)
    while not team._helpers[0].is_ready:  # for the second call, which only rank 2 is to miss
        team.look_around()
        time.sleep(0.01)
    team._start_timeout = 2.0
    attempt(call, team, roles.wander)

def follow():
    attachment = serve(1 if NUMBER == 2 else 2)
    {afterwards}

{CAUGHT.partition("def follow")[0]}
"""
    (tmp_path / "elsewhere.py").write_text("NAME = 'here'")
    with started(source, tmp_path) as scripts:
        leader = scripts[0]
        for done in range(2):
            assert leader.wait_for_line("") == "done None", done
        said = leader.wait_for_line("WorkerError ")
        assert said.startswith("Rank 2 did not take part in this call. Received: ")
        assert expected in said
        assert f"(process {scripts[2].process.pid}, number 2 of its host)" in said
        for script in scripts:
            script.process.kill()


@pytest.mark.exhaustive
def test_fits_in_attached_processes_give_the_weights_of_one(tmp_path: Path) -> None:
    """Two fits and a prediction; a session takes the team as it takes helpers of its own."""
    source = """
import torch
import lockstep
from lockstep.train.runtime import session

def fit(devices):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    trainer = lockstep.Trainer(
        model.double(), loss=torch.nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p),
        strategy=lockstep.MirroredStrategy(devices=devices, num_shares=3), precision="fp64")
    inputs = torch.randn(50, 8, dtype=torch.float64)
    data = (inputs, torch.randint(3, (50,)))
    for _ in range(2):
        trainer.fit(data, epochs=2, batch_size=16, verbose=0)
    outputs = trainer.predict(inputs, batch_size=16)
    trainer._runner.session.close()
    return [*model.state_dict().values(), outputs]

def lead():
    before = torch.get_num_threads()
    alone = fit(1)
    session.take_team = lambda *arguments, first_rank: make_team()
    together = fit(3)
    say("same bits", all(map(torch.equal, alone, together)), torch.get_num_threads() == before)

def state():
    return torch.get_num_threads(), torch.get_rng_state().tolist(), mapped_regions()

def mapped_regions():
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd" in line]

def follow():
    before = state()
    serve(3).close()
    say("as before", state() == before)
"""
    with started(source, tmp_path) as (leader, *followers):
        assert finish(leader) == (0, "same bits True True\nend\n")
        for follower in followers:
            returned = "returned \n" * 3
            assert finish(follower) == (0, f"attached\n{returned}as before True\nend\n")


@pytest.mark.exhaustive
def test_torchrun(tmp_path: Path) -> None:
    """As users start it; its agent is the parent of all processes."""
    source = """
def lead():
    team = make_team()
    region = make_region()
    for _ in range(2):
        call(team, roles.add_up, b"3", (region,))
        say("sum", roles.sum_over_ranks(0, 3, os.dup(region), lambda waited: team.look_around()))
        team.finish(WAIT)

def follow():
    serve(2)
"""
    (tmp_path / "roles.py").write_text(ROLES)
    (tmp_path / "job.py").write_text(JOB + source + END)
    out = run(
        "",
        directory=tmp_path,
        options=(),
        command=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "job.py"],
    )
    assert sorted(out.split("\n"))[1:] == sorted(
        ["sum 111"] * 2 + ["returned 111"] * 4 + ["attached"] * 2 + ["end"] * 3
    )
