// Transcripts as files, as the server itself would write them.

import { subtitles } from "./api.js";

const oneLine = (text) => text.trim().split(/\s+/).join(" ");

const txt = (job) => job.segments.map((segment) => `${oneLine(segment.text)}\n`).join("");

function json(job) {
  const { name, text, language, duration, segments } = job;
  return `${JSON.stringify({ file: name, text, language, duration, segments }, null, 2)}\n`;
}

const WRITERS = { txt, srt: subtitles, vtt: subtitles, json };
export const FORMATS = Object.keys(WRITERS);

// What a job says, for the clipboard.
export { txt as plain };

// A job's transcript as [name, text]. Raises a ServerError: subtitles are the server's work.
export async function file(job, format, key) {
  return [
    `${job.name.replace(/\.\w{1,5}$/, "")}.${format}`,
    await WRITERS[format](job, format, key),
  ];
}
