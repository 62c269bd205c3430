// Who says what: names that can be edited, and a colour for each speaker.

import { el } from "./dom.js";
import { edit } from "./editor.js";

const COLOURS = 8; // that style.css has

// What a speaker of a job is called: as somebody wrote it, else as the server does.
export const nameOf = (job, speaker) => job.names?.[speaker] ?? speaker ?? null;

// A speaker's name above the speaker's words. Choosing it starts an edit; `renamed(name)` is called
// with another name. It is no <button>, because browsers do not edit the text of one.
export function label(job, speaker, renamed) {
  const speakers = [...new Set(job.segments.map((segment) => segment.speaker))];
  const element = el("span", { className: "speaker", tabIndex: 0, title: "Change this name" });
  element.dataset.colour = speakers.indexOf(speaker) % COLOURS;
  element.dataset.speaker = speaker;
  element.textContent = nameOf(job, speaker);
  element.setAttribute("role", "button");
  const write = async () => {
    if (element.isContentEditable) return;
    const original = element.textContent;
    const { text, left } = await edit(element, `Name of ${original}`);
    element.setAttribute("role", "button");
    if (!left) element.focus({ preventScroll: true });
    if (!text) element.textContent = original;
    else if (text !== original) renamed(text);
  };
  element.onclick = write;
  element.addEventListener("keydown", (event) => {
    if (element.isContentEditable || !["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    write();
  });
  return element;
}
