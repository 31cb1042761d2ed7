// Elements and words. The only place that makes elements: text is always set as text, never read as HTML.

// What a screen does not show, or what turns the order of other letters around: names, logs and rows come from others.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;

/** The text with such letters written out. */
export function visible(text) {
  return String(text).replace(HIDDEN, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const SPOKEN = new Set(["title", "aria-label", "placeholder"]);
const shown = (children) =>
  children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : visible(child)));

/** An element. `on...` are listeners, `true` an attribute without a value, null and false none at all. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? visible(value) : String(value));
  }
  element.append(...shown(children));
  return element;
}

/** Sets an element's text, and leaves it alone where it is the same: what is selected or read aloud stays so. */
export function say(element, text) {
  const clean = visible(text);
  if (element.textContent !== clean) element.textContent = clean;
}

export function fill(element, ...children) {
  element.replaceChildren(...shown(children));
}

/** For those who hear the page. */
export function speak(text) {
  say(document.getElementById("spoken"), text);
}

/** What could not be done, until it is closed or another place is shown. */
export function complain(error) {
  say(document.getElementById("notice-text"), error.message);
  document.getElementById("notice").hidden = false;
}

/** Asks before something that cannot be undone. */
export function confirmFirst(title, text, action) {
  const dialog = document.getElementById("confirm");
  say(document.getElementById("confirm-title"), title);
  say(document.getElementById("confirm-text"), text);
  say(document.getElementById("confirm-yes"), action);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export function stateChip(job) {
  const chip = h("span", { class: "chip" });
  updateChip(chip, job);
  return chip;
}

export function updateChip(chip, job) {
  chip.dataset.state = job.state;
  say(chip, job.cancelling ? "cancelling" : job.state);
}

/** A box that scrolls sideways, by keyboard too. `label` is what it holds. */
export function scrollBox(label) {
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" });
}

export function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

// --- words for numbers ------------------------------------------------------------------------------------------

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  const whole = Math.max(Math.round(seconds), 0);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 45) return "just now";
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export function moment(time) {
  return time ? new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "";
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) [count, place] = [count / 1024, place + 1];
  return `${place ? count.toPrecision(3) : count} ${units[place]}`;
}

/** Four digits are enough for eyes. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

/** The last part of a path: models are often folders far down. A long name breaks at its slash. */
export function modelName(name) {
  const parts = name.split("/").filter(Boolean);
  const shown = name.startsWith("/") ? ["…", parts.at(-1) ?? ""] : parts;
  return h(
    "span",
    { title: name },
    shown.map((part, place) => (place ? ["/", h("wbr"), part] : part)),
  );
}
