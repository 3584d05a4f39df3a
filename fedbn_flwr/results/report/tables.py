"""The tables of a report on rows, for `fedbn report DIR...`, and tables as text of each format."""

from __future__ import annotations

import csv
import io
import math
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedbn_flwr.data.source import HeldOut, Source
from fedbn_flwr.errors import UserError, did_you_mean, few, needs
from fedbn_flwr.results.text import in_csv, in_markdown, on_page, printable
from fedbn_flwr.tasks import is_lower_better, title_of
from fedbn_flwr.trees import Draft, Tree

from ..folder.clients import OWN_TRAINING, PartitionCounts, spread
from ..metric_key import CLIENTS, EVALUATED, OWN, WHOSE, MetricKey
from ..result import Result
from .rows import (
    Row,
    Sweep,
    both,
    candidates,
    choose,
    deviation,
    differing,
    headline,
    mean,
    repetitions,
    runs_of,
    sweeps,
    validation,
)

if TYPE_CHECKING:
    from jinja2 import Template

Lines = list[tuple[str, ...]]  # of a table: the headings, and the cells of each row
Table = tuple[str, Lines]  # with its title; the first one of a report has none


COSTS = ("rounds", "communication_rounds", "bytes_down", "bytes_up", "seconds")


@dataclass(frozen=True)
class ReportForm:
    """What the table of a report shows, if not the default."""

    columns: tuple[str, ...] = ()  # keys of summary.json
    baseline: str = ""  # the row that the others are compared with, seed by seed; see `against`


DEFAULT = ReportForm()


def columns(rows: Sequence[Row], form: ReportForm) -> list[MetricKey]:
    """The columns of the form; by default the main metric, others that a row has, and the costs."""
    runs = runs_of(rows)
    known = {key for run in runs for key, value in run.values.items() if type(value) in (int, float)}
    if unknown := [key for key in form.columns if key not in known]:
        in_summary = str(MetricKey(unknown[0], CLIENTS))  # what it calls a metric of clients.jsonl
        hint = did_you_mean(in_summary if in_summary in known else unknown[0], known)
        raise UserError(f"no run has a metric {unknown[0]!r} in its summary.json; {hint}")
    main = headline(runs)
    keys = {main: None}
    for summary in (run.summary for run in runs):
        task = MetricKey(summary.of_task.main)
        best = task.of("best_test"), main.of_best_round, task.of_best_round
        of_clients = (MetricKey(name, whose) for name in (task.name, *summary.metrics) for whose in (CLIENTS, OWN))
        others = map(MetricKey, (*summary.of_task.reported, *summary.metrics))
        keys |= dict.fromkeys((task, *best, *of_clients, *map(task.of, EVALUATED[3:]), *others))
    shown = [key for key in (*keys, *map(MetricKey, COSTS)) if key == main or any(row.values(key) for row in rows)]
    return list(map(MetricKey.parse, form.columns)) or shown


def table(rows: Sequence[Row], form: ReportForm = DEFAULT) -> Lines:
    """Headings and cells as text; several seeds are shown as mean ± standard deviation, with their number."""
    shown, compared = columns(rows, form), against(rows, form)
    headings = (f"difference to {form.baseline}", *_OF_PAIRS) if compared else ()
    lines: Lines = [("run", *(key.title for key in shown), *headings)]
    runs = [run.values for run in runs_of(rows)]
    digits = [key.digits([run[str(key)] for run in runs if str(key) in run]) for key in shown]
    for row in rows:
        cells = [as_measured(key, row.values(key), n) for key, n in zip(shown, digits, strict=True)]
        if compared:
            cells += _of_pairs(compared.get(row.label), shown[0], digits[0])
        seeds = f" ({repetitions(row)})" if 1 < len(row.runs) == len(row.counted) else ""
        lines.append((row.title + seeds, *cells))
    return lines


# --- the paired test ---

FEWEST = 3  # pairs for a test


@dataclass(frozen=True)
class Paired:
    """A mean difference, its 95 % interval, and the two-sided p value, NaN where there is none."""

    pairs: int
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan  # corrected for the number of rows that have a p value


def paired(values: Mapping[Any, float], base: Mapping[Any, float], test_to_train: float = 0.0) -> Paired:
    """`values` minus `base`, both by seed or by client. Too few pairs, and equal differences, have no p value.

    If each seed draws its own test split, training sets overlap, so the differences aren't independent: Nadeau and
    Bengio (2003, doi 10.1023/A:1024068626366) multiply their variance by 1/n + n_test/n_train instead of 1/n.
    """
    found = [value - base[seed] for seed, value in values.items() if seed in base]
    count = len(found)
    if not found or not all(map(math.isfinite, found)):
        return Paired(count)
    if count < FEWEST or math.isclose(min(found), max(found), abs_tol=1e-12):  # equal but for rounding
        return Paired(count, mean(found))
    error = statistics.stdev(found) * math.sqrt(1 / count + test_to_train)
    with needs("report", "the t test of --baseline"):
        from scipy.special import stdtr, stdtrit  # distribution of t, and its inverse
    width = float(stdtrit(count - 1, 0.975)) * error
    p = 2 * float(stdtr(count - 1, -abs(mean(found)) / error))
    return Paired(count, mean(found), mean(found) - width, mean(found) + width, p)


def holm(each_p: Sequence[float]) -> list[float]:
    """P values, corrected for their number (Holm 1979): the smallest of m times m, the next times m - 1, and so on."""
    found, largest = [1.0] * len(each_p), 0.0
    for rank, (p, place) in enumerate(sorted((p, place) for place, p in enumerate(each_p))):
        found[place] = largest = min(1.0, max(largest, (len(each_p) - rank) * p))
    return found


def against(rows: Sequence[Row], form: ReportForm) -> dict[str, Paired]:
    """The other rows by label, compared with the baseline in the first column; empty without a baseline."""
    if not form.baseline:
        return {}
    labels = {row.label: row for row in rows}
    # The label in the experiment's file, which has neither swept values nor the ending of a row like others.
    alike = [row for row in rows if form.baseline in (row.first.label, row.first.cell.get("row"))]
    base = labels.get(form.baseline) or (alike[0] if len(alike) == 1 else None)
    if base is None:
        count = len(alike) or "no"
        raise UserError(
            f"{count} row{'s are' if alike else ' is'} called {form.baseline!r}; "
            f"{did_you_mean(form.baseline, [row.label for row in alike] or labels)}"
        )
    key = columns(rows, form)[0]
    values = base.by_seed(key)
    pairs = {
        label: paired(row.by_seed(key), values, max(map(test_to_train, (row, base))))
        for label, row in labels.items()
        if row is not base
    }
    return with_holm(pairs)


def with_holm(pairs: Mapping[str, Paired]) -> dict[str, Paired]:
    """Rows compared with one other, with their p values corrected for the number of those that have one."""
    tested = {label: pair.p for label, pair in pairs.items() if not math.isnan(pair.p)}
    corrected = dict(zip(tested, holm([*tested.values()]), strict=True))
    return {label: replace(pair, p_holm=corrected.get(label, math.nan)) for label, pair in pairs.items()}


def test_to_train(row: Row) -> float:
    """The test examples for each training example, if each seed draws its own test split; otherwise 0."""
    test = held_out(row)
    return test.test_to_train if test is not None and test.is_drawn_per_seed else 0.0


def held_out(row: Row) -> HeldOut | None:
    """How the row's test split is held out; None if the data have one."""
    with suppress(ValidationError):  # a file that somebody changed
        return Source(test=(row.first.config.get("data") or {}).get("test")).held_out
    return None


_OF_PAIRS = ("95 % interval", "p (Holm)", "pairs")


def _of_pairs(found: Paired | None, key: MetricKey, digits: int) -> list[str]:
    """Cells of a comparison; the baseline's are empty."""
    if found is None:
        return ["-"] * 4
    difference, low, high = (
        f"{key.scale * value:+,.{digits}f}" if math.isfinite(value) else "-"
        for value in (found.difference, found.low, found.high)
    )
    p = "-" if math.isnan(found.p_holm) else "<0.001" if found.p_holm < 0.001 else f"{found.p_holm:.3f}"
    return [difference, "-" if low == "-" else f"{low} to {high}", p, str(found.pairs)]


# --- for a paper: numbers as they are, for CSV and pandas ---


def numbers(rows: Sequence[Row], form: ReportForm) -> Sequence[Tree]:
    """A line per row: mean and standard deviation of each column, and how many of the row's runs count."""
    compared, keys, found = against(rows, form), columns(rows, form), []
    for row in rows:
        line: Draft = {
            "run": row.label.removesuffix(row.accuracy_of),
            **({"accuracy_of": row.first.summary.accuracy_of} if any(row.accuracy_of for row in rows) else {}),
            "status": row.unfinished or "finished",
            "seeds": len({run.summary.seed for run in row.counted}),
            "runs": len(row.counted),
            "runs_left_out": len(row.runs) - len(row.counted),
        }
        for key in keys:
            values = row.values(key)
            value, off = mean(values) if values else math.nan, deviation(values)
            whole = value.is_integer() and all(type(run.values[str(key)]) is int for run in row.counted)
            line |= {str(key): int(value) if whole else value, f"{key}_std": math.nan if off is None else off}
        found.append(line | (asdict(compared.get(row.label) or Paired(0)) if compared else {}))
    return found


def as_csv(rows: Sequence[Row], form: ReportForm) -> str:
    found, stream = numbers(rows, form), io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([map(in_csv, line) for line in (found[0], *(line.values() for line in found))])
    return stream.getvalue()


# --- domains and clients ---


def by_domain(rows: Sequence[Row]) -> dict[MetricKey, list[MetricKey]]:
    """The main metric, and the same one in each domain that at least one run has; of the global model first."""
    found: dict[MetricKey, list[MetricKey]] = {}
    for key in dict.fromkeys(key for run in runs_of(rows) for key in run.summary.domains):
        found.setdefault(replace(key, domain=""), []).append(key)
    return dict(sorted(found.items(), key=lambda item: list(WHOSE).index(item[0].whose)))


def in_domains(row: Row, keys: Sequence[MetricKey]) -> list[list[float]]:
    """The values of its runs in each domain, and their unweighted mean, if all runs have all domains."""
    found = list(map(row.values, keys))
    return [*found, list(map(statistics.fmean, zip(*found, strict=True))) if all(found) else []]


def domain_table(rows: Sequence[Row], metric: MetricKey, keys: Sequence[MetricKey]) -> Table:
    found = [(row.title, columns) for row in rows if any(columns := in_domains(row, keys))]
    lines = [(title, *(as_measured(metric, values) for values in columns)) for title, columns in found]
    return f"{metric.title}, by domain", [("run", *(key.domain for key in keys), "average"), *lines]


def measures_of_clients(run: Result) -> dict[str, MetricKey]:
    """The main metric and `evaluate.metrics` by their keys in clients.jsonl, first on the clients' own examples."""
    names = dict.fromkeys((run.summary.of_task.main, *run.summary.metrics))
    keys = {str(MetricKey(name, own)): MetricKey(name, whose) for own, whose in _PLACES.items() for name in names}
    return {key: metric for key, metric in keys.items() if key in run.clients}


_PLACES = {"own": OWN, "": CLIENTS}  # of metrics in clients.jsonl


def client_table(rows: Sequence[Row]) -> Lines:
    """Mean, deviation and worst tenth over clients of each measure; maybe only headings."""
    lines: Lines = [("run", "metric", "clients", "mean", "deviation", "worst tenth")]
    for row in rows:
        for key, metric in measures_of_clients(row.counted[0]).items() if not row.diverged else ():
            seeds = [list(run.clients[key].values()) for run in row.counted if key in run.clients]
            if len(seeds) == len(row.counted):
                count = as_measured(MetricKey("clients"), list(map(len, seeds)))
                spreads = zip(*(spread(values, key) for values in seeds), strict=True)
                lines.append((row.title, metric.title, count, *(as_measured(metric, values) for values in spreads)))
    return lines


def judged_table(rows: Sequence[Row]) -> Table:
    """What each client measured of the models that were given, not trained, and how they differ from the first one."""
    runs = {row.label: row.counted[0] for row in rows if row.first.config.get("rounds") == 0}
    own = MetricKey(next((run.summary.of_task.main for run in runs.values()), ""), "own")
    found = [run.clients.get(str(MetricKey("examples", "own")), {}) for run in runs.values()]
    counts = {client: count for counted in found for client, count in counted.items() if count}
    tables = [
        {client: value for client, value in run.clients.get(str(own), {}).items() if client in counts}
        for run in runs.values()
    ]
    lines: Lines = [("client", "examples", *runs)]
    for client in sorted(counts, key=lambda number: (len(number), number)):
        cells = [as_measured(own, [values[client]] if client in values else []) for values in tables]
        lines.append((next(iter(runs.values())).files.name_of(client), f"{counts[client]:,.0f}", *cells))
    means = [
        [statistics.fmean(values.values(), [counts[each] for each in values])] if values else [] for values in tables
    ]
    lines.append(("weighted", f"{sum(counts.values()):,.0f}", *(as_measured(own, mean) for mean in means)))
    pairs = with_holm({label: paired(values, tables[0]) for label, values in [*zip(runs, tables, strict=True)][1:]})
    digits = own.digits([value for values in tables for value in values.values()])
    columns = [("difference to the first", *_OF_PAIRS), *(_of_pairs(pairs.get(label), own, digits) for label in runs)]
    lines += [(heading, "", *line) for heading, *line in zip(*columns, strict=True)] if pairs else []
    return f"{own.of('').title} on each client's own test examples", lines if any(tables) else []


def participation_table(rows: Sequence[Row]) -> Lines:
    """Each client's examples and rounds, of runs on data of sites and of those that lacked clients; and how it trained,
    if that differs."""
    runs = {row.label: run for row in rows if (run := next(filter(_clients_differ, row.counted), None))}
    own = [key for key in OWN_TRAINING if any(key in run.clients for run in runs.values())]
    training = [key.replace("_", " ") for key in own]
    lines: Lines = [("run", "client", "training examples", "rounds", "last round", *training)]
    for label, run in runs.items():
        trained: dict[str, dict[int, Mapping[str, float]]] = {}
        for line in run.files.lines("clients.jsonl"):
            for client, values in line["clients"].items():
                if "examples" in values:
                    trained.setdefault(client, {})[line["round"]] = values
        for client, found in sorted(trained.items(), key=lambda item: int(item[0]))[:_SHOWN_CLIENTS]:
            values = found[last := max(found)]
            cells = [f"{values['examples']:,.0f}", str(len(found)), str(last)]
            cells += [f"{values[key]:g}" if key in values else "" for key in own]
            lines.append((label, run.files.name_of(client), *cells))
    return lines


def _clients_differ(run: Result) -> bool:
    return bool(run.summary.own_data_sites or run.summary.missing or not {*OWN_TRAINING}.isdisjoint(run.clients))


# --- sweeps, candidates ---


def measures_of_sweep(sweep: Sweep, form: ReportForm) -> list[MetricKey]:
    """A table and a panel each: the columns that are asked for, or what its runs are compared by."""
    rows = [row for line in sweep.lines.values() for row in line.values()]
    return list(map(MetricKey.parse, form.columns)) or both(headline(runs_of(rows)), rows)


def sweep_tables(sweep: Sweep, form: ReportForm = DEFAULT) -> list[Table]:
    """A column for each value."""
    found: list[Table] = []
    for measure in measures_of_sweep(sweep, form):
        lines: Lines = [(sweep.key, *sweep.values)]
        for label, line in sweep.lines.items():
            lines.append((label, *(_cell_of(line[word], measure) if word in line else "-" for word in sweep.values)))
        found.append((", ".join(filter(None, (f"{measure.title} by {sweep.key}", sweep.title))), lines))
    return found


def _cell_of(row: Row, measure: MetricKey) -> str:
    values = row.values(measure)
    return row.divergence if row.diverged and not values else as_measured(measure, values) + row.marks


def candidates_tables(rows: Sequence[Row]) -> list[Table]:
    """All candidates of `tune`, in a table for each main metric of their tasks.

    If clients evaluate their own models on their own data, so does the test metric.
    """
    chosen, found = choose(rows), dict[str, Lines]()
    places = [(row.first.cell.get("row"), MetricKey(row.first.summary.of_task.main), row) for row in candidates(rows)]
    own = {(name, main) for name, main, row in places if any(str(main.of(OWN)) in run.values for run in row.runs)}
    for name, main, row in places:
        values, is_own = validation(row), (name, main) in own
        measure = main.of(OWN) if is_own else main
        whose = f"{main.title} on {'own ' * is_own}held-out training examples"
        title = f"candidates: the best is chosen by the {whose}, mean over seeds"
        head = ("run", f"validation {measure.title}", f"test {measure.title}", "seeds", "chosen")
        lines = found.setdefault(title, [head])
        mark = "chosen" if values and row in chosen else ""
        lines.append((row.label, as_measured(measure, values), _cell_of(row, measure), repetitions(row), mark))
    return list(found.items())


# --- settings and partitions ---


def differing_settings(rows: Sequence[Row]) -> Table:
    """The settings that differ between rows; without lines if none do."""
    different = differing([row.first.settings for row in rows])
    lines = [(row.label, *(str(row.first.settings.get(key, "-")) for key in different)) for row in rows]
    return "settings that differ", [("run", *different), *lines] if different else []


def set_up(rows: Sequence[Row]) -> str:
    """What the runs have in common, as a caption: "quick: digits, mlp, 4 clients, 6 rounds, seeds 0, 1, 2."."""
    runs = runs_of(rows)
    names = ", ".join(dict.fromkeys(run.summary.name for run in runs))
    settings = [run.settings | {"data.name": run.data} for run in runs]
    common = {key: value for key, value in settings[0].items() if all(own.get(key) == value for own in settings)}
    words = {"data.name": "{}", "model.name": "{}", "clients": "{} clients", "rounds": "{} rounds"}
    seeds = sorted({run.summary.seed for run in runs})
    found = [text.format(common[key]) for key, text in words.items() if common.get(key) is not None]
    found.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return f"{names}: {', '.join(found)}."


def notes(rows: Sequence[Row]) -> list[str]:
    """Sentences about smaller sizes, the directions of metrics, missing ones, and random or different examples."""
    runs = runs_of(rows)
    sizes = dict.fromkeys(run.summary.size for run in runs if run.summary.size)
    found = [f"Size {size}: a smaller version of the experiment." for size in sizes]
    mains = dict.fromkeys(run.summary.of_task.main for run in runs)
    if lower := [title_of(main) for main in mains if is_lower_better(main)]:
        found.append(f"Lower is better: {', '.join(lower)}.")
    for main in map(MetricKey, mains):
        own = main.of(OWN)
        personal = any(run.summary.personal and str(own) in run.values for run in runs)
        if lacking := [row.label for row in rows if personal and row.values(main) and not row.values(own)]:
            found.append(
                f"No {own.title}: {', '.join(lacking)}, whose clients were not evaluated. To measure it, "
                "train these runs again: delete their folders and resume."
            )
    rounds = {row.label: row.first.summary.rounds for row in rows if not row.marks}
    if len({*rounds.values()}) > 1:
        found.append(f"Rounds differ: {few((f'{label} {number}' for label, number in rounds.items()), 8)}.")
    if any((run.config.get("data") or {}).get("random") for run in runs):
        found.append("Random examples; metrics mean nothing.")
    splits = [test for row in rows if len({run.summary.seed for run in row.runs}) > 1 and (test := held_out(row))]
    if any(test.is_drawn_per_seed for test in splits):
        found.append("Each seed has its own test split; intervals and p values are corrected for their overlap.")
    elif splits and not any(test.time for test in splits):
        found.append(
            "All seeds have the same test split: intervals and p values cover the seeds, not the split. Set "
            "data.test: {share: 0.2, split: seed} or {folds: 5} to vary it too."
        )
    for row in rows:
        if (test := held_out(row)) is not None and test.is_drawn_per_seed:
            continue
        if len(sums := sorted({run.data_checksum for run in row.runs if run.data_checksum})) > 1:
            found.append(f"{row.label}: its runs have the same settings and different examples ({', '.join(sums)}).")
    return found


_SHOWN_CLASSES = 12  # more columns do not fit in a line
_SHOWN_CLIENTS = 40


def partition_table(partition: PartitionCounts) -> str:
    """The examples of each client by class, for `fedbn partition EXPERIMENT` and `fedbn explain EXPERIMENT`."""
    sizes, classes = partition.sizes, partition.classes if 1 < len(partition.classes) <= _SHOWN_CLASSES else ()
    clients = list(zip(partition.names, partition.counts, strict=True))
    has_classes = len(partition.classes) > 1
    lines: Lines = [("client", "examples", *(["classes"] if has_classes else ()), *classes)]
    for name, row in (*clients[:_SHOWN_CLIENTS], ("all", list(map(sum, zip(*partition.counts, strict=True))))):
        present = [str(sum(count > 0 for count in row))] if has_classes else []
        lines.append((name, str(sum(row)), *present, *(str(count or ".") for count in row[: len(classes)])))
    more = len(clients) - _SHOWN_CLIENTS
    rest = f"... and {more} more clients\n" if more > 0 else ""
    spread = f"examples per client: {min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}"
    return f"{partition.title}\n\n{as_text(lines)}\n{rest}{spread}"


# --- text of each format ---


def as_measured(measure: MetricKey, values: Sequence[float], digits: int | None = None) -> str:
    """The mean, and the standard deviation: of costs such as rounds only if they differ.

    A deviation of zero has no digits; for a small one of a metric there are more, so that it does not look like zero.
    """
    if not values:
        return "-"
    digits = measure.digits(values) if digits is None else digits
    scaled = [value * measure.scale for value in values]
    middle, spread = mean(scaled), deviation(scaled)
    is_cost = str(measure) in COSTS or all(type(value) is int for value in values)
    if spread is None or spread <= 1e-9 * abs(middle):  # of equal values, but for rounding
        return f"{middle:,.{digits}f}{measure.unit}" + ("" if spread is None or is_cost else " ± 0")
    if not is_cost:
        digits = min(max(digits, -math.floor(math.log10(2 * spread))), 12)
    return f"{middle:,.{digits}f}{measure.unit} ± {spread:,.{digits}f}"


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(in_markdown, line))} |" for line in lines]
    rule = "|---" + "|---:" * (len(lines[0]) - 1) + "|"
    return "\n".join([head, rule, *body]) + "\n"


def as_text(lines: Sequence[Sequence[str]], width: float = math.inf) -> str:
    """Columns aligned with spaces: the first two, and the others as far as they fit."""
    head, *body = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    fits = max(2, sum(end - 2 <= width for end in accumulate(2 + each for each in widths)))
    rows = [head, ["-" * width for width in widths], *body]
    aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])][:fits] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


@cache
def template(name: str) -> Template:
    """A template of HTML, which escapes all text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch needs it, too

    loader = PackageLoader("fedbn_flwr.results.report", "")
    made = Environment(loader=loader, autoescape=True, finalize=on_page, undefined=StrictUndefined)
    return made.get_template(f"{name}.html.md")


def as_html(title: str, lines: Sequence[Sequence[str]]) -> str:
    return str(template("table").module.table(title, lines))  # type: ignore[attr-defined]


def tables(every: Sequence[Row], form: ReportForm = DEFAULT) -> list[Table]:
    """The tables of a report, with a title each."""
    rows = choose(every)
    found = [
        ("", table(rows, form)),
        judged_table(rows),
        *(domain_table(rows, *domains) for domains in by_domain(rows).items()),
        ("clients with equal weights, last evaluated round", client_table(rows)),
        ("clients that took part", participation_table(rows)),
        *(table for sweep in sweeps(rows) for table in sweep_tables(sweep, form)),
        *candidates_tables(every),
    ]
    return [(title, lines) for title, lines in found if len(lines) > 1]


def tables_as_text(found: Iterable[Table]) -> str:
    """As wide as the terminal; elsewhere as wide as they are."""
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # below live lines rich replaces it
    width = shutil.get_terminal_size().columns if stream.isatty() else math.inf
    return "\n\n".join((f"{name}\n" if name else "") + as_text(lines, width) for name, lines in found)
