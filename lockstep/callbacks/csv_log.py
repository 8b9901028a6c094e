"""Writes the logs of every epoch to a CSV file."""

import csv
import json
import os
from pathlib import Path
from typing import Any, TextIO

from lockstep.disk import prepare_file, writing
from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed
from lockstep.options import check_flag, check_path
from lockstep.train.callbacks.callback import ClosingCallback, Logs

_MISSING = "NA"


class CSVLogger(ClosingCallback):
    """Writes a row per epoch: the epoch's number, from 0, and its logs, at full precision.

    Every row is in the file as soon as its epoch is over.

    Args:
        filename: the file; its folder is made.
        separator: one character between values.
        append: append to the file, which must have the same columns; otherwise every ``fit`` writes
            the file anew.

    Raises:
        OptionError: an option is invalid; when training begins, the file cannot be written; after
            the first epoch, it has other columns.
    """

    def __init__(
        self, filename: str | os.PathLike[str], *, separator: str = ",", append: bool = False
    ) -> None:
        problems = Problems()
        check_path("filename", filename, problems)
        check_flag("append", append, problems)
        is_character = isinstance(separator, str) and len(separator) == 1
        if not is_character or separator in '"\r\n':
            problems.add(
                "`separator` must be one character other than a quote or an end of line.",
                received=repr(separator),
                fix="Use ',' or ';'.",
            )
        problems.raise_if_any(OptionError)
        self._path = Path(filename)
        self._separator = separator
        self._appends = append
        self._columns: list[str] | None = None
        self._file: TextIO | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        prepare_file(self._path)
        self._columns = self._columns_there() if self._appends else None
        self._file = self._path.open("a" if self._appends else "w", newline="")

    def _columns_there(self) -> list[str] | None:
        """The file's first row, if it has one."""
        if not self._path.exists():
            return None
        with self._path.open(newline="") as file:
            return next(csv.reader(file, delimiter=self._separator), None)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert self._file is not None
        row = {"epoch": epoch, **{name: _cell(value) for name, value in (logs or {}).items()}}
        is_new = self._columns is None
        if self._columns is None:
            self._columns = list(row)
        self._check_columns(row)
        writer = csv.DictWriter(
            self._file, self._columns, restval=_MISSING, delimiter=self._separator
        )
        with writing(self._path):
            if is_new:
                writer.writeheader()
            writer.writerow(row)
            self._file.flush()

    def _check_columns(self, row: dict[str, Any]) -> None:
        assert self._columns is not None
        if not row.keys() <= set(self._columns):
            raise OptionError(
                f"{self._path} has columns {listed(self._columns)}.",
                received=f"values of {listed(row)}",
                fix="Write to another file, with append=False, or with the same separator.",
            )

    def _close(self, error: BaseException | None) -> None:
        file, self._file = self._file, None
        if file is not None:
            with writing(self._path):
                file.close()


def _cell(value: Any) -> Any:
    """Metrics with several values fill one cell, as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value
