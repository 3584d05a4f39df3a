"""Bounds of a user's own, without those of the extension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.messages.aggregate import Arrays


class Equal:
    """Each client counts once, and the last of three or more is left out."""

    def notes(self) -> Mapping[str, Any]:
        return {"equal": True}

    def of_updates(self) -> Mapping[str, Any]:
        return self.notes()

    def outliers(self, cohort: Mapping[int, Arrays], keys: Sequence[str]) -> Mapping[int, str]:
        return {[*cohort][-1]: "it is the last one"} if len(cohort) > 2 else {}

    def weights(self, weights: Sequence[float]) -> list[float]:
        return [1.0] * len(weights)

    def clip(self, replies: Sequence[Arrays], sent: Arrays, what: str) -> Sequence[Arrays]:
        return replies
