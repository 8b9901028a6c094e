"""A Kubernetes manifest for a job on several hosts: an indexed Job, and a Service for its names.

No operator is needed. A Job in the mode "Indexed" gives each pod a number, which becomes its host's
index, and a host name; the headless Service publishes that name, so that the others find host 0.
The secret is in a Secret of the cluster, which the manifest only names.
"""

import json
import re
from pathlib import PurePath
from typing import Any

import msgspec

from lockstep.errors import Problems
from lockstep.launch.script import Script

# A Service's name (RFC 1035), short enough for a pod's: name, index, and six characters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*([KMGTPE]i?|[kmun])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@+-]*")
_SECRET_KEY = "secret"
_LABEL = "app.kubernetes.io/name"

_HEADER = """\
# Once, make the secret with which the hosts prove to each other that they belong together:
#
#   python -c 'import secrets; print(secrets.token_hex(32), end="")' |
#       kubectl create secret generic {secret} --from-file={key}=/dev/stdin{namespace}
#
# Then start the job, see what host 0 says, and remove it:
#
#   kubectl apply -f FILE
#   kubectl logs -f -l batch.kubernetes.io/job-completion-index=0,app.kubernetes.io/name={name}
#   kubectl delete -f FILE
"""


class ClusterJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job for Kubernetes.

    Attributes:
        script: the script, with paths inside the image.
        hosts: number of pods.
        devices: cores of each pod.
        name: of the Job and the Service.
        image: an image with Python, Lockstep and the script; required.
        python: the interpreter in the image.
        directory: the script's working directory; None is the image's.
        namespace: None is kubectl's.
        memory: of a pod.
        shared_memory: the part of it for /dev/shm, where DataLoaders' workers put batches.
        secret: name of the Secret, whose key is "secret".
        port: where host 0 listens.
        restarts: how often all hosts may be restarted.
    """

    script: Script
    hosts: int
    devices: int
    name: str
    image: str = ""
    python: str = "python"
    directory: str | None = None
    namespace: str | None = None
    memory: str = "4Gi"
    shared_memory: str = "1Gi"
    secret: str = "lockstep"
    port: int = 29400
    restarts: int = 0

    def check(self, problems: Problems) -> None:
        """Note options that Kubernetes would refuse."""
        name = "at most 52 lower-case letters, digits and dashes, and begin with a letter"
        for option, value, pattern, rule in (
            ("--name", self.name, _NAME, name),
            ("--namespace", self.namespace, _NAME, name),
            ("--secret-name", self.secret, _SUBDOMAIN, "lower-case letters, digits, dots, dashes"),
            ("--image", self.image, _IMAGE, "an image's name"),
            ("--memory", self.memory, _QUANTITY, "a quantity such as 16Gi"),
            ("--shared-memory", self.shared_memory, _QUANTITY, "a quantity such as 2Gi"),
        ):
            if value is not None and pattern.fullmatch(value) is None:
                problems.add(
                    f"{option} must be {rule}.",
                    received=repr(value),
                    fix="Kubernetes would refuse the manifest.",
                )


def default_name(script: Script) -> str:
    """A name for the job, after its script."""
    stem = script.target if script.is_module else PurePath(script.target).stem
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return words[:52].rstrip("-") if words[:1].isalpha() else f"job-{words}"[:52].rstrip("-")


def write_manifest(job: ClusterJob) -> str:
    """The manifest's text: YAML, with the commands to type as a comment."""
    namespace = "" if job.namespace is None else f" --namespace={job.namespace}"
    header = _HEADER.format(secret=job.secret, key=_SECRET_KEY, namespace=namespace, name=job.name)
    return f"{header}---\n{as_yaml(_service(job))}\n---\n{as_yaml(_job(job))}\n"


def as_yaml(document: object) -> str:
    """JSON, which is also YAML if characters that YAML forbids are escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _metadata(job: ClusterJob) -> dict[str, Any]:
    namespace = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": job.name, **namespace, "labels": {_LABEL: job.name}}


def _service(job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "selector": {_LABEL: job.name},
            # Hosts look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
        },
    }


def _job(job: ClusterJob) -> dict[str, Any]:
    resources = {"cpu": str(job.devices), "memory": job.memory}
    secret = {"secretKeyRef": {"name": job.secret, "key": _SECRET_KEY}}
    container = {
        "name": "lockstep",
        "image": job.image,
        "command": _command(job),
        **({} if job.directory is None else {"workingDir": job.directory}),
        "env": [{"name": "LOCKSTEP_SECRET", "valueFrom": secret}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    memory = {"medium": "Memory", "sizeLimit": job.shared_memory}
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": memory}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.hosts,
            "parallelism": job.hosts,
            # If one host fails all do, and Kubernetes counts each.
            "backoffLimit": job.restarts * job.hosts,
            "template": {"metadata": {"labels": {_LABEL: job.name}}, "spec": pod},
        },
    }


def _command(job: ClusterJob) -> list[str]:
    """The container's command. Kubernetes inserts the pod's number, and reads ``$$`` as ``$``."""
    script = job.script
    arguments = ["--", *script.arguments] if script.arguments else []
    return [
        *(job.python, "-m", "lockstep", "run"),
        f"--hosts={job.hosts}",
        "--host-index=$(JOB_COMPLETION_INDEX)",
        f"--rendezvous={job.name}-0.{job.name}:{job.port}",
        f"--devices={job.devices}",
        *(["-m"] if script.is_module else []),
        *(word.replace("$", "$$") for word in (script.target, *arguments)),
    ]
