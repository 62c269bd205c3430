// Finds a text in all transcripts, whatever its case and accents, and marks it where it stands.

import { $ } from "./dom.js";

const SOON_MS = 150;

export class Search {
  #ranges = [];
  #at = -1; // which of them is looked at
  #timer;

  // `cards()` gives all of them.
  constructor(cards) {
    this.cards = cards;
    $("search").oninput = () => this.again();
    $("search").onkeydown = (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.#look();
      this.#go(event.shiftKey ? -1 : 1);
    };
  }

  // What is there has changed, or what is looked for.
  again() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), SOON_MS);
  }

  clear() {
    if (!$("search").value) return;
    $("search").value = "";
    this.#look();
  }

  #look() {
    clearTimeout(this.#timer);
    const wanted = folded($("search").value.trim()).text;
    const cards = this.cards();
    let shown = 0;
    const ranges = [];
    for (const { element, text, job } of cards) {
      const found = wanted ? [...places(text, wanted)] : [];
      element.hidden = Boolean(wanted) && !found.length && !folded(job.name).text.includes(wanted);
      shown += !element.hidden;
      ranges.push(...found);
    }
    this.#at = same(ranges, this.#ranges) ? this.#at : -1;
    this.#ranges = ranges;
    const times = ranges.length === 1 ? "once" : `${ranges.length} times`;
    const said = wanted ? `${times}, in ${shown} of ${cards.length}` : "";
    if ($("found").textContent !== said) $("found").textContent = said;
    this.#mark();
  }

  #go(step) {
    const { length } = this.#ranges;
    if (!length) return;
    this.#at = this.#at < 0 && step < 0 ? length - 1 : (this.#at + step + length) % length;
    this.#mark();
    const { parentElement } = this.#ranges[this.#at].startContainer;
    parentElement.scrollIntoView({ block: "center" });
  }

  #mark() {
    if (!window.Highlight) return; // a browser that cannot mark text still finds it
    CSS.highlights.set("found", new Highlight(...this.#ranges));
    const looked = this.#ranges[this.#at];
    CSS.highlights.set("looked-at", new Highlight(...(looked ? [looked] : [])));
  }
}

const same = (some, others) =>
  some.length === others.length &&
  some.every(
    (one, i) =>
      one.startContainer === others[i].startContainer && one.startOffset === others[i].startOffset,
  );

// Letters without case and accents, and of which place in the text each is.
function folded(text) {
  const letters = [];
  const from = [];
  let at = 0;
  for (const letter of text) {
    for (const plain of letter.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase()) {
      letters.push(plain);
      for (let i = 0; i < plain.length; i += 1) from.push(at);
    }
    at += letter.length;
  }
  return { text: letters.join(""), from: [...from, at] };
}

// Where a text stands, as ranges; in each paragraph by itself, over the edges of words.
function* places(element, wanted) {
  for (const paragraph of element.querySelectorAll("p:not(.detail)")) {
    const { text, from } = folded(paragraph.textContent);
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(...spot(paragraph, from[at], false));
      range.setEnd(...spot(paragraph, from[at + wanted.length], true));
      yield range;
    }
  }
}

// The text node that has a place, and the place in it. An end lies behind a letter, not before one.
function spot(paragraph, place, end) {
  const nodes = document.createTreeWalker(paragraph, NodeFilter.SHOW_TEXT);
  let left = place;
  let node = nodes.nextNode();
  while (left > node.length || (left === node.length && !end)) {
    left -= node.length;
    node = nodes.nextNode();
  }
  return [node, left];
}
