// Live text: pieces of sound go up a WebSocket, words come down, in OpenAI's realtime format.

import { RATE } from "./wav.js";

const OPEN_MS = 10_000;
const LAST_MS = 15_000; // for the last words, once the microphone is off

export class Realtime {
  #items = new Map(); // id -> {text, done}, in the order in which they were said
  #waiting = []; // pieces from before the session was ready
  #ready = false;

  // `changed(done, open)`: the text that stays, and what may still change; `lost(message)`.
  constructor(settings, key, changed, lost) {
    this.settings = settings;
    this.changed = changed;
    this.lost = lost;
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

  // Resolves once the last words are there.
  async finish() {
    if (this.socket.readyState !== WebSocket.OPEN || !this.#ready) return this.#close();
    this.#say("input_audio_buffer.commit");
    const end = new Promise((resolve) => (this.ended = resolve));
    const limit = setTimeout(this.ended, LAST_MS);
    await end;
    clearTimeout(limit);
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
    this.#say("session.update", { session: { type: "transcription", audio: { input } } });
  }

  #take(event) {
    const item = this.#items.get(event.item_id);
    switch (event.type) {
      case "session.updated":
        clearTimeout(this.limit);
        this.#ready = true;
        for (const piece of this.#waiting.splice(0)) this.send(piece);
        return;
      case "input_audio_buffer.speech_started":
      case "input_audio_buffer.committed":
        if (!item) this.#items.set(event.item_id, { text: "", done: false });
        this.committed ||= event.type.endsWith("committed");
        return;
      case "conversation.item.input_audio_transcription.delta":
        if (item) item.text += event.delta;
        return this.#show();
      case "conversation.item.input_audio_transcription.completed":
        this.#items.set(event.item_id, { text: event.transcript, done: true });
        return this.#show();
      case "conversation.item.input_audio_transcription.failed":
        this.#items.delete(event.item_id);
        return this.#lose(event.error.message);
      case "error":
        if (this.ended) return this.ended(); // nothing was left to commit
        return this.#lose(event.error.message);
    }
  }

  #show() {
    const items = [...this.#items.values()];
    const texts = (done) =>
      items.filter((item) => item.done === done).map((item) => item.text.trim());
    this.changed(texts(true).join(" "), texts(false).filter(Boolean).join(" "));
    if (this.ended && items.every((item) => item.done)) this.ended();
  }

  #closed(event) {
    if (this.ended) this.ended();
    else this.#lose(event.reason || "The connection to the server broke off.");
  }

  #lose(message) {
    if (this.closed) return;
    this.#close();
    this.lost(message);
  }

  #close() {
    this.closed = true;
    clearTimeout(this.limit);
    this.socket.onclose = null;
    this.socket.close();
  }
}

function base64(buffer) {
  return btoa(String.fromCharCode(...new Uint8Array(buffer)));
}
