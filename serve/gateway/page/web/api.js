// The server, as this page speaks to it: transcriptions as they are found, and its state.

import { megabytes } from "./dom.js";
import { nameOf } from "./speakers.js";

const FORMAT = "verbose_json";

export class ServerError extends Error {
  // `status`: of HTTP, 0 if there was no answer. `detail`: the server's own words. `waitS`: above 0
  // if trying again may help. `final`: sending the file again cannot help. `cutShort`: its end is
  // missing, and what is there can be transcribed. `unreadable`: it cannot be played either.
  constructor(message, more = {}) {
    super(message);
    const flags = { final: false, cutShort: false, unreadable: false };
    Object.assign(this, { status: 0, detail: "", waitS: 0, ...flags, ...more });
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
  if (settings.partial) data.append("partial", "true");
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
      if (request.status !== 200) reject(refusal(request, file, settings));
      else if (last?.type === "transcript.text.done") resolve(last);
      else reject(last?.error ? failure(last.error, settings) : brokenOff());
    };
    request.onerror = async () => reject(request.responseText ? brokenOff() : await unsent(key));
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

const brokenOff = () => new ServerError("The connection to the server broke off.");

const unreachable = () =>
  new ServerError("The server cannot be reached. Check the connection, then try again.");

// Why there was no answer to an upload. A server that refuses an upload may hang up before the
// browser has sent it all; then the browser does not read the answer.
async function unsent(key) {
  try {
    await state(key);
  } catch (error) {
    return error;
  }
  return new ServerError("The connection broke off during the upload. Try again.");
}

const BY_CODE = {
  audio_cut_short: "The end of this file is missing. Send the whole file if you have it.",
  audio_limit_exceeded: "This recording is too long for this server. Send it in parts.",
  insufficient_quota: "You have used up today's share of this server. Try again tomorrow.",
  invalid_audio: "The server cannot use the audio in this file.",
  invalid_value: "The server does not accept one of the settings.",
  rate_limit_exceeded: "You have used up your share of this server for the moment.",
};

const BY_STATUS = {
  400: "The server cannot work with this request.",
  401: "This server needs a valid API key. Enter one under Settings, then try again.",
  408: "The upload took too long for this server.",
  429: "The server is busy.",
  503: "The server is starting or stopping.",
};

// What an error of the server means to people. `error`: {code, message} as OpenAI's API has it.
export function meaning({ code }, status = 500) {
  const general = status < 500 ? "The server rejected this." : "The server could not finish this.";
  return BY_CODE[code] ?? BY_STATUS[status] ?? general;
}

function failure(error, settings, more = {}) {
  const { code } = error;
  const cutShort = code === "audio_cut_short";
  const unreadable = code === "invalid_audio" && settings.speakers !== "channels";
  const final = cutShort || unreadable || code === "audio_limit_exceeded";
  const detail = cutShort ? "" : error.message; // the button beside it says what to do
  const flags = { final, cutShort, unreadable };
  return new ServerError(meaning(error, more.status), { detail, ...flags, ...more });
}

function refusal(request, file, settings) {
  const { status } = request;
  let error = {};
  try {
    error = JSON.parse(request.responseText).error;
  } catch {
    // Another program answered, such as a proxy on the way.
    error.message = `status ${status} ${request.statusText}`;
  }
  if (status === 413) {
    const message = `This file is too large for this server: ${megabytes(file.size)}.`;
    return new ServerError(message, { status, detail: error.message, final: true });
  }
  const again = [429, 503].includes(status) && error.code !== "insufficient_quota";
  const waitS = again ? Number(request.getResponseHeader("Retry-After")) || 1 : 0;
  return failure(error, settings, { status, waitS });
}

// A transcript in a format that has cues, which the server splits as it does in its own answers.
export async function subtitles(job, format, key) {
  const { segments, duration } = job;
  const times = ({ start, end }) => ({ start, end });
  const cues = segments.map(({ text, words, speaker, ...bounds }) => ({
    ...times(bounds),
    text,
    speaker: nameOf(job, speaker),
    words: words?.map(({ word, ...bounds }) => ({ ...times(bounds), word })) ?? null,
  }));
  const ends = segments.map(({ end }) => end);
  const transcript = { format, segments: cues, duration: duration || Math.max(0, ...ends) };
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify(transcript);
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
    throw unreachable();
  }
  if (answer.ok) return answer;
  const { status } = answer;
  const error = await answer.json().then((body) => body.error, () => ({}));
  throw new ServerError(meaning(error, status), { status, detail: error.message });
}
