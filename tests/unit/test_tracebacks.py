"""What users see of an error: their own frames, the layer, and all frames where they ask."""

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import tracebacks
from lockstep.errors import DeviceError, Problems
from lockstep.graph.layer_graph import LayerGraph

DATA = (torch.ones(4, 3), torch.ones(4, 1))


class Refusing(nn.Module):
    """A model that fails, on rank 0 or on the others."""

    def __init__(self, *, on_helpers: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.on_helpers, self.is_sent = on_helpers, False

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "is_sent": True}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_sent == self.on_helpers:
            raise ValueError("the user's own error")
        result: Tensor = self.linear(x)
        return result


def trainer(model: nn.Module, devices: int = 1, **options: Any) -> lockstep.Trainer:
    given: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD, **options}
    return lockstep.Trainer(model, strategy=lockstep.MirroredStrategy(devices), **given)


def fail(model: nn.Module, devices: int = 1, *, epochs: int = 1) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the tests look at what it is
        trainer(model, devices).fit(DATA, epochs=epochs, verbose=0)
    return caught.value


def shown(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def own_frames(lines: list[str]) -> list[str]:
    return [line for line in lines if "lockstep/" in line and "/tests/" not in line]


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_has_the_frames_of_the_user_and_the_layer(devices: int) -> None:
    lines = shown(fail(Refusing(), devices))
    assert not own_frames(lines)
    assert "    trainer(model, devices).fit(DATA, epochs=epochs, verbose=0)" in lines
    assert sum("in forward" in line for line in lines) == 1
    assert "ValueError: the user's own error" in lines
    rows = 4 // devices
    part = " (of a batch of 4)" if devices > 1 else ""
    assert lines[-1] == (
        f"Lockstep: in the model (Refusing); inputs ({rows}, 3) float32, targets ({rows}, 1) "
        f"float32{part}."
    )
    assert len(lines) < 15


def test_what_a_helper_tells_has_no_frames_of_lockstep_either() -> None:
    error = fail(Refusing(on_helpers=True), 2)
    assert isinstance(error, ValueError)
    lines = shown(error)
    assert not own_frames(lines)
    assert "--- traceback of rank 1 ---" in lines
    assert sum("in forward" in line for line in lines) == 1
    assert sum(line.startswith("Lockstep: in the model") for line in lines) == 1
    assert len(lines) < 25


def test_an_error_of_an_option_has_the_line_of_the_user_alone() -> None:
    lines = shown(fail(nn.Linear(3, 1), epochs=0))
    assert not own_frames(lines)
    assert lines[-1] == (
        "lockstep.errors.OptionError: `epochs` must be an integer of at least 1. "
        "Received: epochs=0. Pass a positive integer."
    )


def test_logging_shows_the_same(caplog: pytest.LogCaptureFixture) -> None:
    try:
        trainer(nn.Linear(4, 1)).evaluate(DATA)
    except RuntimeError:
        logging.getLogger("mine").exception("it failed")
    assert not own_frames(caplog.text.splitlines())
    assert "in the model (Linear(in_features=4" in caplog.text


def test_all_frames_are_there_where_the_user_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "full")
    lines = shown(fail(Refusing()))
    assert len(own_frames(lines)) > 10


def raised(act: Callable[[], object]) -> Exception:
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:
        return error  # type: ignore[return-value]
    raise AssertionError("it must fail")


def test_what_lockstep_itself_does_wrong_keeps_its_last_frame() -> None:
    problems = Problems()
    for name in "ab":
        problems.add(name, received=name, fix="Mend it.")
    act = tracebacks.public(lambda: problems.raise_if_any(None))  # type: ignore[arg-type]
    lines = shown(raised(act))
    assert len(own_frames(lines)) == 1
    assert "in raise_if_any" in own_frames(lines)[0]
    assert lines[-1] == "Lockstep: LOCKSTEP_TRACEBACK=full shows all frames."


def test_a_cause_whose_words_an_error_repeats_is_not_shown_beside_it() -> None:
    with pytest.raises(lockstep.errors.DataError, match="inhomogeneous") as caught:
        trainer(nn.Linear(3, 1)).fit([[1, 2], [3]], [1, 2])
    assert len([line for line in shown(caught.value) if "inhomogeneous" in line]) == 1


def test_a_file_that_is_not_there_is_told_once() -> None:
    with pytest.raises(lockstep.errors.CheckpointError) as caught:
        trainer(nn.Linear(3, 1)).load("nothing.safetensors")
    assert len([line for line in shown(caught.value) if "No such file" in line]) == 1


def test_what_a_dataclass_checks_has_no_frame_of_its_own() -> None:
    with pytest.raises(lockstep.errors.OptionError) as caught:
        trainer(nn.Linear(3, 1), schedule="cosine")
    assert not any("<string>" in line for line in shown(caught.value))


def test_a_model_without_parameters_is_named() -> None:
    with pytest.raises(lockstep.errors.ModelError, match=r"no parameters.*Received: ReLU"):
        trainer(nn.ReLU())


def test_a_file_that_is_not_there_has_no_frames_of_python_itself() -> None:
    error = raised(lambda: tracebacks.public(LayerGraph.load)("nothing.json"))
    assert isinstance(error, FileNotFoundError)
    assert not any("pathlib" in line for line in shown(error))


def test_causes_contexts_and_groups_are_shortened_too() -> None:
    def checked() -> None:
        lockstep.MirroredStrategy(devices=0)

    def act() -> None:
        try:
            checked()
        except DeviceError as error:
            raise ExceptionGroup("several", [raised(checked), error]) from error

    error = raised(tracebacks.public(act))
    lines = shown(error)
    assert not own_frames(lines)
    assert sum("in checked" in line for line in lines) == 3


def test_other_errors_of_a_script_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook
    sys.excepthook = sys.__excepthook__
    try:
        tracebacks.install()
        for kind in (ValueError, KeyboardInterrupt):
            error = raised(lambda kind=kind: (_ for _ in ()).throw(kind("mine")))  # type: ignore[misc]
            sys.excepthook(type(error), error, error.__traceback__)
            printed = capsys.readouterr().err
            assert printed == "".join(traceback.format_exception(error))
    finally:
        sys.excepthook = before
