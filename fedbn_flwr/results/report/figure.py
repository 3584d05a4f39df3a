"""A matplotlib figure that a notebook shows without pyplot, whose figures stay in memory until they are closed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import needs
from fedbn_flwr.storage import writing

from ..text import in_html

with needs("report", "a plot"):
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


class Plot(Figure):
    """A picture: a file of any format of matplotlib, or SVG in a page, in which values are shown under the pointer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({"layout": "constrained"} | options))
        FigureCanvasAgg(self)
        self._tips: list[tuple[Any, float, float, str]] = []
        self._svg = ""

    def tips(self, panel: Any, points: Sequence[tuple[float, float]], words: Sequence[str]) -> None:
        """Words that an SVG shows under the pointer at each point of a panel."""
        self._tips += [(panel, *point, text) for point, text in zip(points, words, strict=True)]

    def write(self, *files: Path) -> None:
        """Write the formats of the files, among them SVG."""
        for file in files:
            if file.suffix == ".svg":
                with writing(file):
                    file.write_text(self.svg(), encoding="utf-8")
            else:
                with _style():
                    self.savefig(file, dpi=130, metadata={".pdf": {"CreationDate": None}}.get(file.suffix))
            self.set_layout_engine("none")  # the places of the panels are known now

    def svg(self) -> str:
        if self._svg:
            return self._svg
        stream = io.StringIO()
        with _style():
            self.savefig(stream, format="svg", metadata={"Date": None})
        height, marks = 72 * self.get_size_inches()[1], []
        for panel, *point, text in self._tips:
            x, y = panel.transData.transform(point) * 72 / self.dpi
            title = f"<title>{in_html(text)}</title>"
            marks.append(f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="5" fill-opacity="0">{title}</circle>')
        head, end, _ = stream.getvalue().rpartition("</svg>")
        self._svg = f"{head}{''.join(marks)}{end}\n"
        return self._svg

    def savefig(self, fname: Any, **options: Any) -> None:
        with writing(fname) if isinstance(fname, Path) else nullcontext():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80)
        return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """No date and random ids, which would make files of equal figures differ; text that can be searched, and TrueType
    fonts, since publishers refuse matplotlib's others in a PDF."""
    style: Any = {"svg.hashsalt": "fedbn", "svg.fonttype": "none", "pdf.fonttype": 42}
    with warnings.catch_warnings(), rc_context(style):
        warnings.filterwarnings("ignore", message="Glyph")  # a label in a script that the font lacks
        yield
