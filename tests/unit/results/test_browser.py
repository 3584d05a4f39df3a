"""The page of a report in headless Chromium: layout, colours, sorting, tooltips, downloads, and that it stays inert."""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.results.page import write_page
from fedbn_flwr.results.rows import find_runs, group
from tests.support.runs import write_run
from tests.unit.results.test_page import write_hostile

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("FEDBN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here: install one of {', '.join(NAMES)}, or set FEDBN_CHROMIUM to its path")
    with playwright.sync_playwright() as tools:
        # Chromium's sandbox needs rights that containers do not have; the page is our own.
        started = tools.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section: twelve rows of three seeds; the first two rows have equal curves."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(12):
        for seed in range(3):
            top = 0.5 + 0.03 * max(number, 1) + 0.01 * seed
            lines = [
                {
                    "accuracy": top * (1 - math.exp(-i / 5)),
                    "clients_own_accuracy": top,
                    "loss": 1 / i,
                    "accuracy_sea": top,
                    "seconds": 1.0 + number,
                }
                for i in range(1, 31)
            ]
            ids = [str(i) for i in range(8)]
            files = {
                "partition.json": {
                    "title": f"digits: seed={seed}", "classes": ids, "clients": [],
                    "counts": [[(i * k + seed) % 7 for k in range(8)] for i in range(8)],
                },
                "clients.jsonl": [{"round": 30, "clients": {i: {"own_accuracy": top - int(i) / 50} for i in ids}}],
                "matrix.json": {"clients": ids, "accuracy": [[0.1 * (i == k) for i in range(8)] for k in range(8)]},
                "norms.jsonl": [
                    {"round": i, "layers": {f"layer{k}.bn": {"mean_drift": k / i} for k in range(20)}, "clients": {}}
                    for i in range(1, 31)
                ],
            }  # fmt: skip
            config = {"train": {"lr": number}, "published": {"accuracy": 0.5, "source": "a paper"}}
            write_run(folder / f"{number}-{seed}", f"rule {number}", seed, lines=lines, files=files, config=config)
    write_page(group(find_runs([folder])), folder / "page.html")
    return folder / "page.html"


@contextmanager
def opened(browser: Any, file: Path, *, width: int = 1280, scheme: str = "light", **options: Any) -> Iterator[Any]:
    """The page in a window; no error, no request beside the file, and no dialog may occur while it is open."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
    page = context.new_page()
    events: list[str] = []
    page.on("console", lambda message: events.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: events.append(f"error: {error}"))
    page.on("dialog", lambda dialog: events.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: events.extend({request.url[:200]} - {file.as_uri()}))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert events == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wider_than_the_window(browser: Any, full: Path, width: int, scheme: str) -> None:
    with opened(browser, full, width=width, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sections = page.eval_on_selector_all("main > section:not([hidden]) > h2", "all => all.map(h => h.textContent)")
        assert len(sections) == 9, sections
        assert page.locator("svg.chart").count() >= 7
        assert "NaN" not in page.content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_can_be_read(browser: Any, full: Path, scheme: str) -> None:
    """Contrast as WCAG 2 defines it: 4.5 for text; lines have a dash pattern and markers besides their colour."""
    colours = """all => all.map(e => { const s = getComputedStyle(e); return [s.color, s.fill] })"""
    with opened(browser, full, scheme=scheme) as page:
        paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (paper > 0.9) == (scheme == "light")
        texts = page.eval_on_selector_all("h1, h2, th, td, p.note, a, legend, label, summary, small", colours)
        texts += [[fill] for _, fill in page.eval_on_selector_all("svg text.soft", colours)]
        for colour, *_ in texts:
            low, high = sorted((paper, luminance(colour)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, colour
        lines = page.eval_on_selector_all(
            "#curves figure:first-child path.line",
            "all => all.map(e => getComputedStyle(e).stroke + getComputedStyle(e).strokeDasharray)",
        )
        assert len(set(lines)) == len(lines) == 12


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_tables_are_sorted_by_number_with_mouse_and_keyboard(browser: Any, full: Path) -> None:
    with opened(browser, full) as page:

        def column(number: int) -> list[str]:
            return page.eval_on_selector_all(
                f"#results tbody tr > :nth-child({number})", "all => all.map(cell => cell.textContent)"
            )

        before = column(1)
        head = page.locator("#results th", has_text="seconds")
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert column(1)[0].startswith("rule 11"), "360 seconds come before 90"
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert column(1)[0].startswith("rule 0")
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") is None
        assert column(1) == before


def test_curves_follow_the_controls(browser: Any, full: Path) -> None:
    with opened(browser, full) as page:
        first = "#curves figure:first-child"
        assert "These curves coincide: rule 0, rule 1." in page.inner_text(first)
        lines = page.eval_on_selector_all(f"{first} path.line", "all => all.map(e => e.getAttribute('d'))")
        page.get_by_role("combobox", name="Against").select_option(label="seconds")
        assert page.eval_on_selector_all(f"{first} path.line", "all => all.map(e => e.getAttribute('d'))") != lines
        assert "coincide" not in page.inner_text(first), "rule 1 takes twice as long"
        page.locator("#curves").get_by_label("logarithmic horizontally").check()
        page.locator("#curves").get_by_label("logarithmic vertically").check()
        assert "seconds (logarithmic)" in page.text_content(first)
        assert "NaN" not in page.inner_html(first)
        assert page.locator(f"{first} path.band").count() == 12
        page.get_by_role("combobox", name="Band").select_option(label="each run as a thin line")
        assert page.locator(f"{first} path.thin").count() == 36
        page.get_by_role("button", name="rule 3").click()
        assert page.locator(f"{first} path.thin").count() == 33
        page.get_by_text("Measures", exact=True).click()
        page.get_by_label("loss", exact=True).check()
        assert page.locator("#curves figure").count() == 3


def test_a_chart_names_its_values(browser: Any, full: Path) -> None:
    with opened(browser, full) as page:
        chart = page.locator("#curves svg.chart").first
        assert "rule 11" in chart.get_attribute("aria-label")
        chart.focus()
        page.keyboard.press("ArrowRight")
        tip = page.locator("#curves .tip").first.inner_text()
        assert "round 1" in tip
        mean = 100 * (0.5 + 0.33 + 0.01) * (1 - math.exp(-1 / 5))
        assert f"{mean:.2f} %" in tip
        page.get_by_role("button", name="rule 11").hover()
        assert page.locator("#curves figure:first-child path.line.dim").count() == 11
        page.locator("#matrix svg.chart").focus()
        page.keyboard.press("ArrowRight")
        assert "10.00 %" in page.locator("#matrix .tip").inner_text()


def test_files_can_be_saved(browser: Any, full: Path) -> None:
    with opened(browser, full, accept_downloads=True) as page:
        with page.expect_download() as saving:
            page.get_by_role("link", name="curves.csv").click()
        lines = list(csv.DictReader(io.StringIO(Path(saving.value.path()).read_text(encoding="utf-8"))))
        assert len(lines) == 12 * 3 * 30
        assert float(lines[29]["accuracy_sea"]) == pytest.approx(0.53)


def test_hostile_labels_are_text(browser: Any, tmp_path: Path) -> None:
    write_hostile(tmp_path)
    write_page(group(find_runs([tmp_path])), tmp_path / "page.html")
    for width in (375, 1280):
        with opened(browser, tmp_path / "page.html", width=width) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("img").count() == 0
            assert page.locator("script").count() == 2
            assert "<script>alert(1)</script>" in page.inner_text(".legend")
            for chart in page.locator("svg.chart").all():
                chart.focus()
                page.keyboard.press("ArrowRight")


def test_a_page_can_be_printed_and_read_without_a_program(browser: Any, full: Path) -> None:
    with opened(browser, full) as page:
        assert page.pdf()[:4] == b"%PDF"
        page.emulate_media(media="print")
        assert page.locator(".controls:visible").count() == 0
    with opened(browser, full, java_script_enabled=False) as page:
        assert page.locator("#results tbody tr").count() == 12
        assert page.locator("#differing tbody tr").count() == 12
