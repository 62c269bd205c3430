// What every transcription is asked for with; kept in this browser.

import { $, el, languageName } from "./dom.js";
import { loadKey, loadSettings, saveKey, saveSettings } from "./store.js";

const FIELDS = [
  "language",
  "beam_size",
  "vad",
  "mode",
  "speakers",
  "num_speakers",
  "prompt",
  "hotwords",
];

const CHECKS = { words: true, doubts: false }; // as they are until somebody chooses

export function settings() {
  const found = {};
  for (const check of Object.keys(CHECKS)) found[check] = $(check).checked;
  for (const field of FIELDS) found[field] = $(field).value.trim();
  return found;
}

let asked = false;

export const key = () => loadKey();

export function setUp(keyChanged) {
  const saved = loadSettings();
  for (const field of FIELDS) {
    if (!saved[field]) continue;
    // A choice that the server has yet to name.
    const choices = [...($(field).options ?? [])].map((option) => option.value);
    if (choices.length && !choices.includes(saved[field]))
      $(field).append(el("option", { value: saved[field] }, languageName(saved[field])));
    $(field).value = saved[field];
  }
  for (const [check, standard] of Object.entries(CHECKS))
    $(check).checked = saved[check] ?? standard;
  $("key").value = loadKey();
  $("key-field").hidden = !loadKey();
  for (const field of [...FIELDS, ...Object.keys(CHECKS)])
    $(field).addEventListener("change", () => {
      saveSettings(settings());
      sum();
    });
  $("key").addEventListener("change", () => {
    saveKey($("key").value.trim());
    keyChanged();
  });
  $("settings")
    .querySelector("form")
    .addEventListener("submit", (event) => event.preventDefault());
  sum();
}

// The field for a key, where the server turned out to want one.
export function askForKey() {
  if (asked) return; // once; whoever closed it knows
  asked = true;
  $("key-field").hidden = false;
  $("settings").open = true;
  $("key").focus();
}

// Choices as the running engine offers them.
export function offer({ offers, defaults }) {
  if (!offers) return;
  const languages = offers.languages.map((code) => [code, languageName(code)]);
  languages.sort((a, b) => a[1].localeCompare(b[1]));
  if (offers.detects_language) languages.unshift(["", "Detect"]);
  fill($("language"), languages);
  const beams = Array.from({ length: offers.beams }, (_, i) => [String(i + 1), beamName(i + 1)]);
  fill($("beam_size"), [["", asSet(defaults.beam_size)], ...beams]);
  $("vad").options[0].text = asSet(VAD[defaults.vad]);
  $("mode").options[0].text = asSet(MODE[defaults.mode]);
  $("words").disabled = !offers.words;
  sum();
}

const asSet = (choice) => `As the server is set: ${choice}`;
const VAD = { auto: "in long audio", on: "always", off: "never" };
const MODE = { parallel: "all parts at once", sequential: "part by part" };
const beamName = (size) => (size === 1 ? "1, greedy: the quickest" : String(size));

function fill(select, options) {
  const texts = options.map(([, text]) => text).join();
  if (select.dataset.texts === texts) return; // an open list stays as it is
  const chosen = select.value;
  select.dataset.texts = texts;
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function sum() {
  const { language, beam_size, words, doubts, vad, mode, speakers, prompt, hotwords } = settings();
  document.body.classList.toggle("doubts", doubts);
  $("num_speakers").disabled = speakers !== "voice";
  const found = [language ? languageName(language) : "any language"];
  if (beam_size) found.push(`beam ${beam_size}`);
  if (words) found.push("times of words");
  if (doubts) found.push("doubts marked");
  if (vad) found.push(vad === "true" ? "speech alone" : "all of the audio");
  if (mode) found.push(MODE[mode]);
  if (speakers) found.push(`speakers by ${speakers}`);
  if (prompt || hotwords) found.push("with hints");
  $("chosen").textContent = found.join(", ");
}
