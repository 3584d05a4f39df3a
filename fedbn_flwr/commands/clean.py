"""`fedbn clean`: deletes old runs and old node states."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from fedbn_flwr.errors import SettingsError

from .common import Commands, add_command, default_folder, duration, size_text

_UNITS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "clean",
        clean,
        summary="delete old finished runs and old node states",
        description=(
            "List finished runs and node states that have not changed for a time, and delete them with --yes. Running "
            "runs are never deleted, others that are not finished only with --unfinished."
        ),
        epilog="Example: fedbn clean runs --older-than 90d --keep-models --yes",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="run folders, or their parent folders ($FEDBN_OUT or runs; none if --states is given)",
    )
    parser.add_argument("--states", type=Path, metavar="DIR", help="state folder of a node, whose old states to delete")
    parser.add_argument(
        "--older-than", default="30d", metavar="AGE", help="without a change for so long: 12h, 30d, 8w (30d)"
    )
    parser.add_argument("--keep-models", action="store_true", help="of runs delete only the checkpoint")
    parser.add_argument("--unfinished", action="store_true", help="also interrupted, failed and silent runs")
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is changed")


def clean(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.retention import Old, old_runs, old_states

    now = time.time()
    before = now - _seconds(arguments.older_than)
    folders = arguments.folders or ([] if arguments.states else [default_folder()])
    found = list(old_runs(folders, before, keep_models=arguments.keep_models, unfinished=arguments.unfinished))
    if arguments.states:
        found += old_states(arguments.states, before)
    old = [each for each in found if isinstance(each, Old)]
    for each in found:
        if isinstance(each, str):
            print(each)
            continue
        if arguments.yes:
            each.delete()
        print(f"{each.path}: {'deleted' if arguments.yes else 'would be deleted'}, {each.what}, changed "
              f"{duration(now - each.changed)} ago, {size_text(each.size)}")  # fmt: skip
    freed = f"{len(old)} of them, {size_text(sum(each.size for each in old))}"
    if not old:
        print(f"nothing to delete that is older than {arguments.older_than}")
    elif arguments.yes:
        print(f"deleted: {freed}")
    else:
        print(f"nothing was deleted; --yes deletes {freed}")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,5})([hdw])", text)
    if match is None:
        raise SettingsError(f"--older-than is {text!r}; expected a number with h, d or w, such as 30d, at most 99999")
    return int(match[1]) * _UNITS[match[2]]
