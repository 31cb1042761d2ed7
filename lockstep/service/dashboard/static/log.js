// A job's log: the last lines, then every new one. The stream is held only while the page is looked at, since a
// browser opens few connections to one place.

import { ApiError, follow, jobPath, pause } from "./api.js";
import { fill, h, say, visible } from "./dom.js";

const FIRST_LINES = 500;
const MAX_CHARACTERS = 400_000;
const AGAIN_MS = 3000;
const COLOURS = /\x1b\[[0-9;?]*[A-Za-z]/g;
const OVERWRITTEN = /[^\n]*\r(?!\n)/g;

export class LogView {
  #job;
  #signal;
  #stream = new AbortController();
  #text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off" });
  #follows = h("input", { type: "checkbox", id: "log-follow", checked: true });
  #note = h("span", { class: "quiet small" });
  #length = 0;
  element;

  constructor(job, signal) {
    [this.#job, this.#signal] = [job, signal];
    const ranks = Array.from({ length: job.procs }, (_, rank) => [String(rank), `rank ${rank}`]);
    const choices = [...ranks, ["launcher", "launcher"]].map(([value, name]) => h("option", { value }, name));
    const rank = h("select", { id: "log-rank", onchange: () => this.#start(rank.value) }, choices);
    const controls = h(
      "div",
      { class: "controls" },
      h("label", { for: "log-rank" }, "Log of"),
      rank,
      this.#follows,
      h("label", { for: "log-follow" }, "follow"),
      this.#note,
    );
    this.element = h("section", {}, h("h2", {}, "Log"), controls, this.#text);
    signal.addEventListener("abort", () => this.#stream.abort());
    this.#start("0");
  }

  /** A job that has just failed before its ranks could write has its words in the launcher's log. */
  showLauncherIfEmpty() {
    const rank = this.element.querySelector("select");
    if (this.#length || rank.value === "launcher") return;
    rank.value = "launcher";
    this.#start("launcher");
  }

  #start(rank) {
    this.#stream.abort();
    this.#stream = new AbortController();
    fill(this.#text);
    this.#length = 0;
    this.#run(rank, this.#stream.signal).catch(
      (error) => this.#stream.signal.aborted || say(this.#note, error.message),
    );
  }

  async #run(rank, signal) {
    let lastId = null;
    while (!signal.aborted && !this.#signal.aborted) {
      if (document.hidden) {
        await pause(AGAIN_MS, signal);
        continue;
      }
      const visit = new AbortController();
      const leave = () => document.hidden && visit.abort();
      document.addEventListener("visibilitychange", leave, { signal: visit.signal });
      try {
        const query = lastId === null ? `?rank=${rank}&tail=${FIRST_LINES}` : `?rank=${rank}`;
        const messages = follow(jobPath(this.#job.id, `logs/stream${query}`), {
          lastId,
          signal: AbortSignal.any([signal, visit.signal]),
        });
        for await (const [id, event, data] of messages) {
          if (event === "end") {
            say(this.#note, this.#length ? "" : "nothing was written");
            return;
          }
          lastId = id ?? lastId;
          this.#add(data.text);
        }
      } catch (error) {
        if (error instanceof ApiError && error.status < 500) throw error;
        if (signal.aborted) return;
      } finally {
        visit.abort();
      }
      await pause(AGAIN_MS, signal);
    }
  }

  #add(text) {
    const clean = text.replace(COLOURS, "").replace(OVERWRITTEN, "");
    const atEnd = this.#text.scrollHeight - this.#text.scrollTop - this.#text.clientHeight < 40;
    this.#text.append(visible(clean));
    this.#length += clean.length;
    say(this.#note, "");
    while (this.#length > MAX_CHARACTERS && this.#text.childNodes.length > 1) {
      this.#length -= this.#text.firstChild.length;
      this.#text.firstChild.remove();
    }
    if (this.#follows.checked && (atEnd || this.#text.childNodes.length === 1))
      this.#text.scrollTop = this.#text.scrollHeight;
  }
}
