"""A folder for checkpoints that all hosts share: each writes and reads its part.

Where hosts have folders of their own, host 0 gathers the training, and writes it alone.
"""

import os
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.generations import generations
from lockstep.checkpoint.partitioned_files import PartitionedFile
from lockstep.checkpoint.reading import first_whole, read_generation
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import Folder
from lockstep.checkpoint.trees import Tensors
from lockstep.errors import CheckpointError
from lockstep.train.checkpointing.partitioned_state import Found, check_paths, joined
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.runtime.session import Session

_MARK = ".hosts"


@dataclass(frozen=True)
class SharedFolder:
    """See the module.

    Attributes:
        hosts: all of them; each calls every method.
        path: of the folder, on this host.
    """

    hosts: Hosts
    path: Path

    @classmethod
    def find(cls, hosts: Hosts | None, folder: Folder) -> "SharedFolder | None":
        """The folder, if there are several hosts and they share it; host 0 has locked it."""
        if hosts is None or hosts.control_group.num_hosts == 1 or not isinstance(folder, Path):
            return None
        mark, place = hosts.from_chief(secrets.token_hex(16)), folder.absolute() / _MARK
        if hosts.host == 0:
            with suppress(OSError):  # then no host sees it
                place.write_text(mark)
        hosts.wait()
        is_seen = _is_marked(place, mark)
        are_equal = all(hosts.from_all(is_seen))
        if hosts.host == 0:
            place.unlink(missing_ok=True)
        return cls(hosts, place.parent) if are_equal else None

    def newest(
        self, *, is_finished: bool | None = None, without: Collection[str] = ()
    ) -> Saved | None:
        """The newest complete checkpoint, read by all hosts; see ``read_newest``."""
        names = self.hosts.from_chief([one.name for one in generations(self.path)])
        every = [self.path / name for name in names if name not in without]
        return first_whole(self.path, every, self._read, is_finished=is_finished)

    def _read(self, generation: Folder) -> Saved:
        """One generation; its parts are checked when they are read.

        Raises:
            CheckpointError: it is damaged.
        """
        hosts, reason, saved = self.hosts, "", None
        try:
            saved = read_generation(generation, checks_parts=False)
        except CheckpointError as error:
            reason = str(error)
        reasons = [one for one in hosts.from_all(reason) if one]
        if saved is None or reasons:
            raise CheckpointError(reasons[0])
        return saved

    def write(
        self, session: Session, files: Sequence[PartitionedFile], folder: str, tensors: Tensors
    ) -> Found:
        """Write whole tensors of a training, which all hosts have, with all processes.

        Args:
            session: of this host.
            files: on host 0, which has laid them out there; else none.
            folder: in which they are, on this host.
            tensors: by name.
        """
        files = self.hosts.from_chief([*files])
        check_paths(files)
        own = session.write_stored(files, folder, tensors, self.hosts)
        return joined(self.hosts.from_all(own))


def _is_marked(place: Path, mark: str) -> bool:
    try:
        return place.read_text() == mark and os.access(place.parent, os.W_OK)
    except OSError:
        return False
