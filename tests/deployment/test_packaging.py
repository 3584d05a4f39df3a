"""The wheel and the Flower app bundle work without this checkout."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import fedbn_flwr
from fedbn_flwr.commands import cli
from tests.support.command import ROOT, fedbn
from tests.support.packages import CLEAN, UV, needs_uv, run

pytestmark = needs_uv


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fedbn_flwr"}
    assert "fedbn_flwr/strategies/__init__.py" in names
    assert "fedbn_flwr/strategies.py" not in names
    assert "fedbn_flwr/py.typed" in names
    assert {"fedbn_flwr/apps/experiments/demo.yaml", "fedbn_flwr/apps/experiments/fixbn/table4.yaml"} <= set(names)


@pytest.mark.slow
def test_package_indices_accept_the_wheel_and_the_source(wheel: Path, tmp_path: Path) -> None:
    run(str(UV), "build", "--sdist", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    (source,) = tmp_path.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source, cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_runs_a_federation(clean_environment: Path, tmp_path: Path) -> None:
    where = run(
        clean_environment / "python",
        "-c",
        "import fedbn_flwr.strategies as s; print(s.__file__, s.FixBN.__module__)",
        cwd=tmp_path,
        **CLEAN,
    )
    assert str(clean_environment.parent) in where
    assert "fedbn_flwr.strategies.fixbn" in where
    command = clean_environment / "fedbn"
    assert "quick" in run(command, "list", "experiments", cwd=tmp_path, **CLEAN)
    assert cli.main(["run", "quick", "--out", str(tmp_path / "here")]) == 0
    expected = (tmp_path / "here" / "FixBN" / "model.safetensors").read_bytes()
    for engine in ("local", "ray"):
        printed = run(command, "run", "quick", "--engine", engine, "--out", tmp_path / engine, cwd=tmp_path, **CLEAN)
        assert "communication rounds" in printed
        assert (tmp_path / engine / "FixBN" / "model.safetensors").read_bytes() == expected


@pytest.mark.slow
def test_the_bundle_is_self_contained_and_holds_no_tests(tmp_path: Path) -> None:
    checkout = tmp_path / "fedbn-flwr"  # flwr build expects a folder name of this form
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "*_cache", "__pycache__"))
    flwr = Path(sys.executable).parent / "flwr"
    run(flwr, "build", "--app", checkout, cwd=tmp_path, FLWR_HOME=str(tmp_path / "home"))
    (bundle,) = tmp_path.glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    assert {name.split("/")[0] for name in names} <= {
        "apps", "fedbn_flwr", "strategies", "pyproject.toml", "README.md", "LICENSE", ".info",
    }  # fmt: skip
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(bundle).extractall(unpacked)
    code = (
        "import json, fedbn_flwr, apps.server_app, apps.client_app\n"
        "import fedbn_flwr.strategies as s, fedbn_flwr.experiment.file.content as e\n"
        "print(json.dumps([s.__file__, s.FixBN.__module__, sorted(e.shipped_experiments()), fedbn_flwr.__version__]))"
    )
    printed = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(unpacked))
    file, module, experiments, version = json.loads(printed.splitlines()[-1])
    assert file.startswith(str(unpacked))
    assert module == "fedbn_flwr.strategies.fixbn"
    assert {"demo", "fixbn/table4"} <= set(experiments)
    assert version == fedbn_flwr.__version__


@pytest.mark.slow
def test_two_projects_with_packages_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    """A project that is started inside another must still get its own code."""
    other = tmp_path / "other"
    for package in ("apps", "strategies"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").write_text("")
    (other / "strategies" / "mine.py").write_text("NAME = 'the other project'\n")
    (other / "apps" / "server_app.py").write_text(
        "import time\n"
        "from flwr.app import Message, RecordDict\n"
        "from flwr.serverapp import ServerApp\n"
        "app = ServerApp()\n"
        "@app.main()\n"
        "def main(grid, context):\n"
        "    end = time.monotonic() + 300\n"
        "    while len(nodes := list(grid.get_node_ids())) < 2 and time.monotonic() < end:\n"
        "        time.sleep(0.1)\n"
        "    replies = grid.send_and_receive([Message(RecordDict(), n, 'query') for n in nodes], timeout=300)\n"
        "    print(sorted(r.content['reply']['name'] for r in replies))\n"
    )
    (other / "apps" / "client_app.py").write_text(
        "from flwr.app import ConfigRecord, Message, RecordDict\n"
        "from flwr.clientapp import ClientApp\n"
        "from strategies.mine import NAME\n"
        "app = ClientApp()\n"
        "@app.query()\n"
        "def query(message, context):\n"
        "    return Message(RecordDict({'reply': ConfigRecord({'name': NAME})}), reply_to=message)\n"
    )
    (other / "pyproject.toml").write_text(
        '[project]\nname = "other"\nversion = "1.0"\ndescription = "x"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "other"\nfab-include = ["apps/*.py", "strategies/*.py"]\n'
        '[tool.flwr.app.components]\nserverapp = "apps.server_app:app"\nclientapp = "apps.client_app:app"\n'
    )
    # From inside our checkout, whose folders have the same names.
    done = fedbn("flwr", "run", other, "--engine", "ray", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['the other project', 'the other project']" in done.stdout
