"""One command per chore, `nox -s check` for instance; without a name, check and test.

They run in the environment that nox is installed in (`uv pip install -e '.[dev]'`), also in the workflows: an
environment per chore would download PyTorch each time.
"""

import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["check", "test"]


def run(session: nox.Session, *words: str) -> None:
    """Run a command of this environment, which need not be active."""
    session.run(str(Path(sys.executable).with_name(words[0])), *words[1:])


@nox.session
def check(session: nox.Session) -> None:
    """Format, lint, types, prose and generated tables."""
    run(session, "ruff", "format", "--check", ".")
    run(session, "ruff", "check", ".")
    run(session, "mypy")
    run(session, "python", "tools/prose.py")
    run(session, "python", "tools/tables.py", "--check")


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Fix formatting and lint, and rewrite the generated tables."""
    run(session, "ruff", "check", "--fix", ".")
    run(session, "ruff", "format", ".")
    run(session, "python", "tools/tables.py")


@nox.session
def test(session: nox.Session) -> None:
    """Unit tests and training on the local engine; arguments after -- go to pytest."""
    run(session, "pytest", *session.posargs)


@nox.session(name="test-all")
def test_all(session: nox.Session) -> None:
    """All tests except the nightly ones, with Ray and a local deployment; under ten minutes on two cores."""
    run(session, "pytest", "-n", "2", "-m", "not nightly", "--cov", "--durations=25", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Tests with Flower's real timeouts, and tests that need containers or a GPU."""
    run(session, "pytest", "-m", "nightly", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Rewrite the generated tables and build the documentation site in build/site."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    run(session, "python", "tools/tables.py")
    run(session, "mkdocs", "build", "--strict")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the overhead over a bare PyTorch loop; close other programs first."""
    run(session, "fedbn", "bench", *session.posargs)
