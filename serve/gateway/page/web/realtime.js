// Live text: pieces of sound go up a WebSocket, words come down, in OpenAI's realtime format.
//
// An utterance is an item. Its deltas are words that stay; what is heard beyond them may change,
// and comes as events of ours, `earshot.hypothesis`, which are asked for.

import { RATE } from "./wav.js";

const OPEN_MS = 10_000;
const LAST_MS = 15_000; // for the last words, once the microphone is off
const LAST_COMMIT = "last"; // name of the event that ends the last utterance
const ITEM = "conversation.item.input_audio_transcription";

export class Realtime {
  #items = new Map(); // id -> {text, guess, done}, in the order in which they were said
  #waiting = []; // pieces from before the session was ready
  #ready = false;
  #last = false; // whether the last utterance has ended, after the microphone

  // `changed(text, guess, spoken)`: what stays, what may still change, and both as utterances with
  // their times; `problem(message)`: an item has no text; `lost(message)`: there will be no more.
  constructor(settings, key, { changed, problem, lost }) {
    Object.assign(this, { settings, changed, problem, lost });
    const url = new URL("v1/realtime?intent=transcription", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    const protocols = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
    this.socket = new WebSocket(url, protocols);
    this.socket.onopen = () => this.#configure();
    this.socket.onmessage = (event) => this.#take(JSON.parse(event.data));
    this.socket.onclose = (event) => this.#closed(event);
    this.limit = setTimeout(() => this.#lose("The server does not answer."), OPEN_MS);
  }

  send(buffer) {
    if (!this.#ready) this.#waiting.push(buffer);
    else this.#say("input_audio_buffer.append", { audio: base64(buffer) });
  }

  // Resolves once the last words are there, or did not come in time.
  async finish() {
    if (this.#ready && !this.over) {
      const end = new Promise((resolve) => (this.ended = resolve));
      const limit = setTimeout(this.ended, LAST_MS);
      this.#say("input_audio_buffer.commit", { event_id: LAST_COMMIT });
      await end;
      clearTimeout(limit);
    }
    this.#close();
  }

  #say(type, more = {}) {
    this.socket.send(JSON.stringify({ type, ...more }));
  }

  #configure() {
    const { language, prompt } = this.settings;
    const transcription = { ...(language && { language }), ...(prompt && { prompt }) };
    const format = { type: "audio/pcm", rate: RATE };
    const input = { format, transcription, turn_detection: { type: "server_vad" } };
    const include = ["earshot.hypothesis"];
    this.#say("session.update", { session: { type: "transcription", audio: { input }, include } });
  }

  #take(event) {
    this.#handlers[event.type]?.(event);
    if (this.ended && this.#last && [...this.#items.values()].every((item) => item.done))
      this.ended();
  }

  #handlers = {
    "session.updated": () => this.#begin(),
    "input_audio_buffer.speech_started": ({ item_id, audio_start_ms }) =>
      this.#set(item_id, { start: audio_start_ms / 1000 }),
    "input_audio_buffer.speech_stopped": ({ item_id, audio_end_ms }) =>
      this.#set(item_id, { end: audio_end_ms / 1000 }),
    "input_audio_buffer.committed": ({ item_id }) => {
      this.#set(item_id, {});
      this.#last ||= Boolean(this.ended);
    },
    "earshot.hypothesis": ({ item_id, text }) => this.#set(item_id, { guess: text }),
    [`${ITEM}.delta`]: ({ item_id, delta }) => this.#set(item_id, { more: delta }),
    [`${ITEM}.completed`]: ({ item_id, transcript }) =>
      this.#set(item_id, { text: transcript, guess: "", done: true }),
    [`${ITEM}.failed`]: ({ item_id, error }) => {
      this.#set(item_id, { guess: "", done: true });
      this.problem(`Some words were lost: ${error.message}`);
    },
    error: ({ error }) => {
      if (error.event_id === LAST_COMMIT)
        this.#last = true; // nobody was speaking
      else this.#lose(error.message);
    },
  };

  #begin() {
    clearTimeout(this.limit);
    this.#ready = true;
    for (const piece of this.#waiting.splice(0)) this.send(piece);
  }

  #set(id, { more = "", ...changes }) {
    const item = this.#items.get(id) ?? { text: "", guess: "", done: false };
    const guess = behind(item.guess, more); // until the next one comes
    this.#items.set(id, { ...item, guess, ...changes, text: (changes.text ?? item.text) + more });
    const items = [...this.#items.values()];
    const texts = items.map(({ text }) => text.trim()).filter(Boolean);
    const spoken = items.map(({ start = 0, end, text, guess }) => {
      return { start, end, text: text + guess };
    });
    this.changed(texts.join(" "), items.map(({ guess }) => guess).join(""), spoken);
  }

  #closed(event) {
    if (this.ended) this.ended();
    else this.#lose(event.reason || "The connection to the server broke off.");
  }

  #lose(message) {
    if (this.over) return;
    this.#close();
    this.lost(message);
  }

  #close() {
    this.over = true;
    clearTimeout(this.limit);
    this.socket.onclose = null;
    this.socket.close();
  }
}

// A guess without as many words as have become text.
function behind(guess, text) {
  const words = text.split(/\s+/).filter(Boolean).length;
  return words
    ? guess
        .trimStart()
        .split(/(?=\s)/)
        .slice(words)
        .join("")
    : guess;
}

function base64(buffer) {
  return btoa(String.fromCharCode(...new Uint8Array(buffer)));
}
