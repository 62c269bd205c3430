// The page: what happens where, and nothing that any one part can do by itself.

import { $, button, megabytes, save } from "./dom.js";
import { Card } from "./card.js";
import { audioOf, ofTransfer } from "./files.js";
import { FORMATS, file } from "./formats.js";
import { Jobs } from "./jobs.js";
import { silence, warnings } from "./messages.js";
import { Queue, unfinished } from "./queue.js";
import { watch } from "./server.js";
import * as settings from "./settings.js";
import * as speak from "./speak.js";
import { zip } from "./zip.js";

const cards = new Map();
const announced = new Map(); // the state of each job
let limitBytes = Infinity;

const queue = new Queue({
  changed(job) {
    if (!cards.has(job.id)) {
      cards.set(job.id, new Card(job, queue));
      $("cards").prepend(cards.get(job.id).element);
    }
    cards.get(job.id).update();
    if (job.error?.status === 401) settings.askForKey();
    tell(job);
    count();
  },
  removed(id) {
    cards.get(id)?.close();
    cards.delete(id);
    count();
  },
  writing(count) {
    $("cards").dataset.writes = count;
  },
  lost() {
    const lost = "This browser stores nothing. You lose all texts when you close this page.";
    notice(lost);
    $("kept").textContent = lost;
  },
  options: () => ({ settings: settings.settings(), key: settings.key() }),
});

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// ------------------------------------------------------------ what comes in

const tooLarge = ({ name, size }) =>
  `${name} is too large: ${megabytes(size)}. This server takes up to ${megabytes(limitBytes)}.`;

const skipped = (count) =>
  count === 1
    ? "1 file was skipped: it does not look like audio."
    : `${count} files were skipped: they do not look like audio.`;

async function add({ files, leftOut }) {
  const complaints = [];
  if (leftOut) complaints.push(skipped(leftOut));
  for (const file of files) {
    if (!file.size) complaints.push(`${file.name} is empty.`);
    else if (file.size > limitBytes) complaints.push(tooLarge(file));
    else queue.add(file);
  }
  notice(complaints.join(" "));
}

function picks(id, opener, take) {
  $(opener).onclick = () => $(id).click();
  $(id).onchange = () => {
    add(take([...$(id).files]));
    $(id).value = "";
  };
}

picks("files", "choose", (files) => ({ files, leftOut: 0 }));
picks("folder", "choose-folder", audioOf);

const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dragged");
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragged");
});
addEventListener("drop", async (event) => {
  document.body.classList.remove("dragged");
  if (!carriesFiles(event)) return;
  event.preventDefault();
  add(await ofTransfer(event.dataTransfer));
});
addEventListener("paste", async (event) => {
  if (event.clipboardData.files.length) add(await ofTransfer(event.clipboardData));
});

// ------------------------------------------------------------ all of them

// Says to those who do not see it what became of a job.
function tell(job) {
  const previous = announced.get(job.id);
  announced.set(job.id, job.state);
  if (!previous || previous === job.state) return;
  if (job.state === "done")
    $("said").textContent = [`${job.name} is done.`, silence(job), ...warnings(job)].join(" ");
  if (job.state === "failed") $("said").textContent = `${job.name}: ${job.error.message}`;
}

const again = ({ state, error }) => state === "interrupted" || (state === "failed" && !error.final);

function count() {
  const { jobs } = queue;
  const pending = jobs.filter(unfinished).length;
  const done = jobs.filter((job) => job.segments.length);
  $("results-head").hidden = jobs.length < 2;
  const text = pending ? `${pending} of ${jobs.length} to go` : `${jobs.length} recordings`;
  if ($("count").textContent !== text) $("count").textContent = text;
  $("downloads").hidden = done.length < 2 || pending > 0;
  $("retry-all").hidden = jobs.filter(again).length < 2;
  document.title = pending ? `(${pending}) Earshot` : "Earshot";
}

for (const format of FORMATS)
  $("downloads").append(
    button(format, () => downloadAll(format), {
      className: "quiet format",
      "aria-label": `Download all as ${format}`,
    }),
  );

async function downloadAll(format) {
  const files = [];
  try {
    for (const job of queue.jobs.filter(({ segments }) => segments.length))
      files.push(await file(job, format, settings.key()));
    save(`transcripts-${format}.zip`, zip(files));
  } catch (error) {
    notice(error.message);
  }
}

$("retry-all").onclick = () => queue.jobs.filter(again).forEach((job) => queue.retry(job));
$("remove-all").onclick = () => {
  const all = "Remove all transcripts and recordings from this browser? This cannot be undone.";
  if (confirm(all))
    queue.jobs.forEach((job) => queue.remove(job));
};

// A browser drops what is not written yet with the page: it asks before it does.
addEventListener("beforeunload", (event) => {
  if (Number($("cards").dataset.writes)) event.preventDefault();
});

// ------------------------------------------------------------ begin

const jobs = new Jobs(settings.key, settings.settings, notice);
const look = watch(
  settings.key,
  (state) => {
    limitBytes = state.limits.request_bytes;
    $("limits").textContent = `Up to ${megabytes(limitBytes)} each.`;
    settings.offer(state);
    jobs.offer(state.jobs);
  },
  (error) => {
    if (error.status === 401) settings.askForKey();
  },
);
settings.setUp(look);
speak.setUp(queue, notice);
queue.load();
