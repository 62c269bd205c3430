// The queue: what was added, what became of it, and what of that outlives a reload.
//
// A job is plain data, as IndexedDB keeps it. Its state: "waiting", "sending", "working", "done",
// "failed"; "recording" while a microphone is on; "interrupted" where the page went before the end.

import { ServerError, transcribe } from "./api.js";
import * as store from "./store.js";
import { RATE, wav } from "./wav.js";
import { correct } from "./words.js";

const AT_ONCE = 3; // a browser has six connections to a server, and others are needed as well
const MOST_TRIES = 8; // where the server has no room
const LONGEST_WAIT_S = 60;
const SAVE_EVERY_MS = 1000;
const UNFINISHED = ["waiting", "sending", "working"];

export const unfinished = (job) => UNFINISHED.includes(job.state);

export class Queue {
  #jobs = new Map();
  #files = new Map(); // by id, as long as the page is there
  #running = new Map(); // id -> AbortController
  #saved = new Map(); // id -> when
  #writes = 0; // that have not ended

  // `changed(job)` is called after each change, `removed(id)`, `writing(count)` when a write begins
  // or ends, and `lost()` where the browser turns out not to keep anything; `options()` gives
  // {settings, key}.
  constructor({ changed, removed, writing, lost, options }) {
    Object.assign(this, { changed, removed, writing, lost, options });
  }

  get jobs() {
    return [...this.#jobs.values()];
  }

  async load() {
    let jobs = [];
    await this.#keep(async () => (jobs = await store.loadJobs()));
    for (const job of jobs.sort((a, b) => a.added - b.added)) {
      if (unfinished(job)) job.state = "interrupted";
      if (job.state === "recording") job.state = "done"; // what was said until then is there
      if (job.live) settle(job);
      this.#jobs.set(job.id, job);
      this.changed(job);
    }
  }

  async add(file, more = {}) {
    const job = this.#new(file.name, file.size, { state: "waiting", ...more });
    this.#files.set(job.id, file);
    this.changed(job);
    await this.#keep(() => store.saveAudio(job.id, 0, file));
    await this.update(job);
    this.#next();
    return job;
  }

  // ---------------------------------------------------------------- recordings

  // A job whose text and sound come bit by bit, until `endRecording`.
  addRecording(name) {
    const job = this.#new(name, 0, { state: "recording", live: "", open: "", parts: 0 });
    this.update(job);
    return job;
  }

  // `live` is text that stays, `open` is text that may change, `spoken` has both, as segments.
  hear(job, live, open, spoken) {
    const grown = job.live !== live;
    Object.assign(job, { live, open, spoken });
    if (grown) this.update(job);
    else this.changed(job);
  }

  // Five seconds or so of PCM16.
  async addPart(job, blob) {
    if (!this.#jobs.has(job.id)) return;
    job.parts += 1;
    job.size += blob.size;
    job.duration = job.size / 2 / RATE;
    await this.#keep(() => store.saveAudio(job.id, job.parts, blob));
    await this.update(job);
  }

  endRecording(job, message = null) {
    settle(job);
    this.#end(job, "done", message && new ServerError(message));
  }

  // ---------------------------------------------------------------- audio

  // The audio of a job; null where it is not there any more.
  async audio(job) {
    const file = this.#files.get(job.id);
    if (file) return file;
    const parts = await store.loadAudio(job.id).catch(() => []);
    if (!parts.length) return null;
    const blob = job.parts ? wav(parts) : parts[0];
    this.#files.set(job.id, blob);
    return blob;
  }

  // `more`: fields of the job to change, such as `partial`, whether a file that is cut short is
  // transcribed as far as it goes.
  async retry(job, more = {}) {
    if (unfinished(job)) return;
    const { settings } = this.options();
    const earlier = job.segments.length > 0; // this text stays until another one begins
    const fresh = { state: "waiting", error: null, stopped: false, earlier, settings };
    Object.assign(job, fresh, more);
    await this.update(job);
    this.#next();
  }

  // See `correct` of words.js.
  correct(job, segment, word, text) {
    correct(segment, word, text);
    // Where words are gone the list is another one.
    if (!text) job.segments = job.segments.filter((segment) => segment.text.trim());
    Object.assign(job, { text: textOf(job.segments), corrected: true });
    this.update(job);
  }

  // Call a speaker by another name, wherever he speaks.
  rename(job, speaker, name) {
    job.names = { ...job.names, [speaker]: name };
    this.update(job);
  }

  stop(job) {
    job.stopped = true;
    this.#running.get(job.id)?.abort();
    if (job.state === "waiting") this.#end(job, "interrupted");
  }

  async remove(job) {
    this.stop(job);
    this.#jobs.delete(job.id);
    this.#files.delete(job.id);
    await this.#keep(() => store.removeJob(job.id));
    this.removed(job.id); // not before: what is gone from sight does not come back with a reload
  }

  async update(job) {
    if (!this.#jobs.has(job.id)) return;
    this.changed(job);
    this.#saved.set(job.id, Date.now());
    await this.#keep(() => store.saveJob(job));
  }

  #new(name, size, more) {
    const job = {
      id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`,
      added: Date.now(),
      name,
      size,
      settings: this.options().settings,
      text: "",
      segments: [],
      language: null,
      duration: null,
      error: null,
      ...more,
    };
    this.#jobs.set(job.id, job);
    return job;
  }

  async #keep(work) {
    this.writing((this.#writes += 1));
    try {
      await work();
    } catch {
      this.lost();
    } finally {
      this.writing((this.#writes -= 1));
    }
  }

  #next() {
    for (const job of this.#jobs.values()) {
      if (this.#running.size >= AT_ONCE) return;
      if (job.state === "waiting" && !this.#running.has(job.id)) this.#run(job);
    }
  }

  async #run(job) {
    const stop = new AbortController();
    this.#running.set(job.id, stop);
    try {
      await this.#transcribe(job, stop.signal);
      this.#end(job, "done");
    } catch (error) {
      if (error.name === "AbortError") this.#end(job, "interrupted");
      else if (error instanceof ServerError) this.#end(job, "failed", error);
      else throw error;
    } finally {
      this.#running.delete(job.id);
      this.#next();
    }
  }

  async #transcribe(job, signal) {
    const file = await this.audio(job);
    const gone = "The audio is no longer in this browser. Add it again.";
    if (!file) throw new ServerError(gone, { final: true });
    const began = Date.now();
    for (let tries = 1; ; tries += 1) {
      try {
        Object.assign(job, await this.#once(job, file, signal));
        job.seconds = (Date.now() - began) / 1000;
        job.dictated = false;
        return;
      } catch (error) {
        if (!error.waitS || tries === MOST_TRIES) throw error;
        const waitS = Math.min(LONGEST_WAIT_S, Math.max(error.waitS, 2 ** (tries - 1)));
        job.state = "waiting";
        job.note = `${error.message} Trying again in ${waitS} s.`;
        this.changed(job);
        await pause(waitS, signal);
        job.note = null;
      }
    }
  }

  async #once(job, file, signal) {
    const none = { names: {}, warnings: [], language: null, corrected: false };
    const empty = { text: "", segments: [], ...none };
    const before = Object.fromEntries(Object.keys(empty).map((field) => [field, job[field]]));
    Object.assign(job, { state: "sending", sent: 0, ...empty });
    this.changed(job);
    const on = {
      sent: (share) => {
        job.sent = share;
        if (share === 1) job.state = "working";
        this.changed(job);
      },
      event: ({ delta, segment, words }) => {
        Object.assign(job, { state: "working", earlier: false });
        job.text += delta;
        job.segments.push(words ? { ...segment, words } : segment);
        if (Date.now() - this.#saved.get(job.id) > SAVE_EVERY_MS) this.update(job);
        else this.changed(job);
      },
    };
    const { settings, key } = this.options();
    job.settings = settings;
    try {
      const options = { ...settings, partial: job.partial };
      const done = await transcribe(file, job.name, options, key, on, signal);
      const { text, language, duration, warnings = [] } = done;
      return { text, language, duration, warnings };
    } catch (error) {
      if (!job.segments.length) Object.assign(job, before); // nothing came in place of it
      throw error;
    }
  }

  #end(job, state, error = null) {
    Object.assign(job, { state, note: null });
    job.error = error && { message: error.message, ...error };
    this.update(job);
  }
}

// Makes the text of a recording that has ended final; the last segment ends with the recording.
function settle(job) {
  const spoken = job.spoken ?? [{ text: job.live + job.open, start: 0 }];
  const duration = job.duration ?? 0;
  job.segments = spoken
    .filter(({ text }) => text.trim())
    .map(({ text, start, end }) => ({ start, text: ` ${text.trim()}`, end: end ?? duration }));
  Object.assign(job, { text: textOf(job.segments), live: null, open: "", spoken: null });
  job.dictated = true;
}

const textOf = (segments) => segments.map(({ text }) => text).join("").trim();

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
  });
}
