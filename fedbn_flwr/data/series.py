"""A long table, which has a row for each time of a series, becomes series [N, C, T]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedbn_flwr.errors import DataError


@dataclass(frozen=True)
class Long:
    """Where the rows of a long table belong; arrays have an entry for each row, in the order of series and times."""

    where: str  # for errors
    rows: np.ndarray
    series: np.ndarray
    place: np.ndarray  # in the series, from 0
    first: np.ndarray  # an entry for each series: its first row

    @classmethod
    def of(cls, where: str, ids: ArrayLike, times: ArrayLike | None) -> Long:
        """By the columns of ids and times; without times, the rows of a series are in the order of the table."""
        given = [_ordered(where, column) for column in (ids, times) if column is not None]
        rows = np.lexsort(given[::-1])
        _, series, counts = np.unique(given[0][rows], return_inverse=True, return_counts=True)
        starts = np.cumsum(counts) - counts
        place = np.arange(len(rows)) - starts[series]
        if times is not None and (twice := int(((np.diff(given[1][rows]) == 0) & (np.diff(series) == 0)).sum())):
            raise DataError(f"{where} has {twice} rows with the series and the time of another row; expected one each")
        return cls(where, rows, series, place, rows[starts])

    @property
    def lengths(self) -> np.ndarray:
        return np.bincount(self.series)

    def stacked(self, columns: Sequence[ArrayLike], length: int) -> np.ndarray:
        """float32 [N, C, length], zero behind the end of a series."""
        values = np.zeros((len(self.first), len(columns), length), np.float32)
        for channel, column in enumerate(columns):
            try:
                values[self.series, channel, self.place] = np.asarray(column)[self.rows].astype(np.float32)
            except (TypeError, ValueError):
                raise DataError(f"{self.where} has texts in a column of inputs; series need numbers") from None
        return values

    def mask(self, length: int) -> np.ndarray:
        return np.arange(length) < self.lengths[:, None]

    def one_each(self, column: str, values: ArrayLike) -> np.ndarray:
        """The value of each series in a column whose value is the same in all of its rows."""
        found = np.asarray(values)
        own, like = found[self.rows], found[self.first][self.series]
        differ = (own != like) & ~((own != own) & (like != like))  # NaN
        if wrong := len(np.unique(self.series[differ])):
            raise DataError(
                f"{self.where}: {wrong} of {len(self.first)} series have several values in {column!r}; expected one "
                "for each series"
            )
        one: np.ndarray = found[self.first]
        return one


def _ordered(where: str, values: ArrayLike) -> np.ndarray:
    """Numbers, or texts as their places in order."""
    found = np.asarray(values)
    absent = found != found if found.dtype.kind in "fM" else found == np.array(None)
    if np.any(absent):
        raise DataError(f"{where} has {int(absent.sum())} rows without a series or a time; expected both in each row")
    return np.unique(found.astype(str) if found.dtype.kind in "OSU" else found, return_inverse=True)[1]
