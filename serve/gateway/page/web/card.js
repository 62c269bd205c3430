// One job on the page: its name, what it does, its player, its text, and what can be done with it.

import { button, clock, el, megabytes, save } from "./dom.js";
import { FORMATS, file, plain } from "./formats.js";
import { Player } from "./player.js";
import { unfinished } from "./queue.js";

const PARAGRAPH_PAUSE_S = 2; // a longer one begins a paragraph
const PARAGRAPH_CHARS = 420; // and so does a sentence after so many

export class Card {
  constructor(job, queue) {
    this.job = job;
    this.queue = queue;
    this.player = new Player(job.name, () => queue.audio(job));
    this.facts = el("p", { className: "facts" });
    this.bar = el("div", { className: "bar", hidden: true }, el("i"));
    this.problem = el("div", { className: "problem", hidden: true });
    this.text = el("div", { className: "text", tabIndex: 0 });
    this.text.setAttribute("role", "group");
    this.text.setAttribute(
      "aria-label",
      `Text of ${job.name}. Space plays, arrows go from word to word and between paragraphs.`,
    );
    this.text.onclick = (event) => this.#click(event);
    this.text.onkeydown = (event) => this.#key(event);
    this.actions = el("div", { className: "actions" });
    this.element = el(
      "article",
      { id: `job-${job.id}` },
      el("header", {}, el("h3", { title: job.name }, job.name), this.facts),
      this.bar,
      this.problem,
      this.player.element,
      this.text,
      this.actions,
    );
    this.element.setAttribute("aria-label", job.name);
    this.#clear();
  }

  update() {
    const { job } = this;
    this.element.dataset.state = job.state;
    this.text.setAttribute("aria-live", job.state === "recording" ? "polite" : "off");
    this.facts.textContent = facts(job);
    this.#showProgress();
    this.#showProblem();
    this.#showText();
    if (job.duration) this.player.setDuration(job.duration);
    this.player.element.hidden = job.state === "recording" || Boolean(job.error?.final);
    if (this.shown !== job.state) this.#showActions();
    this.shown = job.state;
  }

  close() {
    this.player.close();
    this.element.remove();
  }

  #showProgress() {
    const { job, bar } = this;
    bar.hidden = !["sending", "working"].includes(job.state);
    if (bar.hidden) return;
    if (job.state === "working") this.player.open(); // tells how long it is
    const heard = job.segments.at(-1)?.end ?? 0;
    const share = job.state === "sending" ? job.sent : heard / (this.player.duration || Infinity);
    bar.classList.toggle("unknown", job.state === "working" && !share);
    bar.firstChild.style.setProperty("--share", Math.min(1, share));
  }

  #showProblem() {
    const { error, state, note } = this.job;
    const text = note ?? error?.message ?? (state === "interrupted" ? "It was interrupted." : null);
    this.problem.hidden = !text;
    const detail = error?.detail ? [el("p", { className: "detail" }, error.detail)] : [];
    this.problem.replaceChildren(el("p", {}, text ?? ""), ...detail);
  }

  // ---------------------------------------------------------------- text

  #clear() {
    this.segments = 0;
    this.player.words = [];
    this.paragraph = null;
    this.text.replaceChildren();
  }

  #showText() {
    const { segments, state, text, live, open, error } = this.job;
    // Another list, of another try; or the first segment, in place of text without times.
    if (segments !== this.from || (segments.length && !this.segments)) this.#clear();
    this.from = segments;
    for (; this.segments < segments.length; this.segments += 1)
      this.#append(segments[this.segments], segments[this.segments - 1]);
    if (!segments.length) this.#showPlain(live ?? text, open);
    const silent = state === "done" && !error && !segments.length && !(live ?? text);
    if (silent) this.text.replaceChildren(el("p", { className: "detail" }, "Nobody speaks in it."));
    this.text.hidden = !this.text.hasChildNodes();
  }

  // Text without times: of a microphone, whose last words may still change.
  #showPlain(text, open = "") {
    const parts = [text && el("span", {}, text), open && el("span", { className: "open" }, open)];
    const found = parts.filter(Boolean);
    this.text.replaceChildren(...(found.length ? [el("p", {}, ...found)] : []));
  }

  #append(segment, before) {
    const pause = before ? segment.start - before.end : 0;
    const full = before && this.paragraph.textContent.length > PARAGRAPH_CHARS;
    if (!before || pause > PARAGRAPH_PAUSE_S || (full && /[.?!。？！]\s*$/.test(before.text))) {
      this.paragraph = el("p", {});
      this.text.append(el("div", {}, el("time", {}, clock(segment.start)), this.paragraph));
    }
    for (const piece of pieces(segment)) {
      if (piece.start === undefined) {
        this.paragraph.append(piece.text);
        continue;
      }
      const element = el("span", { className: "word" }, piece.text);
      element.dataset.index = this.player.words.length;
      this.player.words.push({ start: piece.start, end: piece.end, element });
      this.paragraph.append(element);
    }
  }

  #click(event) {
    const index = event.target.dataset?.index;
    if (index === undefined || String(getSelection())) return; // a selection is no click
    this.player.playFrom(this.player.words[index].start);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { player } = this;
    const at = player.at(player.position);
    const places = {
      ArrowLeft: () => at - 1,
      ArrowRight: () => at + 1,
      ArrowUp: () => this.#otherParagraph(at, -1),
      ArrowDown: () => this.#otherParagraph(at, 1),
      Home: () => 0,
      End: () => player.words.length - 1,
    };
    if (event.key === " ") player.toggle();
    else if (event.key in places) {
      const index = Math.min(player.words.length - 1, Math.max(0, places[event.key]()));
      if (index >= 0) player.seek(player.words[index].start);
    } else return;
    event.preventDefault();
  }

  // Where the paragraph after or before that of a word begins.
  #otherParagraph(index, step) {
    const { words } = this.player;
    const of = (i) => words[i].element.parentElement;
    let other = Math.max(0, index);
    while (words[other] && of(other) === of(Math.max(0, index))) other += step;
    while (step < 0 && other > 0 && of(other - 1) === of(other)) other -= 1;
    return other;
  }

  // ---------------------------------------------------------------- actions

  #showActions() {
    const { job, queue } = this;
    const rest = el("span", { className: "rest" }, ...this.#again());
    if (job.state !== "recording") rest.append(button("Remove", () => queue.remove(job)));
    this.actions.replaceChildren(...this.#uses(), rest);
  }

  // What its text can be used for, once no more is coming.
  #uses() {
    const { job, queue } = this;
    if (unfinished(job) || job.state === "recording") return [];
    if (!job.segments.length && !job.live) return [];
    const formats = job.segments.length ? FORMATS : ["txt"]; // the others need times
    const more = (format) => ({
      className: "quiet format",
      "aria-label": `Download ${job.name} as ${format}`,
    });
    const saves = (format) => (event) => download(event.target, job, format, queue.options().key);
    return [
      button("Copy", (event) => copy(event.target, job)),
      ...formats.map((format) => button(format, saves(format), more(format))),
    ];
  }

  #again() {
    const { job, queue } = this;
    const retry = () => queue.retry(job);
    if (unfinished(job)) return [button("Stop", () => queue.stop(job))];
    if (job.state === "interrupted" || (job.state === "failed" && !job.error.final))
      return [button("Try again", retry, { className: "quiet strong" })];
    if (job.state !== "done") return [];
    const told = { title: "With the settings as they are now" };
    const live = job.live && !job.segments.length;
    return [button(live ? "Transcribe the recording" : "Again", retry, told)];
  }
}

// A segment's text in pieces, words with their times and what stands between them.
function* pieces({ text, start, end, words }) {
  if (!words) return yield { text, start, end };
  let at = 0;
  for (const word of words) {
    const found = text.indexOf(word.word, at);
    if (found < 0) continue;
    if (found > at) yield { text: text.slice(at, found) };
    at = found + word.word.length;
    yield { text: word.word, start: word.start, end: word.end };
  }
  if (at < text.length) yield { text: text.slice(at) };
}

function facts(job) {
  if (job.state === "recording") return "recording";
  const found = [];
  if (job.state === "waiting" && !job.note) found.push("waiting");
  if (job.state === "sending") found.push(`sending, ${Math.round(100 * job.sent)} %`);
  if (job.state === "working") found.push("listening");
  if (job.duration) found.push(clock(job.duration));
  else if (job.size) found.push(megabytes(job.size));
  if (job.language) found.push(job.language[0].toUpperCase() + job.language.slice(1));
  if (job.state === "done" && job.seconds) found.push(`in ${job.seconds.toFixed(1)} s`);
  return found.join(" · ");
}

async function copy(target, job) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(plain(job));
  } catch {
    said = "This browser does not let it";
  }
  answer(target, said);
}

async function download(target, job, format, key) {
  try {
    const [name, text] = await file(job, format, key);
    save(name, new Blob([text], { type: "text/plain;charset=utf-8" }));
  } catch (error) {
    answer(target, error.message);
  }
}

// Has a button say for a while what became of it.
function answer(target, text) {
  const label = target.textContent;
  target.textContent = text;
  setTimeout(() => (target.textContent = label), 2000);
}
