"""A secret is found, is fit to be one, and does not show."""

import copy
import os
import pickle
import traceback
from pathlib import Path

import pytest

from lockstep.errors import HostError
from lockstep.launch.secret import Secret, find_secret

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
    with pytest.raises(HostError, match="LOCKSTEP_SECRET is too short") as caught:
        find_secret({"LOCKSTEP_SECRET": text})
    assert "fifteen" not in str(caught.value)
    with pytest.raises(HostError, match=r"secret \(LOCKSTEP_SECRET_FILE\) is too short"):
        find_secret(secret_file(tmp_path, text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_files_that_are_open_to_others_are_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"open to others.*chmod 600") as caught:
        find_secret(secret_file(tmp_path, TEXT, mode))
    assert TEXT not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "absent")})
    with pytest.raises(HostError, match="no regular file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path)})
    os.mkfifo(tmp_path / "pipe", mode=0o600)  # nobody writes to it: reading would wait for ever
    with pytest.raises(HostError, match="no regular file"):
        find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "pipe")})
    with pytest.raises(HostError, match="5000 bytes"):
        find_secret(secret_file(tmp_path, "x" * 5000))


def test_it_does_not_show() -> None:
    secret = Secret(TEXT.encode())
    assert TEXT not in f"{secret} {secret!r} {[secret]}"
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not sent anywhere") as caught:
            send(secret)
        assert TEXT not in "".join(traceback.format_exception(caught.value))
