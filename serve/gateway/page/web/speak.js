// From the button to a job: what is said becomes text while it is said, and a recording.

import { $ } from "./dom.js";
import { level, listen } from "./microphone.js";
import { Realtime } from "./realtime.js";
import { key, settings } from "./settings.js";

const PIECES_A_PART = 50; // five seconds; no more than that is lost with the page

// `problem(message)` tells whoever looks.
export function setUp(queue, problem) {
  let dictation = null;
  $("speak").onclick = async () => {
    $("speak").disabled = true;
    problem("");
    try {
      if (dictation) await dictation.stop();
      else {
        dictation = new Dictation(queue, problem, () => (dictation = null));
        await dictation.start();
      }
    } catch (error) {
      dictation = null;
      problem(error.message);
    }
    $("speak").disabled = false;
  };
}

class Dictation {
  #pieces = [];

  constructor(queue, problem, ended) {
    Object.assign(this, { queue, problem, ended });
  }

  async start() {
    this.microphone = await listen((buffer) => this.#hear(buffer));
    this.job = this.queue.addRecording(`Recording ${now()}`);
    this.realtime = new Realtime(settings(), key(), {
      changed: (...heard) => this.queue.hear(this.job, ...heard),
      problem: this.problem,
      lost: (message) => this.stop(message),
    });
    show(true);
  }

  // `lost`: why there is no live text any more; the recording is there all the same.
  async stop(lost = null) {
    this.microphone.stop();
    show(false);
    this.ended();
    this.#keep();
    if (!lost) await this.realtime.finish();
    this.queue.endRecording(this.job, lost);
  }

  #hear(buffer) {
    if (!this.realtime) return; // a moment later
    $("speak").style.setProperty("--level", level(buffer));
    this.#pieces.push(buffer);
    this.realtime.send(buffer);
    if (this.#pieces.length === PIECES_A_PART) this.#keep();
  }

  #keep() {
    const part = new Blob(this.#pieces.splice(0));
    if (part.size) this.queue.addPart(this.job, part);
  }
}

// As ISO 8601 has it, but of here, and fit for names of files.
const now = () => new Date().toLocaleString("sv-SE").replaceAll(":", "-");

function show(on) {
  $("speak").setAttribute("aria-pressed", on);
  $("speak").textContent = on ? "Stop" : "Speak";
}
