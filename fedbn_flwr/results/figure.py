"""A matplotlib figure that a notebook shows without pyplot, whose figures stay in memory until they are closed."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import needs
from fedbn_flwr.storage import writing

with needs("report", "a plot"):
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


class Plot(Figure):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        FigureCanvasAgg(self)

    def write(self, *files: Path) -> None:
        """Write the formats of the files; a date or random ids would make files of equal figures differ."""
        # TrueType fonts: publishers refuse matplotlib's others in a PDF.
        with warnings.catch_warnings(), rc_context({"svg.hashsalt": "fedbn", "pdf.fonttype": 42}):
            warnings.filterwarnings("ignore", message="Glyph")  # a label in a script that the font lacks
            for file in files:
                metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix)
                self.savefig(file, dpi=130, metadata=metadata)
                self.set_layout_engine("none")  # the places of the panels are known now

    def savefig(self, fname: Any, **options: Any) -> None:
        with writing(fname) if isinstance(fname, Path) else nullcontext():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80)
        return file.getvalue()
