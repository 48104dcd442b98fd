"""``measurements.csv``: the quick way for whole files, the careful way to find out what is wrong with one."""

from __future__ import annotations

import csv
import io
import math
from typing import NamedTuple

_SPLITS = ("train/", "val/", "test/")


class Table(NamedTuple):
    """A file of measurements.

    Args:
        header: column names; the first is ``step``.
        body: lines without the header, each with its end.
        remark: something odd about it that does not make it useless; empty if there is nothing.
    """

    header: tuple[str, ...]
    body: bytes
    remark: str


def split(content: bytes) -> Table:
    """Header and lines of a file.

    Raises:
        ValueError: there is no header with a ``step`` in front.
    """
    head, end, body = content.partition(b"\n")
    header = tuple(name.strip() for name in head.decode("utf-8").strip("\r\ufeff").split(","))
    if not end or header[0] != "step":
        raise ValueError("its first line is not a header that begins with step")
    if len(set(header)) < len(header):
        raise ValueError("a column is there twice")
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n")
    remarks: list[str] = []
    if body and not body.endswith(b"\n"):
        remarks.append("its last line has no end; taken as it is")
        body += b"\n"
    unknown = [name for name in header[1:] if not is_metric(name)]
    remarks += [f"column {name!r} is no split/metric; left out" for name in unknown]
    return Table(header, body, "; ".join(remarks))


def is_metric(column: str) -> bool:
    """Whether a column is one of the metrics."""
    return column.startswith(_SPLITS)


def numbered(place: int, body: bytes) -> bytes:
    """Lines with a number in front of each."""
    if not body:
        return body
    mark = b"%d," % place
    return mark + body[:-1].replace(b"\n", b"\n" + mark) + b"\n"


def normalised(table: Table) -> bytes:
    """The same lines in the form that is read fastest, each checked.

    Raises:
        ValueError: a line is broken; the text names it.
    """
    lines: list[str] = []
    reader = csv.reader(io.StringIO(table.body.decode("utf-8"), newline=""))
    for number, row in enumerate(reader, start=2):
        if not row:
            continue
        if len(row) != len(table.header):
            raise ValueError(
                f"line {number} has {len(row)} columns, the header {len(table.header)}"
            )
        try:
            step = float(row[0])
            values = [
                _number(cell) if is_metric(name) else None
                for name, cell in zip(table.header[1:], row[1:], strict=True)
            ]
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not (math.isfinite(step) and step == int(step) and step >= 0):
            raise ValueError(f"line {number}: step {row[0]}; steps are whole and not negative")
        cells = ["" if value is None else repr(value) for value in values]
        lines.append(",".join([str(int(step)), *cells]) + "\n")
    return "".join(lines).encode()


def _number(cell: str) -> float | None:
    if "_" in cell:  # which Python takes for a digit separator
        raise ValueError(f"could not convert string to float: {cell!r}")
    return float(cell) if cell.strip() else None
