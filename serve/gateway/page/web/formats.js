// Transcripts as files, as the server itself would write them.

import { subtitles } from "./api.js";
import { nameOf } from "./speakers.js";

const oneLine = (text) => text.trim().split(/\s+/).join(" ");

// As the server's own text: a speaker's name where another one begins.
function txt(job) {
  let previous = null;
  const lines = job.segments.map(({ text, speaker }) => {
    const begins = speaker && speaker !== previous ? `${nameOf(job, speaker)}: ` : "";
    previous = speaker;
    return `${begins}${oneLine(text)}\n`;
  });
  return lines.join("");
}

function json(job) {
  const { name, text, language, duration, warnings = [] } = job;
  const segments = job.segments.map((segment) =>
    segment.speaker ? { ...segment, speaker: nameOf(job, segment.speaker) } : segment,
  );
  const transcript = { file: name, text, language, duration, segments };
  if (warnings.length) transcript.warnings = warnings;
  return `${JSON.stringify(transcript, null, 2)}\n`;
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
