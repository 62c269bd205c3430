// Transcripts as files, as the server itself would write them.

const oneLine = (text) => text.trim().split(/\s+/).join(" ");
const cue = (text) => oneLine(text).replaceAll("-->", "->");
const withoutMarkup = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function timestamp(seconds, mark) {
  const all = Math.round(seconds * 1000);
  const pad = (number, digits) => String(number).padStart(digits, "0");
  const whole = Math.floor(all / 1000);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return `${parts.map((part) => pad(part, 2)).join(":")}${mark}${pad(all % 1000, 3)}`;
}

const span = (segment, mark) =>
  `${timestamp(segment.start, mark)} --> ${timestamp(segment.end, mark)}`;

function txt(job) {
  const lines = job.segments.map((segment) => `${oneLine(segment.text)}\n`);
  return lines.length || !job.live ? lines.join("") : `${job.live}\n`;
}

const srt = (job) =>
  job.segments
    .map((segment, index) => `${index + 1}\n${span(segment, ",")}\n${cue(segment.text)}\n`)
    .join("\n");

const vtt = (job) =>
  [
    "WEBVTT\n",
    ...job.segments.map((one) => `${span(one, ".")}\n${withoutMarkup(cue(one.text))}\n`),
  ].join("\n");

function json(job) {
  const { name, text, language, duration, segments } = job;
  return `${JSON.stringify({ file: name, text, language, duration, segments }, null, 2)}\n`;
}

const WRITERS = { txt, srt, vtt, json };
export const FORMATS = Object.keys(WRITERS);

// A job's transcript as [name, text].
export function file(job, format) {
  return [`${job.name.replace(/\.\w{1,5}$/, "")}.${format}`, WRITERS[format](job)];
}
