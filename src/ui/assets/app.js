"use strict";
// The plan follows the controls: a move is sent at once, or after a pause where it follows another one, as while a slider is
// dragged. It replaces the request before it, and late answers are dropped. The settings are in the fragment of the address, so
// that a link restores them.

// Milliseconds without a move before the plan is asked for again.
const PAUSE_MS = 60;
// Seconds after which the best plan so far is shown, until the proof is complete. Solutions of a search that a limit
// ended are cached for the next one.
const ANSWERS_S = [0.15, 2, undefined];

const element = id => document.getElementById(id);
const create = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

// Share of its size to which a picture may shrink.
const READABLE_SHARE = 0.75;

let options = null;
let settings = {};
let sliders = [];
let pending = null;
let latest = 0;
let timer = 0;
let lastMove = -Infinity;

const preset = (list, name) => options[list].find(known => known.name === name);
// The value of a field that no setting replaces; null where the field does not apply, undefined where it is searched.
const presetValue = field => {
  const values = { ...preset("models", settings.model)?.values, ...preset("hardware", settings.hardware)?.values };
  return values[field];
};

// Values are sent as typed; numbers as numbers.
const parsed = text => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text.trim());
const shown = number => String(Number(Number(number).toPrecision(6)));

function readAddress() {
  settings = {};
  const given = new URLSearchParams(location.hash.slice(1));
  if ([...given.keys()].length === 0) Object.assign(settings, options.settings);
  for (const [field, text] of given) if (text.trim() !== "") settings[field] = parsed(text);
  settings.model ??= options.settings.model;
  settings.hardware ??= options.settings.hardware;
}

function writeAddress() {
  history.replaceState(null, "", `#${new URLSearchParams(settings)}`);
}

// ---- controls

function buildControls() {
  for (const [id, list] of [["model", "models"], ["hardware", "hardware"]]) {
    const select = element(id);
    select.replaceChildren(...options[list].map(known => new Option(known.name, known.name)));
    select.addEventListener("change", () => {
      // Other presets have other ranks, bandwidths and memory.
      for (const field of Object.keys(preset(list, settings[id])?.values ?? {})) delete settings[field];
      settings[id] = select.value;
      moved();
      listFields();
    });
  }
  sliders = options.controls.map(buildSlider);
  element("sliders").replaceChildren(...sliders.map(slider => slider.node));
  element("reset").addEventListener("click", () => {
    settings = { ...options.settings };
    moved();
  });
  element("more").addEventListener("toggle", listFields);
  element("extra-add").addEventListener("click", addExtra);
  element("extra-field").addEventListener("input", describeExtra);
  for (const id of ["extra-field", "extra-value"]) {
    element(id).addEventListener("keydown", event => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      addExtra();
    });
  }
}

function buildSlider(control) {
  const id = `field-${control.field}`;
  const number = create("input", { id, type: "text", inputMode: "decimal", autocomplete: "off" });
  const range = create("input", { type: "range", min: 0, max: control.stops.length - 1, step: 1 });
  range.setAttribute("aria-label", `${control.label}, slider`);
  number.setAttribute("aria-describedby", `${id}-note`);
  range.addEventListener("input", () => set(control.field, control.stops[range.value]));
  number.addEventListener("input", () => set(control.field, parsed(number.value)));
  // An emptied field shows the value of the preset again.
  number.addEventListener("blur", () => show());
  const label = create("label", { htmlFor: id, textContent: control.label });
  const note = create("p", { className: "note", id: `${id}-note`, textContent: control.note });
  const node = create("div", { className: "control" }, label, number, range, note);
  const show = () => {
    const own = presetValue(control.field);
    const value = settings[control.field] ?? own ?? "";
    if (document.activeElement !== number) number.value = typeof value === "number" ? shown(value) : value;
    const place = nearest(control.stops, typeof value === "number" ? value : estimate(control.field));
    range.value = place;
    range.setAttribute("aria-valuetext", value === "" ? "not set" : `${number.value} ${control.note}`);
    number.disabled = range.disabled = own === null;
    node.classList.toggle("changed", own !== undefined && value !== own);
  };
  return { node, show };
}

// A place for the slider of a value that is not set.
const estimate = field => (field === "global_batch" ? settings.devices ?? 1 : 1);

function nearest(stops, value) {
  const distance = stop => Math.abs(Math.log(stop / value));
  return stops.reduce((best, stop, index) => (distance(stop) < distance(stops[best]) ? index : best), 0);
}

function set(field, value) {
  if (value === "" || value === presetValue(field)) delete settings[field];
  else settings[field] = value;
  moved();
}

function showControls() {
  for (const [id, list] of [["model", "models"], ["hardware", "hardware"]]) {
    const known = preset(list, settings[id]);
    element(id).value = known ? settings[id] : "";
    element(`${id}-note`).textContent = known ? known.description : `no preset is called ${settings[id]}`;
  }
  sliders.forEach(slider => slider.show());
  const own = new Set(["model", "hardware", ...options.controls.map(control => control.field)]);
  const extras = Object.entries(settings).filter(([field]) => !own.has(field));
  element("extras").replaceChildren(...extras.map(([field, value]) => {
    const remove = create("button", { type: "button", textContent: "Remove" });
    remove.setAttribute("aria-label", `Remove ${field}`);
    remove.addEventListener("click", () => {
      delete settings[field];
      moved();
    });
    return create("li", {}, create("code", { textContent: `${field} = ${value}` }), remove);
  }));
  if (extras.length > 0) element("more").open = true;
}

// ---- fields without a slider

let fields = [];

async function listFields() {
  if (!element("more").open) return;
  try {
    const { model, hardware } = settings;
    fields = (await post("/api/fields", { settings: { model, hardware } })).fields;
  } catch {
    fields = [];
  }
  element("fields").replaceChildren(...fields.map(field => create("option", { value: field.name })));
  describeExtra();
}

function describeExtra() {
  const name = element("extra-field").value.trim();
  element("extra-help").textContent = fields.find(field => field.name === name)?.help ?? "";
}

function addExtra() {
  const [field, value] = [element("extra-field"), element("extra-value")];
  if (field.value.trim() === "" || value.value.trim() === "") return;
  settings[field.value.trim()] = parsed(value.value);
  field.value = value.value = "";
  field.focus();
  moved();
}

// ---- requests

function moved() {
  writeAddress();
  showControls();
  clearTimeout(timer);
  latest += 1;
  pending?.abort();
  document.body.dataset.state = "waiting";
  const now = performance.now();
  timer = setTimeout(update, now - lastMove < PAUSE_MS ? PAUSE_MS : 0);
  lastMove = now;
}

class Refusal extends Error {
  constructor(error) {
    super("refused");
    this.error = error;
  }
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const answer = await response.json();
  if (answer.error) throw new Refusal(answer.error);
  return answer;
}

async function update() {
  const move = ++latest;
  pending = new AbortController();
  const { signal } = pending;
  const body = { settings: { ...settings } };
  const begin = performance.now();
  document.body.dataset.state = "searching";
  try {
    for (const time_limit_s of ANSWERS_S) {
      const answer = await post("/api/plan", { ...body, time_limit_s }, signal);
      if (move !== latest) return;
      const isProvisional = answer.search.status === "time_limit" && time_limit_s !== undefined;
      showAnswer(answer, isProvisional);
      if (!isProvisional) break;
    }
    document.body.dataset.proofMs = Math.round(performance.now() - begin);
    const baselines = await post("/api/baselines", body, signal);
    if (move !== latest) return;
    showBaselines(baselines);
    document.body.dataset.state = "ready";
  } catch (error) {
    if (move === latest && error.name !== "AbortError") showProblem(error);
  }
}

// ---- answers

function showAnswer(answer, isProvisional) {
  element("problem").hidden = true;
  element("result").classList.remove("stale");
  if (!answer.decisions) {
    status("Searching: no plan yet …");
    element("result").classList.add("stale");
    return;
  }
  const stepTime = answer.highlights.find(highlight => highlight.name === "Step time").value;
  const verdict = answer.verdict.replace(/^out of time; /, "");
  const proof = isProvisional ? `Best plan so far, ${verdict}; searching on …` : `${verdict}.`;
  document.title = `${answer.title} – Narrows`;
  status(`${answer.title}: ${stepTime} a step. ${proof[0].toUpperCase()}${proof.slice(1)}`);
  element("result").hidden = false;
  element("result").classList.toggle("provisional", isProvisional);
  element("highlights").replaceChildren(...answer.highlights.map(({ name, value, note }) =>
    create("div", {}, create("dt", { textContent: name }), create("dd", { className: "value", textContent: value }),
      create("dd", { className: "note", textContent: note }))));
  element("figures").replaceChildren(...answer.figures.map(figure));
  element("baselines").replaceChildren();
  if (!isProvisional) element("baselines").append(create("p", { className: "note", textContent: "Planning the baselines …" }));
  element("details").innerHTML = answer.details;
}

function showBaselines(answer) {
  element("baselines").innerHTML = answer.details;
  // The picture of all plans replaces that of this plan.
  for (const shown of answer.figures) {
    document.querySelector(`#figures [data-kind="${shown.kind}"]`)?.replaceWith(figure(shown));
  }
}

function figure({ kind, svg, caption }) {
  const picture = create("div", { className: "picture", tabIndex: 0, innerHTML: svg });
  const drawing = picture.querySelector("svg");
  // Texts of wide pictures would be too small; the picture scrolls instead.
  drawing.style.minWidth = `${READABLE_SHARE * drawing.getAttribute("width")}px`;
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", caption);
  const node = create("figure", {}, picture, create("figcaption", { textContent: caption }));
  node.dataset.kind = kind;
  return node;
}

function showProblem(error) {
  const problems = error instanceof Refusal
    ? error.error.problems
    : [{ field: "", message: "The server no longer answers", causes: [], hints: ["start `narrows ui` again"] }];
  const list = problems.map(({ field, message, causes, hints }) => create("div", {},
    create("p", { className: "message", textContent: field ? `${field}: ${message}` : message }),
    create("ul", {}, ...causes.map(cause => create("li", { textContent: cause })),
      ...hints.map(hint => create("li", { className: "hint", textContent: `Hint: ${hint}` })))));
  element("problem").replaceChildren(...list);
  element("problem").hidden = false;
  element("result").classList.add("stale");
  status(`No plan: ${problems[0]?.message ?? "no reason is known"}`);
  document.body.dataset.state = "failed";
}

function status(text) {
  element("status").textContent = text;
}

// ---- start

async function start() {
  const response = await fetch("/api/options");
  options = await response.json();
  buildControls();
  readAddress();
  showControls();
  window.addEventListener("hashchange", () => {
    if (location.hash === `#${new URLSearchParams(settings)}`) return;
    readAddress();
    moved();
  });
  element("skip").addEventListener("click", event => {
    // The fragment holds the settings.
    event.preventDefault();
    element("answer").focus();
  });
  element("controls").addEventListener("submit", event => event.preventDefault());
  update();
}

start();
