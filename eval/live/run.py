"""`python -m eval live`: stream recordings at the pace of speech, and measure the text.

Every stream plays its share of the recordings one after another, each in a session of its own. The
time of a word is what the same server says of the whole recording while it has no other request.
"""

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, RAW, Normalize, normalizer
from eval.accuracy.passages import join_clips
from eval.accuracy.score import Counts, char_counts, in_common
from eval.config import HELD_S, Config
from eval.corpora.find import find_clips
from eval.live.systems import System, open_system
from eval.record import Check, Result, Run, Say, Section, Table
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.messages import Request, Transcript
from serve.speech.audio import decode
from serve.speech.meter import Limits


@dataclasses.dataclass(frozen=True)
class Final:
    """A word that became final, at a time of its stream."""

    text: str
    at_s: float


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A word with the time at which it ends in the audio."""

    text: str
    end_s: float


def final_words(deltas: Iterable[tuple[float, str]]) -> list[Final]:
    """Return the words of one utterance.

    A word counts as there with the last of its letters; a mark may follow it later.

    Args:
        deltas: times and texts, in order.
    """
    times, text = list[float](), ""
    for at_s, delta in deltas:
        text += delta
        times += [at_s] * len(delta)
    words, begin = list[Final](), 0
    for word in text.split():
        begin = text.index(word, begin)
        letters = [i for i, character in enumerate(word) if character.isalnum()] or [0]
        words.append(Final(word, times[begin + letters[-1]]))
        begin += len(word)
    return words


def latencies(
    final: Sequence[Final], spoken: Sequence[Spoken], normalize: Normalize, language: str | None
) -> list[float]:
    """Measure the seconds from the end of each word in the audio to its final text.

    Words that were heard otherwise than they are known to have been said tell nothing.
    """
    mine = [normalize(word.text, language) for word in final]
    theirs = [normalize(word.text, language) for word in spoken]
    return [final[i].at_s - spoken[j].end_s for i, j in in_common(mine, theirs)]


# ---------------------------------------------------------------- passages


def passages(config: Config, join_s: float) -> list[Clip]:
    """Make passages of the clips of `eval.manifest` and `eval.half`, of their groups in turn.

    The clips of each speaker are joined. Where that or the place itself makes passages the other
    clips are left out, else they are taken as they are.

    Args:
        config: the product, whose `eval.gate_groups` alone are taken where there are any.
        join_s: the most that joined clips last; what lasts half of it is a passage.

    Raises:
        ConfigError: there are none.
        EarshotError: a clip cannot be read.
    """
    speech = config.eval.manifest
    drawn = find_clips(speech, half=config.eval.half).clips
    groups = {clip.group for clip in drawn} & set(config.eval.gate_groups)
    clips = [clip for clip in drawn if clip.text and (not groups or clip.group in groups)]
    if not clips:
        raise ConfigError(f"{speech} has no clip with text; expected some")
    alone = [clip for clip in clips if not clip.speaker]
    joined = join_clips([clip for clip in clips if clip.speaker], join_s, Limits(join_s))
    long = [clip for clip in (*joined, *alone) if clip.duration_s >= join_s / 2]
    return list(_in_turn(sorted(long or clips, key=_group)))


def _in_turn(clips: Iterable[Clip]) -> Iterable[Clip]:
    by_group = {group: list(some) for group, some in itertools.groupby(clips, _group)}
    for turn in itertools.zip_longest(*by_group.values()):
        yield from (clip for clip in turn if clip is not None)


def _group(clip: Clip) -> str:
    return clip.group


# ---------------------------------------------------------------- run


MOST_WORSE = 0.5  # points of CER that live text may have more than whole clips
_NORMALIZE = normalizer(DEFAULT)
_APART_S = 0.37  # between the beginnings of two streams
_TORN = re.compile(r"[.?!…] (\w)")  # the end of a sentence, and what follows


@dataclasses.dataclass(frozen=True)
class Offline:
    """The texts that a system makes of a whole recording."""

    words: tuple[Spoken, ...]  # of `text`
    text: str  # as any request
    alike: str  # searched as live text is
    short: str  # and with live text's encoder


@dataclasses.dataclass(frozen=True)
class Level:
    """Figures of so many streams at a time."""

    streams: int
    audio_s: float
    words: int
    matched: int  # of them, those whose time is known
    p50_s: float
    p95_s: float
    p99_s: float
    changed_per_word: float  # words of hypotheses that did not stay; none of them was final
    cer: float  # %, as the following, of the same recordings as a whole: see `Offline`
    whole_cer: float
    alike_cer: float
    short_cer: float
    from_whole: float  # %: the errors of live text if a whole recording's were right
    from_written: float  # % likewise, with its marks and capital letters
    torn: int  # ends of sentences that a small letter follows
    whole_torn: int
    failed: int  # utterances without text

    @property
    def checks(self) -> tuple[Check, ...]:
        """Check what must hold."""
        late = f"95 of 100 words are final within {HELD_S:g} s"
        worse = f"CER at most {MOST_WORSE:g} points above that of whole recordings"
        points = self.cer - self.whole_cer
        of = f"with {self.streams} streams"
        return (
            Check(f"every utterance has its text {of}", not self.failed, f"{self.failed} failed"),
            Check(f"{late} {of}", self.p95_s <= HELD_S, f"{self.p95_s:.2f} s"),
            Check(f"{worse} {of}", points <= MOST_WORSE, f"{points:+.2f} points"),
        )

    @property
    def row(self) -> list[str]:
        """Return the row of the report."""
        rates = (self.cer, self.whole_cer, self.alike_cer, self.short_cer)
        return [
            str(self.streams),
            *(f"{seconds:.2f}" for seconds in (self.p50_s, self.p95_s, self.p99_s)),
            f"{self.changed_per_word:.2f}",
            str(self.words),
            f"{100 * self.matched / max(1, self.words):.0f} %",
            *(f"{rate:.2f} %" for rate in (*rates, self.from_whole, self.from_written)),
            str(self.torn),
            str(self.whole_torn),
        ]


HEADER = (
    *("streams", "p50, s", "p95, s", "p99, s", "changed", "words", "known", "CER live", "whole"),
    *("alike", "short enc.", "from whole", "as written", "torn", "whole torn"),
)


def live(
    run: Run, *, streams: tuple[int, ...], clips: int, join_s: float, simulate: float
) -> Result:
    """Measure live text of `eval.manifest`, of which `passages` says what is played.

    Args:
        run: its record is kept anew with each number of streams.
        streams: how many at a time, one after another; the last must be good.
        clips: how many each of them plays.
        join_s: as of `passages`.
        simulate: as of `open_system`.

    Raises:
        EarshotError: a server did not start, or does not do what it should.
    """
    config, offline, levels = run.config, dict[str, Offline](), list[Level]()
    played = passages(config, join_s)
    with open_system(config, simulate) as system:
        for count in streams:
            shares = [_share(played, index, clips) for index in range(count)]
            measure = _Measure(system, config, shares, offline, run.say)
            levels.append(measure.level())
            run.say("; ".join(map(" ".join, zip(HEADER, levels[-1].row, strict=True))))
            table = Table(HEADER, [level.row for level in levels])
            result = Result(levels, levels[-1].checks, (Section("Live text", [table]),))
            run.keep(result)
            system.require_unbroken()
    return result


def _offline(system: System, clip: Clip, config: Config) -> Offline:
    audio, live = clip.path.read_bytes(), config.live
    request = Request(audio, language=clip.language)
    alike = dataclasses.replace(request, beam_size=live.beam_size or None)
    short = dataclasses.replace(alike, short_encoder=live.asks_short_encoder)
    text = system.whole(dataclasses.replace(request, word_timestamps=True))
    texts = (system.whole(variant).text for variant in (alike, short))
    return Offline(tuple(_spoken(text)), text.text, *texts)


def _spoken(transcript: Transcript) -> Iterator[Spoken]:
    for segment in transcript.segments:
        for word in segment.words or ():
            yield Spoken(word.word.strip(), word.end)


@dataclasses.dataclass(frozen=True)
class _Played:
    """One clip, streamed."""

    clip: Clip
    text: str
    latency_s: list[float]
    words: int
    failed: int


@dataclasses.dataclass
class _Measure:
    """One number of streams."""

    system: System  # makes the text
    config: Config  # its
    shares: Sequence[Sequence[Clip]]  # what each stream plays
    offline: dict[str, Offline]  # what it says of each clip as a whole; grows
    say: Say
    played: list[_Played] = dataclasses.field(default_factory=list)

    def level(self) -> Level:
        """Play all of them.

        Raises:
            EarshotError: the system does not do what it should.
        """
        new = {clip.file: clip for share in self.shares for clip in share}
        self.say(f"as a whole: {len(new.keys() - self.offline.keys())} …")
        for file in new.keys() - self.offline.keys():
            self.offline[file] = _offline(self.system, new[file], self.config)
        all_s = max(sum(clip.duration_s for clip in share) for share in self.shares)
        self.say(f"{len(self.shares)} streams, {all_s:.0f} s at the pace of speech …")
        changed = self.system.changed()
        self.system.run(self._streams())
        changed = self.system.changed() - changed
        played = self.played
        times = [latency for playback in played for latency in playback.latency_s]
        if not times:
            raise EarshotError("no word became final that is in the whole clips; expected most")
        words = sum(playback.words for playback in played)
        p50_s, p95_s, p99_s = map(float, np.percentile(times, (50, 95, 99)))
        return Level(
            streams=len(self.shares),
            audio_s=sum(playback.clip.duration_s for playback in played),
            words=words,
            matched=len(times),
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            changed_per_word=changed / max(1, words),
            cer=self._cer(_said, _text),
            whole_cer=self._cer(_said, self._whole),
            alike_cer=self._cer(_said, lambda playback: self.offline[playback.clip.file].alike),
            short_cer=self._cer(_said, lambda playback: self.offline[playback.clip.file].short),
            from_whole=self._cer(self._whole, _text),
            from_written=self._cer(self._whole, _text, normalizer(RAW)),
            torn=sum(_torn(playback.text) for playback in played),
            whole_torn=sum(_torn(self._whole(playback)) for playback in played),
            failed=sum(playback.failed for playback in played),
        )

    async def _streams(self) -> None:
        await asyncio.gather(
            *(self._stream(share, index * _APART_S) for index, share in enumerate(self.shares))
        )

    async def _stream(self, clips: Sequence[Clip], wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        for clip in clips:
            self.played.append(await self._play(clip))
            total = sum(map(len, self.shares))
            self.say(f"  {len(self.played)} of {total} clips; {clip.file}")

    async def _play(self, clip: Clip) -> _Played:
        blocks = decode(clip.path.read_bytes(), Limits(clip.duration_s + 60))
        wanted = {} if clip.language is None else {"language": clip.language}
        deltas: dict[str, list[tuple[float, str]]] = {}
        transcripts, failed = list[str](), 0
        async for news in self.system.play(list(blocks), wanted):
            kind = news.event["type"].rpartition(".")[2]
            if kind == "delta":
                delta = news.at_s, news.event["delta"]
                deltas.setdefault(news.event["item_id"], []).append(delta)
            elif kind == "completed":
                transcripts.append(news.event["transcript"])
            failed += kind == "failed"
        words = [word for utterance in deltas.values() for word in final_words(utterance)]
        known = self.offline[clip.file].words
        times = latencies(words, known, _NORMALIZE, clip.language)
        return _Played(clip, " ".join(transcripts), times, len(words), failed)

    def _whole(self, played: _Played) -> str:
        return self.offline[played.clip.file].text

    def _cer(
        self,
        reference: Callable[[_Played], str],
        hypothesis: Callable[[_Played], str],
        normalize: Normalize = _NORMALIZE,
    ) -> float:
        """Return the errors in % of the characters."""
        total = Counts()
        for played in self.played:
            language = played.clip.language
            right, answered = reference(played), hypothesis(played)
            total += char_counts(normalize(right, language), normalize(answered, language))
        return 100 * total.errors / total.length


def _said(played: _Played) -> str:
    return played.clip.text


def _text(played: _Played) -> str:
    return played.text


def _torn(text: str) -> int:
    return sum(letter.islower() for letter in _TORN.findall(text))


def _share(clips: Sequence[Clip], index: int, each: int) -> list[Clip]:
    """Choose the clips of a stream: streams next to each other play different ones."""
    return [clips[(index * 5 + i) % len(clips)] for i in range(each)]
