"""Streams clips to a real server at the pace of speech, some at a time, and tells what came of it.

Every stream plays its share of the clips one after another, each in a session of its own. When a
word was said is what the same server says of the whole clip while nothing else is asked.
"""

import asyncio
import dataclasses
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import char_counts
from eval.config import Config
from eval.corpora.find import find_clips
from eval.files import write_json
from eval.live.words import Spoken, final_words, latencies
from eval.machine import machine_facts
from serve.clips import Clip
from serve.errors import ConfigError, EarshotError
from serve.gateway.live.client import Heard, transcribe_live
from serve.messages import Request, Transcript
from serve.speech.audio import decode
from serve.speech.meter import Limits
from serve.supervisor.run import Server, for_this_machine, running_server
from serve.triton.client import Client

HELD_S = 2.0  # a stream is held where 95 of 100 words are final by then
MOST_WORSE = 0.5  # points of CER that live text may have more than whole clips
_APART_S = 0.37  # between the beginnings of two streams
_CHANGED = re.compile(r"^earshot_live_changed_words_total (\S+)", re.MULTILINE)

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Offline:
    """What a server says of a whole clip."""

    words: tuple[Spoken, ...]  # of `text`
    text: str  # decoded as live text is, but for the encoder, which sees 30 s
    short: str  # and with live text's encoder
    configured: str  # as any request


@dataclasses.dataclass(frozen=True)
class Level:
    """What came of so many streams at a time."""

    streams: int
    audio_s: float
    words: int
    matched: int  # of them, those whose time is known
    p50_s: float
    p95_s: float
    changed_per_word: float  # words of hypotheses that did not stay; none of them was final
    cer: float  # %, as the following, of the same clips as a whole: see `Offline`
    offline_cer: float
    short_cer: float
    configured_cer: float
    failed: int  # utterances without text

    @property
    def held(self) -> bool:
        """Whether so many streams are not too many."""
        return self.failed == 0 and self.p95_s <= HELD_S

    @property
    def complaints(self) -> list[str]:
        """What is not as it should be."""
        found = []
        if self.failed:
            found.append(f"{self.failed} utterances failed")
        if self.p95_s > HELD_S:
            found.append(f"p95 is {self.p95_s:.2f} s; expected at most {HELD_S:g}")
        if (worse := self.cer - self.offline_cer) > MOST_WORSE:
            found.append(
                f"CER is {worse:.2f} points above that of whole clips; expected at most "
                f"{MOST_WORSE:g}"
            )
        return [f"{self.streams} streams: {complaint}" for complaint in found]

    def __str__(self) -> str:
        """A line of the table."""
        shares = (self.cer, self.offline_cer, self.short_cer, self.configured_cer)
        return (
            f"{self.streams:7} {self.p50_s:7.2f} {self.p95_s:7.2f} {self.changed_per_word:9.2f} "
            f"{self.words:6} {100 * self.matched / max(1, self.words):5.0f} % "
            + "".join(f"{share:10.2f} %" for share in shares)
        )


HEADING = (
    "streams  p50, s  p95, s   changed  words   known    CER live       whole  short enc.  "
    "configured"
)


def live(config: Config, levels: Sequence[int], clips: int, folder: Path, say: Say) -> list[Level]:
    """Start a server and measure it.

    Args:
        config: the product.
        levels: how many streams at a time, one after another.
        clips: so many for each stream, drawn in turn.
        folder: gets `live.json`, anew with each number of streams.
        say: gets a line of progress at a time.

    Raises:
        EarshotError: the server did not start, or does not do what it should.
    """
    found = [clip for clip in find_clips(config.eval.manifest).clips if clip.text]
    if not found:
        raise ConfigError(f"{config.eval.manifest} has no clip with text; expected some")
    server_config = for_this_machine(config.server)
    measured = []
    with running_server(dataclasses.replace(config, server=server_config)) as server:
        say(f"clips as a whole: {len(found)} …")
        with Client(server.grpc, config.transcriber.request_timeout_s) as client:
            offline = {clip.file: _offline(client, clip, config) for clip in found}
        for streams in levels:
            measure = _Measure(server, found, offline, streams, clips, say)
            measured.append(asyncio.run(measure.level()))
            say(f"{HEADING}\n{measured[-1]}")
            _write(folder / "live.json", config, clips, measured)
            server.require_unbroken()
    return measured


def _write(path: Path, config: Config, clips: int, levels: list[Level]) -> None:
    settings = {"live": config.live, "runtime": config.runtime, "clips": clips}
    report = {"config": config.name, "machine": machine_facts(), "settings": settings}
    write_json(path, {**report, "levels": levels})


def _offline(client: Client, clip: Clip, config: Config) -> Offline:
    audio, live = clip.path.read_bytes(), config.live
    alike = Request(
        audio, language=clip.language, beam_size=live.beam_size or None, word_timestamps=True
    )
    text = client.start(alike).result()
    short = client.start(dataclasses.replace(alike, short_encoder=live.short_encoder)).result()
    configured = client.transcribe(audio, language=clip.language)
    return Offline(tuple(_spoken(text)), text.text, short.text, configured.text)


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


class _Measure:
    """One number of streams.

    Args:
        server: it runs.
        clips: of all streams.
        offline: what it says of each.
        streams: how many there are at a time.
        each: how many clips each one plays.
        say: gets a line for each clip.
    """

    def __init__(
        self,
        server: Server,
        clips: Sequence[Clip],
        offline: dict[str, Offline],
        streams: int,
        each: int,
        say: Say,
    ) -> None:
        self._server = server
        self._offline = offline
        self._shares = [_share(clips, index, each) for index in range(streams)]
        self._say = say
        self._normalize = normalizer(DEFAULT)
        self._played: list[_Played] = []

    async def level(self) -> Level:
        """Play all of them.

        Raises:
            EarshotError: the server does not do what it should.
        """
        all_s = max(sum(clip.duration_s for clip in share) for share in self._shares)
        self._say(f"{len(self._shares)} streams, {all_s:.0f} s at the pace of speech …")
        changed = _changed(self._server)
        await asyncio.gather(
            *(self._stream(share, index * _APART_S) for index, share in enumerate(self._shares))
        )
        changed = _changed(self._server) - changed
        played = self._played
        times = [latency for one in played for latency in one.latency_s]
        if not times:
            raise EarshotError("no word became final that is in the whole clips; expected most")
        words = sum(one.words for one in played)
        return Level(
            streams=len(self._shares),
            audio_s=sum(one.clip.duration_s for one in played),
            words=words,
            matched=len(times),
            p50_s=float(np.percentile(times, 50)),
            p95_s=float(np.percentile(times, 95)),
            changed_per_word=changed / max(1, words),
            cer=self._cer(lambda one: one.text),
            offline_cer=self._cer(lambda one: self._offline[one.clip.file].text),
            short_cer=self._cer(lambda one: self._offline[one.clip.file].short),
            configured_cer=self._cer(lambda one: self._offline[one.clip.file].configured),
            failed=sum(one.failed for one in played),
        )

    async def _stream(self, clips: Sequence[Clip], wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        for clip in clips:
            self._played.append(await self._play(clip))
            total = sum(map(len, self._shares))
            self._say(f"  {len(self._played)} of {total} clips; {clip.file}")

    async def _play(self, clip: Clip) -> _Played:
        blocks = decode(clip.path.read_bytes(), Limits(clip.duration_s + 60))
        wanted = {} if clip.language is None else {"language": clip.language}
        deltas: dict[str, list[tuple[float, str]]] = {}
        transcripts, failed = list[str](), 0
        async for heard in transcribe_live(f"ws://{self._server.http}", list(blocks), wanted):
            kind = heard.event["type"].rpartition(".")[2]
            if kind == "delta":
                deltas.setdefault(heard.event["item_id"], []).append(_timed(heard))
            elif kind == "completed":
                transcripts.append(heard.event["transcript"])
            failed += kind == "failed"
        words = [word for utterance in deltas.values() for word in final_words(utterance)]
        known = self._offline[clip.file].words
        times = latencies(words, known, self._normalize, clip.language)
        return _Played(clip, " ".join(transcripts), times, len(words), failed)

    def _cer(self, text: Callable[[_Played], str]) -> float:
        errors = length = 0
        for one in self._played:
            language = one.clip.language
            said, heard = (self._normalize(it, language) for it in (one.clip.text, text(one)))
            counts = char_counts(said, heard)
            errors, length = errors + counts.errors, length + counts.length
        return 100 * errors / length


def _share(clips: Sequence[Clip], index: int, each: int) -> list[Clip]:
    """The clips of a stream: streams next to each other play different ones."""
    return [clips[(index * 5 + i) % len(clips)] for i in range(each)]


def _timed(heard: Heard) -> tuple[float, str]:
    return heard.at_s, heard.event["delta"]


def _changed(server: Server) -> float:
    page = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read().decode()
    found = _CHANGED.search(page)
    return float(found[1]) if found else 0.0
