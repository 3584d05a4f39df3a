"""Escapes text of run folders, such as labels and names of classes, for each format that shows it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping


def printable(text: str) -> str:
    """Text without line breaks and other control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def columns_in_words(columns: Mapping[str, str]) -> list[str]:
    """Lines that name the input columns, and the other columns with their use or why they are left out."""
    inputs = [name for name, use in columns.items() if use == "input"]
    others = [f"{name or 'a column without name'} ({use})" for name, use in columns.items() if use != "input"]
    lines = f"inputs ({len(inputs)}): {', '.join(inputs)}", f"other columns: {', '.join(others)}"
    return [printable(shorten(line, 2000)) for line in lines]


def in_words(value: object) -> str:
    """The value of a setting for a label; a section, such as a partition, is its kind followed by its options."""
    if isinstance(value, Mapping):
        rest = [f"{key}={in_words(option)}" for key, option in value.items() if key not in ("name", "kind")]
        return " ".join([*(str(value[key]) for key in ("name", "kind") if key in value), *rest])
    if isinstance(value, list):
        return "[" + ", ".join(map(in_words, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def file_name(text: str) -> str:
    """A name for a file or folder: without separators, never "..", and at most 200 of the 255 bytes allowed."""
    name = re.sub(r"[^\w+.=-]+", "-", text).strip("-.") or "run"
    return name.encode()[:200].decode(errors="ignore")


# Marks of Markdown, HTML and formulas; an underscore inside a word means nothing.
_MARKS = re.compile(r"[\\`*\[\]<>|$&]|(?<!\w)_|_(?!\w)")


def in_markdown(text: str) -> str:
    return _MARKS.sub(r"\\\g<0>", printable(text))


def in_plot(text: str, length: int = 60) -> str:
    """Text in which matplotlib finds no formula. A long text keeps both ends, because labels may differ at either."""
    text, half = printable(text), length // 2
    return (text if len(text) <= length else f"{text[: half - 1]}…{text[-half:]}").replace("$", r"\$")


def in_html(text: str) -> str:
    return html.escape(str(on_page(text)))


def on_page(value: object) -> object:
    """A value of a page before it is escaped; a line never breaks within `78.55% ± 1.47`."""
    if hasattr(value, "__html__") or not isinstance(value, str):  # HTML already
        return value
    return printable(value).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def in_csv(value: object) -> object:
    """A value that a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{0 if seconds >= 10 * length else 1}f} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{max(seconds, 0) * 1000:.2g} ms"
