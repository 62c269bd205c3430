// What outlives a reload. Texts and audio are in IndexedDB, settings in localStorage, the API key
// in sessionStorage, which ends with the tab.
//
// A job's audio is one part, that of a microphone one part every few seconds.

let database; // a promise; rejected where the browser keeps nothing

function open() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("earshot", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("jobs", { keyPath: "id" });
      request.result.createObjectStore("audio", { keyPath: ["id", "part"] });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

async function run(mode, work) {
  const transaction = (await open()).transaction(["jobs", "audio"], mode);
  const request = work(transaction.objectStore("jobs"), transaction.objectStore("audio"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

const partsOf = (id) => IDBKeyRange.bound([id, 0], [id, Infinity]);

export const loadJobs = () => run("readonly", (jobs) => jobs.getAll());

export const saveJob = (job) => run("readwrite", (jobs) => jobs.put(job));

export const saveAudio = (id, part, blob) =>
  run("readwrite", (jobs, audio) => audio.put({ id, part, blob }));

// The parts in their order; none where the audio was not kept.
export const loadAudio = async (id) =>
  (await run("readonly", (jobs, audio) => audio.getAll(partsOf(id)))).map((part) => part.blob);

export const removeJob = (id) =>
  run("readwrite", (jobs, audio) => {
    jobs.delete(id);
    audio.delete(partsOf(id));
  });

export const loadSettings = () => JSON.parse(localStorage.getItem("earshot-settings") ?? "{}");

export const saveSettings = (settings) =>
  localStorage.setItem("earshot-settings", JSON.stringify(settings));

export const loadKey = () => sessionStorage.getItem("earshot-key") ?? "";

export const saveKey = (key) => sessionStorage.setItem("earshot-key", key);
