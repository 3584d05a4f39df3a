"""Parts of the user by the name `module:name`."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.results.naming import give_name
from tests.support.command import ROOT

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the current folder; its name must not be that of another test's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written = []

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_a_module_of_the_current_folder_is_found_though_the_folder_is_not_on_the_path(write: Write) -> None:
    assert "" not in sys.path
    write("parts_beside", "NAME = 'beside'")
    write(
        "parts_here",
        "import parts_beside\nclass Nets:\n    @staticmethod\n    def one():\n        return parts_beside.NAME",
    )
    assert named.load("model.name", "parts_here:Nets.one")() == "beside"


def test_the_folder_of_the_command_holds_in_processes_that_run_elsewhere(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("parts_of_the_command", "def one():\n    return 1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "from fedbn_flwr import named; print(named.load('model.name', 'parts_of_the_command:one')())"
    monkeypatch.setenv(named.FOLDER, str(tmp_path))
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=elsewhere, capture_output=True, text=True)
    assert found.stdout == "1\n", found.stderr


def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "other"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_module_of_another_folder_is_not_taken_for_that_of_this_one(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("parts_twice", "def one():\n    return 1")
    assert named.load("model.name", "parts_twice:one")() == 1
    folder = other_folder(tmp_path, monkeypatch)
    (folder / "parts_twice.py").write_text("def one():\n    return 2")
    message = (
        r"model\.name='parts_twice:one': 'parts_twice' is already loaded from '.*parts_twice.py', not from "
        r"'.*other/parts_twice.py'; start a new process, or give the module another name"
    )
    with pytest.raises(SettingsError, match=message):
        named.load("model.name", "parts_twice:one")
    (folder / "parts_twice.py").write_text("def one():\n    return 1")  # as in an app bundle
    assert named.load("model.name", "parts_twice:one")() == 1


def test_a_file_with_the_name_of_a_module_of_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.py").write_text("def net():\n    return 1")
    with pytest.raises(SettingsError, match=r"'token' is already loaded from .*, not from '.*token.py'"):
        named.load("model.name", "token:net")


def test_a_file_of_the_folder_does_not_replace_a_module_that_is_not_asked_for(write: Write) -> None:
    write("parts_asked_for", "def one():\n    return 1")
    named.load("model.name", "json:dumps")
    assert str(Path.cwd()) not in sys.path
    named.load("model.name", "parts_asked_for:one")
    assert str(Path.cwd()) in sys.path


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (functools.partial(int, base=2), "builtins:int(base=2)"),
        (
            functools.partial(functools.partial(sorted), key=None, reverse=True),
            "builtins:sorted(key=None, reverse=True)",
        ),
        (
            functools.partial(dict, a="1, b=(2", c=[{"d": (-1, 0.5)}]),
            "builtins:dict(a='1, b=(2', c=[{'d': (-1, 0.5)}])",
        ),
    ],
)
def test_a_partial_has_a_name_that_others_can_load(part: functools.partial[object], name: str) -> None:
    assert give_name(part) == name
    loaded = named.load("data.name", name)
    assert isinstance(loaded, functools.partial)
    assert (loaded.func, loaded.args, loaded.keywords) == (part.func, (), part.keywords)


def power(exponent: int) -> Callable[[int], int]:
    return lambda number: number**exponent


def test_a_closure_has_a_name_in_this_process_alone() -> None:
    square, cube = power(2), power(3)
    assert give_name(square) == give_name(square) != give_name(cube)
    assert named.load("train.loss", give_name(cube))(2) == 8
    first, other = (functools.partial(sorted, key=key) for key in (len, str))  # no literal
    assert give_name(first).startswith("builtins:sorted@")
    assert named.load("train.loss", give_name(other))(["10", "9"]) == ["10", "9"]
    assert named.load("train.loss", give_name(first))(["10", "9"]) == ["9", "10"]
    code = "from tests.unit.test_named import give_name, power; print(give_name(power(2)))"
    other_name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    assert other_name.partition("@")[0] == give_name(power(2)).partition("@")[0]
    assert other_name.partition("-")[0] != give_name(power(2)).partition("-")[0]
    with pytest.raises(SettingsError, match="was defined inside a function and given to"):
        named.load("train.loss", other_name)


def test_a_file_whose_name_is_no_identifier_is_a_module(write: Write) -> None:
    write("parts-with-hyphens", "class Nets:\n    one = dict")
    assert named.load("model.name", "parts-with-hyphens:Nets.one") is dict


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parts_wrong", r"train\.loss='parts_wrong': expected module:callable, for instance my_parts:loss"),
        (":one", "expected module:callable"),
        ("parts_wrong:", "expected module:callable"),
        ("parts_wrong:one()", r"train\.loss='parts_wrong:one\(\)': expected module:callable, for instance"),
        ("parts_wrong:one.", "expected module:callable"),
        ("parts_wrong:one(scale=3)(a=1)", "expected module:callable"),
        ("parts_wrong:one(scale=three)", "expected module:callable"),
        ("parts_wrong:one(**{'scale': 3})", "expected module:callable"),
        ("parts_wrong:make.<locals>.one@0123abcd", "was defined inside a function and given to run"),
        ("http://127.0.0.1:1/x", "expected module:callable"),
        ("p" * 300 + ":one", "cannot import 'p+' "),
        ("no_parts:one", r"cannot import 'no_parts' .*; expected a module in '.*', in a folder of PYTHONPATH"),
        ("parts_broken:one", r"cannot import 'parts_broken' \(ModuleNotFoundError: No module named 'a_package'\)$"),
        ("parts_wrong:on", r"'parts_wrong' has no 'on'; did you mean 'one'\? known: ends, one, two"),
        ("parts_wrong:FIVE", "is a int; expected a function or a class"),
        (
            "parts_wrong:two",
            r"'parts_wrong:two' failed: TypeError: two\(\) missing 1 required positional argument: 'b'",
        ),
        ("parts_exits:one", r"cannot import 'parts_exits' \(SystemExit: 3\)"),
        ("parts_wrong:ends", "'parts_wrong:ends' failed: SystemExit: 4"),
        ("parts_wrong:one", "'parts_wrong:one' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_is_one_message_with_the_key(write: Write, name: str, message: str) -> None:
    write(
        "parts_wrong",
        "FIVE = 5\ndef one(a, scale):\n    return a / 0\ndef two(a, b, scale):\n    return a\n"
        "def ends(a, scale):\n    raise SystemExit(4)",
    )
    write("parts_exits", "import sys\nsys.exit(3)")
    write("parts_broken", "import a_package")
    with pytest.raises(SettingsError, match=message) as caught:
        named.call("train.loss", name, 1, scale=2)
    assert str(caught.value).startswith("train.loss=")


def everything(*positional: object, **arguments: object) -> dict[str, object]:
    return {"positional": positional, **arguments}


class Everything:
    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments


OPTIONS = {"name": "a", "key": "b", "function": "c", "options": "d", "arguments": "e", "self_": "f"}


def test_options_of_a_user_may_have_any_name() -> None:
    name = f"{__name__}:everything"
    assert named.call("data.name", name, 1, **OPTIONS) == {"positional": (1,), **OPTIONS}
    assert named.with_options("train.loss", name, OPTIONS)(2) == {"positional": (2,), **OPTIONS}
    assert named.with_options("train.loss", f"{__name__}:Everything", OPTIONS).arguments == OPTIONS  # type: ignore[attr-defined]
