"""The page of results: tables in the terminal, and sections of `results.md`."""

import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax

PAGE = Path(__file__).with_name("results.md")
MIB = 2**20
_LIBRARIES = (
    *("jax", "equinox", "jax-privacy", "optax", "torch", "opacus"),
    *("flowjax", "diffrax", "haliax"),
)


class Table(NamedTuple):
    """Rows of cells by column, all of the same columns, and a note below."""

    title: str
    rows: Sequence[dict[str, str]]
    note: str = ""

    def lines(self) -> list[Sequence[str]]:
        """The columns, then the cells of every row."""
        return [tuple(self.rows[0]), *(tuple(row.values()) for row in self.rows)]

    def markdown(self) -> str:
        head, *rows = self.lines()
        rule = ("---", *["---:"] * (len(head) - 1))
        lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
        return "\n\n".join(filter(None, (f"### {self.title}", "\n".join(lines), self.note)))

    def __str__(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(*self.lines(), strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in self.lines()
        ]
        return "\n".join(filter(None, (self.title, *lines, self.note)))


def setting() -> str:
    """The device and the versions of libraries."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    versions: list[str] = []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{device.platform}{kind}, {cores}; {', '.join(versions)}"


def write_section(path: Path, title: str, body: str, titles: Sequence[str]) -> None:
    """Replaces one section of a page, or adds it; sections are in the order of `titles`."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Measurements\n"
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    sections = dict(part.split("\n", 1) for part in parts)
    sections[title] = f"\n{body}\n"
    order = sorted(sections, key=lambda name: titles.index(name) if name in titles else -1)
    written = (f"## {name}\n\n{sections[name].strip()}\n" for name in order)
    path.write_text("\n".join((f"{head.strip()}\n", *written)), encoding="utf-8")
