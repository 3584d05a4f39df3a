"""Finds the round with the best main figure on the validation examples, and ends a run that no longer improves.

Everything follows from the history, so a resumed run continues with the same counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.tasks import Task, goodness, title_of

from .listener import Listener, Round, Running


class Best(Listener):
    def __init__(self, folder: RunFolder, task: Task, patience: int | None) -> None:
        self.folder = folder
        self.main = task.main
        self.patience = patience
        self.best_round = 0
        self.best: float | None = None
        self.waited = 0  # evaluations since the best one

    def on_start(self, running: Running, at: Round) -> Round:
        for line in self.folder.history():
            self._note(line)
        return self._ended(at)

    def on_round(self, running: Running, at: Round) -> Round:
        if self._note(at.line):
            at = at.with_figures({"best_round": at.number}, {}, is_best=running.prepared.rule.traits.has_global_model)
        return self._ended(at)

    def _ended(self, at: Round) -> Round:
        reason = None if at.is_last else self._reason()
        return at if reason is None else replace(at, ended=reason, is_last=True)

    def _note(self, line: Mapping[str, Any]) -> bool:
        """Take a line of the history into account; whether its round is the best so far (the first of equal ones)."""
        figure: float | None = line.get(f"validation_{self.main}")
        if figure is None:
            return False
        before = -math.inf if self.best is None else goodness(self.main, self.best)
        if is_best := goodness(self.main, figure) > before:
            self.best, self.best_round, self.waited = figure, line["round"], 0
        else:
            self.waited += 1
        return is_best

    def _reason(self) -> str | None:
        if self.patience is None or self.waited < self.patience:
            return None
        count = "evaluation" if self.waited == 1 else "evaluations"
        best = "" if self.best is None else f"; its best is {self.best:.4f} in round {self.best_round}"
        return f"validation {title_of(self.main)} has not improved in {self.waited} {count}{best}"
