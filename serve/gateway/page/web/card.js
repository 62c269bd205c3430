// One job on the page: its name, what it does, its player, its text, and what can be done with it.

import { button, clock, el, save } from "./dom.js";
import { edit } from "./editor.js";
import { FORMATS, file, plain } from "./formats.js";
import { facts, problem, silence, warnings } from "./messages.js";
import { Player } from "./player.js";
import { unfinished } from "./queue.js";
import { Reading } from "./reading.js";
import { label, nameOf } from "./speakers.js";
import { pieces } from "./words.js";

const HINT_MOUSE =
  "Click a word and type. Enter keeps the change, Escape does not, Tab goes to the next word.";
const HINT_TOUCH = "Tap a word and type.";
const HINT_SPEAKERS = "Choose a speaker's name to change it everywhere in this text.";
const PARAGRAPH_PAUSE_S = 2; // a longer one begins a paragraph
const PARAGRAPH_CHARS = 420; // and so does a sentence after so many
const DOUBTFUL = 0.5; // of confidence

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
      `Text of ${job.name}. Space plays, arrows go from word to word and between paragraphs, ` +
        "Enter corrects a word.",
    );
    this.text.onclick = (event) => this.#click(event);
    this.text.ondblclick = (event) => this.#correct(event.target.dataset?.index);
    this.text.onkeydown = (event) => this.#key(event);
    this.reading = new Reading(this.text, job.name);
    this.warnings = el("ul", { className: "warnings", hidden: true, "aria-label": "Notes" });
    this.naming = el("p", { className: "detail naming", hidden: true }, HINT_SPEAKERS);
    this.correction = this.#correctionBar();
    this.actions = el("div", { className: "actions" });
    this.element = el(
      "article",
      { id: `job-${job.id}` },
      el("header", {}, el("h3", { title: job.name }, job.name), this.facts),
      this.bar,
      this.problem,
      this.player.element,
      this.warnings,
      this.naming,
      this.reading.element,
      this.correction,
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
    this.#showWarnings();
    this.#showText();
    if (job.duration) this.player.setDuration(job.duration);
    this.player.element.hidden = job.state === "recording" || Boolean(job.error?.unreadable);
    if (this.shown !== job.state) this.#showActions();
    this.shown = job.state;
  }

  // Whether its text is there to be used: no more is coming.
  get settled() {
    return !unfinished(this.job) && this.job.state !== "recording";
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
    const textEnd = job.segments.at(-1)?.end ?? 0;
    const share = job.state === "sending" ? job.sent : textEnd / (this.player.duration || Infinity);
    bar.classList.toggle("unknown", job.state === "working" && !share);
    bar.firstChild.style.setProperty("--share", Math.min(1, share));
  }

  #showProblem() {
    const { error } = this.job;
    const text = problem(this.job);
    this.problem.hidden = !text;
    const detail = error?.detail ? [el("p", { className: "detail" }, error.detail)] : [];
    this.problem.replaceChildren(el("p", {}, text), ...detail);
  }

  #showWarnings() {
    const texts = warnings(this.job);
    this.warnings.hidden = !texts.length;
    this.warnings.replaceChildren(...texts.map((text) => el("li", {}, text)));
  }

  // ---------------------------------------------------------------- text

  #clear() {
    this.segments = 0;
    this.player.words = [];
    this.paragraph = null;
    this.text.replaceChildren();
  }

  #showText() {
    const { segments, state, text, live, open } = this.job;
    const { scrollTop } = this.text;
    const { atEnd } = this.reading;
    // Another list, of another try or corrected; or the first segment, in place of text without
    // times.
    if (segments !== this.from || (segments.length && !this.segments)) this.#clear();
    this.from = segments;
    for (; this.segments < segments.length; this.segments += 1)
      this.#append(segments[this.segments], segments[this.segments - 1]);
    this.#showNames();
    if (!segments.length) this.#showPlain(live ?? text, open);
    const silent = silence(this.job);
    if (silent) this.text.replaceChildren(el("p", { className: "detail" }, silent));
    this.text.hidden = !this.text.hasChildNodes();
    this.text.scrollTop = scrollTop;
    if (state === "recording" && atEnd) this.reading.toEnd();
    this.reading.changed();
  }

  // Text without times: of a microphone, whose last words may still change.
  #showPlain(text, open = "") {
    const spans = [];
    if (text) spans.push(el("span", {}, text));
    if (open) spans.push(el("span", { className: "open" }, open));
    this.text.replaceChildren(...(spans.length ? [el("p", {}, ...spans)] : []));
  }

  #append(segment, previous) {
    const pause = previous ? segment.start - previous.end : 0;
    const full = previous && this.paragraph.textContent.length > PARAGRAPH_CHARS;
    const newSpeaker = previous && segment.speaker !== previous.speaker;
    const ended = pause > PARAGRAPH_PAUSE_S || (full && /[.?!。？！]\s*$/.test(previous.text));
    if (!previous || newSpeaker || ended) {
      this.paragraph = el("p", {});
      const head = el("div", {}, el("time", {}, clock(segment.start)));
      if (segment.speaker && (!previous || newSpeaker)) head.append(this.#speaker(segment.speaker));
      head.append(this.paragraph);
      this.text.append(head);
    }
    for (const piece of pieces(segment)) {
      if (piece.start === undefined) {
        this.paragraph.append(piece.text);
        continue;
      }
      const element = el("span", { className: "word" }, piece.text);
      mark(element, piece.word);
      element.dataset.index = this.player.words.length;
      const { start, end, word } = piece;
      this.player.words.push({ start, end, element, segment, word });
      this.paragraph.append(element);
    }
  }

  #speaker(speaker) {
    return label(this.job, speaker, (name) => this.queue.rename(this.job, speaker, name));
  }

  // Names as they are now, wherever they stand.
  #showNames() {
    for (const element of this.text.querySelectorAll(".speaker"))
      if (!element.isContentEditable)
        element.textContent = nameOf(this.job, element.dataset.speaker);
    const { names, segments } = this.job;
    const named = Object.keys(names ?? {}).length > 0;
    this.naming.hidden = !this.settled || named || !segments.some(({ speaker }) => speaker);
  }

  #click(event) {
    const index = event.target.dataset?.index;
    if (index === undefined) return;
    if (this.correcting) this.#correct(index);
    else if (!String(getSelection())) this.player.playFrom(this.player.words[index].start);
  }

  // ---------------------------------------------------------------- corrections

  async #correct(index) {
    const word = this.player.words[index];
    if (!word || !this.settled || word.element.isContentEditable) return;
    const original = word.element.textContent.trim();
    const { text, step, left } = await edit(word.element, `Correct: ${original}`);
    if (text !== original) {
      this.queue.correct(this.job, word.segment, word.word, text);
      mark(word.element, word.word);
    }
    const next = Number(index) + (text || step < 0 ? step : 0); // the one that is gone has no place
    if (step && this.player.words[next]) this.#correct(next);
    else if (!left) this.text.focus({ preventScroll: true });
  }

  // How words are corrected, and the button that ends it. It stays in sight beside a long text.
  #correctionBar() {
    const done = button("Done", () => this.#endCorrecting(), { className: "primary" });
    done.onmousedown = (event) => event.preventDefault(); // else the text moves before the click
    const hint = el(
      "p",
      { className: "detail" },
      el("span", { className: "with-mouse" }, HINT_MOUSE),
      el("span", { className: "with-touch" }, HINT_TOUCH),
    );
    return el("div", { className: "correction", hidden: true }, hint, done);
  }

  // Whether a word that is chosen is corrected, and not played.
  #setCorrecting(on) {
    this.correcting = on;
    this.correction.hidden = !on;
    if (this.begin) this.begin.hidden = on;
    this.text.classList.toggle("correcting", on);
    if (on) this.text.focus({ preventScroll: true });
  }

  #endCorrecting() {
    if (this.text.contains(document.activeElement)) document.activeElement.blur(); // keeps the word
    this.#setCorrecting(false);
    this.begin.focus();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target !== this.text) return;
    const { player } = this;
    const current = player.at(player.position);
    const targets = {
      ArrowLeft: () => current - 1,
      ArrowRight: () => current + 1,
      ArrowUp: () => this.#otherParagraph(current, -1),
      ArrowDown: () => this.#otherParagraph(current, 1),
      Home: () => 0,
      End: () => player.words.length - 1,
    };
    if (event.key === " ") player.toggle();
    else if (event.key === "Enter") this.#correct(Math.max(0, current));
    else if (event.key in targets) {
      const index = Math.min(player.words.length - 1, Math.max(0, targets[event.key]()));
      if (index >= 0) {
        player.seek(player.words[index].start);
        player.words[index].element.scrollIntoView({ block: "nearest" });
      }
    } else if (event.key === "Escape" && this.correcting) this.#endCorrecting();
    else return;
    event.preventDefault();
  }

  // Returns the first word of the paragraph after or before that of a word.
  #otherParagraph(index, step) {
    const { words } = this.player;
    const paragraph = (i) => words[i].element.parentElement;
    const start = Math.max(0, index);
    let i = start;
    while (words[i] && paragraph(i) === paragraph(start)) i += step;
    while (step < 0 && i > 0 && paragraph(i - 1) === paragraph(i)) i -= 1;
    return i;
  }

  // ---------------------------------------------------------------- actions

  #showActions() {
    const { job } = this;
    this.#setCorrecting(false);
    const retries = el("span", { className: "rest" }, ...this.#again());
    if (job.state !== "recording") retries.append(button("Remove", () => this.#remove()));
    this.actions.replaceChildren(...this.#uses(), retries);
  }

  #remove() {
    const { name } = this.job;
    if (confirm(`Remove ${name} and its text from this browser? This cannot be undone.`))
      this.queue.remove(this.job);
  }

  // What its text can be used for, once no more is coming.
  #uses() {
    const { job, queue } = this;
    if (!this.settled || !job.segments.length) return [];
    const attributes = (format) => ({
      className: "quiet format",
      "aria-label": `Download ${job.name} as ${format}`,
    });
    const saves = (format) => (event) => download(event.target, job, format, queue.options().key);
    this.begin = button("Correct", () => this.#setCorrecting(true));
    return [
      button("Copy", (event) => copy(event.target, job)),
      this.begin,
      ...FORMATS.map((format) => button(format, saves(format), attributes(format))),
    ];
  }

  #again() {
    const { job, queue } = this;
    const strong = { className: "quiet strong" };
    const retry = (more) => {
      const changed = job.corrected || Object.keys(job.names ?? {}).length;
      if (!changed || confirm("Transcribe it again? Your corrections and names will be lost."))
        queue.retry(job, more);
    };
    if (unfinished(job)) return [button("Stop", () => queue.stop(job))];
    if (job.error?.cutShort)
      return [button("Transcribe what is there", () => retry({ partial: true }), strong)];
    if (job.state === "interrupted" || (job.state === "failed" && !job.error.final))
      return [button("Try again", () => retry(), strong)];
    if (job.state !== "done") return [];
    const attributes = { title: "With the settings as they are now" };
    const text = job.dictated ? "Transcribe the recording" : "Transcribe again";
    return [button(text, () => retry(), attributes)];
  }
}

// A word that is likelier wrong than right, by its own figure, can be seen to be.
function mark(element, word) {
  const doubtful = word?.confidence < DOUBTFUL;
  element.classList.toggle("doubtful", doubtful);
  element.title = doubtful ? `${Math.round(100 * word.confidence)} % sure` : "";
}

async function copy(target, job) {
  let outcome = "Copied";
  try {
    await navigator.clipboard.writeText(plain(job));
  } catch {
    outcome = "This browser does not let it";
  }
  answer(target, outcome);
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
