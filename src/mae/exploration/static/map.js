// The map of images: dots, and thumbnails where there is room for them, on a plain canvas. It follows map_points.js.
// Every text that comes from outside is set by textContent.

const DOT = 2;
const REACH = 9; // CSS pixels from a dot at which it is still pointed at
const LISTED = 50;
const FADED = 0.12;
const MARGIN = 0.06; // of the view, around the whole map
const DRAGGED = 4; // CSS pixels that make a drag of a click

const canvas = element("map-canvas");
const context = canvas.getContext("2d");
const hover = element("map-hover");

const view = { scale: 1, x: 0, y: 0, width: 0, height: 0, ratio: 1 }; // CSS pixels: screen = place * scale + offset
const state = { selected: -1, pointed: -1, near: new Map(), found: null, only: -1 };
const theme = {};
let atlas = null;
let waiting = false;

function colourOf(label) {
  return data.colours[label] ?? theme.faint;
}

/** The page's own colours, which follow the screen's scheme. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "faint", "accent"]) theme[name] = style.getPropertyValue(`--${name}`).trim();
}

function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

const onScreen = (image) => [places[2 * image] * view.scale + view.x, places[2 * image + 1] * view.scale + view.y];
const currentLevel = () => Math.max(0, Math.floor(Math.log2(view.scale / THUMBNAIL)));
const thumbnailSide = () => (view.scale / 2 ** currentLevel()) * 0.94;
const isShown = (image) =>
  (state.found === null || state.found.has(image)) && (state.only < 0 || labels[image] === state.only);
const isFiltered = () => state.found !== null || state.only >= 0;
const isInside = (x, y, reach) => x > -reach && y > -reach && x < view.width + reach && y < view.height + reach;

function draw() {
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  context.clearRect(0, 0, view.width, view.height);
  const [level, side, pictures] = [currentLevel(), thumbnailSide(), []];
  const filtered = isFiltered();
  for (const [label, images] of byClass) {
    context.fillStyle = colourOf(label);
    for (const image of images) {
      const x = places[2 * image] * view.scale + view.x; // not by onScreen: this is done for every image of every frame
      const y = places[2 * image + 1] * view.scale + view.y;
      if (!isInside(x, y, side)) continue;
      const shown = !filtered || isShown(image);
      if (shown && levels[image] <= level) pictures.push(image);
      if (filtered) context.globalAlpha = shown ? 1 : FADED;
      context.fillRect(x - DOT, y - DOT, 2 * DOT, 2 * DOT);
    }
  }
  context.globalAlpha = 1;
  for (const image of pictures) drawThumbnail(image, side);
  if (state.selected >= 0) drawNear(side);
  if (state.pointed >= 0) frame(state.pointed, side, theme.ink, 2);
  if (canvas.matches(":focus-visible")) drawCentre();
}

function drawThumbnail(image, side) {
  const [x, y] = onScreen(image);
  if (atlas !== null) context.drawImage(atlas, ...inAtlas(image), x - side / 2, y - side / 2, side, side);
  if (labels[image] >= 0) frame(image, side, colourOf(labels[image]), 1.5);
}

function inAtlas(image) {
  const [row, column] = [Math.floor(image / data.columns), image % data.columns];
  return [column * data.side, row * data.side, data.side, data.side];
}

function frame(image, side, colour, width) {
  const [x, y] = onScreen(image);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(x - side / 2, y - side / 2, side, side);
}

/** The selected image and those nearest to it, over all others. */
function drawNear(side) {
  const [x, y] = onScreen(state.selected);
  context.strokeStyle = theme.accent;
  context.lineWidth = 1;
  context.beginPath();
  for (const image of state.near.keys()) {
    context.moveTo(x, y);
    context.lineTo(...onScreen(image));
  }
  context.stroke();
  for (const image of [...[...state.near.keys()].reverse(), state.selected]) {
    drawThumbnail(image, side);
    frame(image, side, theme.accent, image === state.selected ? 4 : 2);
  }
}

function drawCentre() {
  const [x, y] = [view.width / 2, view.height / 2];
  context.strokeStyle = theme.ink;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x - 10, y);
  context.lineTo(x + 10, y);
  context.moveTo(x, y - 10);
  context.lineTo(x, y + 10);
  context.stroke();
}

/** The image at a place of the screen: the thumbnail there, the uppermost first, else the nearest dot. */
function imageAt(x, y, reach = REACH) {
  const [level, half] = [currentLevel(), thumbnailSide() / 2];
  const covers = (image) => {
    const [left, top] = onScreen(image);
    return Math.max(Math.abs(left - x), Math.abs(top - y)) < half;
  };
  const above = state.selected < 0 ? [] : [state.selected, ...state.near.keys()];
  const found = above.find(covers);
  if (found !== undefined) return found;
  let [best, nearest] = [-1, reach];
  for (let image = 0; image < count; image += 1) {
    if (!isShown(image)) continue;
    const left = places[2 * image] * view.scale + view.x;
    const top = places[2 * image + 1] * view.scale + view.y;
    const distance = Math.sqrt((left - x) ** 2 + (top - y) ** 2);
    if (distance < nearest) [best, nearest] = [image, distance];
    else if (best < 0 && levels[image] <= level && covers(image)) [best, nearest] = [image, Math.min(reach, distance)];
  }
  return best;
}

function zoom(factor, x = view.width / 2, y = view.height / 2) {
  const smallest = (0.5 * Math.min(view.width, view.height)) / (1 + MARGIN);
  const scale = Math.min(Math.max(view.scale * factor, smallest), THUMBNAIL * 2 ** LEVELS);
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  moved();
}

function move(across, down) {
  view.x += across;
  view.y += down;
  moved();
}

/** Keeps some of the map in view. */
function moved() {
  view.x = Math.min(Math.max(view.x, view.width / 2 - view.scale), view.width / 2);
  view.y = Math.min(Math.max(view.y, view.height / 2 - view.scale), view.height / 2);
  drawSoon();
}

function showAll() {
  view.scale = Math.min(view.width, view.height) / (1 + 2 * MARGIN);
  view.x = (view.width - view.scale) / 2;
  view.y = (view.height - view.scale) / 2;
  drawSoon();
}

function fitCanvas() {
  const { width, height } = canvas.getBoundingClientRect();
  if (width === 0) return;
  const [x, y, scale] = [view.width / 2 - view.x, view.height / 2 - view.y, view.scale];
  const before = Math.min(view.width, view.height);
  [view.width, view.height, view.ratio] = [width, height, window.devicePixelRatio || 1];
  [canvas.width, canvas.height] = [Math.round(width * view.ratio), Math.round(height * view.ratio)];
  if (before === 0) return showAll();
  view.scale = (scale * Math.min(width, height)) / before; // what was at the centre stays there
  view.x = width / 2 - (x * view.scale) / scale;
  view.y = height / 2 - (y * view.scale) / scale;
  moved();
}

function point(image, x, y) {
  if (image !== state.pointed) drawSoon();
  state.pointed = image;
  canvas.style.cursor = image < 0 ? "" : "pointer";
  hover.hidden = image < 0;
  if (image < 0) return;
  drawSmall(hover.querySelector("canvas"), image);
  hover.querySelector("span").textContent = described(image);
  const { offsetWidth: width, offsetHeight: height } = hover;
  hover.style.left = `${x + 18 + width > view.width ? Math.max(0, x - 18 - width) : x + 18}px`;
  hover.style.top = `${Math.max(0, Math.min(y + 12, view.height - height))}px`;
}

const described = (image) => [data.names[image], className(image)].filter((text) => text !== "").join(" \u00b7 ");

function drawSmall(small, image) {
  if (atlas !== null) small.getContext("2d").drawImage(atlas, ...inAtlas(image), 0, 0, data.side, data.side);
}

function select(image) {
  state.selected = image;
  state.near = new Map();
  for (let rank = 0; rank < perImage; rank += 1) {
    state.near.set(neighbours[image * perImage + rank], cosines[image * perImage + rank]);
  }
  const [x, y] = onScreen(image);
  if (!isInside(x, y, 0)) move(view.width / 2 - x, view.height / 2 - y);
  const entries = [...state.near].map(([near, cosine]) => [near, `cosine ${cosine.toFixed(2)}`]);
  list(`Nearest to ${described(image)}:`, [[image, "selected"], ...entries]);
  drawSoon();
}

function clear() {
  [state.selected, state.found, state.only] = [-1, null, -1];
  state.near = new Map();
  element("map-search").value = "";
  for (const key of element("map-legend").children) key.setAttribute("aria-pressed", "false");
  point(-1);
  list(`${count.toLocaleString("en")} images. Click one to see what is nearest to it.`, []);
  drawSoon();
}

function search() {
  const text = element("map-search").value.trim().toLowerCase();
  [state.selected, state.near] = [-1, new Map()];
  const images = searched.flatMap((name, image) => (name.includes(text) ? [image] : []));
  state.found = text === "" ? null : new Set(images);
  listFound();
}

function listFound() {
  if (!isFiltered()) return clear();
  const images = [...Array(count).keys()].filter(isShown);
  const rest = images.length > LISTED ? `, the first ${LISTED}` : "";
  list(`${images.length.toLocaleString("en")} found${rest}:`, images.slice(0, LISTED).map((image) => [image, ""]));
  drawSoon();
}

function list(status, entries) {
  element("map-status").textContent = status;
  element("map-list").replaceChildren(...entries.map(([image, note]) => listEntry(image, note)));
}

function listEntry(image, note) {
  const [item, button, small, text, below] = ["li", "button", "canvas", "span", "small"].map((tag) =>
    document.createElement(tag),
  );
  button.type = "button";
  [small.width, small.height] = [data.side, data.side];
  drawSmall(small, image);
  text.textContent = data.names[image];
  below.textContent = [className(image), note].filter((part) => part !== "").join(" \u00b7 ");
  text.append(below);
  button.append(small, text);
  button.addEventListener("click", () => {
    select(image);
    element("map-list").querySelector("button").focus(); // this one is gone from the list
  });
  item.append(button);
  return item;
}

function makeLegend() {
  const sizes = [...byClass].filter(([label]) => label >= 0).sort((one, other) => other[1].length - one[1].length);
  const keys = sizes.filter(([label]) => label in data.colours).map(([label, images]) => {
    const [key, spot, name] = ["button", "i", "bdi"].map((tag) => document.createElement(tag));
    key.type = "button";
    key.setAttribute("aria-pressed", "false");
    spot.style.background = colourOf(label);
    name.textContent = data.classes[label];
    key.append(spot, name, ` (${images.length.toLocaleString("en")})`);
    key.addEventListener("click", () => {
      state.only = state.only === label ? -1 : label;
      for (const other of keys) other.setAttribute("aria-pressed", String(other === key && state.only >= 0));
      [state.selected, state.near] = [-1, new Map()];
      listFound();
    });
    return key;
  });
  const [rest, grey] = [document.createElement("span"), []];
  if (sizes.length > keys.length) grey.push(`${sizes.length - keys.length} smaller classes`);
  if (keys.length > 0 && byClass.has(-1)) grey.push(`${byClass.get(-1).length.toLocaleString("en")} without a class`);
  if (grey.length > 0) rest.textContent = `${grey.join(" and ")} in grey`;
  element("map-legend").append(...keys, rest);
}

const pointers = new Map();
let dragged = 0;

const within = (event) => {
  const { left, top } = canvas.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
};

function pressed(event) {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, within(event));
  if (pointers.size === 1) dragged = 0;
}

function pointerMoved(event) {
  const [x, y] = within(event);
  const before = pointers.get(event.pointerId);
  if (before === undefined) return point(imageAt(x, y), x, y);
  const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
  pointers.set(event.pointerId, [x, y]);
  if (other !== undefined) {
    const apart = ([left, top]) => Math.max(1, Math.hypot(left - other[0], top - other[1]));
    zoom(apart([x, y]) / apart(before), (x + other[0]) / 2, (y + other[1]) / 2);
    dragged = Infinity;
    return;
  }
  dragged += Math.hypot(x - before[0], y - before[1]);
  if (dragged > DRAGGED) {
    point(-1);
    move(x - before[0], y - before[1]);
  }
}

function released(event) {
  if (pointers.delete(event.pointerId) && dragged <= DRAGGED && event.type === "pointerup") {
    const image = imageAt(...within(event));
    if (image >= 0) select(image);
  }
}

function wheel(event) {
  // A page that is scrolled past the map goes on scrolling.
  if (!event.ctrlKey && document.activeElement !== canvas) return;
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.002)), ...within(event));
}

const STEP = 60;
const KEYS = {
  ArrowLeft: () => move(STEP, 0),
  ArrowRight: () => move(-STEP, 0),
  ArrowUp: () => move(0, STEP),
  ArrowDown: () => move(0, -STEP),
  "+": () => zoom(1.4),
  "=": () => zoom(1.4),
  "-": () => zoom(1 / 1.4),
  0: showAll,
  Enter: () => {
    const image = imageAt(view.width / 2, view.height / 2, Infinity);
    if (image >= 0) select(image);
  },
  Escape: clear,
};

function keyPressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
}

async function begin() {
  element("map").hidden = false;
  new ResizeObserver(fitCanvas).observe(canvas);
  readTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    drawSoon();
  });
  const events = { pointerdown: pressed, pointermove: pointerMoved, pointerup: released, pointercancel: released,
    pointerleave: () => point(-1), keydown: keyPressed, focus: drawSoon, blur: drawSoon };
  for (const [name, handler] of Object.entries(events)) canvas.addEventListener(name, handler);
  canvas.addEventListener("wheel", wheel, { passive: false });
  element("map-search").addEventListener("input", search);
  const buttons = { "map-in": () => zoom(1.4), "map-out": () => zoom(1 / 1.4), "map-fit": showAll, "map-clear": clear };
  for (const [id, handler] of Object.entries(buttons)) element(id).addEventListener("click", handler);
  makeLegend();
  clear();
  const picture = new Image();
  picture.src = data.atlas;
  await picture.decode();
  atlas = await createImageBitmap(picture);
  element("map").dataset.ready = "true";
  drawSoon();
}

begin();
