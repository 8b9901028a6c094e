"""What a process waits for is shown after 2 s, and again when it has changed, ever less often."""

import pytest

from lockstep.launch.notices import Notice


def test_it_is_shown_when_it_is_due_and_new(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "hosts 1, 2"
    notice = Notice(lambda: f"Waiting for {missing}.")
    shown = {}
    for seconds in (0.0, 1.9, 2.0, 3.0, 4.0, 5.0, 7.9, 8.0, 15.9, 16.0, 40.0):
        if seconds == 5.0:
            missing = "host 1"
        notice.show_if_due(seconds)
        if text := capsys.readouterr().err:
            shown[seconds] = text
    assert shown == {2.0: "Waiting for hosts 1, 2.\n", 8.0: "Waiting for host 1.\n"}
