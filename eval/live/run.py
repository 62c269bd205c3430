"""Streams clips to a real server at the pace of speech, some at a time, and tells what came of it.

Every stream plays its share of the clips one after another, each in a session of its own. When a
word was said is what the same server says of the whole clip, when nothing else is asked.
"""

import asyncio
import dataclasses
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eval.accuracy.normalize import DEFAULT, Normalize, normalizer
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
from serve.supervisor.run import Server, on_free_ports, running_server
from serve.triton.client import Client

HELD_S = 2.0  # a stream is held where 95 of 100 words are final by then
_APART_S = 0.37  # between the beginnings of two streams
_CHANGED = re.compile(r"^earshot_live_changed_words_total (\S+)", re.MULTILINE)

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Offline:
    """What a server says of a whole clip, decoded as live text is, and as configured."""

    words: tuple[Spoken, ...]
    text: str
    configured: str


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
    cer: float  # %, as the following
    offline_cer: float
    configured_cer: float
    failed: int  # utterances without text

    @property
    def held(self) -> bool:
        """Whether so many streams are not too many."""
        return self.failed == 0 and self.p95_s <= HELD_S

    def __str__(self) -> str:
        """A line of the table."""
        return (
            f"{self.streams:7}  {self.p50_s:6.2f}  {self.p95_s:6.2f}  {self.words:6}  "
            f"{100 * self.matched / max(1, self.words):6.1f} %  {self.changed_per_word:8.2f}  "
            f"{self.cer:6.2f} %  {self.offline_cer:8.2f} %  {self.configured_cer:8.2f} %  "
            f"{self.failed:6}  {'yes' if self.held else 'no'}"
        )


HEADING = (
    "streams  p50, s  p95, s   words   matched   changed       CER  offline     configured   "
    "failed  held"
)


def live(config: Config, levels: Sequence[int], clips: int, folder: Path, say: Say) -> list[Level]:
    """Start a server and measure it.

    Args:
        config: the product.
        levels: how many streams at a time, one after another.
        clips: so many for each stream, drawn in turn.
        folder: gets `live.json`.
        say: gets a line of progress at a time.

    Raises:
        EarshotError: the server did not start, or does not do what it should.
    """
    found = [clip for clip in find_clips(config.eval.manifest).clips if clip.text]
    if not found:
        raise ConfigError(f"{config.eval.manifest} has no clip with text; expected some")
    server_config = dataclasses.replace(on_free_ports(config.server), keys_file="")
    measured = []
    with running_server(dataclasses.replace(config, server=server_config)) as server:
        say(f"clips as a whole: {len(found)} …")
        with Client(server.grpc, config.transcriber.request_timeout_s) as client:
            offline = {clip.file: _offline(client, clip, config) for clip in found}
        for streams in levels:
            say(f"{streams} streams of {clips} clips each …")
            level = asyncio.run(_measure(server, found, offline, streams, clips))
            say(f"{HEADING}\n{level}")
            measured.append(level)
            server.require_unbroken()
    write_json(
        folder / "live.json",
        {
            "config": config.name,
            "machine": machine_facts(),
            "settings": {"live": config.live, "runtime": config.runtime, "clips": clips},
            "levels": measured,
        },
    )
    return measured


def _offline(client: Client, clip: Clip, config: Config) -> Offline:
    audio = clip.path.read_bytes()
    configured = client.transcribe(audio, language=clip.language)
    beam_size = config.live.beam_size or None
    alike = client.start(
        Request(audio, language=clip.language, beam_size=beam_size, word_timestamps=True)
    ).result()
    return Offline(tuple(_spoken(alike)), alike.text, configured.text)


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


async def _measure(
    server: Server, clips: Sequence[Clip], offline: dict[str, Offline], streams: int, each: int
) -> Level:
    normalize = normalizer(DEFAULT)
    changed = _changed(server)
    played = await asyncio.gather(
        *(
            _stream(server, _share(clips, index, each), offline, normalize, index * _APART_S)
            for index in range(streams)
        )
    )
    all_played = [one for stream in played for one in stream]
    times = [latency for one in all_played for latency in one.latency_s]
    if not times:
        raise EarshotError("no word became final that is in the whole clips; expected most")
    words = sum(one.words for one in all_played)
    return Level(
        streams=streams,
        audio_s=sum(one.clip.duration_s for one in all_played),
        words=words,
        matched=len(times),
        p50_s=float(np.percentile(times, 50)),
        p95_s=float(np.percentile(times, 95)),
        changed_per_word=(_changed(server) - changed) / max(1, words),
        cer=_cer(all_played, normalize, lambda one: one.text),
        offline_cer=_cer(all_played, normalize, lambda one: offline[one.clip.file].text),
        configured_cer=_cer(all_played, normalize, lambda one: offline[one.clip.file].configured),
        failed=sum(one.failed for one in all_played),
    )


def _share(clips: Sequence[Clip], index: int, each: int) -> list[Clip]:
    """The clips of a stream: streams next to each other play different ones."""
    return [clips[(index * 5 + i) % len(clips)] for i in range(each)]


async def _stream(
    server: Server,
    clips: Sequence[Clip],
    offline: dict[str, Offline],
    normalize: Normalize,
    wait_s: float,
) -> list[_Played]:
    await asyncio.sleep(wait_s)
    return [await _play(server, clip, offline[clip.file], normalize) for clip in clips]


async def _play(server: Server, clip: Clip, offline: Offline, normalize: Normalize) -> _Played:
    blocks = decode(clip.path.read_bytes(), Limits(clip.duration_s + 60))
    wanted = {} if clip.language is None else {"language": clip.language}
    deltas: dict[str, list[tuple[float, str]]] = {}
    transcripts, failed = list[str](), 0
    async for heard in transcribe_live(f"ws://{server.http}", list(blocks), wanted):
        kind = heard.event["type"].rpartition(".")[2]
        if kind == "delta":
            deltas.setdefault(heard.event["item_id"], []).append(_timed(heard))
        elif kind == "completed":
            transcripts.append(heard.event["transcript"])
        failed += kind == "failed"
    words = [word for utterance in deltas.values() for word in final_words(utterance)]
    times = latencies(words, offline.words, normalize, clip.language)
    return _Played(clip, " ".join(transcripts), times, len(words), failed)


def _timed(heard: Heard) -> tuple[float, str]:
    return heard.at_s, heard.event["delta"]


def _cer(played: Sequence[_Played], normalize: Normalize, text: Callable[[_Played], str]) -> float:
    errors = length = 0
    for one in played:
        language = one.clip.language
        counts = char_counts(normalize(one.clip.text, language), normalize(text(one), language))
        errors, length = errors + counts.errors, length + counts.length
    return 100 * errors / length


def _changed(server: Server) -> float:
    page = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read().decode()
    found = _CHANGED.search(page)
    return float(found[1]) if found else 0.0
