"""Writes the repository's address and the version wherever they belong; `--check` only reports files that differ.

The one place to fill in is `Repository` under `[project.urls]` in pyproject.toml. Everything else follows from it: the
other links there, badges and clone commands, CITATION.cff, SECURITY.md and mkdocs.yml. Each is a block between a
comment with `address: NAME` and one with `address end`. As long as there is no address, the blocks have none.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^([^\n]*\baddress: (\w+)\b[^\n]*\n)(.*?)(^[^\n]*\baddress end\b)", re.MULTILINE | re.DOTALL)
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CITATION.cff", "SECURITY.md", "mkdocs.yml")

# What a block holds, with an address and without one. {site} is where a code host serves the documentation.
TEXTS = {
    "urls": (
        'Documentation = "{site}"\nIssues = "{url}/issues"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n',
        "",
    ),
    "badges": (
        "[![checks]({url}/actions/workflows/checks.yml/badge.svg)]({url}/actions/workflows/checks.yml)\n"
        "[![documentation](https://img.shields.io/badge/documentation-read-blue)]({site})\n",
        "",
    ),
    "clone": ("```bash\ngit clone {url} && cd {name}\n```\n", "Clone the repository and change to its folder.\n"),
    "citation": ("version: {version}\nrepository-code: {url}\nurl: {site}\n", "version: {version}\n"),
    "security": (
        "Report it privately at [Report a vulnerability]({url}/security/advisories/new), not in a public issue.\n",
        "Report it privately through the code host's *Security* tab, not in a public issue.\n",
    ),
    "site": ("repo_url: {url}\nsite_url: {site}\n", ""),
}


def address(pyproject: str) -> str | None:
    """The repository's address in the text of pyproject.toml, without a slash at its end."""
    urls = tomllib.loads(pyproject)["project"].get("urls", {})
    return urls["Repository"].rstrip("/") if "Repository" in urls else None


def renewed(text: str, url: str | None, version: str = "") -> str:
    """A file's text with its blocks written for this address and version."""
    *_, owner, name = (url or "//").split("/")
    values = {"url": url, "name": name, "site": f"https://{owner.lower()}.github.io/{name}/", "version": version}

    def block(match: re.Match[str]) -> str:
        with_address, without = TEXTS[match[2]]
        return match[1] + (with_address if url else without).format(**values) + match[4]

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--required", action="store_true", help="without an address, fail: a release needs one")
    arguments = parser.parse_args()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    url, version = address(project), tomllib.loads(project)["project"]["version"]
    if arguments.required and url is None:
        print('pyproject.toml has no address: fill in Repository = "https://..." under [project.urls]')
        return 1
    wrong = 0
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if (new := renewed(text, url, version)) == text:
            continue
        if arguments.check:
            print(f"{name}: the repository's address is not current; run python tools/address.py")
            wrong = 1
        else:
            (ROOT / name).write_text(new, encoding="utf-8")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
