// A recording and its words: what is heard is lit, and a word that is chosen is played.

import { clock, el } from "./dom.js";
import { follow } from "./reading.js";

const LINGER_S = 0.5; // a word stays lit so long where nothing follows
let playing = null; // one at a time

export class Player {
  // `load()` resolves to the audio, or to null.
  constructor(name, load) {
    this.load = load;
    this.words = []; // {start, end, element}, by start
    this.duration = 0;
    this.lit = null;
    this.button = el("button", { type: "button", className: "play", onclick: () => this.toggle() });
    this.slider = el("input", {
      type: "range",
      min: 0,
      max: 0,
      step: 0.1,
      value: 0,
      "aria-label": `Position in ${name}`,
    });
    this.slider.oninput = () => this.seek(Number(this.slider.value));
    this.time = el("span", { className: "time" });
    this.element = el("div", { className: "player" }, this.button, this.slider, this.time);
    this.name = name;
    this.#show();
  }

  setDuration(seconds) {
    if (!Number.isFinite(seconds) || seconds === this.duration) return;
    this.duration = seconds;
    this.slider.max = seconds;
    this.#show();
  }

  // The element that plays, made when it is first needed; null where there is no audio.
  async open() {
    this.opened ??= this.#open();
    return this.opened;
  }

  async toggle() {
    const audio = await this.open();
    if (!audio) return;
    if (audio.paused) await this.#play(audio);
    else audio.pause();
  }

  async seek(seconds) {
    const audio = await this.open();
    if (!audio) return;
    audio.currentTime = seconds;
    this.#show();
  }

  async playFrom(seconds) {
    await this.seek(seconds);
    const audio = await this.open();
    if (audio?.paused) await this.#play(audio);
  }

  // The index of the last word that has begun; -1 before the first.
  at(seconds) {
    let low = 0;
    let high = this.words.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.words[middle].start <= seconds) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  get position() {
    return this.audio?.currentTime ?? 0;
  }

  close() {
    this.audio?.pause();
    if (this.audio) URL.revokeObjectURL(this.audio.src);
  }

  async #open() {
    const file = await this.load();
    if (!file) {
      this.#fail("The audio is no longer in this browser.");
      return null;
    }
    const audio = el("audio", { src: URL.createObjectURL(file), preload: "metadata" });
    audio.onloadedmetadata = () => this.setDuration(audio.duration);
    audio.onplay = () => this.#follow();
    audio.onpause = () => this.#show();
    audio.onseeked = () => this.#show();
    audio.onerror = () => this.#fail("This browser cannot play this kind of audio.");
    this.audio = audio;
    return audio;
  }

  async #play(audio) {
    if (playing !== audio) playing?.pause();
    playing = audio;
    try {
      await audio.play();
    } catch (error) {
      if (error.name !== "AbortError") this.#fail("This browser cannot play this kind of audio.");
    }
  }

  #fail(text) {
    this.element.replaceChildren(el("span", { className: "detail" }, text));
  }

  #follow() {
    this.#show();
    if (!this.audio.paused) requestAnimationFrame(() => this.#follow());
  }

  #show() {
    const seconds = this.position;
    const plays = Boolean(this.audio && !this.audio.paused);
    this.button.classList.toggle("plays", plays);
    this.button.setAttribute("aria-label", `${plays ? "Pause" : "Play"} ${this.name}`);
    this.slider.value = seconds;
    this.slider.setAttribute("aria-valuetext", `${clock(seconds)} of ${clock(this.duration)}`);
    this.slider.style.setProperty("--share", this.duration ? seconds / this.duration : 0);
    this.time.textContent = `${clock(seconds)} / ${clock(this.duration)}`;
    const word = this.words[this.at(seconds)];
    const begun = plays || seconds > 0;
    this.#light(begun && word && seconds < word.end + LINGER_S ? word.element : null);
  }

  #light(element) {
    if (this.lit === element) return;
    this.lit?.classList.remove("lit");
    element?.classList.add("lit");
    if (element && this.audio && !this.audio.paused) follow(element, this.lit);
    this.lit = element;
  }
}
