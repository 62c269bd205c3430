"""Transcription sessions as OpenAI's Realtime API had them before it left its beta.

Their client sends `transcription_session.update`, with the same settings by other names.
https://platform.openai.com/docs/api-reference/realtime-client-events/transcription_session/update
"""

from collections.abc import Mapping
from typing import Any

from serve.contract.errors import shown
from serve.gateway.live.settings import SettingError, Settings, as_session, merged

PREFIX = "transcription_session."
"""Of the types of its events, where those of today begin with `session.`."""
UPDATE = f"{PREFIX}update"

_HEADER = "realtime=v1"  # of OpenAI-Beta
_SUBPROTOCOL = "openai-beta.realtime-v1"  # of browsers, which set no headers
_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_FORMAT = "input_audio_format"
_PARAMS = "input_audio_params"  # not OpenAI's: NVIDIA's speech services say the rate so
_NAMES = {
    "transcription": "input_audio_transcription",
    "turn_detection": "turn_detection",
    "noise_reduction": "input_audio_noise_reduction",
    "format": _FORMAT,
}
"""By the names of `audio.input`'s settings the older ones."""


def speaks_older(beta: str | None, subprotocols: list[str]) -> bool:
    """Tell whether a client says that it is one of the beta.

    Args:
        beta: its header OpenAI-Beta.
        subprotocols: that it offers.
    """
    return _SUBPROTOCOL in subprotocols or _HEADER in (beta or "").replace(" ", "").split(",")


def from_older(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Translate changes to those of `session.update`. Names of today and unknown keys stay.

    Raises:
        SettingError: the format is none of the beta's.
    """
    rest = dict(changes)
    input = {name: rest.pop(older) for name, older in _NAMES.items() if older in rest}
    params = rest.pop(_PARAMS, None)
    if "format" in input or params is not None:
        input["format"] = _format(input.get("format", "pcm16"), params)
    return {**rest, "audio": merged({"input": input}, rest.get("audio", {}))}


def as_older(settings: Settings) -> dict[str, Any]:
    """Translate settings to those that such a client is told."""
    session = as_session(settings)
    input = session["audio"]["input"]
    older = {_NAMES[name]: value for name, value in input.items()}
    (older[_FORMAT],) = (name for name, of in _FORMATS.items() if of == input["format"]["type"])
    if (rate := input["format"].get("rate")) is not None:
        older[_PARAMS] = {"sample_rate_hz": rate, "num_channels": 1}
    return {**older, "include": session["include"]}


def in_older_words(text: str) -> str:
    """Put what is said of a session into the older names of settings."""
    text = text.replace("audio.input.format.rate", f"{_PARAMS}.sample_rate_hz")
    for name, older in _NAMES.items():
        text = text.replace(f"audio.input.{name}", older)
    return text


def _format(name: object, params: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in _FORMATS:
        path = f"session.{_FORMAT}"
        message = f"{path} = {shown(name)}; expected {', '.join(_FORMATS)}"
        raise SettingError(message, path, "invalid_value")
    if params is None:
        return {"type": _FORMATS[name], **({"rate": 24_000} if name == "pcm16" else {})}
    if not isinstance(params, dict) or params.get("num_channels", 1) != 1:
        path = f"session.{_PARAMS}"
        message = f"{path} = {shown(params)}; expected sample_rate_hz, and one channel"
        raise SettingError(message, path, "invalid_value")
    return {"type": _FORMATS[name], "rate": params.get("sample_rate_hz")}
