"""A long table, which has a row for each time of a series, becomes series [N, C, T]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbn_flwr.errors import DataError, log_once

from .source import Window


class Long:
    """A long table by its columns of ids and times; without times, the rows of a series keep their order.

    The series are in the order of their ids. If they are cut into windows, each window is a series from then on.
    """

    def __init__(self, where: str, ids: np.ndarray, times: np.ndarray | None, window: Window | None = None) -> None:
        keys = [_ordered(where, column) for column in (ids, times) if column is not None]
        twice = 0 if times is None else len(ids) - len(np.unique(keys, axis=1).T)
        if twice:
            raise DataError(f"{where} has {twice} rows with the series and the time of another row; expected one each")
        self.where = where  # for errors
        self.rows = np.lexsort(keys[::-1])  # by series and time
        self.series = keys[0][self.rows]  # the series of each row
        self.lengths = np.bincount(self.series)
        self.first = np.cumsum(self.lengths) - self.lengths  # the place of the first row of each series
        if window is not None:
            self._cut(window.length, window.step)

    def _cut(self, length: int, step: int) -> None:
        """Rows behind the last window of a series are left out, and so are rows of series shorter than a window."""
        counts = np.maximum(0, (self.lengths - length) // step + 1)
        if not (total := int(counts.sum())):
            raise DataError(
                f"{self.where}: no series has the {length} rows of a window (data.window.length); the longest has "
                f"{self.lengths.max()}"
            )
        if short := int((counts == 0).sum()):
            log_once(f"data.window leaves out {short} of {len(counts)} series of {self.where}, shorter than a window")
        within = np.arange(total) - np.repeat(
            np.cumsum(counts) - counts, counts
        )  # the number of a window in its series
        starts = np.repeat(self.first, counts) + step * within
        self.rows = self.rows[(starts[:, None] + np.arange(length)).ravel()]
        self.series = np.repeat(np.arange(total), length)
        self.lengths = np.full(total, length)
        self.first = length * np.arange(total)

    def stacked(self, columns: Sequence[np.ndarray], length: int) -> np.ndarray:
        """float32 [N, C, length], zero behind the end of a series."""
        values = np.zeros((len(self.lengths), len(columns), length), np.float32)
        place = np.arange(len(self.rows)) - self.first[self.series]
        try:
            values[self.series, :, place] = np.stack([column.astype(np.float32) for column in columns], 1)[self.rows]
        except (TypeError, ValueError):
            raise DataError(f"{self.where} has texts in a column of inputs; series need numbers") from None
        return values

    def mask(self, length: int) -> np.ndarray:
        return np.arange(length) < self.lengths[:, None]

    def one_each(self, column: str, values: np.ndarray) -> np.ndarray:
        """The value of each series in a column whose value is the same in all of its rows."""
        own: np.ndarray = values[self.rows]
        one: np.ndarray = own[self.first]
        like = one[self.series]
        differ = (own != like) & ~((own != own) & (like != like))  # NaN
        if wrong := len(np.unique(self.series[differ])):
            raise DataError(
                f"{self.where}: {wrong} of {len(one)} series have several values in {column!r}; expected one for each "
                "series"
            )
        return one


def _ordered(where: str, values: np.ndarray) -> np.ndarray:
    """The places of numbers or texts in their order."""
    import pandas as pd

    places: np.ndarray = pd.factorize(values, sort=True)[0]
    if absent := int((places < 0).sum()):
        raise DataError(f"{where} has {absent} rows without a series or a time; expected both in each row")
    return places
