"""Checks the project's prose against a list of words to avoid: `python tools/prose.py [PATH ...]`.

Prose is the text of Markdown files outside of code, the comments and strings of Python (with docstrings and error
messages), and the comments of YAML, TOML and shell files.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_name("prose.txt")


class Hit(NamedTuple):
    file: Path
    line: int
    found: str
    instead: str


def read_words(text: str) -> list[tuple[re.Pattern[str], str]]:
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    # A phrase may be broken over two lines.
    return [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), instead) for pattern, instead in lines]


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Pairs of a line number and the prose that begins in this line."""
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".py":
            kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type in kinds:
                    yield token.start[0], token.string
        case ".md":
            # The line breaks of code are kept, so that line numbers stay right.
            code = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
            plain = code.sub(lambda match: "\n" * match.group().count("\n"), text)
            yield 1, plain
        case _:
            for number, line in enumerate(text.splitlines(), start=1):
                if (comment := re.search(r"(^|\s)#.*", line)) is not None:
                    yield number, comment.group()


def check(files: Iterable[Path]) -> list[Hit]:
    words = read_words(WORDS.read_text(encoding="utf-8"))
    hits = []
    for file in files:
        for first, text in prose(file):
            for pattern, instead in words:
                for match in pattern.finditer(text):
                    line = first + text.count("\n", 0, match.start())
                    hits.append(Hit(file, line, " ".join(match.group().split()), instead))
    return sorted(hits)


def project_files() -> list[Path]:
    """The files of the project that contain prose."""
    patterns = ["*.py", "*.md", "*.yml", "*.yaml", "*.toml", "*.sh", "*Dockerfile"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],  # noqa: S607 (git of the developer)
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files to check instead of the whole project")
    arguments = parser.parse_args()
    hits = check([file.resolve() for file in arguments.paths] or project_files())
    for hit in hits:
        shown = hit.file.relative_to(ROOT) if hit.file.is_relative_to(ROOT) else hit.file
        print(f"{shown}:{hit.line}: {hit.found!r}: {hit.instead}")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
