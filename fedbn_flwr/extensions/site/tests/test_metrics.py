"""deploy/monitoring/metrics.py: what Prometheus reads about runs and certificates."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from tests.support.certificates import write_certificate
from tests.support.command import PATIENCE, ROOT, environment
from tests.support.runs import write_run

FILE = ROOT / "deploy" / "monitoring" / "metrics.py"
SCRIPT = runpy.run_path(str(FILE))
METRICS = SCRIPT["METRICS"]


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, float]:
    """The samples of one call, by name and labels as they are written."""
    SCRIPT["main"](["--once", *map(str, words)])
    lines = capsys.readouterr().out.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {sample.split("{")[0] for sample in samples}
    for name in names:
        assert lines.count(f"# TYPE {name} gauge") == 1
    assert names <= METRICS.keys()
    return {sample: float(value) for sample, value in samples.items()}


def test_a_run_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 'say "hi"\\ now', config={"rounds": 5, "clients": 4}, clients=3)
    found = printed(capsys, tmp_path)
    labels = f'experiment="name",label="say \\"hi\\"\\\\ now",run="{tmp_path / "a"}"'
    assert found[f"fedbn_run_round{{{labels}}}"] == 3
    assert found[f"fedbn_run_rounds{{{labels}}}"] == 5
    assert found[f"fedbn_run_accuracy{{{labels}}}"] == pytest.approx(0.6)
    assert found[f"fedbn_run_clients{{{labels}}}"] == 3
    assert found[f'fedbn_run_bytes{{direction="up",{labels}}}'] == 3 * 2**20
    status = {sample: value for sample, value in found.items() if sample.startswith("fedbn_run_status")}
    assert [sample for sample, value in status.items() if value] == [f'fedbn_run_status{{{labels},status="finished"}}']
    assert len(status) == 5


def test_certificates_have_days_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ca.crt"
    write_certificate(file, 20.5)
    servers = ["--superlink", "127.0.0.1:9", "--superlink", "127.0.0.1:7", "--superlink", "127.0.0.1:9"]
    found = printed(capsys, tmp_path, "--certificate", file, *servers, "--root-certificates", file)
    assert 20.4 < found[f'fedbn_certificate_days{{certificate="{file}"}}'] <= 20.5
    assert [found[f'fedbn_superlink_up{{superlink="127.0.0.1:{port}"}}'] for port in (9, 7)] == [0, 0]
    assert 0 < found[f'fedbn_disk_free_ratio{{folder="{tmp_path}"}}'] < 1
    assert not any(sample.startswith("fedbn_nodes") for sample in found), "a SuperLink that is down has no nodes"


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"ca\.crt' is not a readable PEM certificate"):
        SCRIPT["main"]([str(tmp_path), "--listen", "127.0.0.1:0", "--certificate", str(tmp_path / "ca.crt")])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_prometheus_is_answered(host: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", "A", config={"rounds": 5})
    write_certificate(file := tmp_path / "ca.crt", 20.5)
    command = [sys.executable, str(FILE), str(tmp_path), "--listen", f"{host}:0", "--certificate", str(file)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            if not (line := server.stdout.readline()) and host == "[::1]":
                pytest.skip("no IPv6 here")
            port = re.findall(r"\d+", line)[0]
            with urlopen(f"http://{host}:{port}/metrics", timeout=PATIENCE) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=")
                assert 'fedbn_run_round{experiment="name",label="A"' in answer.read().decode()
        finally:
            server.terminate()


@pytest.mark.parametrize("option", ["--listen", "--superlink"])
def test_wrong_addresses_are_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SCRIPT["main"]([str(tmp_path), option, "localhost"])
    assert f"{option}: 'localhost'; expected HOST:PORT" in capsys.readouterr().err


def test_alerts_and_the_dashboard_use_metrics_that_exist() -> None:
    folder = ROOT / "deploy" / "monitoring"
    assert yaml.safe_load((folder / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
    (group,) = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    used = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    used |= {target["expr"]: target["expr"] for panel in panels for target in panel["targets"]}
    named = {name: set(re.findall(r"fedbn_\w+", expression)) for name, expression in used.items()}
    assert [name for name, metrics in named.items() if not metrics] == ["MetricsDown"], "Prometheus's own"
    assert set().union(*named.values()) <= METRICS.keys()
