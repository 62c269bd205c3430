// Files as they come: dropped, picked or pasted, folders with all that lies in them.

const ENDINGS = new Set(
  (
    "wav mp3 m4a m4b aac flac ogg oga opus wma amr awb ac3 aif aiff caf au w64 sph mpga " +
    "mp4 m4v mov mkv mka webm mpeg mpg 3gp avi wmv flv"
  ).split(" "),
);
const sounds = (file) =>
  /^(audio|video)\//.test(file.type) || ENDINGS.has(file.name.split(".").at(-1).toLowerCase());

// Of a folder only what looks like audio is taken; a file by itself is for the server to judge.
export function ofFolder(files) {
  const found = files.filter(sounds);
  return { files: found, leftOut: files.length - found.length };
}

// What was dropped or pasted. The entries have to be asked for before the first await.
export async function ofTransfer(transfer) {
  const entries = [...transfer.items]
    .filter((item) => item.kind === "file")
    .map((item) => ({ entry: item.webkitGetAsEntry?.(), file: item.getAsFile() }));
  const result = { files: [], leftOut: 0 };
  for (const { entry, file } of entries) {
    if (!entry?.isDirectory) {
      if (file) result.files.push(file);
      continue;
    }
    const { files, leftOut } = ofFolder(await within(entry));
    result.files.push(...files);
    result.leftOut += leftOut;
  }
  return result;
}

async function within(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const files = [];
  while (true) {
    // A reader gives some entries at a time, and none at the end.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    for (const one of some) files.push(...(await within(one)));
  }
  return files.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
}
