// Finds a text in all transcripts, whatever its case and accents, and marks it where it stands.

import { $ } from "./dom.js";

const SOON_MS = 150;

export class Search {
  #ranges = [];
  #current = -1; // the range that is looked at
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
    const query = folded($("search").value.trim()).text;
    const cards = this.cards();
    let shown = 0;
    const ranges = [];
    for (const { element, text, job } of cards) {
      const found = query ? [...places(text, query)] : [];
      element.hidden = Boolean(query) && !found.length && !folded(job.name).text.includes(query);
      shown += !element.hidden;
      ranges.push(...found);
    }
    this.#current = same(ranges, this.#ranges) ? this.#current : -1;
    this.#ranges = ranges;
    const times = ranges.length === 1 ? "once" : `${ranges.length} times`;
    const summary = query ? `${times}, in ${shown} of ${cards.length}` : "";
    if ($("found").textContent !== summary) $("found").textContent = summary;
    this.#mark();
  }

  #go(step) {
    const { length } = this.#ranges;
    if (!length) return;
    if (this.#current < 0 && step < 0) this.#current = 0; // the first step back is to the last
    this.#current = (this.#current + step + length) % length;
    this.#mark();
    const { parentElement } = this.#ranges[this.#current].startContainer;
    parentElement.scrollIntoView({ block: "center" });
  }

  #mark() {
    if (!window.Highlight) return; // a browser that cannot mark text still finds it
    CSS.highlights.set("found", new Highlight(...this.#ranges));
    const looked = this.#ranges[this.#current];
    CSS.highlights.set("looked-at", new Highlight(...(looked ? [looked] : [])));
  }
}

const same = (ranges, previous) =>
  ranges.length === previous.length &&
  ranges.every(
    (range, i) =>
      range.startContainer === previous[i].startContainer &&
      range.startOffset === previous[i].startOffset,
  );

// Letters without case and accents, and of which place in the text each is.
function folded(text) {
  const letters = [];
  const from = [];
  let position = 0;
  for (const letter of text) {
    for (const plain of letter.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase()) {
      letters.push(plain);
      for (let i = 0; i < plain.length; i += 1) from.push(position);
    }
    position += letter.length;
  }
  return { text: letters.join(""), from: [...from, position] };
}

// Where a text stands, as ranges; in each paragraph by itself, over the edges of words.
function* places(element, query) {
  for (const paragraph of element.querySelectorAll("p:not(.detail)")) {
    const { text, from } = folded(paragraph.textContent);
    let end = 0;
    for (let index; (index = text.indexOf(query, end)) >= 0; ) {
      end = index + query.length;
      const range = new Range();
      range.setStart(...spot(paragraph, from[index], false));
      range.setEnd(...spot(paragraph, from[end], true));
      yield range;
    }
  }
}

// The text node that has a place, and the place in it. An end lies behind a letter, not before one.
function spot(paragraph, place, end) {
  const nodes = document.createTreeWalker(paragraph, NodeFilter.SHOW_TEXT);
  let offset = place;
  let node = nodes.nextNode();
  while (offset > node.length || (offset === node.length && !end)) {
    offset -= node.length;
    node = nodes.nextNode();
  }
  return [node, offset];
}
