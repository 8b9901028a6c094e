"""Host files: what a line may say, and which lines are refused, all at once."""

from pathlib import Path

import pytest

from lockstep.errors import OptionError
from lockstep.launch.launchers.secure_shell import ListedHost, read_host_file


def read(folder: Path, text: str) -> tuple[ListedHost, ...]:
    path = folder / "hosts"
    path.write_text(text)
    return read_host_file(path)


def test_hosts_are_listed_in_order(tmp_path: Path) -> None:
    lines = ["# all", "", "node1", "  ada@node2.example devices=04 # fast", "fe80::1%eth0"]
    assert read(tmp_path, "\n".join([*lines, "10.0.0.1\tdevices=1"])) == (
        ListedHost(name="node1"),
        ListedHost(name="node2.example", user="ada", devices=4),
        ListedHost(name="fe80::1%eth0"),
        ListedHost(name="10.0.0.1", devices=1),
    )


def test_a_login_has_the_user() -> None:
    assert ListedHost(name="a").login == "a"
    assert ListedHost(name="a", user="b").login == "b@a"


def test_all_lines_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    lines = ["-oProxyCommand=x", "a devices=0", "a b", "a devices=2 more", "@a", "a@", "a;b", "ok"]
    with pytest.raises(OptionError) as raised:
        read(tmp_path, "\n".join(lines))
    told = str(raised.value).splitlines()
    assert len(told) == len(lines)
    for number, line in enumerate(lines[:-1], 1):
        assert f"Received: {line!r} in line {number}." in told[number]


@pytest.mark.parametrize("text", ["", "# none\n\n"])
def test_a_file_without_hosts_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must name a host"):
        read(tmp_path, text)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "binary"):
        with pytest.raises(OptionError, match="must be a text file"):
            read_host_file(path)
