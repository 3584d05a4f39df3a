"""Paths, names, times and addresses that cannot be used end with one line, and outputs that others read are valid."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedbn_flwr import cli
from fedbn_flwr.commands.metrics import make_server
from fedbn_flwr.engines import simulation
from fedbn_flwr.engines.reach import check_server
from fedbn_flwr.experiment.find import load_experiment
from fedbn_flwr.results.folder import RunFolder
from tests.support.runs import write_run

LONG = "x" * 300  # longer than file systems allow


@pytest.mark.parametrize(
    "words",
    [
        ["status", LONG],
        ["run", "quick", "--out", LONG],
        ["report", LONG],
        ["partition", "quick", "--out", f"{LONG}/x.png"],
        ["clean", "--states", LONG],
        ["metrics", "--once", LONG],
        ["explain", "quick", f"data.name=/{LONG}"],
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedbn: error: '")
    assert LONG in error
    assert error.endswith(": File name too long\n")
    assert error.count("\n") == 1
    monkeypatch.setenv("FEDBN_DEBUG", "1")
    with pytest.raises(OSError, match="File name too long"):
        cli.main(words)


def test_an_error_of_the_system_without_a_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5000, "unheard of")

    monkeypatch.setattr("fedbn_flwr.commands.status.check_seconds", fail)
    with pytest.raises(OSError, match="unheard of"):
        cli.main(["status"])


@pytest.mark.parametrize("key", ["data-path", "state"])
def test_a_path_of_a_site_that_cannot_be_used_is_a_failed_check(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", "--node-config", f"{key}='/{LONG}'"]) == 1
    found = json.loads(capsys.readouterr().out)["checks"]
    assert any(each["status"] == "failed" and "File name too long" in each["found"] for each in found)


def test_standard_output_may_be_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for code, words in ((0, ["list", "norms"]), (0, ["explain", "quick", "--no-trial"]), (2, ["run", "demoo"])):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", None)  # as Python starts after >&-
            assert cli.main(words) == code
            sys.stdout.close()
    assert "did you mean 'demo'" in capsys.readouterr().err


def test_out_of_another_flower_app_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(
        '[project]\nname = "other"\n[tool.flwr.app.components]\nserverapp = "a:b"\nclientapp = "a:c"\n'
    )
    run = RunFolder(tmp_path / "out")
    write_run(run.path, "label")
    summary = run.summary()
    assert summary is not None
    summary.status = "running"
    run.write_summary(summary)

    def stopped(_: Path, run_config: dict[str, Any], __: str) -> None:
        assert run_config["out"] in (5, str(run.path))
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "run_app", stopped)
    for out in ("out=5", f"out='{run.path}'"):
        assert cli.main(["flwr", "run", str(app), "--run-config", out]) == 130
    assert "stopped" in capsys.readouterr().err
    found = run.summary()
    assert found is not None
    assert found.status == "running"


@pytest.mark.parametrize("name", ["", ".yaml", "folder/", os.fsdecode(b"caf\xe9"), "two\nlines"])
def test_names_that_cannot_be_used_make_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    error = capsys.readouterr().err
    assert "expected the name of an experiment" in error or "expected a name of printable characters" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_new_experiment_is_named_as_a_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine.yml"]) == 0
    assert cli.main(["new", "a b"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a b.yaml", "mine.yaml"]
    assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == ["fedbn", "run", "a b.yaml"]
    assert "fedbn run 'a b.yaml'" in (tmp_path / "a b.yaml").read_text()
    load_experiment(str(tmp_path / "a b.yaml"))


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e9", "0", "-1"])
def test_seconds_have_bounds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check", "--timeout"], ["status", "--watch", "--every"]):
        assert cli.main([*words[:-1], f"{words[-1]}={seconds}"]) == 2
        assert "expected seconds, more than 0 and at most 86400" in capsys.readouterr().err


@pytest.mark.parametrize("digits", [6, 400, 5000])
def test_ages_have_bounds(digits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clean", str(tmp_path), "--older-than", "9" * digits + "d"]) == 2
    assert "at most 99999" in capsys.readouterr().err
    assert cli.main(["clean", str(tmp_path), "--older-than", "99999w"]) == 0


def test_an_address_that_can_be_no_name_is_a_failed_check() -> None:
    (found,) = check_server("a..b:9092", None, 1.0)
    assert (found.status, found.found) == ("failed", "the name 'a..b' is unknown here")
    (found,) = check_server("localhost:" + "9" * 5000, None, 1.0)
    assert found.status == "failed"


def test_the_status_of_a_run_that_diverged_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "a", config={"rounds": 2, "clients": 2}, lines=[{"accuracy": 0.1, "loss": float("nan")}])
    assert cli.main(["status", "--json", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["accuracy"], found["loss"]) == (0.1, None)


@contextmanager
def serving(host: str) -> Iterator[int]:
    with make_server(host, 0, lambda: "a 1\n") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_found_with_a_query_or_a_slash() -> None:
    with serving("127.0.0.1") as port:
        for path in ("/metrics?x=1", "/metrics/"):
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                assert answer.read() == b"a 1\n"
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{port}/metrics/other", timeout=10)


@pytest.mark.parametrize(("error", "lines"), [(ConnectionResetError, 0), (BrokenPipeError, 0), (ValueError, 1)])
def test_a_scraper_may_disconnect(error: type[Exception], lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    with make_server("127.0.0.1", 0, str) as server:
        try:
            raise error
        except Exception:
            server.handle_error(b"", ("127.0.0.1", 1))
    assert capsys.readouterr().err.count(error.__name__) == lines


def test_metrics_are_served_at_ipv6_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with serving("::1") as port, urlopen(f"http://[::1]:{port}/metrics", timeout=10) as answer:
        assert answer.read() == b"a 1\n"
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", lambda server: None)
    assert cli.main(["metrics", "--listen", "[::1]:0"]) == 0
    assert capsys.readouterr().out.startswith("metrics: http://[::1]:")
