// The images of the map: what is known of each, and from which scale on it has a thumbnail.

const THUMBNAIL = 34; // CSS pixels of a thumbnail at least, and twice that at most
const LEVELS = 14; // each doubles the scale; level 0 has one thumbnail of the whole map

const element = (id) => document.getElementById(id);
const data = JSON.parse(element("map-data").textContent);
const count = data.names.length;

const places = Float32Array.from(numbers(data.places, "getUint16"), (value) => value / 65535);
const labels = Int32Array.from(numbers(data.labels, "getInt32", 4));
const neighbours = Uint16Array.from(numbers(data.neighbours, "getUint16"));
const cosines = Float32Array.from(numbers(data.cosines, "getInt16"), (value) => value / 10000);
const perImage = neighbours.length / count;
const searched = data.names.map((name, image) => `${name}\n${className(image)}`.toLowerCase());
const byClass = groupByClass();
const levels = chooseThumbnails();

/** Integers of some bytes in base64, little-endian on every machine. */
function numbers(text, read, size = 2) {
  const bytes = new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  return Array.from({ length: bytes.byteLength / size }, (_, at) => bytes[read](size * at, true));
}

function className(image) {
  return labels[image] < 0 ? "" : data.classes[labels[image]];
}

/** Images of one colour together, so that the colour is set once. */
function groupByClass() {
  const groups = new Map();
  for (let image = 0; image < count; image += 1) {
    if (!groups.has(labels[image])) groups.set(labels[image], []);
    groups.get(labels[image]).push(image);
  }
  return groups;
}

/**
 * The first level at which each image has a thumbnail. At a level no two thumbnails are nearer than its cells are wide,
 * so their number on the screen is bounded; an image keeps its thumbnail at all later levels.
 */
function chooseThumbnails() {
  const first = new Uint8Array(count).fill(255);
  const mixed = (image) => Math.imul(image + 1, 2654435761) >>> 0; // images of one class often stand together
  const order = [...Array(count).keys()].sort((one, other) => mixed(one) - mixed(other));
  for (let level = 0; level < LEVELS; level += 1) {
    const side = 2 ** level; // cells of 1 / side
    const taken = new Map();
    const cell = (image, axis) => Math.floor(places[2 * image + axis] * side);
    const put = (image) => {
      const key = cell(image, 1) * (side + 3) + cell(image, 0);
      if (taken.has(key)) taken.get(key).push(image);
      else taken.set(key, [image]);
    };
    const isFree = (image) => {
      for (let row = -1; row <= 1; row += 1) {
        for (let column = -1; column <= 1; column += 1) {
          const key = (cell(image, 1) + row) * (side + 3) + cell(image, 0) + column;
          for (const other of taken.get(key) ?? []) {
            const across = Math.abs(places[2 * image] - places[2 * other]);
            const down = Math.abs(places[2 * image + 1] - places[2 * other + 1]);
            if (Math.max(across, down) < 1 / side) return false;
          }
        }
      }
      return true;
    };
    for (const image of order) if (first[image] < level) put(image);
    for (const image of order) {
      if (first[image] === 255 && isFree(image)) {
        first[image] = level;
        put(image);
      }
    }
  }
  return first;
}
