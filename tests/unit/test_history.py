"""What ``fit`` returns: as a table, as a frame, as a picture."""

import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import ExtraError, OptionError

HISTORY = lockstep.History(
    {"loss": [0.5, 0.25], "val_loss": [0.75, 0.0001], "classes": [[1, 2], [3, 4]], "bad": [0, 1]},
    [3, 4],
)


def test_it_prints_as_a_table_with_a_row_per_epoch() -> None:
    assert str(HISTORY).splitlines() == [
        "epoch    loss  val_loss  classes  bad",
        "    4  0.5000    0.7500   [1, 2]    0",
        "    5  0.2500  1.00e-04   [3, 4]    1",
    ]
    assert HISTORY._repr_mimebundle_() == {"text/plain": str(HISTORY)}
    assert str(lockstep.History()) == "epoch"


def test_it_becomes_a_frame() -> None:
    frame = HISTORY.to_frame()
    assert list(frame.columns) == list(HISTORY.history)
    assert list(frame.index) == [3, 4]
    assert list(frame["val_loss"]) == [0.75, 0.0001]


def test_it_is_drawn(tmp_path: Path) -> None:
    figure = HISTORY.plot()
    figure.savefig(tmp_path / "history.png")
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 1]  # of classes, one line for each
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[4, 5], [4, 5]]
    assert [line.get_label() for line in figure.axes[0].lines] == ["loss", "val_loss"]
    assert len(HISTORY.plot("loss").axes) == 1


@pytest.mark.parametrize(
    ("history", "names"),
    [(HISTORY, ["accuracy"]), (HISTORY, ["val_loss"]), (lockstep.History(), [])],
)
def test_only_what_is_there_is_drawn(history: lockstep.History, names: list[str]) -> None:
    with pytest.raises(OptionError, match="Only values of the history"):
        history.plot(*names)


@pytest.mark.parametrize(
    ("package", "method"), [("pandas", "to_frame"), ("matplotlib.figure", "plot")]
)
def test_a_package_that_is_missing_is_named(
    package: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraError, match=f"History.{method} needs a package"):
        getattr(HISTORY, method)()
