"""What another host writes is shown by this one's terminal, which does not obey it."""

import io

import msgspec
import pytest

from lockstep.errors import HostError, printable
from lockstep.launch.launchers.multi_host_run import Relay
from lockstep.launch.rendezvous.control_group import HostInfo
from lockstep.launch.rendezvous.rendezvous_server import Entry, peer_of
from lockstep.launch.untrusted import decode_untrusted
from tests.control_groups import form, together

TITLE = "\x1b]0;a title\x07"
CLIPBOARD = "\x1b]52;c;cm0gLXJm\x1b\\"


def test_text_keeps_its_lines_and_shows_what_would_command_a_terminal() -> None:
    assert printable(f"one\n\ttwo{TITLE}") == "one\n\ttwo\\x1b]0;a title\\x07"
    assert printable("8 bits: \x9b31m, a carriage return: \r") == (
        "8 bits: \\x9b31m, a carriage return: \\x0d"
    )
    assert printable("节点一\u3000é") == "节点一\u3000é"


def test_the_error_of_another_host_and_its_name_have_no_control_characters() -> None:
    info = msgspec.json.encode(HostInfo(facts={}, about={"name": f"node{TITLE}"}))
    peer = peer_of(1, decode_untrusted(info, HostInfo), "10.0.0.2")
    assert str(peer) == "Host 1 (node\\x1b]0;a title\\x07, 10.0.0.2)"
    groups = form(3)
    groups[1].infos[1].about["name"] = f"evil{TITLE}"  # type: ignore[index]  # a dict
    groups[1].fail(f"ValueError: {CLIPBOARD}")
    errors = together(*(lambda own=own: own.exchange(b"") for own in (groups[0], groups[2])))
    for group in groups:
        group.close()
    for error in errors:
        assert isinstance(error, HostError)
        assert str(error) == (
            "Host 1 (evil\\x1b]0;a title\\x07) failed: ValueError: \\x1b]52;c;cm0gLXJm\\x1b\\"
        )


def test_host_info_of_another_form_is_refused() -> None:
    for wrong in (b"{", b'{"host": "one"}', b"[" * 100_000):
        with pytest.raises(HostError, match="Host 1 must send data in the format"):
            decode_untrusted(wrong, Entry, "Host 1")


def shown(prefix: str, *pieces: str) -> str:
    target = io.StringIO()
    relay = Relay(prefix, target)
    for piece in pieces:
        relay.write(piece.encode())
    relay.write(b"", is_last=True)
    return target.getvalue()


def test_lines_of_the_other_hosts_are_plain() -> None:
    assert shown("[b] ", f"\x1b[1;31mred\x1b[0m {TITLE}\n") == "[b] red \\x1b]0;a title\\x07\n"
    assert shown("[b] ", "10 %\r20 %\r", "\n", "\x1b[2Jno end") == "[b] 20 %\n[b] \\x1b[2Jno end\n"


def test_the_first_hosts_progress_works_and_nothing_else() -> None:
    display = "\x1b[?25l\x1b[1;32m10 %\x1b[0m\r\x1b[2K\x1b[1A20 %\b\b\n\x1b[?25h"
    assert shown("", display) == display
    assert shown("", *display) == display  # one by one
    assert shown("", TITLE, CLIPBOARD) == "\\x1b]0;a title\\x07\\x1b]52;c;cm0gLXJm\\x1b\\"
    assert (
        shown("", "\x1b[?1049h", "\x1b[6n") == "\\x1b[?1049h\\x1b[6n"
    )  # another screen, a question
    assert shown("", "the end \x1b[") == "the end \\x1b["
