// The frame: which place the address names, the header, the banner when the service is away, the token dialog.

import { ApiError, getJson, onTokenWanted, poll, token } from "./api.js";
import { fill, h, say } from "./dom.js";

// Each place's module is loaded when it is first shown.
const PLACES = [
  [/^\/$/, () => import("./jobs.js")],
  [/^\/jobs\/([^/]+)$/, () => import("./job.js")],
  [/^\/compare$/, () => import("./compare.js")],
  [/^\/submit$/, () => import("./submit.js")],
];

const main = document.getElementById("main");
let leaving = new AbortController();

/** Goes to a place of this page without loading it again. */
export function go(address) {
  history.pushState(null, "", address);
  show({ focus: true });
}

async function show({ focus }) {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const path = location.pathname;
  markPlace(path);
  closeNotice();
  const [pattern, load] = PLACES.find(([known]) => known.test(path)) ?? [null, null];
  const root = h("div");
  fill(main, root);
  document.title = "Lockstep";
  if (focus) main.focus({ preventScroll: true });
  if (focus) scrollTo(0, 0);
  try {
    if (load === null) throw new ApiError(404, "not_found", "There is no such place here.");
    const place = await load();
    await place.show(root, pattern.exec(path).slice(1).map(decodeURIComponent), signal);
  } catch (error) {
    if (!signal.aborted) showProblem(root, error);
  }
}

function showProblem(root, error) {
  const known = error instanceof ApiError;
  fill(
    root,
    h("h1", {}, known && error.status === 404 ? "Not found" : "This did not work"),
    h("p", { class: "problem", role: "alert" }, error.message),
    h("p", {}, h("a", { href: "/" }, "All jobs")),
  );
  if (!known) console.error(error);
}

function closeNotice() {
  document.getElementById("notice").hidden = true;
}

function markPlace(path) {
  for (const link of document.querySelectorAll("nav a")) {
    const address = link.getAttribute("href");
    const here = address === path || (address === "/" && path.startsWith("/jobs/"));
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** Plain clicks on our own links; everything else is the browser's. */
function takeClick(event) {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || link.hasAttribute("download") || link.target) return;
  if (address.hash || !PLACES.some(([known]) => known.test(address.pathname))) return;
  event.preventDefault();
  go(address.pathname + address.search);
}

// --- the service: who we are, what is free, whether it answers ----------------------------------------------------

export let health = null;

async function watchService() {
  const place = document.getElementById("service");
  await poll(
    async () => {
      health = await getJson("/api/health");
      const where = health.launcher === "slurm" ? "on Slurm, " : "";
      const free = `${where}${health.free} of ${health.procs} processes free`;
      const who = health.user ? `${health.user} (${health.role})` : null;
      const forget = h("button", { type: "button", class: "plain", onclick: forgetToken }, "Forget token");
      const text = [who, free].filter(Boolean).join(" · ");
      if (place.dataset.text === text) return;
      place.dataset.text = text;
      fill(place, h("span", {}, text), token.get() !== null ? forget : null);
    },
    new AbortController().signal,
    5000,
  );
}

function forgetToken() {
  token.forget();
  location.assign("/");
}

function showBanner({ detail }) {
  const banner = document.getElementById("banner");
  banner.hidden = detail.up;
  if (detail.up) return;
  const seconds = Math.round(detail.retryMs / 1000);
  say(
    document.getElementById("banner-text"),
    `The service does not answer (${detail.message}). Next try in ${seconds} s. Jobs run on without it.`,
  );
}

function askForToken(wasWrong) {
  const dialog = document.getElementById("token");
  const field = document.getElementById("token-text");
  document.getElementById("token-problem").hidden = !wasWrong;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        token.set(field.value.replace(/[^\x21-\x7e]/g, "")); // a header takes nothing else
        field.value = "";
        resolve();
      },
      { once: true },
    );
  });
}

onTokenWanted(askForToken);
document.getElementById("token").addEventListener("cancel", (event) => event.preventDefault());
document.addEventListener("service", showBanner);
document.getElementById("banner-retry").addEventListener("click", () => document.dispatchEvent(new Event("retry")));
document.getElementById("notice-close").addEventListener("click", closeNotice);
document.addEventListener("click", takeClick);
window.addEventListener("popstate", () => show({ focus: true }));
show({ focus: false });
watchService();
