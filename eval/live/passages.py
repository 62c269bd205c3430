"""The passages that streams play: of people each speaker's clips joined, else clips with text."""

import itertools
from collections.abc import Iterable

from build.clips import Clip
from eval.accuracy.passages import join_clips
from eval.config import Config
from eval.corpora.find import find_clips
from serve.contract.errors import ConfigError
from serve.speech.meter import Limits


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
