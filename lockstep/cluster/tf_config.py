"""This process's Place, read from TensorFlow's TF_CONFIG."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import structs

from lockstep.cluster.launcher_variables import Variables, is_number
from lockstep.cluster.place import Address, Place


def place_from_tf_config(variables: Variables) -> Place | None:
    """The place of TF_CONFIG's task: host 0 is the chief, then come the workers.

    Host 0 listens at its address in the cluster. With parameter servers, the tasks with one host
    name are the processes of one host.
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
        "The addresses in TF_CONFIG must differ.",
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
    """The place with tasks of one host name as the processes of one host.

    Args:
        variables: note what is wrong.
        place: as if each task were a host.
        addresses: of the tasks. Servers have the last ranks, so their hosts come last.
        num_servers: the last tasks, which are parameter servers.
    """
    names = [address.name for address in addresses]
    num_workers = len(names) - num_servers
    workers, servers = (dict.fromkeys(each) for each in (names[:num_workers], names[num_workers:]))
    shared = [name for name in servers if name in workers]
    only_servers = [name for name in servers if name not in workers]
    hosts = [*(name for name in workers if name not in servers), *shared, *only_servers]
    variables.check(
        len(shared) <= 1,
        'At most one of the hosts with a "ps" in TF_CONFIG may have another task.',
        ", ".join(shared),
    )
    variables.check(
        hosts[0] == names[0],
        'The first task in TF_CONFIG must not be on the host of a "ps" if another host has no '
        '"ps".',
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
        'TF_CONFIG\'s cluster may only have "chief", "worker" and "ps": rank 0 evaluates.',
        ", ".join(map(repr, others)),
    )
    variables.check(
        bool(servers) or "ps" not in cluster,
        'TF_CONFIG\'s "ps" must list a parameter server.',
        "an empty list",
    )
    variables.check(
        bool(chiefs or workers),
        'TF_CONFIG\'s cluster must have a "chief" or a "worker".',
        ", ".join(f"{len(tasks)} of {role!r}" for role, tasks in roles.items()),
    )
    variables.check(
        len(chiefs) <= 1, 'TF_CONFIG\'s cluster may have only one "chief".', len(chiefs)
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
    """This task's number among all tasks, in the order of the roles."""
    kind, index = task.get("type"), str(task.get("index"))
    if kind not in roles:
        variables.reject(
            'TF_CONFIG\'s task must have the type "chief", "worker" or "ps".', f"type {kind!r}"
        )
        return 0
    # TensorFlow allows the index to be a string.
    if not (is_number(index) and int(index) < len(roles[kind])):
        variables.reject(
            f"TF_CONFIG's task must have an index below {len(roles[kind])}, "
            f"the number of {kind!r} tasks in the cluster.",
            f"index {task.get('index')!r}",
        )
        return 0
    before = list(roles)[: list(roles).index(kind)]
    return int(index) + sum(len(roles[role]) for role in before)
