// Sound of a microphone, as the server hears it and as a file holds it: mono PCM16.

export const RATE = 24_000; // Hz

// Parts of such sound as one file.
export function wav(parts) {
  const size = parts.reduce((sum, part) => sum + part.size, 0);
  const header = new DataView(new ArrayBuffer(44));
  const text = (at, letters) =>
    [...letters].forEach((letter, i) => header.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  header.setUint32(4, 36 + size, true);
  text(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // mono
  header.setUint32(24, RATE, true);
  header.setUint32(28, 2 * RATE, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  text(36, "data");
  header.setUint32(40, size, true);
  return new Blob([header.buffer, ...parts], { type: "audio/wav" });
}
