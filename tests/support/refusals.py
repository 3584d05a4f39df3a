"""Commands that are refused."""

from __future__ import annotations

import pytest

from fedbn_flwr.commands import cli


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line with which a command is refused."""
    assert cli.main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error
