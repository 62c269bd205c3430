// Words of a segment in its text: where they stand, and how one is corrected.

// A segment's text in pieces, words with their times and what stands between them. `word` is the
// piece's entry in `words`; a segment without words is one piece.
export function* pieces(segment) {
  const { text, start, end, words } = segment;
  if (!words) return yield { text, start, end };
  let position = 0;
  for (const word of words) {
    const begin = text.indexOf(word.word, position);
    if (begin < 0) continue;
    if (begin > position) yield { text: text.slice(position, begin) };
    position = begin + word.word.length;
    yield { text: word.word, start: word.start, end: word.end, word };
  }
  if (position < text.length) yield { text: text.slice(position) };
}

// Another text for a word, or for all of a segment without words; with none it is gone.
export function correct(segment, word, text) {
  const all = [...pieces(segment)].map((piece) => {
    if (piece.start === undefined || piece.word !== word) return piece.text;
    return piece.text.match(/^\s*/)[0] + text; // of a segment, which begins with a space
  });
  segment.text = all.join("").replace(/(\s)\s+/g, "$1");
  if (!word) return;
  word.word = text;
  delete word.confidence; // that was the engine's
  if (!text) segment.words.splice(segment.words.indexOf(word), 1);
}
