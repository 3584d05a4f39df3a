"""A matplotlib figure that a notebook shows without pyplot, whose figures stay in memory until they are closed."""

from __future__ import annotations

import io
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import UserError, needs
from fedbn_flwr.storage import replacing, writing

with needs("report", "a plot"):
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# No random ids, which would make files of equal figures differ; text that can be searched; and TrueType fonts, because
# publishers don't accept matplotlib's other fonts in a PDF.
_STYLE: Any = {"svg.hashsalt": "fedbn", "svg.fonttype": "none", "pdf.fonttype": 42}
_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Plot(Figure):
    """A picture: a file of any format of matplotlib, or SVG in a page."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({"layout": "constrained"} | options))
        FigureCanvasAgg(self)

    @property
    def name(self) -> str:
        """What the first panel shows, for readers who do not see it."""
        panel = self.axes[0]
        scale = "logarithmic scale" if panel.get_yscale() == "log" else ""
        parts = panel.get_title(loc="left"), panel.get_ylabel(), panel.get_xlabel(), scale
        return ", ".join(filter(None, parts)).replace(r"\$", "$")

    def write(self, file: Path) -> None:
        """Into a folder that may not exist yet, in the format that the file's name ends in."""
        if file.suffix[1:] not in (known := self.canvas.get_supported_filetypes()):
            raise UserError(
                f"the plot {str(file)!r} has no known format; expected a name that ends in {', '.join(known)}"
            )
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            drawn = self.svg.encode() if file.suffix == ".svg" else self._drawn(file.suffix[1:], dpi=130)
            with replacing(file, durable=False) as temporary:
                temporary.write_bytes(drawn)

    @cached_property
    def svg(self) -> str:
        return self._drawn("svg").decode()

    def _drawn(self, kind: str, **options: Any) -> bytes:
        stream = io.BytesIO()
        with warnings.catch_warnings(), rc_context(_STYLE):
            # A label in a script that the font lacks, or that is longer than its axis.
            warnings.filterwarnings("ignore", message="Glyph|constrained_layout")
            self.savefig(stream, format=kind, metadata=_NO_DATE.get(kind), **options)
        self.set_layout_engine("none")  # the places of the panels are known now
        return stream.getvalue()

    def _repr_png_(self) -> bytes:
        return self._drawn("png", dpi=80)
