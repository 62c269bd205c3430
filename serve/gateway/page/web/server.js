// What the server says of itself, every few seconds while somebody looks.

import { state } from "./api.js";
import { $, el } from "./dom.js";

const EVERY_MS = 3000;
const SVG = "http://www.w3.org/2000/svg";
const WORDS = { ready: "ready", starting: "starting", draining: "stopping" };

const seconds = (value) =>
  value === null ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;

// Calls `known(state)` whenever the server answers, `refused(error)` where it does not.
export function watch(key, known, refused) {
  let timer;
  const look = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      const latest = await state(key());
      show(latest);
      known(latest);
    } catch (error) {
      say("away", error.status === 401 ? "needs an API key" : "does not answer");
      refused(error);
    }
    timer = setTimeout(look, EVERY_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return look;
}

function say(kind, text) {
  const status = $("status");
  if (status.textContent !== text) status.textContent = text; // said aloud when it changes
  status.dataset.kind = kind;
}

function show({ name, status, now, engines, recent, history }) {
  say(status, `${name}, ${WORDS[status]}`);
  const minutes = `last ${Math.round(recent.window_s / 60)} minutes`;
  const figures = [
    ["Queue", now ? String(now.queue) : "–", "requests"],
    ["Slots", now ? `${now.slots_busy} / ${now.slots}` : "–", "busy"],
    ["RTFx", recent.rtfx === null ? "–" : recent.rtfx.toFixed(1), "while at work"],
    ["p50", seconds(recent.p50_s), `of ${recent.requests} requests`],
    ["p99", seconds(recent.p99_s), minutes],
    ...(engines.length > 1 ? [engineFigure(engines)] : []),
  ];
  $("figures").replaceChildren(
    ...figures.map(([term, value, text]) => {
      const about = el("dd", { className: "about" }, text);
      return el("div", {}, el("dt", {}, term), el("dd", {}, value), about);
    }),
  );
  draw(history, recent.window_s);
}

// The number of engines that take requests, and the names of the others.
function engineFigure(engines) {
  const away = engines.filter((engine) => !Object.values(engine.models).every(Boolean));
  const names = away.map(({ name }) => name).join(", ");
  const text = away.length ? `without ${names}` : "take requests";
  return ["Engines", `${engines.length - away.length} / ${engines.length}`, text];
}

// A bar for each stretch of time: how much audio was answered a second, of all clients.
function draw({ interval_s, audio_per_s }, window_s) {
  const places = Math.round(window_s / interval_s);
  const peak = Math.max(...audio_per_s, 0);
  const width = 300 / places;
  const bars = audio_per_s.map((value, index) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = peak ? Math.max(value && 1.5, (46 * value) / peak) : 0;
    const x = width * (places - audio_per_s.length + index);
    const place = { x, y: 47 - height, width: width * 0.7, height };
    for (const [key, number] of Object.entries(place)) bar.setAttribute(key, number.toFixed(2));
    return bar;
  });
  const floor = document.createElementNS(SVG, "path");
  floor.setAttribute("d", "M0 47.5H300");
  $("chart").replaceChildren(floor, ...bars);
  const minutes = Math.round(window_s / 60);
  $("chart-text").textContent = peak
    ? `Seconds of audio answered each second, last ${minutes} minutes; at most ${peak.toFixed(1)}`
    : `No audio was answered in the last ${minutes} minutes`;
}
