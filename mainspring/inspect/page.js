"use strict";
(() => {
  const $ = (selector) => document.querySelector(selector);
  const data = JSON.parse($("#data").textContent);
  const S = (index) => (index < 0 ? null : data.strings[index]);

  /** An element; children are nodes or texts, never markup. */
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  };
  const bytes = (count) => {
    if (count === null) return "–";
    let size = Math.abs(count), unit = 0;
    while (size >= 1024 && unit < 3) { size /= 1024; unit += 1; }
    return `${count < 0 ? "-" : ""}${unit ? size.toFixed(1) : size} ${["B", "KiB", "MiB", "GiB"][unit]}`;
  };
  const duration = (us) => (us === 0 ? "0" : us < 1e3 ? `${us.toFixed(us < 10 ? 2 : 1)} µs` : us < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`);
  const unique = (list) => [...new Set(list)];
  const pattern = (owner) => owner.replace(/^((?:[^.\s]+\.)+?)\d+(?=\.)/, "$1N");

  /* ---- operations ------------------------------------------------------------------------------------- */

  class Operation {
    constructor(packed, index) {
      const [name, kind, symbol, grid, block, shared, parameters, edges, uses, unresolved, parent, note] = packed;
      Object.assign(this, { index, grid, block, shared, parameters, unresolved, parent });
      this.name = S(name); this.kind = S(kind); this.symbol = S(symbol); this.note = S(note);
      this.edges = edges.map((edge) => (edge < 0 ? { index: ~edge, pdl: true } : { index: edge, pdl: false }));
      this.uses = uses.map((at) => data.uses[at]).map(([how, role, text, owner, address, parameter, offset, nbytes]) => (
        { owner: S(owner), address, parameter, offset, kind: S(how), role: S(role), nbytes, text: S(text) }));
    }
    get owners() { return unique(this.uses.map((use) => use.owner)); }
    get hay() {
      this._hay ??= [this.name, this.kind, this.symbol, this.note, `#${this.index}`, ...this.uses.flatMap((use) => [use.owner, use.text])]
        .filter(Boolean).join("\n").toLowerCase();
      return this._hay;
    }
  }
  const operationsOf = (rung) => (rung.list ??= rung.operations.map((packed, index) => new Operation(packed, index)));

  let words = [];
  /** Text with the words of the search marked. */
  const marked = (text) => {
    const lowered = text.toLowerCase();
    const hits = words.map((word) => [lowered.indexOf(word), word.length]).filter(([at]) => at >= 0).sort((a, b) => a[0] - b[0]);
    const parts = [];
    let from = 0;
    for (const [at, length] of hits) {
      if (at < from) continue;
      parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + length)));
      from = at + length;
    }
    return [...parts, text.slice(from)];
  };
  const launchText = (operation) => [
    operation.grid ? `grid ${operation.grid.join(" x ")}` : null,
    operation.block ? `block ${operation.block.join(" x ")}` : null,
  ].filter(Boolean).join(", ");

  /** A details element that gets its contents when it is first opened. */
  const folded = (kind, summary, fill) => {
    const body = make("div", { class: "body" });
    const details = make("details", { class: kind }, make("summary", {}, ...summary), body);
    let filled = false;
    const open = () => { if (details.open && !filled) { filled = true; body.append(...fill()); } };
    details.addEventListener("toggle", open);
    details.unfold = () => { details.open = true; open(); };
    return details;
  };

  const inside = (operation) => {
    const facts = [["kind", operation.kind], ["symbol", operation.symbol], ["grid", operation.grid && operation.grid.join(" x ")],
      ["block", operation.block && operation.block.join(" x ")], ["shared memory", operation.shared === null ? null : bytes(operation.shared)],
      ["parameters", operation.parameters.length ? `${operation.parameters.join(", ")} bytes` : null],
      ["waits for", operation.edges.map((edge) => `#${edge.index}${edge.pdl ? " (programmatic: PDL)" : ""}`).join(", ")],
      ["inside of", operation.parent === null ? null : `#${operation.parent}`], ["note", operation.note],
      ["words that look like addresses", operation.unresolved || null]];
    const list = make("dl", { class: "facts" });
    for (const [name, value] of facts) if (value) list.append(make("dt", {}, name), make("dd", {}, String(value)));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...["Parameter", "Role", "Owner", "Shape", "Bytes", "Address"].map((title) => make("th", { scope: "col" }, title)))));
    const rows = make("tbody");
    for (const use of operation.uses) {
      rows.append(make("tr", {},
        make("td", {}, `${use.parameter}${use.offset || use.kind === "struct" ? ` +${use.offset}` : ""}${use.kind === "pointer" ? "" : ` (${use.kind})`}`),
        make("td", {}, use.role.replace("_", " and ")), make("td", { class: "mono" }, ...marked(use.owner)), make("td", { class: "mono" }, use.text || "–"),
        make("td", { class: "num" }, bytes(use.nbytes)), make("td", { class: "mono" }, use.address === null ? "–" : `0x${use.address.toString(16)}`)));
    }
    table.append(rows);
    const box = make("div", { class: "inner" }, list);
    if (operation.uses.length) box.append(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Addresses of operation ${operation.index}` }, table));
    return [box];
  };
  const operationRow = (operation, layer) => {
    const named = operation.owners.filter((owner) => owner !== "graph pool").map((owner) => (layer && owner.startsWith(`${layer}.`) ? owner.slice(layer.length + 1) : owner));
    const about = [launchText(operation), named.join(", ")].filter(Boolean).join(" · ");
    const row = folded("op", [make("span", { class: "index" }, String(operation.index)), make("span", { class: "name" }, ...marked(operation.name)),
      make("span", { class: "uses" }, ...marked(about))], () => inside(operation));
    if (operation.parent !== null) row.classList.add("inside");
    return row;
  };

  const MOST = 1500;
  const list = $("#operation-list"), count = $("#operation-count"), unfold = $("#unfold");
  const rung = () => data.rungs[Number($("#rung").value)];
  const showOperations = () => {
    const operations = data.rungs.length ? operationsOf(rung()) : [];
    words = $("#search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = operations.filter((operation) => words.every((word) => operation.hay.includes(word)));
    const shown = new Set(wanted.slice(0, MOST).map((operation) => operation.index));
    const rows = (start, stop, layer) => operations.slice(start, stop).filter((operation) => shown.has(operation.index)).map((operation) => operationRow(operation, layer));
    const any = (start, stop) => operations.slice(start, stop).some((operation) => shown.has(operation.index));
    list.replaceChildren();
    for (const [start, stop, title, layers] of data.rungs.length ? rung().sections : []) {
      if (!any(start, stop)) continue;
      if (!layers.length) { list.append(...rows(start, stop)); continue; }
      const each = layers[0][2] - layers[0][1];
      const one = ([name, from, to]) => folded("layer", [name, make("span", { class: "tag" }, `${to - from} operations`)], () => rows(from, to, name));
      const inner = () => (layers.length === 1 ? rows(start, stop, title) : layers.filter(([, from, to]) => any(from, to)).map((layer, at) => {
        const element = one(layer);
        if (at === 0 || words.length) element.unfold();
        return element;
      }));
      const text = layers.length === 1 ? `${each} operations` : `${layers.length} layers alike, ${each} operations each`;
      const section = folded("section", [title, make("span", { class: "tag" }, text)], inner);
      if (words.length) section.unfold();
      list.append(section);
    }
    const of = words.length ? `${wanted.length} of ${operations.length} operations match` : `${operations.length} operations`;
    count.textContent = wanted.length > MOST ? `${of}; the first ${MOST} are shown` : of;
    unfold.textContent = "Unfold all";
  };
  unfold.addEventListener("click", () => {
    const open = unfold.textContent === "Unfold all";
    if (open) {
      for (const section of list.querySelectorAll("details.section")) section.unfold();
      for (const layer of list.querySelectorAll("details.layer")) layer.unfold();
    } else {
      for (const details of list.querySelectorAll("details")) details.open = false;
    }
    unfold.textContent = open ? "Fold all" : "Unfold all";
  });
  data.rungs.forEach((each, at) => {
    for (const select of ["#rung", "#diff-a", "#diff-b"]) $(select).append(make("option", { value: at }, each.title));
  });
  let typing = 0;
  $("#search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(showOperations, 80); });
  $("#rung").addEventListener("change", showOperations);
  showOperations();

  /* ---- ladder ------------------------------------------------------------------------------------------ */

  for (const input of document.querySelectorAll(".ask input")) {
    const sizes = input.dataset.sizes.split(" ").map(Number);
    const output = input.closest("figcaption").querySelector("output");
    const answer = () => {
      const rows = Number(input.value), size = sizes.find((each) => each >= rows);
      output.textContent = !Number.isInteger(rows) || rows < 1 ? "" : size === undefined
        ? `is split over several replays of rung ${sizes.at(-1)} and below`
        : `runs on rung ${size}: ${size - rows} ${size - rows === 1 ? "row" : "rows"} of padding, ${Math.round((100 * (size - rows)) / size)} %`;
    };
    input.addEventListener("input", answer);
    answer();
  }

  /* ---- address book and memory ------------------------------------------------------------------------- */

  const owners = [...document.querySelectorAll("#owners tbody tr")];
  const openGroups = new Set();
  const showOwners = () => {
    const wanted = $("#owner-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const hit = (row) => wanted.every((word) => row.dataset.name.toLowerCase().includes(word));
    let shown = 0, all = 0;
    for (const row of owners) {
      const single = !row.classList.contains("group");
      const matches = hit(row);
      all += single; shown += single && matches;
      row.hidden = wanted.length ? !single || !matches : Boolean(row.dataset.of) && !openGroups.has(row.dataset.of);
    }
    $("#owner-count").textContent = wanted.length ? `${shown} of ${all} owners match` : `${all} owners`;
  };
  for (const button of document.querySelectorAll("#owners .fold")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      openGroups[open ? "add" : "delete"](button.dataset.group);
      showOwners();
    });
  }
  $("#owner-search").addEventListener("input", showOwners);
  showOwners();
  const mapName = $("#map-name");
  for (const piece of document.querySelectorAll(".region rect[data-owner]")) {
    piece.addEventListener("pointerenter", () => { mapName.textContent = piece.dataset.text; });
    piece.addEventListener("click", () => {
      mapName.textContent = piece.dataset.text;
      $("#owner-search").value = piece.dataset.owner;
      showOwners();
      $("#addresses").scrollIntoView();
    });
  }

  /* ---- timeline ---------------------------------------------------------------------------------------- */

  const canvas = $("#timeline-canvas");
  if (canvas) {
    const colours = { product: "--blue", attention: "--orange", norm: "--green", copy: "--purple", launch: "--gold", step: "--gold", wait: "--bad", other: "--grey" };
    const titles = { product: "matrix products", attention: "attention", norm: "norms, activations, embedding", copy: "copies", launch: "launches", step: "steps", wait: "waiting", other: "other" };
    const lanes = data.timelines.flatMap((timeline) => timeline.lanes.map((lane, at) => ({
      mode: timeline.mode, name: lane.name, device: lane.device, first: at === 0,
      events: lane.events.map(([name, kind, start, time, step]) => ({ name: S(name), kind: S(kind), start, time, step })),
    })));
    const present = unique(lanes.flatMap((lane) => lane.events.map((event) => event.kind)));
    for (const kind of Object.keys(titles).filter((each) => present.includes(each))) {
      $("#timeline-legend").append(make("li", {}, make("i", { class: `swatch ${kind}` }), titles[kind]));
    }
    const total = Math.max(1, ...lanes.flatMap((lane) => lane.events.map((event) => event.start + event.time)));
    let from = 0, to = total, chosen = null;
    const LABEL = 22, BAR = 26, SPACE = 8, AXIS = 24;
    const tops = [];
    let height = AXIS;
    for (const lane of lanes) { tops.push(height + LABEL); height += LABEL + BAR + SPACE; }
    const draw = () => {
      const width = canvas.clientWidth, scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
      const paint = canvas.getContext("2d");
      paint.scale(scale, scale);
      const colour = (name) => style.getPropertyValue(name).trim();
      const x = (time) => ((time - from) / (to - from)) * width;
      paint.font = "13px system-ui, sans-serif"; paint.textBaseline = "middle";
      const rough = (to - from) / Math.max(2, Math.floor(width / 120)), power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
      for (let time = Math.ceil(from / tick) * tick; time <= to; time += tick) {
        paint.fillStyle = colour("--line"); paint.fillRect(Math.round(x(time)), AXIS - 4, 1, height);
        const text = duration(time);
        paint.fillStyle = colour("--muted"); paint.fillText(text, Math.min(Math.max(0, x(time) - paint.measureText(text).width / 2), width - paint.measureText(text).width), 10);
      }
      lanes.forEach((lane, row) => {
        const top = tops[row];
        paint.fillStyle = colour("--fg");
        paint.fillText(`${lane.mode}: ${lane.name}`, 0, top - LABEL / 2);
        paint.fillStyle = colour("--soft"); paint.fillRect(0, top, width, BAR);
        for (const event of lane.events) {
          if (event.start + event.time < from || event.start > to) continue;
          const left = x(event.start), wide = Math.max(x(event.start + event.time) - left - (to - from < total / 3 ? 0.5 : 0), 0.6);
          paint.fillStyle = chosen && chosen.event === event ? colour("--fg") : colour(colours[event.kind] || "--grey");
          paint.fillRect(left, top, wide, BAR);
          if (wide > 60) {
            paint.fillStyle = colour("--card");
            const start = Math.max(left, 0) + 4, room = Math.min(left + wide, width) - start - 4;
            let text = event.name.replace(/^\w+::/, "");
            while (text.length > 3 && paint.measureText(text).width > room) text = `${text.slice(0, -2)}…`;
            if (paint.measureText(text).width <= room) paint.fillText(text, start, top + BAR / 2 + 1);
          }
        }
      });
    };
    const say = () => {
      if (!chosen) return;
      const { row, event } = chosen, lane = lanes[row];
      const end = event.start + event.time, later = lane.events.filter((each) => each.start >= end);
      const next = later.length ? Math.min(...later.map((each) => each.start)) - end : null;
      const gap = lane.device && next !== null ? `, then a gap of ${duration(next)}` : "";
      $("#timeline-name").textContent = `${lane.mode} · ${event.name} · ${duration(event.time)} at ${duration(event.start)}${event.step >= 0 ? ` in step ${event.step + 1}` : ""}${gap}`;
    };
    const look = (start, stop) => {
      const wide = Math.min(Math.max(stop - start, total / 5000), total);
      from = Math.min(Math.max(start, 0), total - wide); to = from + wide;
      draw();
    };
    const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
    const pan = (share) => look(from + share * (to - from), to + share * (to - from));
    const choose = (row, event) => {
      if (!event) return;
      chosen = { row, event };
      if (event.start < from || event.start + event.time > to) look(event.start - (to - from) / 2, event.start + (to - from) / 2); else draw();
      say();
    };
    const at = (pointer) => {
      const box = canvas.getBoundingClientRect(), y = pointer.clientY - box.top, time = from + ((pointer.clientX - box.left) / box.width) * (to - from);
      const row = tops.findIndex((top) => y >= top && y < top + BAR);
      if (row < 0) return null;
      const near = (2 * (to - from)) / box.width;
      const event = lanes[row].events.find((each) => time >= each.start - near && time <= each.start + each.time + near);
      return event ? { row, event } : null;
    };
    $("#zoom-in").addEventListener("click", () => zoom(0.5));
    $("#zoom-out").addEventListener("click", () => zoom(2));
    $("#pan-left").addEventListener("click", () => pan(-0.4));
    $("#pan-right").addEventListener("click", () => pan(0.4));
    $("#zoom-all").addEventListener("click", () => look(0, total));
    canvas.addEventListener("keydown", (key) => {
      const row = chosen ? chosen.row : 0, events = lanes[row].events, place = chosen ? events.indexOf(chosen.event) : -1;
      const closest = (other) => lanes[other] && lanes[other].events.reduce((best, each) => (!best || Math.abs(each.start - (chosen ? chosen.event.start : 0)) < Math.abs(best.start - (chosen ? chosen.event.start : 0)) ? each : best), null);
      const actions = {
        ArrowRight: () => choose(row, events[place + 1]), ArrowLeft: () => choose(row, events[place - 1]),
        ArrowDown: () => choose(row + 1, closest(row + 1)), ArrowUp: () => choose(row - 1, closest(row - 1)),
        "+": () => zoom(0.5, chosen ? chosen.event.start : undefined), "=": () => zoom(0.5, chosen ? chosen.event.start : undefined),
        "-": () => zoom(2), Home: () => choose(row, events[0]), End: () => choose(row, events.at(-1)),
      };
      if (actions[key.key] && !key.ctrlKey && !key.metaKey && !key.altKey) { key.preventDefault(); actions[key.key](); }
    });
    let drag = null;
    canvas.addEventListener("pointerdown", (pointer) => { drag = { x: pointer.clientX, from, to }; canvas.setPointerCapture(pointer.pointerId); const hit = at(pointer); if (hit) choose(hit.row, hit.event); });
    canvas.addEventListener("pointermove", (pointer) => {
      if (drag) {
        const moved = ((drag.x - pointer.clientX) / canvas.clientWidth) * (drag.to - drag.from);
        look(drag.from + moved, drag.to + moved);
      } else {
        const hit = at(pointer);
        if (hit && (!chosen || hit.event !== chosen.event)) choose(hit.row, hit.event);
      }
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
    new ResizeObserver(draw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  /* ---- diff -------------------------------------------------------------------------------------------- */

  /** Pairs of operations that are equal in kind and name, in order; null stands for a missing one. */
  const match = (a, b) => {
    const key = (operation) => `${operation.kind}\n${operation.name}`;
    const x = a.map(key), y = b.map(key);
    let head = 0, tail = 0;
    while (head < x.length && head < y.length && x[head] === y[head]) head += 1;
    while (tail < x.length - head && tail < y.length - head && x.at(-1 - tail) === y.at(-1 - tail)) tail += 1;
    const n = x.length - head - tail, m = y.length - head - tail, best = Array.from({ length: n + 1 }, () => new Uint32Array(m + 1));
    for (let i = n - 1; i >= 0; i -= 1) for (let j = m - 1; j >= 0; j -= 1) {
      best[i][j] = x[head + i] === y[head + j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
    const pairs = a.slice(0, head).map((each, at) => [each, b[at]]);
    let i = 0, j = 0;
    while (i < n || j < m) {
      if (i < n && j < m && x[head + i] === y[head + j]) { pairs.push([a[head + i], b[head + j]]); i += 1; j += 1; }
      else if (j >= m || (i < n && best[i + 1][j] >= best[i][j + 1])) { pairs.push([a[head + i], null]); i += 1; }
      else { pairs.push([null, b[head + j]]); j += 1; }
    }
    for (let at = tail; at > 0; at -= 1) pairs.push([a.at(-at), b.at(-at)]);
    return pairs;
  };
  const unnumbered = (owner) => owner.replace(/ #\d+$/, "");
  const fieldsOf = (operation, size) => ({
    grid: operation.grid ? [operation.grid.join(" x ")] : [], block: operation.block ? [operation.block.join(" x ")] : [],
    "shared memory": operation.shared === null ? [] : [String(operation.shared)], parameters: [operation.parameters.join(" x ")], note: [operation.note],
    owners: unique(operation.uses.map((use) => unnumbered(use.owner))),
    shapes: operation.uses.filter((use) => use.text).map((use) => use.text.replace(new RegExp(`\\[${size}(?=[,\\]])`), "[rows")),
    "waits for": operation.edges.map((edge) => (edge.pdl ? "programmatic" : "full")).sort(),
  });
  const changed = (one, other, sizes) => {
    const a = fieldsOf(one, sizes[0]), b = fieldsOf(other, sizes[1]), found = [];
    for (const name of Object.keys(a)) {
      if (a[name].join("\n") === b[name].join("\n")) continue;
      let pairs = [[a[name].join("; ") || "none", b[name].join("; ") || "none"]];
      if (a[name].length === b[name].length) {
        const both = unique(a[name].map((text, at) => [text, b[name][at]]).filter(([p, q]) => p !== q).map((pair) => JSON.stringify(pair))).map((text) => JSON.parse(text));
        pairs = [[both.map(([p]) => p).join("; "), both.map(([, q]) => q).join("; ")]];
      }
      found.push([name, ...pairs[0]]);
    }
    return found;
  };
  const showDiff = () => {
    const [a, b] = ["#diff-a", "#diff-b"].map((select) => data.rungs[Number($(select).value)]);
    const groups = new Map();
    let same = 0, different = 0;
    for (const [one, other] of match(operationsOf(a), operationsOf(b))) {
      const fields = one && other ? changed(one, other, [a.size, b.size]) : [];
      if (one && other && !fields.length) { same += 1; continue; }
      different += 1;
      const what = one ? (other ? "changed" : "removed") : "added";
      const told = fields.map(([name, p, q]) => [name, ...[p, q].map((text) => text.split("; ").map(pattern).join("; "))]);
      const key = JSON.stringify([what, (one || other).name, told]);
      if (!groups.has(key)) groups.set(key, { what, first: one || other, told, times: 0 });
      groups.get(key).times += 1;
    }
    $("#diff-summary").textContent = different ? `${different} operations differ, ${same} are the same` : `The same ${same} operations`;
    $("#diff-table").hidden = !different;
    const side = (told, at) => told.flatMap((field, index) => [index ? make("br") : null, make("span", { class: "muted" }, `${field[0]} `), make("span", { class: "mono" }, field[at])]);
    $("#diff-table tbody").replaceChildren(...[...groups.values()].map((group) => make("tr", {},
      make("td", {}, group.what), make("td", { class: "num" }, String(group.times)), make("td", { class: "mono" }, `#${group.first.index} ${group.first.name}`),
      make("td", {}, ...side(group.told, 1)), make("td", {}, ...side(group.told, 2)))));
  };
  if (data.rungs.length > 1) {
    const name = (each) => each.title.replace(/^[AB]: /, "");
    const second = data.rungs.findIndex((each) => each.file === 1 && name(each) === name(data.rungs[0]));
    const fallback = data.rungs.findIndex((each) => each.file === 1);
    $("#diff-b").value = String(second >= 0 ? second : fallback >= 0 ? fallback : data.rungs.length - 1);
    for (const select of ["#diff-a", "#diff-b"]) $(select).addEventListener("change", showDiff);
    showDiff();
  } else {
    $("#diff").hidden = true;
    for (const link of document.querySelectorAll('nav a[href="#diff"]')) link.hidden = true;
  }
})();
