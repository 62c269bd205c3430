// Elements made in one call. Texts are only ever set as text: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function button(text, onclick, properties = {}) {
  return el("button", { type: "button", className: "quiet", onclick, ...properties }, text);
}

export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// 75.4 -> "1:15", 3675 -> "1:01:15"
export function clock(seconds) {
  const total = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(total / 60) % 60, total % 60];
  const hours = Math.floor(total / 3600);
  if (hours) parts.unshift(hours);
  return parts.map((part, index) => (index ? String(part).padStart(2, "0") : part)).join(":");
}

export function megabytes(bytes) {
  const size = bytes / 2 ** 20;
  return size < 0.1 ? `${Math.ceil(bytes / 1024)} KB` : `${size.toFixed(size < 10 ? 1 : 0)} MB`;
}

const browserNames = new Intl.DisplayNames(["en"], { type: "language", fallback: "none" });
let serverNames = {}; // code -> name in small letters; browsers do not know all of Whisper's codes

export function nameLanguages(names) {
  serverNames = names;
}

// The English name of a language, by its code or the server's name; a code is never shown.
export function languageName(language) {
  const known = Object.keys(serverNames).find((code) => serverNames[code] === language);
  const code = known ?? language;
  const name = browserName(code) ?? serverNames[code];
  if (!name && language.length < 4) return "another language";
  return (name ?? language).replace(/(^|\s)\S/g, (letter) => letter.toUpperCase());
}

function browserName(code) {
  try {
    return browserNames.of(code);
  } catch {
    return undefined; // it is no code
  }
}
