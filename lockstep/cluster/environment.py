"""This process's Place, read from the variables that launchers set.

Every launcher has its own: ``lockstep run``, ``TF_CONFIG``, torchrun and srun are asked in this
order, and the first that has set any of its variables decides. What is incomplete or contradicts
itself is an error that lists all problems: a job of which one host thinks that it is alone would
train something else than was asked for, and say nothing.

``LOCKSTEP_RENDEZVOUS`` says where host 0 listens, and ``LOCKSTEP_MIN_HOSTS`` how many hosts go on
without the others, under every launcher. mpirun is not read.

``Variables`` reads them so that all that is wrong with them is told at once.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import structs

from lockstep.cluster.place import MAX_PORT, Address, Place
from lockstep.cluster.slurm_lists import expand_counts, expand_nodes
from lockstep.errors import OptionError, Problems


class Variables:
    """A launcher's variables; what is wrong with them is noted, and raised at once.

    Args:
        launcher: its name.
        environ: all variables.
    """

    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self._environ = environ
        self._problems = Problems()
        self.are_sound = True  # until something is noted

    def get(self, *names: str) -> str:
        """The first of these that is set; "" where none is."""
        return next((self._environ[name] for name in names if self._environ.get(name)), "")

    def text(self, *names: str) -> str:
        """The first of these that is set, which one must be."""
        found = self.get(*names)
        if not found:
            self.reject(f"{' or '.join(names)} must be set.", "nothing")
        return found

    def number(self, *names: str, least: int = 0) -> int:
        """A number that must be set; ``least`` where it is not, or is none."""
        text = self.text(*names)
        if text:
            return self._parse_number(text, names, least)
        return least

    def number_or_none(self, *names: str, least: int = 0) -> int | None:
        """A number that need not be set."""
        text = self.get(*names)
        return self._parse_number(text, names, least) if text else None

    def rendezvous(self, candidates: Callable[[], list[Address]]) -> tuple[Address, ...]:
        """LOCKSTEP_RENDEZVOUS, or what the launcher says."""
        text = self.get("LOCKSTEP_RENDEZVOUS")
        return self.addresses("LOCKSTEP_RENDEZVOUS", [text]) if text else tuple(candidates())

    def addresses(self, what: str, texts: list[Any]) -> tuple[Address, ...]:
        """Those that are written as addresses are."""
        found = []
        for text in texts:
            try:
                found.append(Address.parse(str(text)))
            except ValueError as error:
                self.reject(f"{what} must be host:port, with an IPv6 address in brackets.", error)
        return tuple(found)

    def devices(self, num_processes: int, *, is_one_each: bool = False) -> int | None:
        """LOCKSTEP_DEVICES, or the number of processes where each is one device."""
        devices = self.number_or_none("LOCKSTEP_DEVICES", least=1)
        if num_processes == 1 and not is_one_each:
            return devices
        self.check_agreement(
            devices in (None, num_processes),
            "Each process is one device where a host has several, or some are parameter servers.",
            f"LOCKSTEP_DEVICES={devices} with {num_processes} processes",
        )
        return num_processes

    def check(self, is_right: bool, what: str, received: object) -> None:
        """Note a problem, unless it is none."""
        if not is_right:
            self.reject(what, received)

    def check_agreement(self, is_right: bool, what: str, received: object) -> None:
        """Note a contradiction, unless it may come from what was noted before."""
        self.check(is_right or not self.are_sound, what, received)

    def reject(self, what: str, received: object) -> None:
        """Note a problem."""
        self.are_sound = False
        fix = f"{self.launcher} says where this process runs: correct it, or unset its variables."
        self._problems.add(what, received=received, fix=fix)

    def raise_if_any(self) -> None:
        """Raise what was noted."""
        self._problems.raise_if_any(OptionError)

    def _parse_number(self, text: str, names: tuple[str, ...], least: int) -> int:
        if is_number(text) and int(text) >= least:
            return int(text)
        name = next(name for name in names if self._environ.get(name))
        self.reject(f"{name} must be a number of at least {least}.", repr(text))
        return least


def is_number(text: str) -> bool:
    """Whether it is written as launchers write counts."""
    # At most 10 digits: nothing that launchers count has more, and int() refuses thousands.
    return text.isascii() and text.isdigit() and len(text) <= 10


# Ports that host 0 tries, where the launcher names none: others may have taken one.
NUM_CANDIDATES = 8

# Of the ports that srun's jobs use: below those that Linux gives to outgoing connections.
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20000, 10000
# Steps from here on are no srun's, but the batch script itself and the like (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def find_place(environ: Mapping[str, str]) -> Place | None:
    """What the launcher says of this process; None where nobody launched it as one of many.

    Args:
        environ: the environment's variables. Empty ones count as unset.

    Raises:
        OptionError: a launcher's variables are incomplete or contradict each other.
    """
    for launcher, find, names in _LAUNCHERS:
        if any(environ.get(name) for name in names):
            variables = Variables(launcher, environ)
            place = _with_min_hosts(variables, find(variables))
            variables.raise_if_any()
            is_alone = place is None or place.num_hosts == place.num_processes == 1
            return None if is_alone else place
    return None


def _with_min_hosts(variables: Variables, place: Place | None) -> Place | None:
    """A Place of which LOCKSTEP_MIN_HOSTS says how many hosts go on without the others."""
    min_hosts = variables.number_or_none("LOCKSTEP_MIN_HOSTS", least=1)
    if place is None or min_hosts is None:
        return place
    variables.check_agreement(
        min_hosts <= place.num_hosts and place.num_processes == 1,
        "LOCKSTEP_MIN_HOSTS must be at most the number of hosts, each of one process.",
        f"{min_hosts} with {place.num_hosts} hosts, {place.num_processes} processes on this one",
    )
    return structs.replace(place, min_hosts=min_hosts)


def find_devices(environ: Mapping[str, str]) -> int | None:
    """Devices that this host is to use, where LOCKSTEP_DEVICES says so.

    Raises:
        OptionError: it is no number of devices.
    """
    return _number_of_run(environ, "LOCKSTEP_DEVICES")


def find_servers(environ: Mapping[str, str]) -> int | None:
    """Parameter servers that this host is to have beside them, where LOCKSTEP_SERVERS says so.

    Raises:
        OptionError: it is no number of servers.
    """
    return _number_of_run(environ, "LOCKSTEP_SERVERS")


def _number_of_run(environ: Mapping[str, str], name: str) -> int | None:
    variables = Variables("lockstep run", environ)
    number = variables.number_or_none(name, least=1)
    variables.raise_if_any()
    return number


# --- lockstep run ---------------------------------------------------------------------------------


def _from_lockstep_run(variables: Variables) -> Place | None:
    num_hosts = variables.number("LOCKSTEP_HOSTS", least=1)
    num_processes = variables.number_or_none("LOCKSTEP_PROCESSES", least=1) or 1
    process = 0 if num_processes == 1 else variables.number("LOCKSTEP_PROCESS")
    devices = variables.devices(num_processes)
    if num_hosts == 1:
        host = variables.number_or_none("LOCKSTEP_HOST_INDEX") or 0
    else:
        host = variables.number("LOCKSTEP_HOST_INDEX")
        variables.text("LOCKSTEP_RENDEZVOUS")
    rendezvous = variables.rendezvous(list)
    variables.check_agreement(
        host < num_hosts,
        "LOCKSTEP_HOST_INDEX must be below LOCKSTEP_HOSTS.",
        f"{host} of {num_hosts} hosts",
    )
    variables.check_agreement(
        process < num_processes,
        "LOCKSTEP_PROCESS must be below LOCKSTEP_PROCESSES.",
        f"{process} of {num_processes} processes",
    )
    return Place(
        launcher=variables.launcher,
        job=variables.get("LOCKSTEP_JOB") or "+".join(map(str, rendezvous)),
        host=host,
        num_hosts=num_hosts,
        process=process,
        num_processes=num_processes,
        rendezvous=rendezvous,
        devices=devices,
        num_ranks=num_hosts * num_processes if num_processes > 1 else None,
        is_one_machine=all(address.is_loopback for address in rendezvous),
    )


# --- TF_CONFIG ------------------------------------------------------------------------------------


def _from_tf_config(variables: Variables) -> Place | None:
    """Hosts are the chief, then the workers; each listens where the cluster says.

    With parameter servers the tasks that are under one name are the processes of one host.
    """
    config = _json_object(variables)
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not cluster:
        return None
    if not _are_tasks(cluster) or not isinstance(task, dict):
        variables.reject(
            'TF_CONFIG must be {"cluster": {"worker": ["host:port", ...]}, '
            '"task": {"type": "worker", "index": 0}}.',
            repr(variables.get("TF_CONFIG")),
        )
        return None
    roles = {role: cluster.get(role, []) for role in ("chief", "worker", "ps")}
    _check_roles(variables, cluster, roles)
    number = _number_of_task(variables, task, roles)
    addresses = variables.addresses("An address in TF_CONFIG", [*chain(*roles.values())])
    variables.check(
        len(set(addresses)) == len(addresses),
        "Every host in TF_CONFIG must have an address of its own.",
        ", ".join(map(str, addresses)),
    )
    rendezvous = variables.rendezvous(lambda: [*addresses[:1]])
    if not variables.are_sound:
        return None
    num_servers = len(roles["ps"])
    place = Place(
        launcher=variables.launcher,
        job=str(addresses[0]),
        host=number,
        num_hosts=len(addresses),
        rendezvous=rendezvous,
        devices=None if num_servers else variables.devices(1),
        is_one_machine=all(address.is_loopback for address in (*addresses, *rendezvous)),
    )
    return _with_servers(variables, place, addresses, num_servers) if num_servers else place


def _with_servers(
    variables: Variables, place: Place, addresses: Sequence[Address], num_servers: int
) -> Place:
    """Of the place of one process among as many hosts: which of its host's it is.

    Servers have the last ranks, so their hosts are the last.
    """
    names = [address.name for address in addresses]
    num_workers = len(names) - num_servers
    workers, servers = (dict.fromkeys(each) for each in (names[:num_workers], names[num_workers:]))
    shared = [name for name in servers if name in workers]
    apart = [name for name in servers if name not in workers]
    hosts = [*(name for name in workers if name not in servers), *shared, *apart]
    variables.check(
        len(shared) <= 1,
        'Of several hosts with a "ps" in TF_CONFIG one at most may have another task.',
        ", ".join(shared),
    )
    variables.check(
        hosts[0] == names[0],
        'The first task in TF_CONFIG, which leads, must not be on the host of a "ps" where '
        "another host has none.",
        names[0],
    )
    here = [number for number, name in enumerate(names) if name == names[place.host]]
    variables.devices(len(here), is_one_each=True)
    return structs.replace(
        place,
        host=hosts.index(names[place.host]),
        num_hosts=len(hosts),
        process=here.index(place.host),
        num_processes=len(here),
        num_ranks=len(names),
        num_servers=num_servers,
        devices=sum(number < num_workers for number in here),
    )


def _check_roles(
    variables: Variables, cluster: Mapping[str, Any], roles: Mapping[str, Sequence[Any]]
) -> None:
    chiefs, workers, servers = roles.values()
    others = sorted(cluster.keys() - roles.keys())
    variables.check(
        not others,
        'TF_CONFIG\'s cluster may have "chief", "worker" and "ps": rank 0 evaluates.',
        ", ".join(map(repr, others)),
    )
    variables.check(
        bool(servers) or "ps" not in cluster,
        'TF_CONFIG\'s cluster must have a parameter server where it has "ps".',
        "none",
    )
    variables.check(
        bool(chiefs or workers),
        'TF_CONFIG\'s cluster must have a "chief" or a "worker", which computes.',
        ", ".join(f"{len(tasks)} of {role!r}" for role, tasks in roles.items()),
    )
    variables.check(
        len(chiefs) <= 1, 'TF_CONFIG\'s cluster may have one "chief".', f"{len(chiefs)} of them"
    )


def _json_object(variables: Variables) -> dict[str, Any]:
    text = variables.get("TF_CONFIG")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if isinstance(config, dict):
        return config
    variables.reject("TF_CONFIG must be a JSON object.", repr(text))
    return {}


def _are_tasks(cluster: object) -> bool:
    return isinstance(cluster, dict) and all(isinstance(each, list) for each in cluster.values())


def _number_of_task(variables: Variables, task: dict[str, Any], roles: dict[str, list[Any]]) -> int:
    """This one's among all tasks, which are in the order of their roles."""
    kind, index = task.get("type"), str(task.get("index"))
    if kind not in roles:
        variables.reject(
            'TF_CONFIG\'s task must have the type "chief", "worker" or "ps".', f"type {kind!r}"
        )
        return 0
    # Some write the index as a string, as TensorFlow allows.
    if not (is_number(index) and int(index) < len(roles[kind])):
        variables.reject(
            f"TF_CONFIG's task must have an index below {len(roles[kind])}, "
            f"the number of the cluster's {kind!r}.",
            f"index {task.get('index')!r}",
        )
        return 0
    before = list(roles)[: list(roles).index(kind)]
    return int(index) + sum(len(roles[role]) for role in before)


# --- torchrun -------------------------------------------------------------------------------------


def _from_torchrun(variables: Variables) -> Place:
    rank, num_ranks = variables.number("RANK"), variables.number("WORLD_SIZE", least=1)
    process = variables.number("LOCAL_RANK")
    num_processes = variables.number("LOCAL_WORLD_SIZE", least=1)
    host = variables.number_or_none("GROUP_RANK")
    num_hosts = variables.number_or_none("GROUP_WORLD_SIZE", least=1)
    if host is None:
        host = rank // num_processes
    if num_hosts is None:
        num_hosts = num_ranks // num_processes
    before = rank - process  # ranks of the hosts before this one
    after = num_ranks - num_processes - before
    variables.check_agreement(
        process < num_processes
        and _can_have(before, host)
        and _can_have(after, num_hosts - 1 - host),
        "RANK, LOCAL_RANK and GROUP_RANK must be one process of those that WORLD_SIZE, "
        "LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE count.",
        f"rank {rank} of {num_ranks}, process {process} of {num_processes}, "
        f"host {host} of {num_hosts}",
    )
    return Place(
        launcher=variables.launcher,
        # Without TORCHELASTIC_RESTART_COUNT: a host that restarts because another one failed
        # does not count it, so hosts of one start may differ there.
        job=f"{variables.get('TORCHELASTIC_RUN_ID') or 'none'}:{variables.get('MASTER_PORT')}",
        host=host,
        num_hosts=num_hosts,
        process=process,
        num_processes=num_processes,
        rendezvous=variables.rendezvous(lambda: _beside_master(variables)),
        devices=variables.devices(num_processes) or num_processes,
        num_ranks=num_ranks,
    )


def _can_have(ranks: int, hosts: int) -> bool:
    """Whether so many ranks can be those of so many hosts, which need not have equally many."""
    return ranks >= hosts if hosts > 0 else ranks == hosts == 0


def _beside_master(variables: Variables) -> list[Address]:
    """Ports near MASTER_PORT, which is taken by torchrun's own store."""
    name, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT", least=1)
    if port > MAX_PORT:
        variables.reject(f"MASTER_PORT must be at most {MAX_PORT}.", port)
        return []
    above = range(port + 1, min(port + NUM_CANDIDATES, MAX_PORT) + 1)
    ports = above or range(port - NUM_CANDIDATES, port)
    return [Address(name=name, port=candidate) for candidate in ports]


# --- srun -----------------------------------------------------------------------------------------


def _from_srun(variables: Variables) -> Place | None:
    step = variables.number("SLURM_STEP_ID")
    if step >= _FIRST_RESERVED_STEP:
        return None
    job = variables.number("SLURM_JOB_ID", least=1)
    variables.number("SLURM_PROCID")
    num_tasks = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    host, process = variables.number("SLURM_NODEID"), variables.number("SLURM_LOCALID")
    tasks = _tasks_per_node(variables)
    nodes = _node_list(variables)
    variables.check_agreement(
        len(nodes) == len(tasks) and sum(tasks) == num_tasks,
        "Slurm's node list, tasks per node and number of tasks must agree.",
        f"{len(nodes)} nodes, {', '.join(map(str, tasks))} tasks on them, {num_tasks} in all",
    )
    variables.check_agreement(
        process < sum(tasks[host : host + 1]),
        "SLURM_NODEID and SLURM_LOCALID must be one of the tasks.",
        f"node {host}, task {process} on it",
    )
    if not variables.are_sound:
        return None
    cores = variables.number_or_none("SLURM_CPUS_PER_TASK", least=1)
    restarts = variables.number_or_none("SLURM_RESTART_COUNT") or 0
    return Place(
        launcher=variables.launcher,
        job=f"{job}.{step}.{restarts}",
        host=host,
        num_hosts=len(tasks),
        process=process,
        num_processes=tasks[host],
        rendezvous=variables.rendezvous(lambda: _ports_of_step(nodes[0], job, step)),
        devices=variables.devices(tasks[host]) or cores,
        # A task that is alone on its node has all devices there.
        num_ranks=num_tasks if min(tasks) > 1 else None,
    )


def _tasks_per_node(variables: Variables) -> tuple[int, ...]:
    text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    try:
        return expand_counts(text) if text else ()
    except ValueError as error:
        variables.reject("Tasks per node must be written like 2(x3),1.", error)
        return ()


def _node_list(variables: Variables) -> tuple[str, ...]:
    text = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    try:
        return expand_nodes(text) if text else ()
    except ValueError as error:
        variables.reject("A node list must be written like node[01-03,7],other.", error)
        return ()


def _ports_of_step(node: str, job: int, step: int) -> list[Address]:
    """Of no other job or step that is near: two of them may share the node."""
    num_slots = _NUM_SLURM_PORTS // NUM_CANDIDATES
    # Jobs are numbered one after the other, and so are steps: a stride keeps them apart.
    slot = (job + step * (num_slots // 2 - 6)) % num_slots
    first = _FIRST_SLURM_PORT + slot * NUM_CANDIDATES
    return [Address(name=node, port=first + index) for index in range(NUM_CANDIDATES)]


# A launcher's name, how its variables are read, and any of which shows that it was there. What
# others set as well (LOCKSTEP_DEVICES, MASTER_ADDR, Slurm's of a batch script) shows nothing.
_LAUNCHERS: tuple[tuple[str, Callable[[Variables], Place | None], tuple[str, ...]], ...] = (
    ("lockstep run", _from_lockstep_run, ("LOCKSTEP_HOSTS", "LOCKSTEP_HOST_INDEX", "LOCKSTEP_JOB")),
    ("TF_CONFIG", _from_tf_config, ("TF_CONFIG",)),
    ("torchrun", _from_torchrun, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")),
    ("srun", _from_srun, ("SLURM_STEP_ID",)),
)
