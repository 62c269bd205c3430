"""Words with times: against plain definitions, and against faster-whisper on the same input."""

import itertools
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from faster_whisper.tokenizer import Tokenizer as TheirTokenizer
from faster_whisper.transcribe import WhisperModel
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.messages import Alignment, Segment
from serve.speech.words import FRAMES_PER_S, assign_words, monotonic_path, split_words, time_words

CHECKPOINT = Path(__file__).parents[2] / "fixture" / "checkpoint"
PIECES = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
EOT = PIECES.token_to_id("<|endoftext|>")
MARKS = set("\"'“”¿¡([{-—)]}.。,，!！?？:：、;…")
PREPENDED, APPENDED = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
TEXT = """ Well... he said: "No," (twice) and went - at 5:30 - to 27 St. Anne's Road! ¿Qué tal?
 Sí, señor; naïve façade — œuvre… it's a rock-and-roll 'thing'. [Aside] What?! ¡Olé!
 東京は。 100% sure: #1"""


def decode(tokens) -> str:
    return PIECES.decode(list(tokens), skip_special_tokens=False)


def encode(text: str) -> list[int]:
    return PIECES.encode(text, add_special_tokens=False).ids


def plain_path(matrix: np.ndarray) -> list[tuple[int, int]]:
    """Dynamic time warping of -matrix, cell by cell, with OpenAI's choice between equals."""
    rows, frames = matrix.shape
    cost = np.full((rows + 1, frames + 1), np.inf)
    cost[0, 0] = 0
    came = {}
    for i, j in itertools.product(range(1, rows + 1), range(1, frames + 1)):
        diagonal, above, left = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        if diagonal < above and diagonal < left:
            best, came[i, j] = diagonal, (i - 1, j - 1)
        elif above < diagonal and above < left:
            best, came[i, j] = above, (i - 1, j)
        else:
            best, came[i, j] = left, (i, j - 1)
        cost[i, j] = best - float(matrix[i - 1, j - 1])
    at, path = (rows, frames), []
    while at != (0, 0):
        path.append((at[0] - 1, at[1] - 1))
        at = came[at]
    return path[::-1]


def begins(path: list[tuple[int, int]]) -> list[int]:
    return [next(j for row, j in path if row == i) for i in range(path[-1][0] + 1)]


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(rows=st.integers(1, 12), frames=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_the_warping_is_the_plain_definitions(rows: int, frames: int, seed: int):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(rows, frames)).astype(np.float32)
    whole = rng.integers(-2, 3, size=(rows, frames)).astype(np.float32)  # equals everywhere
    for matrix in (real, whole):
        assert monotonic_path(matrix).tolist() == begins(plain_path(matrix))


def test_words_behind_a_prefix_are_where_they_are_without_it():
    tokens = encode(" my name is Helen")
    matrix = np.random.default_rng(0).standard_normal((len(tokens) + 4, 200)).astype(np.float32)
    probs = np.linspace(0.5, 1, len(tokens) + 3, dtype=np.float32)
    said = encode(" Good morning,")[:3]
    whole = time_words(Alignment(probs, matrix), [[*said, *tokens]], decode, "en")
    rest = time_words(Alignment(probs[3:], matrix, prefix=3), [tokens], decode, "en")
    mine, those = (
        [(one.text, one.start_s, one.end_s, one.probability) for one in words.timings]
        for words in (rest, whole)
    )
    assert mine == those[-len(mine) :]
    assert rest.timings[0].start_s > 0


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", [*TEXT.split("\n"), "東京は。", " a", "", " 🙂 ok", "…"])
def test_parts_are_split_as_faster_whisper_splits_words(language: str, text: str):
    theirs = TheirTokenizer(PIECES, True, "transcribe", "en")
    theirs.language_code = language
    whole = encode(text)
    for end in range(len(whole) + 1):  # inside characters too
        tokens = whole[:end]
        words, ids = theirs.split_to_word_tokens([*tokens, EOT])
        parts = split_words(tokens, decode, language)
        mine, counts = [text for text, _ in parts], [count for _, count in parts]
        if decode(tokens).endswith("\ufffd"):  # they count what ends the text to its end
            assert len(mine) >= len(words) - 1 and "".join(mine) in decode(tokens)
            mine, counts = mine[: len(words) - 1], counts[: len(words) - 1]
        assert (mine, counts) == (words[:-1], [len(one) for one in ids[:-1]])


def their_words(alignment: Alignment, pieces: list[list[int]], times, until_s: float):
    """Segments' (start, end) and words, as faster-whisper makes them of the same alignment."""
    path = plain_path(alignment.matrix) if len(alignment.token_probs) else []
    found = SimpleNamespace(text_token_probs=alignment.token_probs, alignments=path)
    model = WhisperModel.__new__(WhisperModel)
    model.model = SimpleNamespace(align=lambda *_, **__: [found])
    model.frames_per_second, model.tokens_per_second = 100, 50
    seek = round(times[0][0] * 100)
    segments = [
        {"tokens": tokens, "seek": seek, "start": start, "end": end}
        for tokens, (start, end) in zip(pieces, times, strict=True)
    ]
    tokenizer = TheirTokenizer(PIECES, True, "transcribe", "en")
    model.add_word_timestamps([segments], tokenizer, None, 0, PREPENDED, APPENDED, until_s)
    return segments


SPACES = [0, *(i for i, char in enumerate(TEXT) if char == " "), len(TEXT)]


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.sampled_from(SPACES), min_size=2, max_size=5, unique=True),
    offset=st.integers(0, 50),
    silence=st.integers(0, 8),
)
def test_words_last_from_their_first_part_to_their_last_as_faster_whisper_times_these(
    seed, cuts, offset, silence
):
    rng = np.random.default_rng(seed)
    pieces = [encode(TEXT[a:b]) for a, b in itertools.pairwise(sorted(cuts))]
    tokens = [token for piece in pieces for token in piece]
    frames = int(rng.integers(max(1, len(tokens)), 6 * len(tokens) + 2))
    matrix = rng.normal(size=(len(tokens) + 1, frames)).astype(np.float32)
    ridge = np.sort(rng.integers(0, frames, len(tokens) + 1))
    matrix[np.arange(len(ridge)), ridge] += rng.choice([0, 9], len(ridge))
    alignment = Alignment(rng.random(len(tokens)).astype(np.float32), matrix)
    marks = offset + np.sort(rng.integers(0, frames, 2 * len(pieces) - 1)) / FRAMES_PER_S
    times = [(float(a), float(b)) for a, b in zip([offset, *marks[1::2]], marks[::2], strict=True)]
    until_s = float(max(0, offset - silence))

    theirs = their_words(alignment, pieces, times, until_s)
    segments = [
        Segment(start, end, decode(piece), tuple(piece), None, None, 0.0, 1.0)
        for piece, (start, end) in zip(pieces, times, strict=True)
    ]
    words = time_words(alignment, pieces, decode, "en")
    mine = assign_words(segments, words, float(offset), until_s)

    for ours, other in zip(mine, theirs, strict=True):
        assert "".join(word.word for word in ours.words) == ours.text
        assert " ".join(word.word.strip() for word in ours.words) == " ".join(ours.text.split())
        parts = iter(other["words"])
        for word in ours.words:
            its = [next(parts)]
            while "".join(part["word"] for part in its) != word.word:
                its.append(next(parts))
            said = [part for part in its if not set(part["word"].strip()) <= MARKS] or its[:1]
            low, high = (choose(part["probability"] for part in said) for choose in (min, max))
            assert low - 1e-4 <= word.probability <= high + 1e-4
            assert word.start == pytest.approx(said[0]["start"], abs=6e-4)
            assert word.end == pytest.approx(said[-1]["end"], abs=6e-4)
        assert (ours.start, ours.end) == pytest.approx((other["start"], other["end"]), abs=6e-4)


def joined(text: str, language: str) -> list[str]:
    """The words of a segment, stripped as answers have them."""
    tokens = encode(text)
    alignment = Alignment(np.ones(len(tokens), np.float32), None, np.arange(len(tokens) + 1))
    segment = Segment(0.0, 9.0, text, tuple(tokens), None, None, 0.0, 1.0)
    (given,) = assign_words([segment], time_words(alignment, [tokens], decode, language), 0.0, 0.0)
    assert "".join(word.word for word in given.words) == text
    return [word.word.strip() for word in given.words]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("fr", " L'étoile d'aujourd'hui, qu'est-ce que c'est ? 25,7 % des « gens »"),
        ("it", " l'amico dell'università; un po' d'acqua"),
        ("en", " It cost $25,700 (50% off): co-founders' e-mail at 5:30 and/or 3.5… don't!"),
        ("de", " das Arbeits-/Schlafzimmer - z.B. 1.000,50 €"),
        ("hi", " यह हिन्दी की किताब है।"),
        ("ko", " 모든 인간은, 자유롭다."),
    ],
)
def test_a_word_begins_where_the_text_has_a_space(language, text):
    assert joined(text, language) == text.split()


def test_signs_of_a_vowel_stay_with_their_letter_where_no_spaces_are():
    words = joined("ภาษาไทยน้ำใจเกม", "th")
    assert not any(unicodedata.category(word[0]).startswith("M") for word in words)
    assert not any(word[0] in "ะาำ" or word[-1] in "เแโใไ" for word in words)
    assert len(words) > 3
    assert joined("မြန်မာစာ", "my") and not any(
        unicodedata.category(word[0]).startswith("M") for word in joined("မြန်မာစာ", "my")
    )
    assert joined("東京は。", "ja") == ["東京", "は。"] or joined("東京は。", "ja")[-1] == "は。"


def test_no_word_goes_over_the_end_of_a_segment():
    pieces = [encode(text) for text in (" he said", ", no", "-one", '" came')]
    tokens = [token for piece in pieces for token in piece]
    alignment = Alignment(np.ones(len(tokens), np.float32), None, np.arange(len(tokens) + 1))
    segments = [
        Segment(float(i), i + 1.0, decode(piece), tuple(piece), None, None, 0.0, 1.0)
        for i, piece in enumerate(pieces)
    ]
    given = assign_words(segments, time_words(alignment, pieces, decode, "en"), 0.0, 0.0)
    assert ["".join(word.word for word in one.words) for one in given] == [s.text for s in given]


def words_at(times: list[float], voice=()) -> list[tuple[str, float, float]]:
    """What " It is so." becomes if its tokens begin at these seconds; the last is the end."""
    tokens = encode(" It is so.")
    alignment = Alignment(np.ones(len(tokens), np.float32), None, np.array(times) * FRAMES_PER_S)
    words = time_words(alignment, [tokens], decode, "en", voice=voice)
    return [(w.text, w.start_s, w.end_s) for w in words.timings if w.text]


def test_a_word_after_a_pause_begins_with_the_voice():
    times = [0.5, 1.0, 2.0, 2.4, 2.5]
    assert words_at(times) == [(" It", 0.5, 1.0), (" is", 1.0, 2.0), (" so.", 2.0, 2.4)]
    spoken = words_at(times, voice=[(0.45, 0.98), (1.7, 2.6)])
    assert spoken == [(" It", 0.5, 1.0), (" is", pytest.approx(1.6), 2.0), (" so.", 2.0, 2.4)]


@pytest.mark.parametrize("voice", [[(0.45, 1.4), (1.8, 2.6)], [(5.0, 6.0)]])
def test_a_word_before_a_pause_or_without_a_voice_stays(voice):
    times = [0.5, 1.0, 2.0, 2.4, 2.5]
    assert words_at(times, voice) == words_at(times)
