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
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(whole / 60) % 60, whole % 60];
  const hours = Math.floor(whole / 3600);
  if (hours) parts.unshift(hours);
  return parts.map((part, index) => (index ? String(part).padStart(2, "0") : part)).join(":");
}

export function megabytes(bytes) {
  const size = bytes / 2 ** 20;
  return size < 0.1 ? `${Math.ceil(bytes / 1024)} KB` : `${size.toFixed(size < 10 ? 1 : 0)} MB`;
}

// Codes of languages in English; the server itself names some that browsers do not know.
const names = new Intl.DisplayNames(["en"], { type: "language" });
export function languageName(code) {
  try {
    return names.of(code);
  } catch {
    return code;
  }
}
