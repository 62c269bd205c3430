// Files as they come: dropped, picked or pasted, folders with all that lies in them.
//
// Of what is dropped, pasted or in a folder only what looks like audio is taken, for among it lies
// whatever else there is; who chooses a file means it, and the server judges.

const ENDINGS = new Set(
  (
    "wav mp3 m4a m4b aac flac ogg oga opus wma amr awb aif aiff caf au mpga mp2 ac3 eac3 mka ape " +
    "tta wv w64 rf64 sph nist spx gsm 3ga mp4 m4v mov mkv webm mpeg mpg 3gp 3g2 avi wmv flv ogv"
  ).split(" "),
);
const sounds = (file) =>
  /^(audio|video)\//.test(file.type) || ENDINGS.has(file.name.split(".").at(-1).toLowerCase());

export function audioOf(files) {
  const audio = files.filter(sounds);
  return { files: audio, leftOut: files.length - audio.length };
}

// What was dropped or pasted. The entries have to be asked for before the first await.
export async function ofTransfer(transfer) {
  const entries = [...transfer.items]
    .filter((item) => item.kind === "file")
    .map((item) => ({ entry: item.webkitGetAsEntry?.(), file: item.getAsFile() }));
  const files = [];
  for (const { entry, file } of entries)
    if (entry?.isDirectory) files.push(...(await within(entry)));
    else if (file) files.push(file);
  return audioOf(files);
}

async function within(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const files = [];
  while (true) {
    // A reader gives some entries at a time, and none at the end.
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) break;
    for (const inner of entries) files.push(...(await within(inner)));
  }
  return files.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
}
