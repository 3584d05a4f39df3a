"""A matplotlib figure that a notebook shows without pyplot, whose figures stay in memory until they are closed."""

from __future__ import annotations

import io
from typing import Any

from fedbn_flwr.errors import needs

with needs("report", "a plot"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


class Plot(Figure):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80)
        return file.getvalue()
