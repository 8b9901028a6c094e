"""A Slurm batch file for a job on several hosts.

Slurm starts one task on each host, which reads its place from Slurm's variables and starts helpers
for its other cores. The job makes the hosts' secret in a file that only its user can read, in the
directory from which the job is submitted. All hosts must share that directory.
"""

import re
import shlex
from collections.abc import Sequence

import msgspec

from lockstep.errors import Problems
from lockstep.launch.script import Script

_NAME = re.compile(r"[\w.+@:/-]+")
# sbatch's manual: minutes, min:sec, h:min:sec, days-h, days-h:min, days-h:min:sec.
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\n\r]*)?")


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job for sbatch.

    Attributes:
        script: the script.
        hosts: number of nodes.
        devices: cores of each node.
        name: the job's.
        python: the interpreter on every host.
        time: the job's time limit, in Slurm's format.
        partition: the partition to run on.
        account: the account to charge.
        options: further options of sbatch.
    """

    script: Script
    hosts: int
    devices: int
    name: str
    python: str
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: Sequence[str] = ()

    def check(self, problems: Problems) -> None:
        """Note options that sbatch would refuse or misread."""
        for option, value, pattern, example in (
            ("--name", self.name, _NAME, "digits"),
            ("--time", self.time, _TIME, "1-12:00:00"),
            ("--partition", self.partition, _NAME, "long"),
            ("--account", self.account, _NAME, "physics"),
            *(("--sbatch", each, _OPTION, "--sbatch=--mem=32G") for each in self.options),
        ):
            if value is not None and pattern.fullmatch(value) is None:
                problems.add(
                    f"{option} must have sbatch's format.",
                    received=repr(value),
                    fix=f"For example: {example}",
                )


def write_batch(job: BatchJob) -> str:
    """The text of the batch file."""
    options = "".join(f"#SBATCH {option}\n" for option in _options(job))
    python = shlex.quote(job.python)
    command = shlex.join([job.python, *job.script.words])
    return f"""\
#!/bin/bash
{options}
set -eu

# The hosts prove to each other that they are of this job, with a secret that only you can read.
secret_file=$(umask 077 && mktemp "$PWD/.lockstep-secret-$SLURM_JOB_ID-XXXXXXXX")
trap 'rm -f "$secret_file"' EXIT
{python} -c 'import secrets; print(secrets.token_hex(32))' > "$secret_file"

export LOCKSTEP_SECRET_FILE="$secret_file"
export LOCKSTEP_DEVICES={job.devices}

# One task on each host. What srun does not take over from above is said again.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task={job.devices} --kill-on-bad-exit=1 \\
    {command}
"""


def _options(job: BatchJob) -> list[str]:
    given = {"time": job.time, "partition": job.partition, "account": job.account}
    return [
        f"--job-name={job.name}",
        f"--nodes={job.hosts}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.devices}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *job.options,
    ]
