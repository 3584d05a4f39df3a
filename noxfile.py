"""One command per chore, `nox -s check` for instance; without a name, check and test.

They run in the environment that nox is installed in (`uv pip install -e . --group dev`), also in the workflows: an
environment per chore would download PyTorch each time.
"""

import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["check", "test"]


def run(session: nox.Session, *words: str, **variables: str | None) -> None:
    """Run a command of this environment, which need not be active, with these variables too."""
    session.run(str(Path(sys.executable).with_name(words[0])), *words[1:], env=variables)


@nox.session
def check(session: nox.Session) -> None:
    """Format, lint, types, prose, generated tables, documentation and workflows."""
    run(session, "ruff", "format", "--check", ".")
    run(session, "ruff", "check", ".")
    run(session, "mypy")
    # Advertising; git grep fails if it finds nothing.
    session.run("git", "grep", "-nEif", "tools/prose.txt", "--", ":!tools/prose.txt", external=True, success_codes=[1])
    run(session, "python", "tools/tables.py", "--check")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    run(session, "mkdocs", "build", "--strict")
    workflows = map(str, Path(".github/workflows").glob("*.yml"))
    run(session, "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    run(session, "check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff")
    run(session, "check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    run(session, "zizmor", "--offline", "--quiet", ".github")


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Fix formatting and lint, and rewrite the generated tables."""
    run(session, "ruff", "check", "--fix", ".")
    run(session, "ruff", "format", ".")
    run(session, "python", "tools/tables.py")


@nox.session
def test(session: nox.Session) -> None:
    """The README's test command; arguments after -- go to pytest."""
    run(session, "pytest", "-n", "3", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """All strategies on Ray, Flower's runtime, failing sites, notebooks, packages, and more cases of faster tests."""
    # One process more than cores: these tests wait a lot, but Ray and sites are slow beside too many of their kind. The
    # limit is above the tests' own patience, so a program that hangs is shown with what it has printed.
    options = ("-n", "3", "-m", "slow and not nightly", "--timeout=1800", "--durations=25")
    run(session, "pytest", *options, *session.posargs)


# `test` and `slow` have the processor's own instructions, and one thread.
MACHINES: list[dict[str, str | None]] = [
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"FEDBN_TEST_THREADS": "2"},
]


@nox.session
def machines(session: nox.Session) -> None:
    """The numerical tests with the instructions of older processors, and with two threads."""
    rooms = [
        "tests/federation",
        *(f"tests/unit/{room}" for room in ("norms", "models", "client", "exchange", "messages")),
    ]
    for settings in MACHINES:
        session.log(" ".join(f"{key}={value}" for key, value in settings.items()))
        run(session, "pytest", "-n", "3", *(session.posargs or rooms), **settings)


@nox.session
def coverage(session: nox.Session) -> None:
    """Both groups of tests, and the lines that they miss. Tracing nearly doubles the time of a test."""
    run(session, "pytest", "-n", "4", "-m", "not nightly", "--cov", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Tests with Flower's real timeouts, and tests that need containers, a GPU, or Chromium and npm."""
    run(session, "pytest", "-m", "nightly", *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the pinned packages, from PyPI's database; needs the Internet."""
    options = ("--strict", "--no-deps", "--disable-pip", "--progress-spinner=off")
    run(session, "pip-audit", *options, "--requirement", "constraints.txt")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Property tests of all parsers with 100,000 cases, or as many as FEDBN_EXAMPLES says."""
    session.env.setdefault("FEDBN_EXAMPLES", "100000")
    run(
        session,
        "pytest",
        "-n",
        "2",
        "-m",
        "not nightly",
        "tests/unit",
        "-k",
        "test_any_",
        "--timeout",
        "3600",
        *session.posargs,
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Rewrite the generated tables and build the documentation site in build/site."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    run(session, "python", "tools/tables.py")
    run(session, "mkdocs", "build", "--strict")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the overhead over a bare PyTorch loop; close other programs first."""
    run(session, "python", "-m", "benchmarks.speed", *session.posargs)
