"""The catalogue of voices: which synthesiser, which voice, how high, how fast, and who is kept out.

Kept out of training altogether: flite's voice `rms`, espeak-ng's accent `en-029` (Caribbean), and
the espeak-ng variants of `UNSEEN_VARIANTS`, which stand in for unseen voices in Spanish, where
neither synthesiser has a second independent voice.
"""

import random
from dataclasses import dataclass, replace

ENGLISH_ACCENTS = (
    "en-gb", "en-us", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd",
    "en-us-nyc",
)  # fmt: skip
SPANISH_ACCENTS = ("es", "es-419")
UNSEEN_ACCENT = "en-029"
# Variants that espeak-ng ships, without those nobody could understand; "" is the voice itself.
VARIANTS = (
    "", "adam", "Alex", "Alicia", "Andrea", "Andy", "Annie", "antonio", "aunty", "belinda",
    "benjamin", "boris", "caleb", "david", "Denis", "Diogo", "ed", "edward", "Gene", "gustave",
    "Henrique", "Hugo", "iven", "iven3", "Jacky", "john", "kaukovalta", "Lee", "linda",
    "marcelo", "Marco", "Mario", "max", "Michael", "michel", "miguel", "mike", "Mr serious",
    "pablo", "paul", "pedro", "quincy", "rob", "robert", "steph", "steph3", "Storm", "zac",
    "anika", "f1", "f2", "f3", "f5", "grandpa", "grandma", "klatt", "klatt2", "klatt3",
    "klatt4", "klatt6", "m1", "m2", "m3", "m4", "m6", "m7", "m8", "norbert", "sandro", "shelby",
    "travis", "victor", "whisper", "whisperf", "croak", "Tweaky",
)  # fmt: skip
UNSEEN_VARIANTS = ("f4", "m5", "steph2", "iven2", "klatt5", "edward2")
FLITE_VOICES = ("slt", "awb", "kal16", "kal")
UNSEEN_FLITE_VOICE = "rms"
FLITE_SHARE = 0.42


@dataclass(frozen=True)
class Voice:
    """One speaker as asked of a synthesiser, and how its sound is then stretched.

    `resample` above 1 makes the voice higher, faster and smaller at once.
    """

    engine: str
    name: str
    words_per_minute: int
    pitch: int
    resample: float


def _espeak_name(rng: random.Random, accents: tuple[str, ...], variants: tuple[str, ...]) -> str:
    variant = rng.choice(variants)
    accent = rng.choice(accents)
    return f"{accent}+{variant}" if variant else accent


def _voice(rng: random.Random, engine: str, name: str, spread: float) -> Voice:
    return Voice(
        engine=engine,
        name=name,
        words_per_minute=int(rng.triangular(110, 240, 165)),
        pitch=int(rng.triangular(10, 90, 50)),
        resample=rng.uniform(1 - spread, 1 + spread) if spread else 1.0,
    )


def seen_voice(rng: random.Random, language: str) -> Voice:
    """A voice of the training set, with its sound stretched at random."""
    if language == "en" and rng.random() < FLITE_SHARE:
        name = rng.choices(FLITE_VOICES, (4, 4, 2, 1))[0]
        return _voice(rng, "flite", name, 0.16)
    accents = ENGLISH_ACCENTS if language == "en" else SPANISH_ACCENTS
    return _voice(rng, "espeak", _espeak_name(rng, accents, VARIANTS), 0.12)


def unseen_voice(rng: random.Random, language: str) -> Voice:
    """A voice that training never hears: half flite's rms, half the Caribbean accent; in Spanish,
    the variants kept out."""
    if language == "es":
        return _voice(rng, "espeak", _espeak_name(rng, SPANISH_ACCENTS, UNSEEN_VARIANTS), 0.0)
    if rng.random() < 0.5:
        return _voice(rng, "flite", UNSEEN_FLITE_VOICE, 0.0)
    return _voice(rng, "espeak", _espeak_name(rng, (UNSEEN_ACCENT,), ("", *UNSEEN_VARIANTS)), 0.0)


def plain_seen_voice(rng: random.Random, language: str) -> Voice:
    """A voice of the training set as its synthesiser gives it, to measure with."""
    voice = seen_voice(rng, language)
    return replace(voice, resample=1.0)
