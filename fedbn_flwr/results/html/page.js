"use strict";
// Draws the charts of a report from the JSON beside this program. Text of runs enters the page as text only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["", "8 3", "2 3", "10 3 2 3", "5 2 1 2 1 2"];
  const MARKS = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-3.5 -3.5h7v7h-7z", "M0 -4.5L4.5 3.5H-4.5z", "M0 -5L4.5 0L0 5L-4.5 0z",
    "M0 4.5L4.5 -3.5H-4.5z", "M-1.4 -4.5h2.8v3.1h3.1v2.8h-3.1v3.1h-2.8v-3.1h-3.1v-2.8h3.1z", "M-4.5 0L3.5 -4.5V4.5z", "M4.5 0L-3.5 -4.5V4.5z",
    "M-4.5 -4.5L4.5 4.5V-4.5L-4.5 4.5z", "M-4 -2L0 -5L4 -2L2.5 4H-2.5z", "M-5 -1.5h10v3h-10z", "M-1.5 -5h3v10h-3z"];
  const hidden = new Set();
  const redraws = [];

  // --- elements ---

  function make(namespace, name, attributes, children) {
    const element = namespace ? document.createElementNS(namespace, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(key, "");
      else if (value !== null && value !== false && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children.flat().filter((child) => child !== null));
    return element;
  }
  const html = (name, attributes = {}, ...children) => make("", name, attributes, children);
  const svg = (name, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);
  const section = (name) => {
    const found = document.getElementById(name);
    found.hidden = false;
    return found;
  };
  const colour = (row) => `c${row % data.colours}`;
  const dash = (row) => DASHES[row % DASHES.length] || null;
  const mark = (row, x, y, more = {}) =>
    svg("path", { d: MARKS[row % MARKS.length], transform: `translate(${x} ${y})`, class: `mark ${colour(row)}`, "data-row": row, ...more });

  function choice(title, options, action) {
    const list = html("select", {}, options.map((option, i) => html("option", { value: i }, option)));
    list.addEventListener("change", () => action(Number(list.value)));
    return html("label", {}, title, list);
  }
  function tick(title, checked, action) {
    const box = html("input", { type: "checkbox", checked });
    box.addEventListener("change", () => action(box.checked));
    return html("label", {}, box, title);
  }

  // --- numbers ---

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = (values) => {
    const centre = mean(values);
    return values.length < 2 ? 0 : Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (values.length - 1));
  };
  const number = (value) => {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en-US", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
  };
  const percent = (value) => `${(100 * value).toFixed(2)} %`;
  const shown = (measure) => (measure.fraction ? percent : number);

  function ticks(low, high, count, log, whole) {
    if (log) {
      const found = [];
      const decades = Math.log10(high / low);
      const step = Math.max(1, Math.ceil(decades / count));
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += step) {
        for (const digit of decades < 1 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : decades < 2.5 ? [1, 2, 5] : [1]) found.push(digit * 10 ** power);
      }
      return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    }
    const raw = (high - low) / count;
    const base = 10 ** Math.floor(Math.log10(raw));
    let step = base * [1, 2, 5, 10].find((factor) => factor * base >= raw);
    if (whole) step = Math.max(1, step);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }
  function scale(low, high, from, to, log) {
    const place = log ? Math.log : (value) => value;
    const span = place(high) - place(low) || 1;
    return (value) => from + ((place(value) - place(low)) / span) * (to - from);
  }

  // --- tooltips: by pointer, and by arrow keys while a chart has the focus ---

  function withTip(figure, chart, places, describe) {
    // places: [columns, rows] that arrow keys step through; describe(x, y in pixels, or [column, row]) draws the tip
    const tip = html("div", { class: "tip", role: "status", hidden: true });
    figure.append(tip);
    const show = (found) => {
      tip.hidden = !found;
      if (!found) return;
      tip.replaceChildren(...found.content);
      const offset = chart.getBoundingClientRect().left - figure.getBoundingClientRect().left;
      const width = figure.clientWidth;
      tip.style.left = "0px";
      const left = found.x + offset + 14;
      tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, left + tip.offsetWidth > width ? left - tip.offsetWidth - 28 : left))}px`;
      const above = chart.getBoundingClientRect().top - figure.getBoundingClientRect().top;
      tip.style.top = `${Math.max(0, above + found.y - tip.offsetHeight / 2)}px`;
    };
    chart.addEventListener("pointermove", (event) => {
      const area = chart.getBoundingClientRect();
      show(describe({ x: event.clientX - area.left, y: event.clientY - area.top }));
    });
    const leave = () => { show(null); describe(null); };
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    let at = [-1, 0];
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      at = at.map((value, i) => Math.max(0, Math.min(places[i] - 1, value + step[i])));
      show(describe({ column: at[0], row: at[1] }));
    });
  }
  const entry = (row, label, value) => html("div", {}, html("span", { class: `key ${colour(row)}` }), html("bdi", {}, label), html("b", {}, value));

  // --- line charts ---

  // series: {row, label, points: [[x, middle, low, high]], runs: [[[x, value]]], stroke}
  function lineChart(figure, { title, series, x, y }) {
    figure.replaceChildren(html("figcaption", {}, title));
    const usable = (value, log) => typeof value === "number" && (!log || value > 0);
    series = series
      .map((each) => ({ ...each, points: each.points.filter((point) => usable(point[0], x.log) && usable(point[1], y.log)) }))
      .filter((each) => each.points.length);
    if (!series.length) {
      figure.append(html("p", { class: "note" }, "No values to draw."));
      return;
    }
    const width = Math.max(260, figure.clientWidth);
    const height = Math.round(Math.min(380, Math.max(240, width * 0.6)));
    const points = series.flatMap((each) => each.points);
    const heights = points.flatMap((point) => point.slice(1)).concat(series.flatMap((each) => (each.runs || []).flat().map((point) => point[1])));
    const valid = heights.filter((value) => usable(value, y.log));
    let [low, high] = [valid.reduce((a, b) => Math.min(a, b)), valid.reduce((a, b) => Math.max(a, b))];
    if (low === high) [low, high] = y.log ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.05 || 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
    else if (!y.log) [low, high] = [low - (high - low) * 0.03, high + (high - low) * 0.03];
    const places = [...new Set(points.map((point) => point[0]))].sort((a, b) => a - b);
    const first = x.log ? places[0] : Math.min(0, places[0]);
    let last = places[places.length - 1];
    if (last === first) last = x.log ? first * 2 : first + 1;
    const labels = ticks(low, high, height / 55, y.log, false);
    const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(100 * ((labels[1] ?? high) - (labels[0] ?? low)) || 1)) - 2));
    const format = y.fraction ? (value) => (100 * value).toFixed(y.log ? 1 : digits) : number;
    const left = 18 + 7 * Math.max(...labels.map((value) => format(value).length)) + 14;
    const [right, top, bottom] = [width - 12, 10, height - 40];
    const across = scale(first, last, left, right, x.log);
    const up = scale(low, high, bottom, top, y.log);
    const chart = svg("svg", {
      class: "chart", width, height, role: "img", tabindex: 0,
      "aria-label": `${title} against ${x.title}. Last values: ${series.map((s) => `${s.label} ${y.format(s.points[s.points.length - 1][1])}`).join("; ").slice(0, 2000)}`,
    });
    for (const value of labels) {
      chart.append(svg("line", { class: "grid", x1: left, x2: right, y1: up(value), y2: up(value) }),
        svg("text", { class: "soft", x: left - 6, y: up(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of ticks(first, last, Math.max(2, (right - left) / 75), x.log, x.whole)) {
      chart.append(svg("line", { class: "grid", x1: across(value), x2: across(value), y1: top, y2: bottom }),
        svg("text", { class: "soft", x: across(value), y: bottom + 16, "text-anchor": "middle" }, number(value)));
    }
    chart.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title + (x.log ? " (logarithmic)" : "")),
      svg("text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, (y.fraction ? "%" : y.title || "") + (y.log ? " (log)" : "")));
    const path = (line) => line.map(([a, b], i) => `${i ? "L" : "M"}${across(a).toFixed(1)} ${up(b).toFixed(1)}`).join("");
    for (const each of series) {
      const banded = each.points.filter((point) => point[2] !== undefined && (!y.log || point[2] > 0));
      if (banded.length > 1) {
        const edge = banded.map((p) => [p[0], p[3]]).concat(banded.map((p) => [p[0], p[2]]).reverse());
        chart.append(svg("path", { class: `band ${colour(each.row)}`, "data-row": each.row, d: `${path(edge)}z` }));
      }
      for (const run of each.runs || []) {
        chart.append(svg("path", { class: `line thin ${colour(each.row)}`, "data-row": each.row, d: path(run.filter((p) => usable(p[0], x.log) && usable(p[1], y.log))) }));
      }
    }
    series.forEach((each, i) => {
      // An earlier line is wider, and markers are staggered: equal curves stay visible below each other.
      const thick = 1.4 + (1.8 * (series.length - i)) / series.length;
      const drawn = each.points;
      const line = svg("path", { class: `line ${colour(each.row)}`, "data-row": each.row, "stroke-width": each.stroke ? 1.6 : thick,
        "stroke-dasharray": each.stroke ? null : dash(each.row), d: path(drawn) });
      if (each.stroke) line.style.stroke = each.stroke;
      chart.append(line);
      if (each.stroke && drawn.length > 1) return;
      const count = Math.min(drawn.length, 7);
      for (let k = 0; k < count; k++) {
        const at = drawn.length <= 7 ? k : Math.min(drawn.length - 1, Math.round(((k + i / series.length) / count) * (drawn.length - 1)));
        chart.append(mark(each.row, across(drawn[at][0]).toFixed(1), up(drawn[at][1]).toFixed(1)));
      }
    });
    const cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    chart.append(cursor);
    figure.append(chart);
    withTip(figure, chart, [places.length, 1], (where) => {
      cursor.setAttribute("visibility", where ? "visible" : "hidden");
      if (!where) return null;
      const nearest = (list, distance) => list.reduce((best, item) => (distance(item) < distance(best) ? item : best));
      const place = where.x === undefined ? places[where.column] : nearest(places, (value) => Math.abs(across(value) - where.x));
      const x1 = across(place);
      cursor.setAttribute("x1", x1);
      cursor.setAttribute("x2", x1);
      let found = series.map((each) => ({ each, point: nearest(each.points, (point) => Math.abs(across(point[0]) - x1)) }))
        .filter(({ point }) => Math.abs(across(point[0]) - x1) < 12);
      if (found.length > 14) {
        const height_of = where.y === undefined ? top : where.y;
        found = found.sort((a, b) => Math.abs(up(a.point[1]) - height_of) - Math.abs(up(b.point[1]) - height_of)).slice(0, 12);
      }
      found.sort((a, b) => b.point[1] - a.point[1]);
      const lines = found.map(({ each, point }) => {
        const text = y.format(point[1]) + (each.spread && point[4] ? ` ± ${y.format(point[4]).replace(" %", "")}` : "");
        const line = entry(each.row, each.label, text);
        if (each.stroke) line.firstChild.style.background = each.stroke;
        return line;
      });
      return { x: x1, y: where.y ?? (top + bottom) / 2, content: [html("strong", {}, `${number(place)} ${x.unit}`), ...lines] };
    });
    const same = coinciding(series, high - low);
    if (same.length) {
      figure.append(html("p", { class: "note" }, same.length > 1 ? "Coinciding curves: " : "These curves coincide: ",
        same.flatMap((labels_, i) => [i ? "; " : "", ...labels_.flatMap((label, k) => [k ? ", " : "", html("bdi", {}, label)])]), "."));
    }
  }

  function coinciding(series, range) {
    const groups = [];
    const seen = new Set();
    series.forEach((one, i) => {
      if (seen.has(i) || one.points.length < 2) return;
      const same = series.map((_, k) => k).filter((k) => k > i && !seen.has(k) && series[k].points.length === one.points.length &&
        series[k].points.every((point, at) => Math.abs(point[1] - one.points[at][1]) <= 0.004 * range));
      same.forEach((k) => seen.add(k));
      if (same.length) groups.push([one.label, ...same.map((k) => series[k].label)]);
    });
    return groups;
  }

  // --- curves of the rows ---

  function rowSeries(measure, axis, band) {
    return data.rows.map((row, i) => {
      const curve = data.curves[i];
      const runs = curve.values[measure.key] || [];
      const points = [];
      const each = runs.map(() => []);
      curve.rounds.forEach((_, at) => {
        const values = runs.map((run) => run[at]);
        if (!values.length || values.includes(null)) return;
        const place = curve.axes[axis.key][at];
        const [centre, spread] = [mean(values), deviation(values)];
        const edges = { deviation: [centre - spread, centre + spread], range: [Math.min(...values), Math.max(...values)] }[band];
        points.push([place, centre, ...(edges && values.length > 1 ? edges : [undefined, undefined]), spread]);
        values.forEach((value, run) => each[run].push([place, value]));
      });
      return { row: i, label: row.label, points, runs: band === "runs" && runs.length > 1 ? each : [], spread: runs.length > 1 };
    }).filter((each) => !hidden.has(each.row));
  }

  function curves() {
    if (!data.measures.length || !data.curves.some((curve) => curve.rounds.length)) return;
    const place = section("curves");
    const bands = [["deviation", "± standard deviation over the runs of a row"], ["range", "minimum to maximum over the runs of a row"], ["runs", "each run as a thin line"], ["none", "none"]];
    const state = { axis: data.axes[0], band: data.repeated ? "deviation" : "none", logX: false, logY: false };
    const chosen = new Set(data.measures.filter((measure) => measure.shown));
    if (!chosen.size) chosen.add(data.measures[0]);
    const charts = html("div", { class: "charts" });
    const note = html("p", { class: "note", id: "curves-note" });
    const draw = () => {
      const figures = [...chosen].map(() => html("figure"));
      charts.replaceChildren(...figures);
      [...chosen].forEach((measure, i) => lineChart(figures[i], {
        title: measure.group === "training" ? measure.title : `${measure.title}, ${measure.group}`,
        series: rowSeries(measure, state.axis, state.band),
        x: { title: state.axis.title, unit: state.axis.title, log: state.logX, whole: state.axis.key.includes("round") },
        y: { fraction: measure.fraction, log: state.logY, format: shown(measure) },
      }));
      const longest = Math.max(...data.curves.map((curve) => curve.total));
      note.textContent = [
        data.repeated ? `Lines: mean over the runs of a row, which differ in their seed. Band: ${bands.find(([key]) => key === state.band)[1]}.` : "Each curve is one run.",
        longest > data.points ? `At most ${data.points} of the ${longest.toLocaleString("en-US")} rounds are drawn, evenly spaced.` : "",
        "Bytes are those of training messages; seconds include evaluation.",
      ].join(" ");
    };
    place.append(html("div", { class: "controls" },
      choice("Against", data.axes.map((axis) => axis.title), (i) => { state.axis = data.axes[i]; draw(); }),
      data.repeated ? choice("Band", bands.map(([, title]) => title), (i) => { state.band = bands[i][0]; draw(); }) : null,
      tick("logarithmic horizontally", false, (on) => { state.logX = on; draw(); }),
      tick("logarithmic vertically", false, (on) => { state.logY = on; draw(); })));
    const groups = [...new Set(data.measures.map((measure) => measure.group))];
    place.append(html("details", { class: "measures" }, html("summary", {}, "Measures"), groups.map((group) =>
      html("fieldset", {}, html("legend", {}, group), data.measures.filter((measure) => measure.group === group).map((measure) =>
        tick(measure.title, chosen.has(measure), (on) => { if (on) chosen.add(measure); else chosen.delete(measure); draw(); }))))));
    place.append(charts, note);
    redraws.push(draw);
  }

  // --- legend: hides rows in all charts, and highlights the one under the pointer or with the focus ---

  function highlight(row) {
    for (const element of document.querySelectorAll("svg.chart [data-row]")) {
      element.classList.toggle("dim", row !== null && Number(element.dataset.row) !== row);
    }
  }
  function legend() {
    const list = html("ul", { class: "legend", "aria-label": "Rows; a click hides a row in all charts" });
    data.rows.forEach((row, i) => {
      const sample = svg("svg", { width: 34, height: 12, "aria-hidden": "true" },
        svg("path", { class: `line ${colour(i)}`, "stroke-width": 2, "stroke-dasharray": dash(i), d: "M0 6H34" }), mark(i, 17, 6));
      const button = html("button", { type: "button", "aria-pressed": "true", title: row.label }, sample, html("bdi", {}, row.label), row.runs ? html("small", {}, row.runs) : null);
      button.addEventListener("click", () => {
        if (!hidden.delete(i)) hidden.add(i);
        button.setAttribute("aria-pressed", String(!hidden.has(i)));
        redraws.forEach((draw) => draw());
      });
      for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => highlight(i));
      for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => highlight(null));
      list.append(html("li", {}, button));
    });
    return list;
  }

  // --- domains: a marker for each row, with its deviation over runs ---

  function domains() {
    data.domains.forEach((kind, number_) => {
      const figure = html("figure");
      section("domains").insertBefore(figure, section("domains").querySelectorAll(".scroll")[number_]);
      redraws.push(() => {
        figure.replaceChildren(html("figcaption", {}, kind.title));
        const rows = data.rows.map((_, i) => i).filter((i) => !hidden.has(i) && kind.bars[i].some(Boolean));
        if (!rows.length) return;
        const width = Math.max(260, figure.clientWidth);
        const step = Math.min(14, Math.max(7, 90 / rows.length));
        const band = rows.length * step + 14;
        const left = Math.min(width * 0.32, 12 + 7.5 * Math.max(...kind.names.map((name) => name.length)));
        const values = kind.bars.flat().filter(Boolean);
        const low = Math.max(0, Math.min(...values.map(([value, spread]) => value - spread)) - 0.02);
        const high = Math.min(1, Math.max(...values.map(([value, spread]) => value + spread)) + 0.02);
        const height = band * kind.names.length + 36;
        const across = scale(low, high, left, width - 14, false);
        const chart = svg("svg", { class: "chart", width, height, role: "img", tabindex: 0, "aria-label": `${kind.title}; the table below has the values` });
        for (const value of ticks(low, high, (width - left) / 80, false, false)) {
          chart.append(svg("line", { class: "grid", x1: across(value), x2: across(value), y1: 0, y2: height - 36 }),
            svg("text", { class: "soft", x: across(value), y: height - 20, "text-anchor": "middle" }, String(Math.round(1000 * value) / 10)));
        }
        chart.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "%"));
        kind.names.forEach((name, k) => {
          const room = Math.floor((left - 10) / 6.5);
          chart.append(svg("text", { x: left - 8, y: k * band + band / 2 + 4, "text-anchor": "end" }, name.length > room ? `${name.slice(0, room - 1)}…` : name),
            svg("line", { class: "grid", x1: 0, x2: width - 14, y1: (k + 1) * band, y2: (k + 1) * band }));
          rows.forEach((row, place) => {
            const bar = kind.bars[row][k];
            if (!bar) return;
            const y = k * band + 7 + step * (place + 0.5);
            if (bar[1]) chart.append(svg("line", { class: `stroke ${colour(row)}`, "data-row": row, x1: across(bar[0] - bar[1]), x2: across(bar[0] + bar[1]), y1: y, y2: y }));
            chart.append(mark(row, across(bar[0]).toFixed(1), y));
          });
        });
        figure.append(chart);
        withTip(figure, chart, [1, kind.names.length], (where) => {
          if (!where) return null;
          const k = Math.max(0, Math.min(kind.names.length - 1, where.y === undefined ? where.row : Math.floor(where.y / band)));
          const lines = rows.filter((row) => kind.bars[row][k]).map((row) => {
            const [value, spread] = kind.bars[row][k];
            return entry(row, data.rows[row].label, percent(value) + (spread ? ` ± ${(100 * spread).toFixed(2)}` : ""));
          });
          return { x: where.x ?? left, y: (k + 0.5) * band, content: [html("strong", {}, html("bdi", {}, kind.names[k])), ...lines] };
        });
      });
    });
  }

  // --- clients: box plots ---

  function clients() {
    if (!data.clients) return;
    const place = section("clients");
    const list = data.clients.measures;
    const preferred = ["own_accuracy", "accuracy", "own_mean_iou"].find((key) => list.some((measure) => measure.key === key));
    list.sort((a, b) => (b.key === preferred) - (a.key === preferred));
    let measure = list[0];
    const figure = html("figure");
    const table = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Spread over clients" });
    const draw = () => {
      const boxes = data.clients.boxes[measure.key];
      const rows = data.rows.map((_, i) => i).filter((i) => boxes[i] && !hidden.has(i));
      figure.replaceChildren(html("figcaption", {}, measure.title));
      const format = shown(measure);
      if (rows.length) {
        const width = Math.max(260, figure.clientWidth);
        const each = 54;
        const height = each * rows.length + 40;
        let low = Math.min(...rows.map((i) => boxes[i].range[0]));
        let high = Math.max(...rows.map((i) => boxes[i].range[1]));
        if (low === high) [low, high] = [low - 0.5, high + 0.5];
        const across = scale(low, high, 14, width - 18, false);
        const chart = svg("svg", { class: "chart", width, height, role: "img", tabindex: 0, "aria-label": `${measure.title}: box plots; the table below has the values` });
        for (const value of ticks(low, high, width / 90, false, false)) {
          chart.append(svg("line", { class: "grid", x1: across(value), x2: across(value), y1: 0, y2: height - 40 }),
            svg("text", { class: "soft", x: across(value), y: height - 24, "text-anchor": "middle" }, measure.fraction ? String(Math.round(1000 * value) / 10) : number(value)));
        }
        if (measure.fraction) chart.append(svg("text", { x: width / 2, y: height - 6, "text-anchor": "middle" }, "%"));
        rows.forEach((row, k) => {
          const box = boxes[row];
          const y = k * each + 33;
          const [q1, median, q3] = box.quartiles.map(across);
          const [from, to] = box.whiskers.map(across);
          const room = Math.floor(width / 7);
          const label = data.rows[row].label;
          chart.append(svg("text", { x: 4, y: y - 15, "data-row": row }, label.length > room ? `${label.slice(0, room - 1)}…` : label));
          const group = svg("g", { class: colour(row), "data-row": row },
            svg("path", { class: "stroke", d: `M${from} ${y}H${q1}M${q3} ${y}H${to}M${from} ${y - 5}v10M${to} ${y - 5}v10` }),
            svg("rect", { class: "box", x: q1, y: y - 9, width: Math.max(1, q3 - q1), height: 18 }));
          box.points.forEach(([value], i) => group.append(svg("circle", { class: "dot", r: 2.5, cx: across(value).toFixed(1), cy: y - 6 + ((i * 5) % 13) })));
          group.append(svg("path", { class: "stroke", "stroke-width": 3, d: `M${median} ${y - 9}v18` }));
          chart.append(group, mark(row, across(box.mean).toFixed(1), y));
        });
        figure.append(chart);
        withTip(figure, chart, [1, rows.length], (where) => {
          if (!where) return null;
          const k = Math.max(0, Math.min(rows.length - 1, where.y === undefined ? where.row : Math.floor(where.y / each)));
          const box = boxes[rows[k]];
          const content = [html("strong", {}, html("bdi", {}, data.rows[rows[k]].label))];
          const near = where.x === undefined ? [] : box.points.filter(([value]) => Math.abs(across(value) - where.x) < 4).slice(0, 6);
          near.forEach(([value, name]) => content.push(entry(rows[k], name, format(value))));
          if (!near.length) content.push(entry(rows[k], "median", format(box.quartiles[1])), entry(rows[k], "quartiles", `${format(box.quartiles[0])} to ${format(box.quartiles[2])}`));
          return { x: where.x ?? across(box.quartiles[1]), y: k * each + 33, content };
        });
      }
      const heads = ["run", "clients", "mean", "deviation", "worst tenth", "lowest", "median", "highest"];
      const body = rows.map((row) => {
        const box = boxes[row];
        const count = box.runs > 1 ? `${box.count / box.runs} × ${box.runs} runs` : box.count;
        const cells = [[count, box.count], ...[box.mean, box.deviation, box.worst, box.range[0], box.quartiles[1], box.range[1]].map((value) => [value === null ? "-" : format(value), value])];
        return html("tr", {}, html("th", { scope: "row" }, html("bdi", { class: "label" }, data.rows[row].label)),
          cells.map(([text, value]) => html("td", { class: "number", "data-value": value }, String(text))));
      });
      table.replaceChildren(html("table", {}, html("caption", {}, measure.title), html("thead", {}, html("tr", {}, heads.map((head) => html("th", { scope: "col" }, head)))), html("tbody", {}, body)));
      sortable(table.firstChild);
    };
    if (list.length > 1) place.append(html("div", { class: "controls" }, choice("Measure", list.map((each) => each.title), (i) => { measure = list[i]; draw(); })));
    place.append(figure, table, html("p", { class: "note" },
      "Each value is of one client, in the last round that has it; the boxes are over all clients of all runs of a row: quartiles and median, whiskers to the last value within 1.5 quartile distances, points for clients, a marker for the mean. In the table, mean, deviation over clients and mean of the worst tenth of the clients are computed for each run and averaged over runs."));
    redraws.push(draw);
  }

  // --- heat maps ---

  function heatMap(figure, { title, rows, columns, values, format, rowTitle, columnTitle, low, high }) {
    figure.replaceChildren(html("figcaption", {}, title));
    const measured = values.flat().filter((value) => value !== null && value !== undefined);
    if (!measured.length) {
      figure.append(html("p", { class: "note" }, "No values to draw."));
      return;
    }
    low = low ?? measured.reduce((a, b) => Math.min(a, b));
    high = high ?? measured.reduce((a, b) => Math.max(a, b));
    const width = Math.max(260, figure.clientWidth);
    const short = (name, size) => (name.length > size ? `${name.slice(0, size - 1)}…` : name);
    const left = 28 + 6.5 * Math.min(14, Math.max(...rows.map((name) => name.length)));
    const cell = Math.max(9, Math.min(46, (width - left - 8) / columns.length));
    const tall = Math.max(9, Math.min(26, cell));
    const longest = Math.min(14, Math.max(...columns.map((name) => name.length)));
    const slanted = longest * 7 > cell;
    const top = 22 + (slanted ? 4 + longest * 5.2 : 18);
    const size = [Math.max(width, left + cell * columns.length + 8), top + tall * rows.length + 4];
    const chart = svg("svg", { class: "chart", width: size[0], height: size[1], role: "img", tabindex: 0, "aria-label": `${title}: ${rowTitle} by ${columnTitle}` });
    const every = (space) => Math.ceil(13 / space);
    columns.forEach((name, k) => {
      if (k % every(cell)) return;
      const x = left + (k + 0.5) * cell;
      chart.append(svg("text", slanted ? { class: "soft", transform: `translate(${x + 3} ${top - 6}) rotate(-50)` } : { class: "soft", x, y: top - 6, "text-anchor": "middle" }, short(name, 14)));
    });
    rows.forEach((name, k) => {
      if (!(k % every(tall))) chart.append(svg("text", { class: "soft", x: left - 6, y: top + (k + 0.5) * tall + 4, "text-anchor": "end" }, short(name, 14)));
      values[k].forEach((value, i) => {
        const none = value === null || value === undefined;
        const share = none ? 0 : high > low ? (value - low) / (high - low) : 1;
        chart.append(svg("rect", { class: none ? "none" : "cell", x: (left + i * cell).toFixed(1), y: (top + k * tall).toFixed(1), width: (cell - 0.7).toFixed(1), height: (tall - 0.7).toFixed(1), "fill-opacity": none ? null : (0.04 + 0.96 * share).toFixed(3) }));
        if (!none && cell >= 34 && tall >= 16) chart.append(svg("text", { class: share > 0.55 ? "inverse" : "", x: left + (i + 0.5) * cell, y: top + (k + 0.5) * tall + 4, "text-anchor": "middle" }, format(value, true)));
      });
    });
    chart.append(svg("text", { x: left, y: 13 }, columnTitle), svg("text", { x: 12, y: top + (tall * rows.length) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${top + (tall * rows.length) / 2})` }, rowTitle));
    const chosen = svg("rect", { class: "chosen", width: cell, height: tall, visibility: "hidden" });
    chart.append(chosen);
    const scroller = html("div", { class: "heat" }, chart);
    figure.append(scroller, html("p", { class: "note" }, `Faint: ${format(low)}; full colour: ${format(high)}.`));
    withTip(figure, chart, [columns.length, rows.length], (where) => {
      const i = where && (where.x === undefined ? where.column : Math.floor((where.x - left) / cell));
      const k = where && (where.x === undefined ? where.row : Math.floor((where.y - top) / tall));
      const inside = where && i >= 0 && k >= 0 && i < columns.length && k < rows.length;
      chosen.setAttribute("visibility", inside ? "visible" : "hidden");
      if (!inside) return null;
      chosen.setAttribute("x", left + i * cell);
      chosen.setAttribute("y", top + k * tall);
      const value = values[k][i];
      const line = (name, text) => html("div", {}, name, html("bdi", {}, text));
      return { x: left + (i + 1) * cell, y: top + k * tall, content: [html("strong", {}, value === null || value === undefined ? "not measured" : format(value)), line(`${rowTitle}:`, rows[k]), line(`${columnTitle}:`, columns[i])] };
    });
  }

  function chooser(place, items, draw) {
    let item = items[0];
    const show = () => draw(item);
    if (items.length > 1) place.append(html("div", { class: "controls" }, choice("Run", items.map((each) => each.title), (i) => { item = items[i]; show(); })));
    redraws.push(show);
  }

  function partition() {
    if (!data.partitions.length) return;
    const place = section("partition");
    const figure = html("figure");
    const note = html("p", { class: "note" });
    const whose = (item) => item.runs.slice(0, 4).join(", ") + (item.runs.length > 4 ? `, and ${item.runs.length - 4} more` : "");
    chooser(place, data.partitions.map((item) => ({ ...item, title: `${item.title} (${whose(item)})` })), (item) => {
      const turned = item.classes.map((_, label) => item.counts.map((counts) => counts[label]));
      heatMap(figure, { title: `Training images of each client by class, ${item.title}`, rows: item.classes, columns: item.clients, values: turned, format: (value) => value.toLocaleString("en-US"), rowTitle: "class", columnTitle: "client", low: 0 });
      const sizes = item.counts.map((counts) => counts.reduce((a, b) => a + b, 0));
      note.textContent = `Images per client: ${Math.min(...sizes).toLocaleString("en-US")} to ${Math.max(...sizes).toLocaleString("en-US")}.` +
        (item.total > item.counts.length ? ` The first ${item.counts.length} of ${item.total} clients are shown.` : "") + ` Used by: ${whose(item)}.`;
    });
    place.append(figure, note);
  }

  function matrix() {
    if (!data.matrices.length) return;
    const place = section("matrix");
    const figure = html("figure");
    chooser(place, data.matrices.map((item) => ({ ...item, title: item.run })), (item) => heatMap(figure, {
      title: `${item.run}: accuracy in %${item.block > 1 ? `, mean over blocks of ${item.block} by ${item.block} clients` : ""}`,
      rows: item.clients, columns: item.clients, values: item.values, format: (value, brief) => (brief ? String(Math.round(100 * value)) : percent(value)), rowTitle: "model of client", columnTitle: "images of client",
    }));
    place.append(figure);
  }

  function layers() {
    if (!data.layers.length) return;
    const place = section("layers");
    const [lines, map] = [html("figure"), html("figure")];
    const more = html("div", { class: "controls" });
    const keys = [...new Set(data.layers.flatMap((item) => Object.keys(item.series)))];
    const words = (key) => key.replaceAll("_", " ");
    let [item, key, log] = [data.layers[0], keys[0], false];
    const viridis = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39"];
    const draw = () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const ramp = dark ? viridis.slice(2) : viridis.slice(0, 6);
      const stroke = (i) => ramp[Math.round((i / Math.max(1, item.layers.length - 1)) * (ramp.length - 1))];
      const series = (item.series[key] || []).map((values, i) => ({ row: -1, label: item.layers[i], stroke: stroke(i), points: item.rounds.map((round, at) => [round, values[at]]) }));
      lineChart(lines, { title: `${words(key)} by layer, ${item.run}`, series, x: { title: "rounds", unit: "rounds", log: false, whole: true }, y: { log, format: number } });
      const base = key.split(",")[0];
      map.hidden = !item.by_client[base];
      if (item.by_client[base]) heatMap(map, { title: `${words(base)} of each client in round ${item.rounds[item.rounds.length - 1]}, ${item.run}`, rows: item.layers, columns: item.clients, format: number, rowTitle: "layer", columnTitle: "client", values: item.layers.map((_, i) => item.by_client[base].map((of) => of[i])) });
    };
    if (data.layers.length > 1) more.append(choice("Run", data.layers.map((each) => each.run), (i) => { item = data.layers[i]; draw(); }));
    more.append(choice("Quantity", keys.map(words), (i) => { key = keys[i]; draw(); }), tick("logarithmic vertically", false, (on) => { log = on; draw(); }));
    place.append(more, lines, html("p", { class: "note" }, "Colours run from violet or blue (first layer) to green (last layer)."), map);
    redraws.push(draw);
  }

  // --- tables and files ---

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const original = [...body.rows];
    if (original.length < 2) return;
    heads.forEach((head, column) => {
      const button = html("button", { type: "button", title: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const numeric = original.some((row) => row.cells[column].dataset.value !== undefined);
        const now = head.getAttribute("aria-sort");
        const order = numeric ? ["descending", "ascending", null] : ["ascending", "descending", null];
        const next = order[(order.indexOf(now) + 1) % 3];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (next) head.setAttribute("aria-sort", next);
        const value = (row) => {
          const cell = row.cells[column];
          return numeric ? (cell.dataset.value === undefined ? null : Number(cell.dataset.value)) : cell.textContent;
        };
        const sign = next === "descending" ? -1 : 1;
        const sorted = !next ? original : [...original].sort((a, b) => {
          const [one, two] = [value(a), value(b)];
          if (one === null || two === null) return (one === null) - (two === null);
          return sign * (numeric ? one - two : one.localeCompare(two, "en", { numeric: true }));
        });
        body.append(...sorted);
      });
    });
  }

  function downloads() {
    const list = html("ul");
    const titles = { "runs.csv": "all figures of every run", "curves.csv": "the curves as drawn, a line per run and round" };
    for (const [name, text] of Object.entries({ ...data.files, "report.json": JSON.stringify({ ...data, files: undefined }) })) {
      const type = name.endsWith("csv") ? "text/csv" : "application/json";
      const link = html("a", { download: name, href: URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` })) }, name);
      list.append(html("li", {}, link, `: ${titles[name] || "the data of all charts"}`));
    }
    section("downloads").append(list);
  }

  document.querySelectorAll("table").forEach(sortable);
  curves();
  domains();
  clients();
  partition();
  matrix();
  layers();
  downloads();
  if (redraws.length) document.getElementById("overview").after(legend());
  document.body.style.setProperty("--band", Math.max(0.05, 0.2 - 0.012 * data.rows.length));
  const draw = () => redraws.forEach((redraw) => redraw());
  draw();
  let [width, pending] = [innerWidth, 0];
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(draw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const each of document.querySelectorAll("main > section:not([hidden]) > h2")) {
    document.querySelector("nav").append(html("a", { href: `#${each.parentNode.id}` }, each.textContent));
  }
})();
