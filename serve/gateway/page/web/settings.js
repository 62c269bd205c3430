// What every transcription is asked for with; kept in this browser.

import { $, el, languageName, nameLanguages } from "./dom.js";
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
  const values = {};
  for (const check of Object.keys(CHECKS)) values[check] = $(check).checked;
  for (const field of FIELDS) values[field] = $(field).value.trim();
  return values;
}

let keyAsked = false;
let maxBeam = 8; // the largest beam that the engine offers

export const key = () => loadKey();

export function setUp(keyChanged) {
  const saved = loadSettings();
  for (const field of FIELDS) {
    if (!saved[field]) continue;
    // A choice that the server has yet to name.
    const choices = [...($(field).options ?? [])].map((option) => option.value);
    if (choices.length && !choices.includes(saved[field]))
      $(field).append(el("option", { value: saved[field] }, nameOf(field, saved[field])));
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
  if (keyAsked) return; // once; whoever closed it knows
  keyAsked = true;
  $("key-field").hidden = false;
  $("settings").open = true;
  $("key").focus();
}

// Choices as the running engine offers them.
export function offer({ offers, defaults }) {
  if (!offers) return;
  nameLanguages(offers.languages);
  const languages = Object.keys(offers.languages).map((code) => [code, languageName(code)]);
  languages.sort((a, b) => a[1].localeCompare(b[1]));
  if (offers.detects_language) languages.unshift(["", "Detect automatically"]);
  fill($("language"), languages);
  maxBeam = offers.beams;
  const care = [...new Set([1, Math.ceil((1 + maxBeam) / 2), maxBeam])].map(String);
  const standard = standardly(careOf(defaults.beam_size));
  fill($("beam_size"), [["", standard], ...care.map((size) => [size, careOf(size)])]);
  $("vad").options[0].text = standardly(VAD[defaults.vad]);
  $("mode").options[0].text = standardly(MODE[defaults.mode]);
  $("words").disabled = !offers.words;
  sum();
}

const VAD = { auto: "skip in long recordings", on: "skip", off: "listen to everything" };
const MODE = { parallel: "all parts at the same time", sequential: "one part after the other" };
const standardly = (choice) => `Standard: ${choice.toLowerCase()}`;
const nameOf = (field, value) => (field === "language" ? languageName(value) : careOf(value));

// A beam size in everyday words.
function careOf(size) {
  if (Number(size) === 1) return "Fast";
  return Number(size) >= maxBeam ? "Most careful" : "Careful";
}

function fill(select, options) {
  const texts = options.map(([, text]) => text).join();
  if (select.dataset.texts === texts) return; // an open list stays as it is
  const chosen = select.value;
  select.dataset.texts = texts;
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

// The settings in words, beside their heading.
function sum() {
  const { language, beam_size, words, doubts, vad, mode, speakers, prompt, hotwords } = settings();
  document.body.classList.toggle("doubts", doubts);
  $("num_speakers").disabled = speakers !== "voice";
  const chosen = [language ? languageName(language) : "any language"];
  if (beam_size) chosen.push(careOf(beam_size).toLowerCase());
  if (words) chosen.push("word by word");
  if (doubts) chosen.push("doubts marked");
  if (vad) chosen.push(vad === "true" ? "silence and noise skipped" : "everything heard");
  if (mode) chosen.push(MODE[mode]);
  if (speakers) chosen.push(`speakers by ${speakers === "voice" ? "voice" : "channel"}`);
  if (prompt || hotwords) chosen.push("with hints");
  $("chosen").textContent = chosen.join(", ");
}
