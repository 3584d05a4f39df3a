"""One command per chore, `nox -s check` for instance; without a name, check and test.

They run in the environment that nox is installed in (`uv pip install -e '.[dev]'`), here as in the workflows: an
environment per chore would download PyTorch again.
"""

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["check", "test"]


@nox.session
def check(session: nox.Session) -> None:
    """Format, lint, types and prose; seconds once mypy has a cache."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("python", "tools/prose.py")
    session.run("python", "tools/tables.py", "--check")


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Rewrite the files that `check` would complain about."""
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
    session.run("python", "tools/tables.py")


@nox.session
def test(session: nox.Session) -> None:
    """Unit tests and training on the local engine; arguments after -- go to pytest."""
    session.run("pytest", *session.posargs)


@nox.session(name="test-all")
def test_all(session: nox.Session) -> None:
    """All tests but the nightly ones, with Ray and a local deployment, in less than ten minutes on two cores."""
    session.run("pytest", "-n", "2", "-m", "not nightly", "--cov", "--durations=25", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The tests that wait as long as Flower does for users, or need containers or a GPU."""
    session.run("pytest", "-m", "nightly", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Rewrite the generated tables and build the documentation site in build/site."""
    session.run("python", "tools/tables.py")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """The overhead beside a bare PyTorch loop; close other programs first."""
    session.run("fedbn", "bench", *session.posargs)
