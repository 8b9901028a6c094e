"""A secret is found, or made for one machine; is fit to be one, and does not show."""

import copy
import os
import pickle
import stat
import threading
import traceback
from pathlib import Path

import pytest

from lockstep.errors import HostError
from lockstep.launch.security.secret import Secret, find_secret
from lockstep.train.multihost.followers import host_key

TEXT = "0123456789abcdef-not-to-be-seen"


def secret_file(folder: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return {"LOCKSTEP_SECRET_FILE": str(path)}


def test_the_environment_and_a_file_give_the_same_secret(tmp_path: Path) -> None:
    from_file = find_secret(secret_file(tmp_path, f"  {TEXT}\n"))
    from_environment = find_secret({"LOCKSTEP_SECRET": TEXT})
    assert from_file.key(b"x") == from_environment.key(b"x")
    assert from_file.key(b"x") != from_file.key(b"y")
    assert from_file.key(b"x") != find_secret({"LOCKSTEP_SECRET": TEXT + "2"}).key(b"x")


def test_the_environment_comes_first(tmp_path: Path) -> None:
    both = secret_file(tmp_path, "another secret, just as long") | {"LOCKSTEP_SECRET": TEXT}
    assert find_secret(both).key(b"x") == Secret(TEXT.encode()).key(b"x")


def test_none_is_an_error_that_says_how_to_make_one() -> None:
    with pytest.raises(HostError, match=r"token_hex.*LOCKSTEP_SECRET_FILE=secret"):
        find_secret({})


@pytest.mark.parametrize("text", ["", "   \n", "fifteen letters"])
def test_short_ones_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="in LOCKSTEP_SECRET must have at least 16") as caught:
        find_secret({"LOCKSTEP_SECRET": text})
    assert "fifteen" not in str(caught.value)
    with pytest.raises(HostError, match=r"secret \(LOCKSTEP_SECRET_FILE\) must have at least"):
        find_secret(secret_file(tmp_path, text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_files_that_are_open_to_others_are_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"accessible to other users.*chmod 600") as caught:
        find_secret(secret_file(tmp_path, TEXT, mode))
    assert TEXT not in str(caught.value)


def test_processes_of_a_host_need_no_secret_but_one_that_is_given_must_be_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert host_key() is None
    monkeypatch.setenv("LOCKSTEP_SECRET", TEXT)
    assert host_key() == Secret(TEXT.encode()).key(b"processes of a host")
    monkeypatch.delenv("LOCKSTEP_SECRET")
    monkeypatch.setenv(*secret_file(tmp_path, TEXT, 0o644).popitem())
    with pytest.raises(HostError, match="accessible to other users"):
        host_key()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "absent")})
    with pytest.raises(HostError, match="not a regular file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path)})
    os.mkfifo(tmp_path / "pipe", mode=0o600)  # nobody writes to it: reading would wait for ever
    with pytest.raises(HostError, match="not a regular file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "pipe")})
    with pytest.raises(HostError, match="5000 bytes"):
        find_secret(secret_file(tmp_path, "x" * 5000))


def test_it_does_not_show() -> None:
    secret = Secret(TEXT.encode())
    assert TEXT not in f"{secret} {secret!r} {[secret]}"
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="must not be pickled") as caught:
            send(secret)
        assert TEXT not in "".join(traceback.format_exception(caught.value))


# --- where all hosts are one machine -------------------------------------------------------------


def own_secret(folder: Path) -> Secret:
    return find_secret({"XDG_STATE_HOME": str(folder)}, is_one_machine=True)


def test_one_machine_makes_a_secret_of_its_users_own_once(tmp_path: Path) -> None:
    first = own_secret(tmp_path / "state")
    path = tmp_path / "state" / "lockstep" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_text()) == 65
    assert first.source == str(path)
    assert own_secret(tmp_path / "state").key(b"x") == first.key(b"x")
    at_home = find_secret({"HOME": str(tmp_path), "XDG_STATE_HOME": "rel"}, is_one_machine=True)
    assert at_home.source == str(tmp_path / ".local" / "state" / "lockstep" / "secret")
    assert at_home.key(b"x") != first.key(b"x")


def test_of_many_that_begin_at_once_one_makes_it(tmp_path: Path) -> None:
    all_there = threading.Barrier(16)
    found: set[bytes] = set()

    def begin() -> None:
        all_there.wait(30)
        found.add(own_secret(tmp_path).key(b"x"))

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 1


def test_a_secret_that_was_given_comes_first(tmp_path: Path) -> None:
    environ = {"LOCKSTEP_SECRET": TEXT, "XDG_STATE_HOME": str(tmp_path)}
    assert find_secret(environ, is_one_machine=True).key(b"x") == Secret(TEXT.encode()).key(b"x")
    assert not list(tmp_path.iterdir())


def test_a_file_that_may_not_be_the_users_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_secret(tmp_path)
    path = tmp_path / "lockstep" / "secret"
    path.chmod(0o644)
    with pytest.raises(HostError, match=r"accessible to other users.*chmod 600"):
        own_secret(tmp_path)
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(
            HostError, match=f"secret: the file belongs to user {os.getuid()}.*XDG_STATE_HOME"
        ):
            own_secret(tmp_path)
    path.write_text("short")
    with pytest.raises(HostError, match="secret must have at least"):
        own_secret(tmp_path)
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(HostError, match="symbolic links"):
        own_secret(tmp_path)
    with pytest.raises(HostError, match="Not a directory"):
        own_secret(tmp_path / "secret")
