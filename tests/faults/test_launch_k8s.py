"""``lockstep launch k8s``: the manifest as Kubernetes reads it, and its command as a pod runs it.

What Kubernetes accepts is asked of its official client, whose classes are made from its published
API description: every field must be one of theirs, of its type, and none that is required may be
missing. What that description leaves to the server (names, labels that must agree, mounts of
volumes that are there) is checked here by the rules of its reference.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient

from lockstep.cli.main import main
from lockstep.launch.launchers.kubernetes import default_name
from lockstep.launch.script import Script
from tests.launching import (
    LOCKSTEP,
    MEET,
    TIMEOUT_SECONDS,
    call,
    clean_environment,
    free_port,
    write,
)

CLASSES = {("v1", "Service"): "V1Service", ("batch/v1", "Job"): "V1Job"}
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPEm])?"
COUNTS = ["--hosts", "2", "--devices", "3"]


def manifest(folder: Path, *words: str) -> str:
    done = call([*LOCKSTEP, "launch", "k8s", *words], folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def read(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(text)
    return service, job


# --- what Kubernetes accepts ----------------------------------------------------------------------


def check_schema(document: dict[str, Any]) -> None:
    """Every field is known and has its type, and all that are required are there."""
    client: Any = ApiClient()
    name = CLASSES[document["apiVersion"], document["kind"]]
    model = client.deserialize(json.dumps(document), name, "application/json")
    assert client.sanitize_for_serialization(model) == document


def check_rules(service: dict[str, Any], job: dict[str, Any]) -> None:
    """What the server checks, or what would keep pods from starting or finding each other."""
    template = job["spec"]["template"]
    pod = template["spec"]
    assert service["spec"]["clusterIP"] == "None"  # headless: names of pods, not of the service
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["metadata"].get("namespace") == job["metadata"].get("namespace")
    assert pod["subdomain"] == service["metadata"]["name"]
    for metadata in (service["metadata"], job["metadata"]):
        assert re.fullmatch(DNS_LABEL, metadata["name"])
        assert metadata["name"][0].isalpha()
    # The pods are named after the job, their index, and five random characters.
    assert len(f"{job['metadata']['name']}-{job['spec']['completions'] - 1}-12345") <= 63
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] >= 1  # all at once
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # of a Job
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert re.fullmatch(DNS_LABEL, container["name"])
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        resources = container["resources"]
        assert all(re.fullmatch(QUANTITY, value) for value in resources["limits"].values())
        assert resources["limits"].keys() == {"cpu", "memory"}
        assert resources["requests"] == resources["limits"]
        assert all(isinstance(word, str) for word in container["command"])
        for variable in container["env"]:
            assert re.fullmatch("[A-Za-z_.-][A-Za-z0-9_.-]*", variable["name"])
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert re.fullmatch(QUANTITY, volumes["shm"]["emptyDir"]["sizeLimit"])


ALL_OPTIONS = [
    *("--name", "digits", "--namespace", "lab", "--memory", "16Gi", "--shared-memory", "2Gi"),
    *("--secret-name", "mine", "--port", "31000", "--restarts", "2", "--directory", "/work dir"),
    *("--python", "/opt/python", "--image", "registry.example/lab/train:1.0"),
]


@pytest.mark.parametrize("options", [["--image", "train"], ALL_OPTIONS])
def test_the_manifest_is_one_that_kubernetes_accepts(options: list[str], tmp_path: Path) -> None:
    service, job = read(manifest(tmp_path, *COUNTS, *options, "my_train.py", "--rate", "0.1"))
    check_schema(service)
    check_schema(job)
    check_rules(service, job)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.completionmode", "Indexed"),
        ("spec.completions", "two"),
        ("spec.template.spec.containers.0.image_", "x"),
        ("spec.template.spec.containers.0.name", None),
        ("spec.template.spec.containers", None),
        ("spec.template", None),
    ],
)
def test_a_manifest_that_it_does_not_accept_is_found(
    path: str, value: object, tmp_path: Path
) -> None:
    _, job = read(manifest(tmp_path, *COUNTS, "--image", "train", "train.py"))
    *parents, last = path.split(".")
    place: Any = job
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises((ValueError, TypeError, AssertionError)):
        check_schema(job)


def test_every_option_has_its_field(tmp_path: Path) -> None:
    text = manifest(tmp_path, *COUNTS, *ALL_OPTIONS, "-m", "code.train", "--", "--port", "$x$$")
    service, job = read(text)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert {each["metadata"]["name"] for each in (service, job)} == {"digits"}
    assert {each["metadata"]["namespace"] for each in (service, job)} == {"lab"}
    assert container["resources"]["limits"] == {"cpu": "3", "memory": "16Gi"}
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "2Gi"
    assert container["env"][0] == {
        "name": "LOCKSTEP_SECRET",
        "valueFrom": {"secretKeyRef": {"name": "mine", "key": "secret"}},
    }
    assert job["spec"]["backoffLimit"] == 2 * 2
    assert (container["image"], container["workingDir"]) == (ALL_OPTIONS[-1], "/work dir")
    assert container["command"] == [
        *("/opt/python", "-m", "lockstep", "run", "--hosts=2"),
        *("--host-index=$(JOB_COMPLETION_INDEX)", "--rendezvous=digits-0.digits:31000"),
        *("--devices=3", "-m", "code.train", "--", "--port", "$$x$$$$"),
    ]
    assert "create secret generic mine --from-file=secret=/dev/stdin --namespace=lab" in text


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("code/My_Train.py", "my-train"),
        ("2nd.py", "job-2nd"),
        ("é.py", "job"),
        (f"{'a' * 51}_b.py", "a" * 51),
    ],
)
def test_a_job_is_named_after_its_script(target: str, name: str) -> None:
    assert default_name(Script(target=target)) == name
    assert default_name(Script(target="a.b.c", is_module=True)) == "a-b-c"


# --- what its pods run ----------------------------------------------------------------------------


def expand(word: str, variables: dict[str, str]) -> str:
    """As Kubernetes does: ``$(NAME)`` where there is such a variable, and ``$$`` for ``$``."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)


def start_pod(
    job: dict[str, Any], index: int, secret: str, **variables: str
) -> "subprocess.Popen[str]":
    container = job["spec"]["template"]["spec"]["containers"][0]
    for variable in container["env"]:
        assert variable["valueFrom"]["secretKeyRef"]["key"] == "secret"
        variables[variable["name"]] = secret
    variables["JOB_COMPLETION_INDEX"] = str(index)
    return subprocess.Popen(
        [expand(word, variables) for word in container["command"]],
        cwd=container["workingDir"],
        env=clean_environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_pods_find_their_place_and_each_other(tmp_path: Path) -> None:
    write(tmp_path / "code" / "train.py", MEET)
    options = ["--image=train", "--directory", str(tmp_path / "code"), "--python", sys.executable]
    arguments = ["$(JOB_COMPLETION_INDEX)", "$$", "$HOME", "--hosts", "a b"]
    words = [*COUNTS, *options, "--port", str(free_port()), "train.py", "--", *arguments]
    _, job = read(manifest(tmp_path, *words))
    names = json.dumps({"train-0.train": "127.0.0.1"})  # by the cluster's own name server
    pods = [start_pod(job, index, "5" * 64, NAMES=names) for index in range(2)]
    try:
        said = [pod.communicate(timeout=TIMEOUT_SECONDS) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert said == [
        (f"0 2 3 host 1 {arguments}\n", ""),
        (f"1 2 3 host 0 {arguments}\n", ""),
    ]
    assert [pod.returncode for pod in pods] == [0, 0]


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no numbers, no image": (
        ["train.py"],
        ["--hosts must be", "--devices must be", "--image must be an image's name. Received: ''"],
    ),
    "what Kubernetes does not take": (
        [
            *(*COUNTS, "--image=-x", "--name=Digits", "--namespace", "a.b", "--memory", "much"),
            *("--shared-memory=0", "--secret-name=a_b", "--port=0", "--restarts=-1", "a.py"),
        ],
        [
            "--image must be an image's name. Received: '-x'",
            "--name must be at most 52 lower-case letters",
            "--namespace must be at most 52 lower-case letters",
            "--memory must be a quantity such as 16Gi. Received: 'much'",
            "--shared-memory must be a quantity such as 2Gi. Received: '0'",
            "--secret-name must be lower-case letters, digits, dots, dashes. Received: 'a_b'",
            "--port must be from 1 to 65535. Received: --port 0",
            "--restarts must be from 0 to 1000. Received: --restarts -1",
        ],
    ),
    "too long a name": ([*COUNTS, "--image=x", "--name", "a" * 53, "a.py"], ["at most 52"]),
    "no place to write": (
        [*COUNTS, "--image=x", "--output=/nowhere/job", "a.py"],
        ["--output must be a writable file"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, messages = MISTAKES[name]
    assert main(["launch", "k8s", *words]) == 2
    shown = capsys.readouterr()
    assert [message for message in messages if message not in shown.err] == [], shown.err
    assert shown.out == ""
