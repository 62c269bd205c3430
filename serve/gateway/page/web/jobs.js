// Recordings that the server works through by itself, whoever closes this page: the caller's jobs.

import { call, jobForm, meaning } from "./api.js";
import { $, button, clock, el, save } from "./dom.js";

const EVERY_MS = 3000;
const JOBS = "v1/audio/jobs";
const FORMATS = { txt: "text", srt: "srt", vtt: "vtt", json: "verbose_json" };
const OPEN = ["queued", "in_progress"];
const STATES = {
  queued: "Waiting",
  in_progress: "In progress",
  completed: "Done",
  failed: "Failed",
  cancelled: "Cancelled",
};

// `key()` and `settings()` are those of now; `notice(text)` tells what went wrong.
export class Jobs {
  #key;
  #settings;
  #notice;
  #timer;
  #told = false; // whether the notice is of an error here

  constructor(key, settings, notice) {
    this.#key = key;
    this.#settings = settings;
    this.#notice = notice;
    $("jobs").addEventListener("toggle", () => this.#look());
    document.addEventListener("visibilitychange", () => this.#look());
    $("send-jobs").onclick = () => $("job-files").click();
    $("job-files").onchange = () => this.#send([...$("job-files").files]);
  }

  // Whether the server has jobs, as it says.
  offer(jobs) {
    $("jobs").hidden = !jobs;
  }

  async #send(files) {
    $("job-files").value = "";
    await this.#try(async () => {
      for (const file of files) {
        const body = jobForm(file, file.name, this.#settings());
        await call(JOBS, this.#key(), { method: "POST", body });
      }
    });
    this.#look();
  }

  async #look() {
    clearTimeout(this.#timer);
    if (!$("jobs").open || document.hidden) return;
    await this.#try(async () => {
      const answer = await call(`${JOBS}?limit=100`, this.#key());
      const { data } = await answer.json();
      this.#show(data);
      if (data.some((job) => OPEN.includes(job.status)))
        this.#timer = setTimeout(() => this.#look(), EVERY_MS);
    });
  }

  #show(jobs) {
    const text = JSON.stringify(jobs);
    if ($("job-rows").dataset.text === text) return; // who is at a button stays there
    $("job-rows").dataset.text = text;
    $("job-rows").replaceChildren(...jobs.map((job) => this.#row(job)));
    $("no-jobs").hidden = jobs.length > 0;
    $("job-table").hidden = !jobs.length;
  }

  #row(job) {
    const name = job.filename || job.url || job.id;
    const state = STATES[job.status] ?? job.status;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      el("td", {}, new Date(1000 * job.created_at).toLocaleString()),
      el("td", {}, job.duration === null ? "" : clock(job.duration)),
      el("td", {}, ...(job.error ? [`${state}. `, ...why(job.error)] : [state])),
      el("td", {}, ...this.#actions(job, name)),
    );
  }

  #actions(job, name) {
    if (OPEN.includes(job.status))
      return [button("Cancel", () => this.#cancel(job), { "aria-label": `Cancel ${name}` })];
    if (job.status !== "completed") return [];
    return Object.keys(FORMATS).map((format) =>
      button(format, () => this.#fetch(job, name, format), {
        className: "quiet format",
        "aria-label": `Download ${name} as ${format}`,
      }),
    );
  }

  async #cancel(job) {
    await this.#try(() => call(`${JOBS}/${job.id}/cancel`, this.#key(), { method: "POST" }));
    this.#look();
  }

  async #fetch(job, name, format) {
    await this.#try(async () => {
      const path = `${JOBS}/${job.id}/result?response_format=${FORMATS[format]}`;
      const answer = await call(path, this.#key());
      const stem = name.split(/[\\/]/).pop().replace(/\.[^.]*$/, "");
      save(`${stem || job.id}.${format}`, await answer.blob());
    });
  }

  async #try(work) {
    try {
      await work();
      if (this.#told) this.#notice("");
      this.#told = false;
    } catch (error) {
      this.#notice([error.message, error.detail].filter(Boolean).join(" "));
      this.#told = true;
    }
  }
}

// Why a job failed: what it means, and what the server says.
function why(error) {
  if (error.code === "audio_cut_short")
    return ["The end of this file is missing. Add it at the top to transcribe what is there."];
  return [meaning(error), el("p", { className: "detail" }, error.message)];
}
