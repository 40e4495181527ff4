// What the pages of the report do: sort and filter lists, and play back how a sample was decoded.
// No library, no network. Texts enter the page as text nodes, never as markup.
"use strict";

const make = (name, attributes = {}, ...inside) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...inside);
  return element;
};

// --- lists ---------------------------------------------------------------------------------------

const PAGE = 50; // rows of a filtered list that are shown at first

function sortBy(table, head) {
  const column = [...head.parentNode.children].indexOf(head);
  const numbers = head.classList.contains("number");
  const down = head.getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/^[^\d+-]+/, ""));
    return { row, text, empty: numbers ? Number.isNaN(number) : !text, number };
  });
  const order = numbers ? (a, b) => a.number - b.number
    : (a, b) => a.text.localeCompare(b.text, "en", { numeric: true });
  keyed.sort((a, b) => a.empty - b.empty || (a.empty ? 0 : (down ? -1 : 1) * order(a, b)));
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...keyed.map((entry) => entry.row));
  const form = document.querySelector(`form[data-filters="${table.id}"]`);
  if (form) narrow(form);
}

function narrow(form) {
  const rows = [...document.getElementById(form.dataset.filters).tBodies[0].rows];
  const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
  const select = form.elements.value;
  const most = form.whole ? rows.length : PAGE;
  let found = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const chosen = !select.value
      || row.cells[select.dataset.column].textContent.trim() === select.value;
    const fits = chosen && words.every((word) => text.includes(word));
    found += fits;
    row.hidden = !fits || found > most;
  }
  form.querySelector("output").textContent = found > most ? `${most} of ${found}`
    : `${found} of ${rows.length}`;
  const button = form.querySelector("button");
  button.hidden = found <= most;
  button.textContent = `Show all ${found}`;
}

function lists() {
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    for (const button of table.querySelectorAll("th > button")) {
      button.addEventListener("click", () => sortBy(table, button.parentNode));
    }
  }
  for (const form of document.querySelectorAll("form[data-filters]")) {
    form.addEventListener("input", () => narrow(form));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.whole = true;
      narrow(form);
    });
    narrow(form);
  }
}

// --- data of samples -----------------------------------------------------------------------------

const packs = new Map(); // number of a script -> its samples, or the promise of them

function receiveSamples(number, pack) {
  packs.get(number).resolve(pack);
}

function loadPack(number) {
  if (!packs.has(number)) {
    const waiting = {};
    waiting.promise = new Promise((resolve, reject) => Object.assign(waiting, { resolve, reject }));
    packs.set(number, waiting);
    const missing = () => waiting.reject(new Error(`samples-${number}.js is missing next to this page`));
    document.head.append(make("script", { src: `samples-${number}.js`, onerror: missing }));
  }
  return packs.get(number).promise;
}

// --- colours of forwards, computed as in site/decoding_order.py ------------------------------------

function heat(run, forward, forwards) {
  const place = forward / Math.max(forwards - 1, 1) * (run.scale.length - 1);
  const low = Math.min(Math.floor(place), run.scale.length - 2);
  const ground = run.scale[low].map((a, i) =>
    Math.round(a + (run.scale[low + 1][i] - a) * (place - low)));
  const light = ground.reduce((sum, value, i) =>
    sum + run.luminance[i] * (value / 255) ** 2.2, 0);
  return { ground: `rgb(${ground})`, ink: light > run.even ? "#000000" : "#ffffff" };
}

// --- the viewer of a sample ------------------------------------------------------------------------

const SPEEDS = [["2", "2 forwards/s"], ["5", "5 forwards/s"], ["15", "15 forwards/s"],
  ["measured", "as measured"], ["slower", "measured, 10 × slower"]];
const KEYS = { " ": "play", k: "play", ArrowRight: "next", ArrowLeft: "back", Home: "first",
  End: "last", PageDown: "far", PageUp: "farBack", n: "following", p: "previous" };

class Viewer {
  constructor(run, index, sample, words) {
    Object.assign(this, { run, index, sample, words, timer: null });
    this.forwards = sample.steps.kind.length;
    this.committed = sample.steps.kind.map(() => []);
    sample.born.forEach((forward, position) => {
      if (forward >= 0) this.committed[forward].push(position);
    });
    this.total = 0;
    this.filled = this.committed.map((positions) => (this.total += positions.length));
    this.heats = sample.steps.kind.map((_, i) => heat(run, i, this.forwards));
    this.now = this.forwards; // number of forwards that are shown as made
  }

  // Parts of the page.

  build() {
    this.canvas = make("div", { class: "canvas", role: "group", "aria-label": "Canvas" });
    this.tokens = this.sample.tokens.map((word, position) => this.token(word, position));
    this.drawCanvas();
    this.timeline = make("div", { class: "timeline", "aria-hidden": "true" }, ...this.bars());
    this.range = make("input", { type: "range", min: 0, max: this.forwards, step: 1,
      "aria-label": "Forwards made", oninput: () => this.go(Number(this.range.value)) });
    this.status = make("p", { class: "status", role: "status" });
    this.draft = make("p", { class: "draft" });
    this.rows = this.sample.steps.kind.map((_, i) => this.row(i));
    this.show();
    return [
      make("section", { class: "player", "aria-label": "How the sample was decoded" }, this.canvas,
        this.timeline, this.range, this.controls(), this.status, this.draft, this.legend()),
    ];
  }

  // The list of forwards, which stands next to the texts where the window is wide.
  details() {
    return make("section", {}, make("h2", {}, "Forwards"), this.table());
  }

  token(word, position) {
    const before = position > 0 && this.sample.tokens[position - 1] === word;
    const outside = position >= this.sample.end;
    const text = outside && before ? "·" : this.words[word];
    const element = make("span", { class: outside ? "token outside" : "token" });
    const parts = text.split("\n");
    parts.forEach((part, i) => {
      if (i) element.append(make("span", { class: "sign" }, "↵"), outside ? "" : "\n");
      element.append(part);
    });
    return element;
  }

  drawCanvas() {
    const { borders, end, ended_by: reason } = this.sample;
    const mark = () => make("span", { class: "end" }, `${reason}`);
    this.tokens.forEach((element, position) => {
      if (reason && position === end) this.canvas.append(mark());
      if (borders.includes(position)) this.canvas.append(make("span", { class: "border" }));
      this.canvas.append(element);
    });
    if (reason && end === this.tokens.length) this.canvas.append(mark());
  }

  bars() {
    const most = Math.max(1, ...this.committed.map((positions) => positions.length));
    return this.committed.map((positions, i) => {
      const bar = make("span", { class: positions.length ? "" : "none",
        title: `forward ${i + 1}: ${positions.length} committed`, onclick: () => this.go(i + 1) });
      bar.style.height = `${100 * positions.length / most}%`;
      if (positions.length) bar.style.background = this.heats[i].ground;
      return bar;
    });
  }

  controls() {
    const button = (action, sign, label) =>
      make("button", { type: "button", class: action, "aria-label": label, title: label,
        onclick: () => this[action]() }, sign);
    this.playButton = button("play", "Play", "Play (space)");
    this.speed = make("select", { name: "speed" }, ...SPEEDS.map(([value, text]) =>
      make("option", { value, selected: value === "5" }, text)));
    return make("div", { class: "controls" }, button("first", "|◀", "To the start (Home)"),
      button("back", "◀", "One forward back (←)"), this.playButton,
      button("next", "▶", "One forward on (→)"), button("last", "▶|", "To the end (End)"),
      make("label", {}, "Speed ", this.speed));
  }

  legend() {
    const scale = make("span", { class: "scale", "aria-hidden": "true" });
    scale.style.background = `linear-gradient(90deg, ${this.run.scale.map((c) => `rgb(${c})`)})`;
    const notes = [make("span", {}, "early", scale, "late forward")];
    const note = (occurs, text) => { if (occurs) notes.push(" · ", text); };
    note(this.sample.borders.length, "│ block border");
    note(this.sample.steps.kind.includes("verify"), "dotted line: the target's own token");
    note(this.sample.steps.drafted, "proposal: accepted, rejected (struck out), not verified (grey)");
    note(this.sample.steps.survival,
      "small number: the confidence head's probability that it is accepted if all before it are");
    note(this.sample.steps.branches.some((k) => k > 1),
      "branches: ○ lookahead, □ base, filled: the one continued with");
    const keys = ["space plays", "← → step", "Home End", "PgUp PgDn ten", "n p other sample"];
    return make("p", { class: "keys" }, ...notes,
      make("span", { class: "hint" }, make("br"), `Keys: ${keys.join(" · ")}`));
  }

  row(i) {
    const { steps } = this.sample;
    const swatch = make("td", { class: "swatch" });
    swatch.style.background = this.heats[i].ground;
    const numbers = [steps.fed[i], steps.cached[i], steps.ms[i] ? steps.ms[i].toFixed(1) : "–", this.committed[i].length,
      steps.forced[i], steps.proposed[i] ? `${steps.accepted[i]}/${steps.proposed[i]}` : "",
      `${this.percent(i)} %`];
    const cells = numbers.map((text, column) => make("td", { class: "number",
      hidden: this.hides(column) }, `${text}`));
    return make("tr", { onclick: () => this.go(i + 1) }, swatch,
      make("td", { class: "number" }, `${i + 1}`), make("td", {}, steps.kind[i]),
      make("td", { hidden: this.hides("branches") }, this.marks(i)), ...cells,
      make("td", { class: "tokens" }, this.text(this.committed[i])));
  }

  text(positions) { // equal neighbours are written once, with their number
    const runs = [];
    positions.forEach((position, i) => {
      const word = this.sample.tokens[position];
      const last = runs.at(-1);
      const goes = last && last.word === word && positions[i - 1] === position - 1;
      if (goes) last.times += 1;
      else runs.push({ word, times: 1 });
    });
    return runs.map(({ word, times }) => this.words[word].replaceAll("\n", "↵")
      + (times > 1 ? `×${times} ` : "")).join("");
  }

  hides(column) {
    const { branches, forced, proposed } = this.sample.steps;
    const empty = { branches: branches.every((k) => k === 1), 4: forced.every((n) => !n),
      5: proposed.every((n) => !n) };
    return Boolean(empty[column]);
  }

  marks(i) {
    const { branches, winner } = this.sample.steps;
    return Array.from({ length: branches[i] }, (_, branch) => {
      const signs = branch < branches[i] - 1 ? "○●" : "□■";
      return signs[Number(branch === winner[i])];
    }).join("");
  }

  table() {
    const names = ["fed", "cached", "ms", "committed", "forced", "accepted", "filled"];
    const heads = names.map((name, column) =>
      make("th", { class: "number", scope: "col", hidden: this.hides(column) }, name));
    const head = make("tr", {}, make("td"), make("th", { class: "number", scope: "col" }, "#"),
      make("th", { scope: "col" }, "kind"),
      make("th", { scope: "col", hidden: this.hides("branches") }, "branches"), ...heads,
      make("th", { scope: "col" }, "tokens"));
    return make("div", { class: "scroll forwards", tabindex: 0, role: "region",
      "aria-label": "Forwards" }, make("table", { class: "grid" }, make("thead", {}, head),
      make("tbody", {}, ...this.rows)));
  }

  // What is shown after `now` forwards.

  show() {
    const { born, end } = this.sample;
    const fresh = this.now - 1;
    this.tokens.forEach((element, position) => {
      const masked = born[position] < 0 || born[position] >= this.now;
      const colour = !masked && position < end ? this.heats[born[position]] : null;
      element.classList.toggle("masked", masked);
      element.classList.toggle("fresh", !masked && born[position] === fresh);
      element.classList.toggle("own", !masked && this.isOwn(position));
      element.setAttribute("aria-hidden", String(masked));
      element.style.background = colour ? colour.ground : "";
      element.style.color = colour ? colour.ink : "";
      element.title = masked ? `position ${position}` : `position ${position}, forward ${
        born[position] + 1}`;
    });
    [...this.timeline.children].forEach((bar, i) => bar.classList.toggle("done", i < this.now));
    this.rows.forEach((row, i) => row.classList.toggle("now", i === fresh));
    this.range.value = this.now;
    this.range.setAttribute("aria-valuetext", `${this.now} of ${this.forwards}`);
    this.status.textContent = this.sentence(fresh);
    this.draft.replaceChildren(...this.proposal(fresh));
  }

  isOwn(position) {
    const forward = this.sample.born[position];
    const { kind, accepted } = this.sample.steps;
    return kind[forward] === "verify"
      && this.committed[forward].indexOf(position) >= accepted[forward];
  }

  percent(i) { // of the canvas after forward i
    const { filled } = this.sample.steps; // there if the canvas grew
    return Math.round(100 * (filled ? filled[i] : this.filled[i] / Math.max(this.tokens.length, 1)));
  }

  sentence(i) {
    if (i < 0) return `Before the first of ${this.forwards} forwards: all positions are masked.`;
    const { kind, branches, winner, fed, cached, ms, forced, proposed, accepted } = this.sample.steps;
    const parts = [`Forward ${i + 1} of ${this.forwards}: ${kind[i]}`,
      `${this.committed[i].length} committed`,
      `${this.percent(i)} % filled`,
      `${fed[i]} fed, ${cached[i]} cached`];
    if (ms[i]) parts.push(`${ms[i].toFixed(1)} ms`); // 0: decoded in a batch, not timed
    const { overwritten, remasked, inserted } = this.sample.steps;
    if (overwritten && overwritten[i].length) parts.push(`overwritten: ${overwritten[i].join(", ")}`);
    if (remasked && remasked[i].length) parts.push(`masked again: ${remasked[i].join(", ")}`);
    if (inserted && inserted[i].length) parts.push(`${inserted[i][1]} positions inserted at ${inserted[i][0]}`);
    if (forced[i]) parts.push(`${forced[i]} by the stall rule`);
    if (branches[i] > 1) {
      const base = winner[i] === branches[i] - 1;
      parts.push(`${this.marks(i)} continued with ${base ? "the base" : `lookahead ${winner[i] + 1}`}`);
    }
    if (proposed[i]) parts.push(`${accepted[i]} of ${proposed[i]} drafts accepted`);
    return parts.join(" · ");
  }

  proposal(i) {
    const { drafted, proposed, accepted, survival } = this.sample.steps;
    if (!drafted || i < 0) return [];
    const made = i; // a draft is shown from its own forward on, with verdicts after the verification
    if (["draft", "self_draft", "head"].includes(this.sample.steps.kind[i])) {
      while (i < this.forwards - 1 && this.sample.steps.kind[i] !== "verify") i += 1;
    }
    const kind = (k) => (i > made ? "pending"
      : k < accepted[i] ? "kept" : k < proposed[i] ? "refused" : "unasked");
    const words = { pending: "not verified yet", kept: "accepted", refused: "rejected",
      unasked: "not verified" };
    if (!drafted[i].length) return [];
    const probability = (k) => { // from the confidence head's logit
      const logit = survival ? survival[i][k] : undefined;
      return logit === undefined ? [] : [make("sub", {}, (1 / (1 + Math.exp(-logit))).toFixed(2))];
    };
    return [make("span", { class: "label" }, "Proposal: "), ...drafted[i].map((word, k) =>
      make("span", { class: kind(k), title: words[kind(k)] },
        this.words[word].replaceAll("\n", "↵"), ...probability(k)))];
  }

  // What keys and buttons do.

  go(now) {
    this.now = Math.max(0, Math.min(this.forwards, now));
    this.show();
  }

  first() { this.stop(); this.go(0); }
  last() { this.stop(); this.go(this.forwards); }
  next() { this.stop(); this.go(this.now + 1); }
  back() { this.stop(); this.go(this.now - 1); }
  far() { this.stop(); this.go(this.now + 10); }
  farBack() { this.stop(); this.go(this.now - 10); }
  following() { turn(this.run, this.index + 1); }
  previous() { turn(this.run, this.index - 1); }

  play() {
    if (this.timer !== null) return this.stop();
    if (this.now >= this.forwards) this.go(0);
    this.playButton.textContent = "Pause";
    this.wait();
  }

  wait() {
    this.timer = setTimeout(() => {
      this.go(this.now + 1);
      if (this.now < this.forwards) this.wait();
      else this.stop();
    }, this.pause());
  }

  pause() {
    const measured = this.sample.steps.ms[this.now] || 0;
    const special = { measured, slower: 10 * measured };
    return special[this.speed.value] ?? 1000 / Number(this.speed.value);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.playButton.textContent = "Play";
  }
}

// --- the page of a sample --------------------------------------------------------------------------

let viewer = null;

function turn(run, index) {
  if (index >= 0 && index < run.ids.length) location.hash = `#${index}`;
}

function onKey(event) {
  const action = KEYS[event.key];
  if (!viewer || !action || event.ctrlKey || event.metaKey || event.altKey) return;
  const focused = document.activeElement;
  if (["text", "search"].includes(focused.type) || focused.tagName === "SELECT") return;
  if (focused.tagName === "BUTTON" && event.key === " ") return; // the button reacts itself
  if (focused.matches(".scroll, .text") && /^(Page|Home|End)/.test(event.key)) return;
  event.preventDefault();
  viewer[action]();
}

function heading(run, index, sample) {
  const { facts } = sample;
  const way = (to, text) => (to >= 0 && to < run.ids.length
    ? make("a", { href: `#${to}` }, text) : make("span", { class: "soft" }, text));
  const forwards = facts.forwards === null ? "" : ` in ${facts.forwards} forwards`;
  const time = facts.seconds === null ? [] : [`${facts.seconds.toFixed(3)} s`];
  const words = [`${facts.emitted ?? "unknown number of"} tokens${forwards}`,
    ...time, `sample ${index + 1} of ${run.ids.length}`];
  if (facts.forwards) words.splice(1, 0, `TPF ${(facts.emitted / facts.forwards).toFixed(2)}`);
  for (const [name, value] of Object.entries(sample.scores)) {
    if (value !== null) words.push(`${name} ${Number(value.toFixed(4))}`);
  }
  return [make("div", { class: "heading" }, make("h1", {}, sample.id),
    make("span", { class: `verdict ${sample.verdict}` }, sample.verdict),
    make("span", { class: "turn" }, way(index - 1, "← previous"), way(index + 1, "next →"))),
  make("p", { class: "soft" }, words.join(" · "))];
}

function panel(title, text, absent) {
  const body = text === null || text === undefined ? make("p", { class: "soft" }, absent)
    : make("div", { class: "text", tabindex: 0, role: "region", "aria-label": title },
      make("pre", {}, text));
  return make("section", {}, make("h2", {}, title), body);
}

function chosen(run) {
  const number = parseInt(location.hash.slice(1), 10) || 0;
  return Math.min(Math.max(number, 0), run.ids.length - 1);
}

async function openSample(run) {
  const place = document.getElementById("viewer");
  const index = chosen(run);
  if (viewer) viewer.stop();
  viewer = null;
  try {
    const pack = await loadPack(Math.floor(index / run.chunk));
    if (index !== chosen(run)) return; // the reader has gone on to another sample
    const sample = pack.samples[index % run.chunk];
    document.title = `${sample.id} · dllm-bench`;
    document.querySelector("nav [aria-current]").textContent = sample.id;
    viewer = sample.steps ? new Viewer(run, index, sample, pack.words) : null;
    const unknown = "The prompt is not known: the benchmark or the tokenizer is missing here, or has changed.";
    const texts = [panel("Prompt", sample.prompt, unknown),
      panel("Text", sample.text, "The sample itself is missing here; only its line in the record is known.")];
    if (sample.gold) texts.push(panel("Right answer", sample.gold, ""));
    if (sample.extracted) texts.push(panel("Read from the text", sample.extracted, ""));
    if (sample.raw) texts.push(panel("Before the stop string", sample.raw, ""));
    place.replaceChildren(...heading(run, index, sample), ...(viewer ? viewer.build() : []),
      make("div", { class: "details" }, ...(viewer ? [viewer.details()] : []),
        make("div", { class: "columns" }, ...texts)));
    viewer?.show();
  } catch (error) {
    if (index !== chosen(run)) return;
    place.replaceChildren(make("p", { role: "alert" }, `${error.message}; make the report again.`));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  lists();
  const embedded = document.getElementById("run-data");
  if (!embedded) return;
  const run = JSON.parse(embedded.textContent);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => openSample(run));
  openSample(run);
});
