"""Choose the audio track of a file to transcribe.

A request names a track by its number, from 1 on, or by a language. Otherwise the file's default
track is chosen, as by players, or the first one.
"""

import dataclasses
from collections.abc import Sequence

from serve.contract.errors import OptionError, shown
from serve.speech.languages import language_code

_MAX_SHOWN = 16  # maximum tracks in a message
_MAX_LANGUAGE_CHARS = 16  # maximum characters of a language tag, which comes from the file

# Whisper's codes and the ISO 639-2 codes that video files use; the second of two is bibliographic.
_THREE_LETTERS = """
    en:eng zh:zho,chi de:deu,ger es:spa ru:rus ko:kor fr:fra,fre ja:jpn pt:por tr:tur pl:pol
    ca:cat nl:nld,dut ar:ara sv:swe it:ita id:ind hi:hin fi:fin vi:vie he:heb uk:ukr el:ell,gre
    ms:msa,may cs:ces,cze ro:ron,rum da:dan hu:hun ta:tam no:nor,nob th:tha ur:urd hr:hrv bg:bul
    lt:lit la:lat mi:mri,mao ml:mal cy:cym,wel sk:slk,slo te:tel fa:fas,per lv:lav bn:ben sr:srp
    az:aze sl:slv kn:kan et:est mk:mkd,mac br:bre eu:eus,baq is:isl,ice hy:hye,arm ne:nep mn:mon
    bs:bos kk:kaz sq:sqi,alb sw:swa gl:glg mr:mar pa:pan si:sin km:khm sn:sna yo:yor so:som af:afr
    oc:oci ka:kat,geo be:bel tg:tgk sd:snd gu:guj am:amh yi:yid lo:lao uz:uzb fo:fao ht:hat ps:pus
    tk:tuk nn:nno mt:mlt sa:san lb:ltz my:mya,bur bo:bod,tib tl:tgl,fil mg:mlg as:asm tt:tat haw:haw
    ln:lin ha:hau ba:bak jw:jav su:sun yue:yue
"""
_CODES = {
    name: code
    for code, _, names in (entry.partition(":") for entry in _THREE_LETTERS.split())
    for name in names.split(",")
}
_UNKNOWN = ("", "und", "mis", "mul", "zxx")


@dataclasses.dataclass(frozen=True)
class Track:
    """An audio track, as described by its file."""

    language: str  # the file's language tag; empty: none
    kind: str  # codec and channels
    default: bool = False
    main: bool = True  # neither commentary nor audio description
    readable: bool = True


def pick(tracks: Sequence[Track], wanted: str) -> int:
    """Return the index of the track to transcribe.

    Args:
        tracks: at least one track.
        wanted: number or language; empty: the default track.

    Raises:
        OptionError: there is no such track; the message lists the tracks.
    """
    if not wanted:
        return min(range(len(tracks)), key=lambda i: _rank(tracks[i]))
    if wanted.isdecimal():
        number = int(wanted)
        if 1 <= number <= len(tracks):
            return number - 1
    else:
        code = _code(wanted)
        spoken = [i for i, track in enumerate(tracks) if code and _code(track.language) == code]
        if spoken:
            return min(spoken, key=lambda i: _rank(tracks[i]))
    raise OptionError(
        f"audio_track = {shown(wanted)}, but the file has no such track; expected one of "
        f"{_listed(tracks)}"
    )


def check_only(wanted: str, kind: str) -> None:
    """Check the requested track of a file in a format with only one track.

    Raises:
        OptionError: another track is requested.
    """
    pick([Track("", kind)], wanted)


def others(tracks: Sequence[Track], taken: int) -> str:
    """Return the warning that one of several tracks was chosen by default."""
    rest = [i for i in range(len(tracks)) if i != taken]
    return (
        f"the file has {len(tracks)} audio tracks; track {_named(tracks, taken)} is transcribed, "
        f"and not {_listed(tracks, rest)}; set audio_track to choose another one"
    )


def _rank(track: Track) -> tuple[bool, bool, bool]:
    return (not track.readable, not track.default, not track.main)


def _code(language: str) -> str | None:
    """Return Whisper's code of a language, or the tag's first part in lower case."""
    first = language.strip().lower().replace("_", "-").partition("-")[0]
    if first in _UNKNOWN:
        return None
    return _CODES.get(first) or language_code(language) or first


def _listed(tracks: Sequence[Track], places: Sequence[int] | None = None) -> str:
    shown_places = list(range(len(tracks)) if places is None else places)
    names = [_named(tracks, i) for i in shown_places[:_MAX_SHOWN]]
    return ", ".join(names) + (", …" if len(shown_places) > _MAX_SHOWN else "")


def _named(tracks: Sequence[Track], place: int) -> str:
    track = tracks[place]
    tag = "".join(c for c in track.language if c.isalnum() or c in "-_")[:_MAX_LANGUAGE_CHARS]
    language = "no language" if tag in _UNKNOWN else tag
    default = ", default" if track.default and len(tracks) > 1 else ""
    return f"{place + 1} ({language}, {track.kind}{default})"
