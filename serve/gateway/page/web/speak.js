// From the button to a job: what is said becomes text while it is said, and a recording.

import { $ } from "./dom.js";
import { level, listen } from "./microphone.js";
import { Realtime } from "./realtime.js";
import { key, settings } from "./settings.js";

const PIECES_A_PART = 50; // five seconds; no more is lost with the page

// `problem(message)` tells whoever looks.
export function setUp(queue, problem) {
  let session = null;
  $("speak").onclick = async () => {
    $("speak").disabled = true;
    try {
      if (session) await session.stop();
      else session = await begin(queue, problem, () => (session = null));
    } catch (error) {
      problem(error.message);
    }
    $("speak").disabled = false;
  };
}

async function begin(queue, problem, ended) {
  let pieces = [];
  const job = { now: null };
  const keep = async () => {
    const part = new Blob(pieces);
    pieces = [];
    if (part.size) await queue.addPart(job.now, part);
  };
  const stop = async (message) => {
    microphone.stop();
    show(false);
    ended();
    if (message) problem(message);
    else await realtime.finish();
    await keep();
    await queue.endRecording(job.now, message);
  };
  const realtime = new Realtime(
    settings(),
    key(),
    (done, open) => queue.hear(job.now, done, open),
    stop,
  );
  let microphone;
  try {
    microphone = await listen((buffer) => {
      $("speak").style.setProperty("--level", level(buffer));
      pieces.push(buffer);
      realtime.send(buffer);
      if (pieces.length === PIECES_A_PART) keep();
    });
  } catch (error) {
    await realtime.finish();
    throw error;
  }
  job.now = await queue.addRecording(`Recording ${new Date().toLocaleString()}`);
  show(true);
  return { stop: () => stop() };
}

function show(on) {
  $("speak").setAttribute("aria-pressed", on);
  $("speak").textContent = on ? "Stop" : "Speak";
}
