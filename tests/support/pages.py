"""Pages that show what their commands print. `FEDBN_REWRITE=1 pytest ...` writes what they print now into the page."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from fedbn_flwr.commands import cli

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REWRITE = bool(os.environ.get("FEDBN_REWRITE"))
# What depends on the processor or the clock: accuracies, losses, seconds and their deviations, ages of runs, and the
# round in which a run diverges or is best.
MEASURED = re.compile(r"(± ?)?\d+\.\d+(e-\d+)?%?|\d+%|± ?\d+|(?<=round )\d+(?=:| of)|\S+ \w+ ago")


def printed(command: Callable[[], object]) -> str:
    """What a command prints on both streams."""
    stream = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream):
        command()
    return stream.getvalue()


def form(line: str) -> str:
    """A line without measured numbers and the widths of columns."""
    return re.sub(r"-{2,}", "--", re.sub(r"\*[ *]*", "* ", " ".join(MEASURED.sub("*", line).split())))


def anchored(lines: list[str], first: str) -> int:
    """The line of an output with which an excerpt begins."""
    found = [number for number, line in enumerate(lines) if form(line) == form(first)]
    assert found, f"{first!r} is not printed any more; printed:\n" + "\n".join(lines)
    return found[0]


def excerpt(shown: str, output: str) -> str:
    """The part of an output that a block shows; a line `...` leaves lines out."""
    lines, parts = [line.rstrip() for line in output.splitlines()], []
    for part in shown.split("...\n"):
        start = anchored(lines, part.splitlines()[0]) if part else 0
        parts.append("".join(f"{line}\n" for line in lines[start : start + part.count("\n")]))
    return "...\n".join(parts)


def differences(shown: str, now: str) -> list[tuple[str, str]]:
    """Lines that differ in more than measured numbers: another processor gives others, by many points in few rounds."""
    pairs = zip(shown.splitlines(), now.splitlines(), strict=True)
    return [(old, new) for old, new in pairs if form(old) != form(new)]


class Page:
    """The blocks of a page in their order; a block of text is what the block before it prints."""

    def __init__(self, path: Path):
        self.path, self.text = path, path.read_text(encoding="utf-8")

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """Kind and text of each block that is no output, and the output that the page shows."""
        blocks: list[tuple[str, str]] = BLOCK.findall(self.text)
        for number, (kind, text) in enumerate(blocks):
            after, shown = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            if kind != "text":
                yield kind, text, shown if after == "text" else ""

    def command(self, text: str, shown: str) -> int:
        """Runs the commands of a block, which fail if the page shows an error, and compares what they print."""
        output, lines = "", text.splitlines()
        for line in lines:
            command, *words = shlex.split(line, comments=True)
            assert command == "fedbn"
            codes: list[int] = []
            output += printed(lambda words=words, codes=codes: codes.append(cli.main(words)))
            assert bool(codes[0]) == ("fedbn: error" in shown), (line, output)
        self.compare(shown, output)
        return len(lines)

    def compare(self, shown: str, output: str) -> None:
        if not shown:
            return
        now = excerpt(shown, output)
        if REWRITE:
            assert self.text.count(shown) == 1
            self.text = self.text.replace(shown, now)
            self.path.write_text(self.text, encoding="utf-8")
        else:
            assert differences(shown, now) == [], f"the page shows\n{shown}\nand now is printed\n{output}"
