"""This process's Place, read from the variables that launchers set.

Every launcher has its own: ``lockstep run``, ``TF_CONFIG``, torchrun and srun are looked for in
this order, and the first that has set any of its variables decides. Incomplete or contradictory
variables raise one error that lists all problems. Otherwise a host could believe that it is alone,
and train something else without an error.

Under every launcher ``LOCKSTEP_RENDEZVOUS`` says where host 0 listens, and ``LOCKSTEP_MIN_HOSTS``
how many hosts may start without the others. Variables of mpirun are not read.
"""

from collections.abc import Callable, Mapping

from msgspec import structs

from lockstep.cluster.launcher_variables import Variables
from lockstep.cluster.place import MAX_PORT, Address, Place
from lockstep.cluster.slurm_lists import expand_counts, expand_nodes
from lockstep.cluster.tf_config import place_from_tf_config

# Ports that host 0 tries if the launcher names none: other processes may have taken some.
NUM_CANDIDATES = 8

# The ports for srun's jobs lie below those that Linux gives to outgoing connections.
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20000, 10000
# From this number on, a step was not started by srun: the batch script and the like (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def find_place(environ: Mapping[str, str]) -> Place | None:
    """This process's place in a job, as its launcher says; None if it is the only process.

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
    """The Place with the number of LOCKSTEP_MIN_HOSTS, if that is set."""
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
    """Devices that this host uses, if LOCKSTEP_DEVICES says so.

    Raises:
        OptionError: it is not a number of devices.
    """
    return _number_in(environ, "LOCKSTEP_DEVICES")


def find_servers(environ: Mapping[str, str]) -> int | None:
    """Parameter servers of this host, beside its devices, if LOCKSTEP_SERVERS says so.

    Raises:
        OptionError: it is not a number of servers.
    """
    return _number_in(environ, "LOCKSTEP_SERVERS")


def _number_in(environ: Mapping[str, str], name: str) -> int | None:
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
    ranks_before = rank - process  # of the hosts before this one
    ranks_after = num_ranks - num_processes - ranks_before
    variables.check_agreement(
        process < num_processes
        and _can_have(host, ranks_before)
        and _can_have(num_hosts - 1 - host, ranks_after),
        "RANK, LOCAL_RANK and GROUP_RANK must be consistent with WORLD_SIZE, LOCAL_WORLD_SIZE and "
        "GROUP_WORLD_SIZE.",
        f"rank {rank} of {num_ranks}, process {process} of {num_processes}, "
        f"host {host} of {num_hosts}",
    )
    return Place(
        launcher=variables.launcher,
        # Without TORCHELASTIC_RESTART_COUNT: a host that restarts because another one failed does
        # not count that restart, so hosts of one start may have different counts.
        job=f"{variables.get('TORCHELASTIC_RUN_ID') or 'none'}:{variables.get('MASTER_PORT')}",
        host=host,
        num_hosts=num_hosts,
        process=process,
        num_processes=num_processes,
        rendezvous=variables.rendezvous(lambda: _near_master_port(variables)),
        devices=variables.devices(num_processes) or num_processes,
        num_ranks=num_ranks,
    )


def _can_have(num_hosts: int, num_ranks: int) -> bool:
    """True if so many hosts, each with at least one rank, can have so many ranks."""
    return num_ranks >= num_hosts if num_hosts > 0 else num_ranks == num_hosts == 0


def _near_master_port(variables: Variables) -> list[Address]:
    """Ports near MASTER_PORT, which torchrun's own store takes."""
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
        "Slurm's list of nodes, tasks per node and number of tasks must agree.",
        f"{len(nodes)} nodes, {', '.join(map(str, tasks))} tasks on them, {num_tasks} in all",
    )
    variables.check_agreement(
        process < sum(tasks[host : host + 1]),
        "SLURM_NODEID and SLURM_LOCALID must name one of the job step's tasks.",
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
        # A task that is alone on its node uses all devices there.
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
        variables.reject("A list of nodes must be written like node[01-03,7],other.", error)
        return ()


def _ports_of_step(node: str, job: int, step: int) -> list[Address]:
    """Ports that no job or step of a near number uses: two of them may share the node."""
    num_slots = _NUM_SLURM_PORTS // NUM_CANDIDATES
    # Jobs have consecutive numbers, and so have steps: a stride gives them different slots.
    slot = (job + step * (num_slots // 2 - 6)) % num_slots
    first = _FIRST_SLURM_PORT + slot * NUM_CANDIDATES
    return [Address(name=node, port=first + index) for index in range(NUM_CANDIDATES)]


# A launcher's name, the function that reads its variables, and the variables that only it sets.
# LOCKSTEP_DEVICES, MASTER_ADDR and those of Slurm's batch scripts are set without it as well.
_LAUNCHERS: tuple[tuple[str, Callable[[Variables], Place | None], tuple[str, ...]], ...] = (
    ("lockstep run", _from_lockstep_run, ("LOCKSTEP_HOSTS", "LOCKSTEP_HOST_INDEX", "LOCKSTEP_JOB")),
    ("TF_CONFIG", place_from_tf_config, ("TF_CONFIG",)),
    ("torchrun", _from_torchrun, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")),
    ("srun", _from_srun, ("SLURM_STEP_ID",)),
)
