// The page: a picture, a mask drawn on its patches, and what the model makes of both, all in this browser.

import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const SIDE = 448; // of the larger side of each canvas, in its own pixels
const HIDDEN = "#dde0e5";
const LANGUAGES = ["en", "vi"];

const element = (id) => document.getElementById(id);
const canvases = Object.fromEntries(["input", "masked", "reconstruction", "error"].map((id) => [id, element(id)]));

const state = {
  model: null, // what model.json says
  texts: {}, // by language
  graph: null,
  shown: 0, // whose graph it is, among those of model.json
  loading: false, // whether another graph is chosen than is there
  opened: new Map(), // by file, so that a step seen once is there at once
  choices: 0, // counts the pictures that were asked for
  taken: 0, // which of them is shown
  pixels: null, // Float32Array [C, H, W] in [0, 1]
  hidden: null, // Uint8Array [N]
  cell: 0, // where the keyboard is
  refused: false, // whether the last visible patch was to be hidden
  found: null, // what the model said last
  wanted: 0, // counts changes: an answer to an older one is not shown
  running: false,
  failure: null, // name and values of its text
};

// What the page's own server does not give.
class Unreachable extends Error {}

async function fetched(path, form) {
  try {
    const answer = await fetch(`./${path}`);
    if (answer.ok) return await answer[form]();
  } catch {
    // Told as any other answer without the file.
  }
  throw new Unreachable(path);
}

// Texts -------------------------------------------------------------------------------------------------------------

function text(name, values = {}) {
  return state.texts[document.documentElement.lang][name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

function speak(language) {
  document.documentElement.lang = language;
  document.title = text("title");
  for (const part of document.querySelectorAll("[data-text]")) part.textContent = text(part.dataset.text);
  for (const part of document.querySelectorAll("[data-label]")) part.setAttribute("aria-label", text(part.dataset.label));
  for (const button of document.querySelectorAll("[data-language]"))
    button.setAttribute("aria-pressed", String(button.dataset.language === language));
  document.querySelectorAll("#examples button").forEach((button, at) =>
    button.setAttribute("aria-label", text("example", { number: at + 1 })));
  if (state.model) tellFacts();
  tellStatus();
  tellFailure();
}

function number(value, digits) {
  return value.toLocaleString(document.documentElement.lang, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function tellFacts() {
  const { parameters, size, patch } = state.model;
  element("facts").textContent = text("facts", {
    parameters: number(parameters / 1e6, 1), height: size[0], width: size[1], patchHeight: patch[0], patchWidth: patch[1],
  });
  element("ratio-shown").textContent = `${element("ratio").value} %`;
  const step = number(state.model.graphs[element("step").value].step, 0);
  element("step-shown").textContent = text(state.loading ? "stepLoading" : "step", { step });
}

function tellStatus() {
  if (state.refused) {
    element("status").textContent = text("lastVisible");
    return;
  }
  if (state.loading || !state.found) {
    element("status").textContent = state.loading ? text("loading") : "";
    return;
  }
  const { milliseconds, hidden, quality } = state.found;
  const count = hidden.reduce((sum, value) => sum + value, 0);
  element("status").textContent = text("status", {
    hidden: count, all: hidden.length, share: number((100 * count) / hidden.length, 0), milliseconds: Math.round(milliseconds),
  }) + (quality === null ? "" : text("quality", { value: number(quality, 2) }));
}

function tellFailure() {
  element("failure").textContent = state.failure ? text(...state.failure) : "";
  element("failure").hidden = !state.failure;
}

function fail(name, values) {
  state.failure = [name, values];
  tellFailure();
}

function failBy(reason) {
  if (reason instanceof Unreachable) fail("unreachable", { path: reason.message });
  else fail("failed", { reason });
}

// What is done next makes old what failed or was refused, but for the failure of a page that has no model.
function clearMessages() {
  if (state.refused) {
    state.refused = false;
    tellStatus();
  }
  if (state.graph) state.failure = null;
  tellFailure();
}

// Pictures ----------------------------------------------------------------------------------------------------------

function context(canvas, options) {
  const drawing = canvas.getContext("2d", options);
  drawing.imageSmoothingEnabled = false;
  return drawing;
}

function imageOf(pixels) {
  const { size: [height, width], channels } = state.model;
  const image = new ImageData(width, height);
  const area = height * width;
  for (let at = 0; at < area; at++) {
    for (let colour = 0; colour < 3; colour++)
      image.data[4 * at + colour] = 255 * pixels[(channels === 3 ? colour : 0) * area + at];
    image.data[4 * at + 3] = 255;
  }
  return image;
}

function draw(canvas, image) {
  const small = new OffscreenCanvas(image.width, image.height);
  small.getContext("2d").putImageData(image, 0, 0);
  context(canvas).drawImage(small, 0, 0, canvas.width, canvas.height);
}

function eachCell(canvas, paint) {
  const [rows, columns] = state.model.grid;
  const drawing = context(canvas);
  const [height, width] = [canvas.height / rows, canvas.width / columns];
  for (let at = 0; at < rows * columns; at++)
    paint(drawing, at, (at % columns) * width, Math.floor(at / columns) * height, width, height);
}

function drawMasked() {
  if (!state.pixels) return;
  draw(canvases.masked, imageOf(state.pixels));
  const focused = document.activeElement === canvases.masked;
  eachCell(canvases.masked, (drawing, at, x, y, width, height) => {
    if (state.hidden[at]) {
      drawing.fillStyle = HIDDEN;
      drawing.fillRect(x, y, width + 0.5, height + 0.5);
    }
    drawing.lineWidth = 1;
    drawing.strokeStyle = "rgba(90, 100, 110, 0.35)";
    drawing.strokeRect(x + 0.5, y + 0.5, width, height);
  });
  if (focused)
    eachCell(canvases.masked, (drawing, at, x, y, width, height) => {
      if (at !== state.cell) return;
      drawing.lineWidth = 3;
      drawing.strokeStyle = "#a12c6b";
      drawing.strokeRect(x + 1.5, y + 1.5, width - 3, height - 3);
    });
}

function drawInput(from = null) {
  if (!state.pixels) return;
  draw(canvases.input, imageOf(state.pixels));
  if (from === null || !state.found || state.hidden[from]) return;
  const count = state.hidden.length;
  const row = state.found.attention.subarray(from * count, (from + 1) * count);
  const most = Math.max(...row) || 1;
  eachCell(canvases.input, (drawing, at, x, y, width, height) => {
    drawing.fillStyle = `rgba(0, 0, 0, ${0.8 * (1 - row[at] / most)})`;
    drawing.fillRect(x, y, width + 0.5, height + 0.5);
    if (at === from) {
      drawing.lineWidth = 3;
      drawing.strokeStyle = "#ffd800";
      drawing.strokeRect(x + 1.5, y + 1.5, width - 3, height - 3);
    }
  });
}

// White where there is no error, through red to near black: what the eye finds is where the model is wrong.
function errorColour(share) {
  const stops = [[255, 255, 255], [252, 170, 120], [205, 50, 100], [60, 10, 70]];
  const place = Math.min(share, 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, at) => value + (place - low) * (stops[low + 1][at] - value));
}

function drawFound() {
  const { size: [height, width], channels, patch, grid } = state.model;
  const area = height * width;
  const way = document.querySelector("input[name=way]:checked").value;
  const shown = state.found.pictures[way] ?? state.found.pictures.picture;
  draw(canvases.reconstruction, imageOf(shown));
  const error = new ImageData(width, height);
  let [wrong, spread, count] = [0, 0, 0];
  const seen = new Float64Array(channels);
  let visible = 0;
  const isHidden = (at) => state.found.hidden[
    Math.floor(Math.floor(at / width) / patch[0]) * grid[1] + Math.floor((at % width) / patch[1])];
  for (let at = 0; at < area; at++) {
    if (isHidden(at)) continue;
    visible++;
    for (let channel = 0; channel < channels; channel++) seen[channel] += state.found.pixels[channel * area + at];
  }
  for (let at = 0; at < area; at++) {
    let distance = 0;
    if (isHidden(at))
      for (let channel = 0; channel < channels; channel++) {
        const true_ = state.found.pixels[channel * area + at];
        const off = shown[channel * area + at] - true_;
        distance += Math.abs(off) / channels;
        wrong += off * off;
        spread += (true_ - seen[channel] / visible) ** 2;
        count++;
      }
    const colour = errorColour(distance / 0.4);
    for (let part = 0; part < 3; part++) error.data[4 * at + part] = colour[part];
    error.data[4 * at + 3] = 255;
  }
  draw(canvases.error, error);
  state.found.quality = count && spread > 0 ? 1 - wrong / spread : null;
}

// The model ---------------------------------------------------------------------------------------------------------

function open(file) {
  if (!state.opened.has(file)) {
    const opening = fetched(file, "arrayBuffer").then((bytes) => ort.InferenceSession.create(bytes));
    opening.catch(() => state.opened.delete(file)); // so that it is asked for anew
    state.opened.set(file, opening);
  }
  return state.opened.get(file);
}

async function chooseStep(at) {
  clearMessages();
  state.loading = true;
  tellFacts();
  tellStatus();
  const isOld = () => Number(element("step").value) !== at; // another was chosen meanwhile
  try {
    const graph = await open(state.model.graphs[at].file);
    if (isOld()) return;
    [state.graph, state.shown] = [graph, at];
  } catch (reason) {
    if (isOld()) return;
    element("step").value = state.shown;
    failBy(reason);
  }
  state.loading = false;
  tellFacts();
  tellStatus();
  await compute();
}

async function change() {
  drawMasked();
  await compute();
}

async function compute() {
  state.wanted++;
  if (state.running || !state.graph || !state.pixels) return; // what runs, or what is loading, asks again
  state.running = true;
  try {
    let answered;
    do {
      answered = state.wanted;
      await answer();
    } while (answered !== state.wanted);
  } catch (reason) {
    failBy(reason);
  } finally {
    state.running = false;
  }
}

async function answer() {
  const { size: [height, width], channels } = state.model;
  const [pixels, hidden] = [state.pixels.slice(), state.hidden.slice()];
  const began = performance.now();
  const said = await state.graph.run({
    image: new ort.Tensor("float32", pixels, [1, channels, height, width]),
    hidden: new ort.Tensor("bool", hidden, [1, hidden.length]),
  });
  const pictures = Object.fromEntries(
    ["picture", "informed"].filter((name) => name in said).map((name) => [name, said[name].data]));
  state.found = {
    pixels, hidden, pictures, attention: said.attention.data, patches: said.patches.data,
    milliseconds: performance.now() - began, quality: null,
  };
  drawFound();
  drawInput();
  tellStatus();
  document.dispatchEvent(new CustomEvent("reconstructed", { detail: state.found }));
}

// Masks -------------------------------------------------------------------------------------------------------------

function hide(at, wanted) {
  if (state.hidden[at] === Number(wanted)) return;
  clearMessages();
  if (wanted && state.hidden.reduce((sum, value) => sum + value, 0) === state.hidden.length - 1) {
    state.refused = true;
    tellStatus();
    element("cell").textContent = text("lastVisible");
    return;
  }
  state.hidden[at] = Number(wanted);
  change();
}

const masks = {
  random(count) {
    const order = [...state.hidden.keys()];
    for (let at = order.length - 1; at > 0; at--) {
      const other = Math.floor(Math.random() * (at + 1));
      [order[at], order[other]] = [order[other], order[at]];
    }
    state.hidden.fill(0);
    for (const at of order.slice(0, count)) state.hidden[at] = 1;
  },
  block(count) { // one rectangle, as square as it can be
    const [rows, columns] = state.model.grid;
    const height = Math.min(rows, Math.max(1, Math.round(Math.sqrt((count * rows) / columns))));
    const width = Math.min(columns, Math.round(count / height), Math.floor((state.hidden.length - 1) / height));
    const [top, left] = [rows - height, columns - width].map((room) => Math.floor(Math.random() * (room + 1)));
    state.hidden.forEach((_, at) => {
      const [row, column] = [Math.floor(at / columns), at % columns];
      state.hidden[at] = Number(row >= top && row < top + height && column >= left && column < left + width);
    });
  },
  grid() { // of each two by two patches one stays
    const columns = state.model.grid[1];
    state.hidden.forEach((_, at) => {
      state.hidden[at] = Number(Math.floor(at / columns) % 2 === 1 || (at % columns) % 2 === 1);
    });
  },
  invert() {
    state.hidden.forEach((value, at) => { state.hidden[at] = 1 - value; });
  },
  clear() {
    state.hidden.fill(0);
  },
};

function applyMask(name) {
  clearMessages();
  const count = Math.min(state.hidden.length - 1, Math.round((element("ratio").value / 100) * state.hidden.length));
  masks[name](count);
  if (state.hidden.every((value) => value === 1)) state.hidden[0] = 0; // one must stay visible
  change();
}

// Input -------------------------------------------------------------------------------------------------------------

// Row and column of the patch under the pointer, or of where it would be outside of the canvas.
function placeUnder(canvas, event) {
  const [rows, columns] = state.model.grid;
  const box = canvas.getBoundingClientRect();
  return [((event.clientY - box.top) / box.height) * rows, ((event.clientX - box.left) / box.width) * columns].map(Math.floor);
}

function cellOf([row, column]) {
  const [rows, columns] = state.model.grid;
  return row < 0 || row >= rows || column < 0 || column >= columns ? null : row * columns + column;
}

// All places on the line, of which a fast pointer tells some alone; without the first.
function placesBetween(from, to) {
  const steps = Math.max(...to.map((value, axis) => Math.abs(value - from[axis])));
  return Array.from({ length: steps }, (_, at) =>
    from.map((value, axis) => Math.round(value + ((at + 1) / steps) * (to[axis] - value))));
}

function listenToDrawing() {
  let painting = null; // true: hiding, false: showing
  const { masked, input } = canvases;
  let last = null; // where the pointer was
  masked.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !event.isPrimary) return;
    last = placeUnder(masked, event);
    const at = cellOf(last);
    if (at === null) return;
    masked.setPointerCapture(event.pointerId);
    state.cell = at;
    painting = !state.hidden[at];
    hide(at, painting);
  });
  masked.addEventListener("pointermove", (event) => {
    if (!event.isPrimary) return;
    const place = placeUnder(masked, event);
    if (painting === null) {
      attend(cellOf(place));
      return;
    }
    for (const at of placesBetween(last, place).map(cellOf)) if (at !== null) hide(at, painting);
    last = place;
  });
  for (const end of ["pointerup", "pointercancel"]) masked.addEventListener(end, () => { painting = null; });
  masked.addEventListener("keydown", (event) => {
    const [rows, columns] = state.model.grid;
    const moves = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 };
    if (event.key !== " " && !(event.key in moves)) return;
    event.preventDefault();
    clearMessages();
    const column = state.cell % columns;
    if (event.key === " ") hide(state.cell, !state.hidden[state.cell]);
    else {
      const next = state.cell + moves[event.key];
      const leaves = (event.key === "ArrowLeft" && column === 0) || (event.key === "ArrowRight" && column === columns - 1);
      if (!leaves && next >= 0 && next < rows * columns) state.cell = next;
    }
    drawMasked();
    attend(state.cell);
    if (state.refused) return; // which is told
    element("cell").textContent = text(state.hidden[state.cell] ? "hiddenCell" : "visibleCell", {
      row: Math.floor(state.cell / columns) + 1, column: (state.cell % columns) + 1,
    });
  });
  for (const moment of ["focus", "blur"]) masked.addEventListener(moment, drawMasked);
  for (const moment of ["pointerdown", "pointermove"])
    input.addEventListener(moment, (event) => attend(cellOf(placeUnder(input, event))));
  for (const canvas of [masked, input]) canvas.addEventListener("pointerleave", () => drawInput());
}

function attend(at) {
  if (element("attention").checked) drawInput(at);
}

// A picture that is chosen later stays, however long one that was chosen before takes to be read.
async function take(source, name) {
  clearMessages();
  const choice = ++state.choices;
  let bitmap;
  try {
    bitmap = await createImageBitmap(await source, { colorSpaceConversion: "none" }); // values as in the file
  } catch (reason) {
    if (reason instanceof Unreachable) failBy(reason);
    else fail("notAnImage", { name });
    return;
  }
  if (choice > state.taken) {
    state.taken = choice;
    state.pixels = pixelsOf(bitmap);
    drawInput();
    change();
  }
  bitmap.close();
}

// Left, top, width and height of a picture of which the model's size is the centre, by the rules of evaluation.
function placeOf(bitmap) {
  const { size, crop_share: share } = state.model;
  if (bitmap.height === size[0] && bitmap.width === size[1]) return [0, 0, bitmap.width, bitmap.height];
  const [high, wide] = size.map((side) => Math.floor(side / share));
  const isWide = high * bitmap.width >= wide * bitmap.height;
  const height = isWide ? high : Math.floor((wide * bitmap.height) / bitmap.width);
  const width = isWide ? Math.floor((high * bitmap.width) / bitmap.height) : wide;
  const [top, left] = [[height, size[0]], [width, size[1]]].map(([found, wanted]) => half(found - wanted));
  return [-left, -top, width, height];
}

// Rounded as Python does, to the even number.
function half(value) {
  return value % 2 ? 2 * Math.round(value / 4) : value / 2;
}

function pixelsOf(bitmap) {
  const { size: [height, width], channels } = state.model;
  const small = new OffscreenCanvas(width, height);
  const drawing = small.getContext("2d", { willReadFrequently: true });
  drawing.imageSmoothingQuality = "high";
  drawing.fillStyle = "#ffffff"; // what is transparent lies on white, as when training
  drawing.fillRect(0, 0, width, height);
  drawing.drawImage(bitmap, ...placeOf(bitmap));
  const { data } = drawing.getImageData(0, 0, width, height);
  const area = height * width;
  const pixels = new Float32Array(channels * area);
  for (let at = 0; at < area; at++) {
    const colours = [data[4 * at], data[4 * at + 1], data[4 * at + 2]];
    const values = channels === 3 ? colours : [0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]];
    values.forEach((value, channel) => { pixels[channel * area + at] = value / 255; });
  }
  return pixels;
}

function listen() {
  listenToDrawing();
  for (const button of document.querySelectorAll("[data-mask]"))
    button.addEventListener("click", () => applyMask(button.dataset.mask));
  for (const button of document.querySelectorAll("[data-language]"))
    button.addEventListener("click", () => speak(button.dataset.language));
  element("ratio").addEventListener("input", () => { tellFacts(); applyMask("random"); });
  element("step").addEventListener("input", ({ target }) => chooseStep(Number(target.value)));
  element("ways").addEventListener("change", () => {
    if (!state.found) return;
    drawFound();
    tellStatus();
  });
  element("attention").addEventListener("change", () => drawInput());
  element("file").addEventListener("change", ({ target }) => {
    const [file] = target.files;
    target.value = ""; // so that the same file can be chosen again
    if (file) take(file, file.name);
  });
  for (const moment of ["dragover", "drop"]) document.addEventListener(moment, (event) => event.preventDefault());
  document.addEventListener("dragover", () => element("drop").classList.add("over"));
  for (const moment of ["dragleave", "drop"]) document.addEventListener(moment, () => element("drop").classList.remove("over"));
  document.addEventListener("drop", ({ dataTransfer }) => {
    if (dataTransfer.files[0]) take(dataTransfer.files[0], dataTransfer.files[0].name);
  });
}

function lay() {
  const { size: [height, width], grid, graphs, normalised, ratio, examples } = state.model;
  for (const canvas of Object.values(canvases)) {
    canvas.width = Math.round((SIDE * width) / Math.max(height, width));
    canvas.height = Math.round((SIDE * height) / Math.max(height, width));
  }
  state.hidden = new Uint8Array(grid[0] * grid[1]);
  element("ratio").value = Math.round(100 * ratio);
  element("step").max = graphs.length - 1;
  element("step").value = state.shown = graphs.length - 1;
  element("steps").hidden = graphs.length < 2;
  element("ways").hidden = !normalised;
  for (const path of examples) {
    const button = document.createElement("button");
    button.type = "button";
    const picture = document.createElement("img");
    picture.src = `./${path}`;
    picture.alt = "";
    button.append(picture);
    button.addEventListener("click", () => take(fetched(path, "blob"), path));
    element("examples").append(button);
  }
}

async function begin() {
  element("unserved").remove();
  const asked = new URLSearchParams(location.search);
  const spoken = [asked.get("lang"), ...navigator.languages.map((name) => name.slice(0, 2))];
  state.texts = Object.fromEntries(
    await Promise.all(LANGUAGES.map(async (name) => [name, await fetched(`${name}.json`, "json")])));
  state.loading = true;
  speak(spoken.find((name) => LANGUAGES.includes(name)) ?? "en");
  // The script that loads it is part of the bundle; a path for both would ask for that as a file of its own.
  ort.env.wasm.wasmPaths = { wasm: new URL("./vendor/ort-wasm-simd-threaded.wasm", location.href).href };
  // Several threads share memory, which only an isolated page may.
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Number(asked.get("threads")) || Math.min(4, navigator.hardwareConcurrency) : 1;
  state.model = await fetched("model.json", "json");
  lay();
  speak(document.documentElement.lang);
  masks.random(Math.round(state.model.ratio * state.hidden.length));
  listen();
  const [example] = state.model.examples;
  take(fetched(example, "blob"), example);
  await chooseStep(state.shown);
}

begin().catch((reason) => {
  state.loading = false;
  tellStatus();
  failBy(reason);
});
