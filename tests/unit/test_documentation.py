"""What the documentation says about installing, commands, versions and files of this project is so."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator

import yaml

from fedbn_flwr.commands.cli import parser
from fedbn_flwr.experiment.data import shape_without_data
from fedbn_flwr.experiment.settings import Evaluate, Settings
from tests.support.command import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("apps", "benchmarks", "deploy", "docs", "examples", "fedbn_flwr", "strategies", "tests", "tools", ".github")
TEXTS = (".py", ".md", ".txt", ".yml", ".yaml", ".toml", ".sh", ".ipynb", ".html", "")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def texts() -> Iterator[tuple[str, str]]:
    """The files that users read or that print what they read."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    for file in [*ROOT.iterdir(), *files]:
        if file.is_file() and file.suffix in TEXTS and "__pycache__" not in file.parts:
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def test_nothing_installs_the_project_from_an_index_where_it_is_not() -> None:
    """Another package could have its name there. A wheel is a file."""
    from_index = re.compile(r"\binstall(?: -\S+)* ['\"]?fedbn[-_]flwr(?!\S*whl)")
    assert [name for name, text in texts() if from_index.search(text)] == []


def commands() -> Iterator[tuple[str, str]]:
    """Pairs of a page and its code; raw outputs have their commands in comments."""
    for page in PAGES:
        yield page.name, "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    for output in sorted((ROOT / "docs" / "results").rglob("*.txt")):
        yield output.name, "\n".join(re.findall(r"^# .*", output.read_text(encoding="utf-8"), re.MULTILINE))


def test_commands_named_in_the_documentation_exist() -> None:
    (known,) = (action.choices for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    measured = importlib.import_module("benchmarks.speed.__main__").BENCHMARKS  # mypy knows it by another name
    unknown = set()
    for name, code in commands():
        unknown |= {(name, f"fedbn {word}") for word in re.findall(r"\bfedbn ([a-z]+)", code) if word not in known}
        for module in re.findall(r"\bpython3? -m ([\w.]+)", code):
            if importlib.util.find_spec(module) is None:
                unknown.add((name, module))
        for benchmarks in re.findall(r"\bbenchmarks\.speed((?: [a-z]+)*)", code):
            unknown |= {(name, word) for word in benchmarks.split() if word not in measured}
        for script in re.findall(r"\bpython ((?:benchmarks|deploy|examples|tools)/\S+\.py)", code):
            if not (ROOT / script).is_file():
                unknown.add((name, script))
    assert unknown == set()


def test_links_of_the_pages_exist_in_the_repository() -> None:
    missing = {
        (page.name, link)
        for page in [*PAGES, CONTRIBUTING]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", CODE.sub("", page.read_text(encoding="utf-8")))
        if not (page.parent / link).exists()
    }
    assert missing == set()


def test_pages_that_errors_and_docstrings_name_exist() -> None:
    named = {
        (name, page)
        for name, text in texts()
        if name.startswith(("fedbn_flwr/", "strategies/", "apps/"))
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)
    }
    assert len(named) > 3
    assert [pair for pair in named if not (ROOT / pair[1]).is_file()] == []


def test_functions_in_the_tables_of_the_guide_exist() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| `([\w/]+)\.py` \|$", CONTRIBUTING.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 20
    for function, file in rows:
        pkgutil.resolve_name(f"{file.replace('/', '.')}:{function}")  # raises an error if there is no such function


def test_the_ports_on_the_page_for_sites_are_those_of_docker_compose() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    server = {
        name: each.get("ports", []) for name, each in services.items() if each.get("profiles", ["proxy"]) == ["proxy"]
    }
    published = {port.rsplit(":", 1)[1] for ports in server.values() for port in ports}
    inside = {word.removeprefix("--port=") for word in services["supernode-0"]["entrypoint"] if "--port=" in word}
    page = (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "images" / "sites.svg").read_text(encoding="utf-8")
    assert {*re.findall(r"\| (\d{4}) \|", page)} == {*re.findall(r">port (\d{4})", picture)} == published | inside
    assert {name for name, ports in server.items() if ports} == {"superlink", "superexec-serverapp", "proxy"}, (
        "no site opens one"
    )


def test_a_server_without_data_needs_what_the_meaning_of_its_key_gives() -> None:
    meaning = str(Evaluate.model_fields["server"].description)
    (data,) = re.findall(r"`(data: \{.*?\})`", meaning)
    run = Settings.model_validate({**yaml.safe_load(data), "evaluate": {"server": False}})
    assert shape_without_data(run).classes == 10
