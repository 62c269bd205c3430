// Texts as one archive, stored as they are.
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = ~0;
  for (const byte of bytes) value = CRC[(value ^ byte) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}

// Fields of 2 and 4 bytes, little-endian.
function record(...fields) {
  const bytes = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)));
  let offset = 0;
  for (const [size, value] of fields) {
    if (size === 2) bytes.setUint16(offset, value, true);
    else bytes.setUint32(offset, value, true);
    offset += size;
  }
  return bytes.buffer;
}

const UTF8_NAMES = 0x800;
const NEW_YEAR_1980 = 0x21; // a date has to be there

// `files`: [name, text]; of equal names the later ones get a number.
export function zip(files) {
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [name, text] of distinct(files)) {
    const [path, data] = [name, text].map((string) => new TextEncoder().encode(string));
    const facts = [
      [2, 20],
      [2, UTF8_NAMES],
      [2, 0],
      [2, 0],
      [2, NEW_YEAR_1980],
      [4, crc32(data)],
      [4, data.length],
      [4, data.length],
      [2, path.length],
      [2, 0],
    ];
    const head = record([4, 0x04034b50], ...facts);
    directory.push(
      record([4, 0x02014b50], [2, 20], ...facts, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]),
      path,
    );
    parts.push(head, path, data);
    offset += head.byteLength + path.length + data.length;
  }
  const size = directory.reduce((sum, part) => sum + part.byteLength, 0);
  const count = files.length;
  const end = record(
    [4, 0x06054b50],
    [2, 0],
    [2, 0],
    [2, count],
    [2, count],
    [4, size],
    [4, offset],
    [2, 0],
  );
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}

function distinct(files) {
  const seen = new Map();
  return files.map(([name, text]) => {
    const count = seen.get(name) ?? 0;
    seen.set(name, count + 1);
    return [count ? name.replace(/(\.\w+)$/, ` (${count + 1})$1`) : name, text];
  });
}
