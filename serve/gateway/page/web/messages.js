// What a card says about its job: facts, what went wrong, and what to know about the text.

import { clock, languageName, megabytes } from "./dom.js";

const NO_LANGUAGE = "unknown"; // what the server says if there is no speech

export function facts(job) {
  if (job.state === "recording") return "recording";
  const texts = [];
  if (job.state === "waiting" && !job.note) texts.push("waiting");
  if (job.state === "sending") texts.push(`sending, ${Math.round(100 * job.sent)} %`);
  if (job.state === "working") texts.push("listening");
  if (job.duration) texts.push(clock(job.duration));
  else if (job.size) texts.push(megabytes(job.size));
  if (job.language && job.language !== NO_LANGUAGE) texts.push(languageName(job.language));
  if (job.corrected) texts.push("corrected");
  if (job.state === "done" && job.seconds) texts.push(`in ${job.seconds.toFixed(1)} s`);
  return texts.join(" · ");
}

// What went wrong, as sentences; empty if nothing did.
export function problem(job) {
  const { state, note, error } = job;
  if (note) return note;
  if (state === "interrupted") {
    const reason = job.stopped ? "You stopped this." : "This stopped when you left the page.";
    return `${reason}${below(job)}`;
  }
  return error ? `${error.message}${below(job)}` : "";
}

function below(job) {
  if (job.state === "done" || !job.segments.length) return "";
  return job.earlier
    ? " The text below is from before."
    : " The text up to there is below.";
}

// What stands in place of a text without words; empty if there is a text, or none yet.
export function silence(job) {
  const empty = !job.segments.length && !(job.live ?? job.text);
  if (job.state !== "done" || job.error || !empty) return "";
  return job.partial ? "No speech was found in the part that is there." : "No speech was found.";
}

// What the server says to know about the text, as sentences.
export const warnings = (job) =>
  (job.warnings ?? []).map((text) => `${text[0].toUpperCase()}${text.slice(1)}`);
