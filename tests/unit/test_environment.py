"""Places, from the variables that each launcher sets; every mistake in them is one clear error."""

import json
from itertools import pairwise

import pytest

from lockstep.cluster.environment import NUM_CANDIDATES, find_devices, find_place
from lockstep.cluster.place import Address, Place
from lockstep.errors import OptionError

RUN = {
    "LOCKSTEP_HOSTS": "2",
    "LOCKSTEP_HOST_INDEX": "1",
    "LOCKSTEP_RENDEZVOUS": "10.0.0.1:29400",
    "LOCKSTEP_DEVICES": "3",
    "LOCKSTEP_JOB": "digits",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "digits",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[01-02],big",
}


def tf_config(cluster: object, kind: str = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


TWO = {"worker": ["a:1111", "b:2222"]}


def place_in(environ: dict[str, str]) -> Place:
    place = find_place(environ)
    assert place is not None
    return place


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LOCKSTEP_DEVICES": "2"},
        {"LOCKSTEP_RENDEZVOUS": "a:1"},
        {"LOCKSTEP_HOSTS": "", "TF_CONFIG": ""},
        {"LOCKSTEP_HOSTS": "1"},
        {"LOCKSTEP_HOSTS": "1", **TORCHRUN},
        {"TF_CONFIG": "{}"},
        tf_config({"worker": ["a:1111"]}),
        tf_config({"chief": ["a:1111"]}, "chief"),
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        TORCHRUN
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
        | dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        without(SRUN, "SLURM_STEP_ID"),  # a batch script
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # an interactive shell
    ],
)
def test_a_script_by_itself_has_no_place(environ: dict[str, str]) -> None:
    assert find_place(environ) is None


# --- one of many ----------------------------------------------------------------------------------


def test_lockstep_run_says_it_all() -> None:
    assert place_in(RUN) == Place(
        launcher="lockstep run",
        job="digits",
        host=1,
        num_hosts=2,
        rendezvous=(Address(name="10.0.0.1", port=29400),),
        devices=3,
    )


def test_what_lockstep_run_need_not_say() -> None:
    place = place_in(without(RUN, "LOCKSTEP_DEVICES", "LOCKSTEP_JOB"))
    assert (place.devices, place.job) == (None, "10.0.0.1:29400")


@pytest.mark.parametrize(
    ("kind", "index", "host"), [("chief", 0, 0), ("worker", 0, 1), ("worker", "1", 2)]
)
def test_hosts_of_tf_config_are_the_chief_then_the_workers(
    kind: str, index: object, host: int
) -> None:
    cluster = {"worker": ["a:1111", "[fe80::2%eth0]:2222"], "chief": ["c:3333"]}
    assert place_in(tf_config(cluster, kind, index)) == Place(
        launcher="TF_CONFIG",
        job="c:3333",
        host=host,
        num_hosts=3,
        rendezvous=(Address(name="c", port=3333),),
    )


@pytest.mark.parametrize(
    ("kind", "index", "process"), [("chief", 0, 0), ("worker", 1, 2), ("ps", 0, 3), ("ps", 1, 4)]
)
def test_tasks_of_tf_config_with_servers_are_processes_of_one_host(
    kind: str, index: int, process: int
) -> None:
    cluster = {"ps": ["a:4", "a:5"], "worker": ["a:2", "a:3"], "chief": ["a:1"]}
    assert place_in(tf_config(cluster, kind, index)) == Place(
        launcher="TF_CONFIG",
        job="a:1",
        host=0,
        num_hosts=1,
        process=process,
        num_processes=5,
        rendezvous=(Address(name="a", port=1),),
        devices=3,
        num_ranks=5,
        num_servers=2,
    )


@pytest.mark.parametrize(
    ("kind", "index", "host", "process", "devices", "servers"),
    [
        ("chief", 0, 0, (0, 2), 2, 0),
        ("worker", 0, 2, (0, 2), 1, 1),
        ("worker", 1, 0, (1, 2), 2, 0),
        ("worker", 2, 1, (0, 1), 1, 0),
        ("ps", 0, 3, (0, 1), 0, 1),
        ("ps", 1, 2, (1, 2), 1, 1),
    ],
)
def test_hosts_of_tf_config_with_servers_are_names_those_of_servers_the_last(
    kind: str, index: int, host: int, process: tuple[int, int], devices: int, servers: int
) -> None:
    cluster = {"ps": ["d:1", "b:2"], "worker": ["b:1", "a:2", "c:1"], "chief": ["a:1"]}
    place = place_in(tf_config(cluster, kind, index))
    assert (place.host, place.num_hosts, place.num_ranks, place.num_servers) == (host, 4, 6, 2)
    assert (place.process, place.num_processes) == process
    assert (place.devices, place.num_servers_here) == (devices, servers)
    assert place.rendezvous == (Address(name="a", port=1),)


def test_devices_of_a_tf_config_host_are_those_that_lockstep_is_told() -> None:
    assert place_in(tf_config(TWO) | {"LOCKSTEP_DEVICES": "2"}).devices == 2


def test_a_torchrun_process_is_one_device() -> None:
    assert place_in(TORCHRUN) == Place(
        launcher="torchrun",
        job="digits:29500",
        host=1,
        num_hosts=2,
        process=1,
        num_processes=4,
        rendezvous=tuple(Address(name="node1", port=port) for port in range(29501, 29509)),
        devices=4,
        num_ranks=8,
    )


def test_ranks_of_srun_are_counted_where_each_task_is_one() -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NODEID": "0"}
    several = SRUN | tasks | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    assert place_in(several).num_ranks == 4
    assert place_in(several | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}).num_ranks is None


def test_torchrun_without_groups_has_equally_many_processes_per_host() -> None:
    place = place_in(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (place.host, place.num_hosts, place.process) == (1, 2, 1)


def test_torchrun_with_different_numbers_of_processes() -> None:
    first = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    last = {"RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
    for changed, place in [(first, (0, 0, 1)), (last, (1, 2, 3))]:
        found = place_in(TORCHRUN | {"WORLD_SIZE": "4"} | changed)
        assert (found.host, found.process, found.num_processes) == place


def test_hosts_that_torchrun_restarts_agree_on_the_job() -> None:
    """Only the host whose process failed counts the restart."""
    jobs = {
        place_in(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": count}).job for count in ("0", "1", "2")
    }
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("port", "candidates"),
    [("65533", [65534, 65535]), ("65535", list(range(65527, 65535))), ("1", list(range(2, 10)))],
)
def test_candidates_of_torchrun_are_ports(port: str, candidates: list[int]) -> None:
    place = place_in(TORCHRUN | {"MASTER_PORT": port})
    assert [address.port for address in place.rendezvous] == candidates


def test_torchrun_on_one_host_has_a_place_for_each_process() -> None:
    single = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "4", "RANK": "1"}
    place = place_in(TORCHRUN | single)
    assert (place.num_hosts, place.process, place.leads) == (1, 1, False)


def test_srun_says_it_all() -> None:
    place = place_in(SRUN)
    assert place.rendezvous[0].name == "node01"
    ports = [address.port for address in place.rendezvous]
    assert ports == list(range(ports[0], ports[0] + NUM_CANDIDATES))
    assert (place.launcher, place.job) == ("srun", "1234.0.0")
    assert (place.host, place.num_hosts, place.process, place.num_processes) == (2, 3, 0, 1)
    assert place.devices is None


def test_srun_processes_are_devices_or_start_one_per_core_they_have() -> None:
    cores = {"SLURM_CPUS_PER_TASK": "6"}
    assert place_in(SRUN | cores).devices == 6
    assert place_in(SRUN | cores | {"LOCKSTEP_DEVICES": "2"}).devices == 2
    assert place_in(SRUN | cores | {"SLURM_NODEID": "1"}).devices == 2


def test_ports_of_srun_stay_apart_and_in_their_range() -> None:
    first = {
        (job, step): place_in(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        .rendezvous[0]
        .port
        for job in [1, 2, 3, 1249, 4294967295]
        for step in range(4)
    }
    assert all(20000 <= port <= 30000 - NUM_CANDIDATES for port in first.values())
    near = sorted(port for (job, _), port in first.items() if job < 4)
    assert min(b - a for a, b in pairwise(near)) >= NUM_CANDIDATES


def test_a_requeued_slurm_job_is_another_start() -> None:
    assert place_in(SRUN | {"SLURM_RESTART_COUNT": "1"}).job != place_in(SRUN).job


@pytest.mark.parametrize("environ", [RUN, tf_config(TWO), TORCHRUN, SRUN])
def test_a_given_rendezvous_wins(environ: dict[str, str]) -> None:
    place = place_in(environ | {"LOCKSTEP_RENDEZVOUS": "[2001:db8::1]:40000"})
    assert place.rendezvous == (Address(name="2001:db8::1", port=40000),)
    assert str(place.rendezvous[0]) == "[2001:db8::1]:40000"


def test_launchers_are_asked_in_order() -> None:
    together = {**RUN, **tf_config(TWO), **TORCHRUN, **SRUN}
    order = []
    for group in (RUN, tf_config(TWO), TORCHRUN, SRUN):
        order.append(place_in(together).launcher)
        together = without(together, *group)
    assert order == ["lockstep run", "TF_CONFIG", "torchrun", "srun"]


def test_devices_are_those_that_the_environment_says() -> None:
    assert find_devices({}) is None
    assert find_devices({"LOCKSTEP_DEVICES": ""}) is None
    assert find_devices({"LOCKSTEP_DEVICES": "3"}) == 3
    with pytest.raises(OptionError, match="LOCKSTEP_DEVICES must be a number of at least 1"):
        find_devices({"LOCKSTEP_DEVICES": "many"})


@pytest.mark.parametrize("environ", [RUN, tf_config(TWO)], ids=["lockstep run", "TF_CONFIG"])
def test_fewer_hosts_may_go_on_where_that_is_said(environ: dict[str, str]) -> None:
    assert place_in(environ).min_hosts is None
    assert place_in(environ | {"LOCKSTEP_MIN_HOSTS": "1"}).min_hosts == 1
    assert find_place({"LOCKSTEP_MIN_HOSTS": "1"}) is None


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[dict[str, str], list[str]]] = {
    "no index, no rendezvous": (
        {"LOCKSTEP_HOSTS": "2"},
        ["LOCKSTEP_HOST_INDEX must be set", "LOCKSTEP_RENDEZVOUS must be set"],
    ),
    "no hosts": ({"LOCKSTEP_HOST_INDEX": "0"}, ["LOCKSTEP_HOSTS must be set"]),
    "an index too large": (
        RUN | {"LOCKSTEP_HOST_INDEX": "2"},
        ["LOCKSTEP_HOST_INDEX must be below LOCKSTEP_HOSTS. Received: 2 of 2 hosts"],
    ),
    "at least no host": (
        RUN | {"LOCKSTEP_MIN_HOSTS": "0"},
        ["LOCKSTEP_MIN_HOSTS must be a number of at least 1. Received: '0'"],
    ),
    "at least more hosts than there are": (
        RUN | {"LOCKSTEP_MIN_HOSTS": "3"},
        ["LOCKSTEP_MIN_HOSTS must be at most the number of hosts", "3 with 2 hosts"],
    ),
    "fewer hosts of several processes": (
        TORCHRUN | {"LOCKSTEP_MIN_HOSTS": "1"},
        ["each of one process. Received: 1 with 2 hosts, 4 processes on this one"],
    ),
    "words for numbers": (
        RUN | {"LOCKSTEP_HOSTS": "two", "LOCKSTEP_DEVICES": "0", "LOCKSTEP_HOST_INDEX": "-1"},
        [
            "LOCKSTEP_HOSTS must be a number of at least 1. Received: 'two'",
            "LOCKSTEP_DEVICES must be a number of at least 1. Received: '0'",
            "LOCKSTEP_HOST_INDEX must be a number of at least 0. Received: '-1'",
        ],
    ),
    "no port": (
        RUN | {"LOCKSTEP_RENDEZVOUS": "10.0.0.1"},
        ["LOCKSTEP_RENDEZVOUS must be host:port"],
    ),
    "no JSON": ({"TF_CONFIG": "{"}, ["TF_CONFIG must be a JSON object. Received: '{'"]),
    "no object": ({"TF_CONFIG": "[" * 100_000}, ["TF_CONFIG must be a JSON object"]),
    "no lists": (tf_config({"worker": "a:1"}), ["TF_CONFIG must be {"]),
    "an evaluator": (
        tf_config(TWO, "evaluator"),
        ['must have the type "chief", "worker" or "ps". Received: type \'evaluator\''],
    ),
    "an evaluator in the cluster": (
        tf_config(TWO | {"evaluator": ["e:1"]}),
        ["rank 0 evaluates. Received: 'evaluator'"],
    ),
    "servers beside workers of two hosts": (
        tf_config({"chief": ["c:1"]} | TWO | {"ps": ["a:1", "b:1", "d:1"]}, "ps"),
        ["may have another task. Received: a, b"],
    ),
    "a server on the first task's host": (
        tf_config(TWO | {"ps": ["a:1"]}, "ps"),
        ['must not be on the host of a "ps" if another host has no "ps". Received: a'],
    ),
    "more devices than tasks": (
        tf_config(TWO | {"ps": ["c:1"]}) | {"LOCKSTEP_DEVICES": "2"},
        ["LOCKSTEP_DEVICES=2 with 1 processes"],
    ),
    "servers without workers": (
        tf_config({"ps": ["a:1", "a:2"]}, "ps"),
        ['must have a "chief" or a "worker".', "0 of 'worker', 2 of 'ps'"],
    ),
    "workers without servers": (
        tf_config({"worker": ["a:1"], "ps": []}),
        ['"ps" must list a parameter server. Received: an empty list'],
    ),
    "a server that is not there": (
        tf_config({"worker": ["a:1"], "ps": ["a:2"]}, "ps", 1),
        ["an index below 1, the number of 'ps' tasks in the cluster"],
    ),
    "two chiefs": (tf_config({"chief": ["a:1", "b:1"]}, "chief"), ['may have only one "chief"']),
    "a task that is not there": (
        tf_config(TWO, index=2),
        ["an index below 2, the number of 'worker' tasks in the cluster. Received: index 2"],
    ),
    "no index": (tf_config(TWO, index=None), ["Received: index None"]),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": TWO})}, ["type None"]),
    "one address twice": (
        tf_config({"worker": ["a:1", "a:1"]}),
        ["must differ. Received: a:1, a:1"],
    ),
    "no address": (
        tf_config({"worker": ["a:1", "fe80::1:2222", "b:70000", 3]}),
        ["Received: 'fe80::1:2222'", "Received: 'b:70000'", "Received: '3'"],
    ),
    "only the number of torchrun's processes": ({"WORLD_SIZE": "2"}, ["RANK must be set"]),
    "some of torchrun's": (
        {"RANK": "0", "LOCAL_RANK": "0"},
        [f"{name} must be set" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")],
    ),
    "more ranks than there are": (TORCHRUN | {"RANK": "8"}, ["rank 8 of 8"]),
    "more processes than there are": (TORCHRUN | {"LOCAL_RANK": "4"}, ["process 4 of 4"]),
    "more hosts than there are": (TORCHRUN | {"GROUP_RANK": "2"}, ["host 2 of 2"]),
    "ranks of no host": (
        TORCHRUN | {"WORLD_SIZE": "9", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        ["host 0 of 1"],
    ),
    "another number of devices": (
        TORCHRUN | {"LOCKSTEP_DEVICES": "2"},
        ["Received: LOCKSTEP_DEVICES=2 with 4 processes"],
    ),
    "no such port": (TORCHRUN | {"MASTER_PORT": "65536"}, ["MASTER_PORT must be at most 65535"]),
    "some of srun's": (
        {"SLURM_STEP_ID": "0"},
        [
            f"{name} must be set"
            for name in (
                "SLURM_JOB_ID",
                "SLURM_PROCID",
                "SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
                "SLURM_NODEID",
                "SLURM_LOCALID",
                "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE",
                "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST",
            )
        ],
    ),
    "another number of tasks": (
        SRUN | {"SLURM_NTASKS": "6"},
        ["3 nodes, 2, 2, 1 tasks on them, 6 in all"],
    ),
    "another number of nodes": (
        SRUN | {"SLURM_STEP_NODELIST": "node[01-02]"},
        ["2 nodes, 2, 2, 1 tasks on them"],
    ),
    "no such node": (SRUN | {"SLURM_NODEID": "3"}, ["node 3, task 0 on it"]),
    "no such task": (SRUN | {"SLURM_LOCALID": "1"}, ["node 2, task 1 on it"]),
    "no lists of Slurm's": (
        SRUN | {"SLURM_STEP_NODELIST": "node[3-1]", "SLURM_STEP_TASKS_PER_NODE": "2x3"},
        ["A list of nodes must be written like", "Tasks per node must be written like"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_listed(name: str) -> None:
    environ, messages = MISTAKES[name]
    with pytest.raises(OptionError) as raised:
        find_place(environ)
    told = str(raised.value)
    assert [message for message in messages if message not in told] == [], told
    listed = [line for line in told.splitlines() if line.lstrip()[:1].isdigit() and ". " in line]
    assert len(listed) == (len(told.splitlines()) - 1 if len(told.splitlines()) > 1 else 0)


def test_no_follow_up_problems_are_told() -> None:
    with pytest.raises(OptionError) as raised:
        find_place(SRUN | {"SLURM_STEP_NODELIST": "node["})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:1 ", "[a]:1", "[::1]", "::1:80", "a b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["a:1", "10.0.0.1:65535", "[::1]:80", "my-host.example:29400"])
def test_addresses_are_written_as_they_are_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("workers", "more", "expected"),
    [
        (["127.0.0.1:1111", "127.0.0.1:2222"], {}, True),
        (["localhost:1111", "[::1]:2222"], {}, True),
        (["localhost:1111", "10.0.0.1:2222"], {}, False),
        (["node:1111", "localhost:2222"], {}, False),
        (["localhost:1", "localhost:2"], {"LOCKSTEP_RENDEZVOUS": "10.0.0.1:3"}, False),
    ],
)
def test_tf_config_of_the_tutorials_is_one_machine(
    workers: list[str], more: dict[str, str], expected: bool
) -> None:
    place = place_in({**tf_config({"worker": workers}), **more})
    assert place.is_one_machine is expected


@pytest.mark.parametrize(("where", "expected"), [("127.0.0.1:1", True), ("10.0.0.1:1", False)])
def test_hosts_that_meet_where_nobody_else_can_come_are_one_machine(
    where: str, expected: bool
) -> None:
    assert place_in(RUN | {"LOCKSTEP_RENDEZVOUS": where}).is_one_machine is expected
