// The box that holds a transcript. A long one scrolls in it, with a fade where text is hidden, or
// is shown whole.

import { button, el } from "./dom.js";

export class Reading {
  #planned = false;

  // `text`: the element that holds the transcript of `name`.
  constructor(text, name) {
    this.text = text;
    this.toggle = button("Show all", () => this.#toggle(), { className: "show", hidden: true });
    this.toggle.setAttribute("aria-expanded", "false");
    this.toggle.setAttribute("aria-label", `Show all of ${name}`);
    this.name = name;
    this.element = el("div", { className: "reading" }, el("div", {}, text), this.toggle);
    text.addEventListener("scroll", () => this.changed(), { passive: true });
    new ResizeObserver(() => this.changed()).observe(text);
  }

  // Whether the end of the text is in sight.
  get atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.text;
    return scrollHeight - clientHeight - scrollTop <= 1;
  }

  toEnd() {
    this.text.scrollTop = this.text.scrollHeight;
  }

  // Looks at what is hidden, once before the next frame.
  changed() {
    if (this.#planned) return;
    this.#planned = true;
    requestAnimationFrame(() => {
      this.#planned = false;
      this.#show();
    });
  }

  #show() {
    const { classList } = this.element;
    const { scrollTop, scrollHeight, clientHeight } = this.text;
    classList.toggle("above", scrollTop > 1);
    classList.toggle("below", !this.atEnd);
    this.toggle.hidden = !classList.contains("whole") && scrollHeight - clientHeight <= 1;
  }

  #toggle() {
    const expanded = this.element.classList.toggle("whole");
    const label = expanded ? "Show less" : "Show all";
    this.toggle.textContent = label;
    this.toggle.setAttribute("aria-expanded", expanded);
    this.toggle.setAttribute("aria-label", `${label} of ${this.name}`);
    if (!expanded) this.element.scrollIntoView({ block: "nearest" });
    this.#show();
  }
}

// Scrolls to the word that is heard: in its box, or on the page if the word before it was in sight.
export function follow(word, before) {
  const box = word.closest(".text");
  if (box.scrollHeight - box.clientHeight > 1) {
    const [place, frame] = [word.getBoundingClientRect(), box.getBoundingClientRect()];
    const faded = 2 * place.height;
    if (place.top < frame.top || place.bottom > frame.bottom - faded)
      box.scrollTop += place.top - frame.top - frame.height / 3;
  } else if (before && onScreen(before)) word.scrollIntoView({ block: "nearest" });
}

function onScreen(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}
