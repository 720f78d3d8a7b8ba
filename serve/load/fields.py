"""Fields of a trace's rows, checked as they are read: an error names the file, the line, the field and its value."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Row:
    """One JSON object of a trace. ``where`` leads to it inside its line: ``requests[3].``."""

    file: str
    line: int
    values: Any
    where: str = ""

    def __post_init__(self):
        if not isinstance(self.values, dict):
            place = self.where.rstrip(".") or "the row"
            raise ValueError(f"{self.file}, line {self.line}: {place} is no object but {shown(self.values)}")

    def fail(self, field: str, need: str) -> NoReturn:
        got = shown(self.values[field]) if field in self.values else "nothing"
        raise ValueError(f"{self.file}, line {self.line}: {self.where}{field} must be {need}, got {got}")

    def count(self, field: str, low: int = 0) -> int:
        """An integer of at least ``low``."""
        value = self.values.get(field)
        if type(value) is not int or not low <= value < 2**53:
            self.fail(field, f"an integer >= {low}")
        return value

    def seconds(self, field: str, optional: bool = False) -> float | None:
        """A finite number >= 0; None only where it may be absent."""
        value = self.values.get(field)
        if value is None and optional:
            return None
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            self.fail(field, "a number >= 0")
        return float(value)

    def text(self, field: str, among: tuple[str, ...] = ()) -> str:
        value = self.values.get(field)
        if not isinstance(value, str) or (among and value not in among):
            self.fail(field, f"one of {', '.join(among)}" if among else "text")
        return value

    def rows(self, field: str) -> list["Row"]:
        """The objects of a list."""
        value = self.values.get(field)
        if not isinstance(value, list):
            self.fail(field, "a list")
        return [Row(self.file, self.line, v, f"{self.where}{field}[{i}].") for i, v in enumerate(value)]


def shown(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[:width] + " ..."


def json_rows(path: Path) -> Iterator[Row]:
    """An object a line; blank lines are skipped. Raises ValueError for what is no JSON, and for a file of no rows."""
    some = False
    for number, line in lines(path):
        if not line.strip():
            continue
        some = True
        yield Row(str(path), number, parsed(line, path, number))
    if not some:
        raise ValueError(f"{path} holds no rows")


def parsed(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: no JSON: {error}") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1, and lines without their ends. Raises ValueError for a missing file and for bytes that are
    not UTF-8."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                yield number, raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 at byte {error.start}") from None
