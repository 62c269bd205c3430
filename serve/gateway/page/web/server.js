// What the server says of itself, every few seconds while somebody looks.

import { state } from "./api.js";
import { $, el } from "./dom.js";

const EVERY_MS = 3000;
const WORDS = { ready: "ready", starting: "starting", draining: "stopping" };

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

function show({ name, status, now, engines }) {
  say(status, `${name}, ${WORDS[status]}`);
  const figures = [
    ["Queue", now ? String(now.queue) : "–", "requests"],
    ["Slots", now ? `${now.slots_busy} / ${now.slots}` : "–", "busy"],
    ...(engines.length > 1 ? [engineFigure(engines)] : []),
  ];
  $("figures").replaceChildren(
    ...figures.map(([term, value, text]) => {
      const about = el("dd", { className: "about" }, text);
      return el("div", {}, el("dt", {}, term), el("dd", {}, value), about);
    }),
  );
}

// The number of engines that take requests, and the names of the others.
function engineFigure(engines) {
  const away = engines.filter(({ available }) => !available);
  const names = away.map(({ name }) => name).join(", ");
  const text = away.length ? `without ${names}` : "take requests";
  return ["Engines", `${engines.length - away.length} / ${engines.length}`, text];
}
