// The server, as this page speaks to it: transcriptions as they are found, and its state.

import { megabytes } from "./dom.js";
import { nameOf } from "./speakers.js";

const FORMAT = "verbose_json";

export class ServerError extends Error {
  // `status`: of HTTP, 0 where there was no answer. `detail`: the server's own words. `waitS`:
  // above 0, the server says that trying again may help. `final`: this file will never do.
  constructor(message, { status = 0, detail = "", waitS = 0, final = false } = {}) {
    super(message);
    Object.assign(this, { status, detail, waitS, final });
  }
}

function form(file, name, settings) {
  const data = jobForm(file, name, settings);
  data.append("stream", "true");
  return data;
}

// What a job is asked for with.
export function jobForm(file, name, settings) {
  const data = new FormData();
  data.append("response_format", FORMAT);
  data.append("timestamp_granularities[]", "segment");
  if (settings.words) data.append("timestamp_granularities[]", "word");
  for (const field of ["language", "beam_size", "vad", "mode", "prompt", "hotwords"])
    if (settings[field]) data.append(field, settings[field]);
  if (settings.speakers === "channels") data.append("channels", "split");
  if (settings.speakers === "voice") {
    data.append("diarize", "true");
    if (settings.num_speakers) data.append("num_speakers", settings.num_speakers);
  }
  data.append("file", file, name);
  return data;
}

// Send a file. `on.sent(share)` and `on.event(event)` are called as it goes up and as segments come
// down; resolves to the last event. `signal` ends it.
//
// An XMLHttpRequest, because fetch cannot say how much of a body has been sent.
export function transcribe(file, name, settings, key, on, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const events = new Events();
    let last;
    const read = () => {
      if (request.status !== 200) return;
      for (const event of events.read(request.responseText)) {
        last = event;
        if (event.type === "transcript.text.delta") on.event(event);
      }
    };
    request.open("POST", "v1/audio/transcriptions");
    if (key) request.setRequestHeader("Authorization", `Bearer ${key}`);
    request.upload.onprogress = (event) => on.sent(event.loaded / event.total);
    request.upload.onload = () => on.sent(1);
    request.onprogress = read;
    request.onload = () => {
      read();
      if (request.status !== 200) reject(refusal(request, file));
      else if (last?.type === "transcript.text.done") resolve(last);
      else reject(failure(last?.error));
    };
    request.onerror = () => reject(gone(request.responseText.length > 0));
    request.onabort = () => reject(new DOMException("", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.send(form(file, name, settings));
  });
}

// Server-sent events out of a text that grows.
class Events {
  #read = 0;

  *read(text) {
    for (let end; (end = text.indexOf("\n\n", this.#read)) >= 0; this.#read = end + 2) {
      const line = text.slice(this.#read, end);
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

const gone = (begun) =>
  new ServerError(
    begun
      ? "The connection to the server broke off. What it had found is below."
      : "The server cannot be reached. Is it running?",
  );

const failure = (error) =>
  error
    ? new ServerError("The server could not finish this one.", { detail: error.message })
    : gone(true);

const MEANINGS = {
  400: "The server cannot work with this.",
  401: "This server wants an API key that it knows. Write it under Settings, then try again.",
  408: "The upload took longer than this server waits.",
  422: "This is more audio than the server takes at once.",
  429: "The server has as much to do as it takes.",
  503: "The server is not ready.",
};

function refusal(request, file) {
  let error = {};
  try {
    error = JSON.parse(request.responseText).error;
  } catch {
    // Whoever answered, it was not this server: a proxy on the way, perhaps.
    error.message = `status ${request.status} ${request.statusText}`;
  }
  let message = MEANINGS[request.status] ?? "The server failed on this one; its log says why.";
  const tooLarge = request.status === 413;
  const noAudio = error.code === "invalid_audio";
  if (tooLarge) message = `Too large for this server: ${megabytes(file.size)}.`;
  if (noAudio) message = "The server finds no audio in this that it can read.";
  const usedUp = error.code === "insufficient_quota";
  if (usedUp) message = "This API key has had all its audio of today.";
  const waitS = [429, 503].includes(request.status) && !usedUp
    ? Number(request.getResponseHeader("Retry-After")) || 1
    : 0;
  const final = tooLarge || noAudio;
  return new ServerError(message, { status: request.status, detail: error.message, waitS, final });
}

// A transcript in a format that has cues, which the server splits as it does in its own answers.
export async function subtitles(job, format, key) {
  const { segments, duration } = job;
  const times = ({ start, end }) => ({ start, end });
  const said = segments.map(({ text, words, speaker, ...one }) => ({
    ...times(one),
    text,
    speaker: nameOf(job, speaker),
    words: words?.map(({ word, ...its }) => ({ ...times(its), word })) ?? null,
  }));
  const ends = segments.map((one) => one.end);
  const asked = { format, segments: said, duration: duration || Math.max(0, ...ends) };
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify(asked);
  const answer = await call("subtitles", key, { method: "POST", headers, body });
  return answer.text();
}

// What the server says of itself.
export async function state(key) {
  return (await call("state", key, {}, 5000)).json();
}

// Ask the server for something small, within a time; an answer that is none is a ServerError.
export async function call(path, key, options = {}, withinMs = 60_000) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(withinMs) });
  } catch {
    throw gone(false);
  }
  if (answer.ok) return answer;
  const detail = await answer.json().then(({ error }) => error.message, () => "");
  throw new ServerError(MEANINGS[answer.status] ?? "", { status: answer.status, detail });
}
