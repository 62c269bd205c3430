"""An update of a session, in the event of today or in the older one."""

from collections.abc import Callable

from serve.gateway.live import older
from serve.gateway.live.events import ClientEvent, EventError
from serve.gateway.live.settings import SettingError, Settings, SettingWarning, updated
from serve.gateway.refusals import Refusal


def read_update(
    event: ClientEvent, before: Settings, check_model: Callable[[str], object], begun: bool
) -> tuple[Settings, list[SettingWarning]]:
    """Read an update: the session after it, and what of it has no effect.

    Args:
        event: the event.
        before: what the session is.
        check_model: refuses names of models that are not served.
        begun: whether audio has come.

    Raises:
        EventError: it says what is wrong or cannot be done; nothing is changed.
    """
    is_older = event.type == older.UPDATE
    named = older.in_older_words if is_older else str
    try:
        changes = event.fields["session"]
        if not isinstance(changes, dict):
            raise SettingError("session is no object", "session", "invalid_value")
        after, warnings = updated(before, older.from_older(changes) if is_older else changes)
        _check(after, before, check_model, begun)
    except SettingError as error:
        param = error.param and named(error.param)
        raise EventError(named(str(error)), error.code, param) from None
    return after, [
        SettingWarning(named(warning.param), named(warning.message)) for warning in warnings
    ]


def _check(
    after: Settings, before: Settings, check_model: Callable[[str], object], begun: bool
) -> None:
    """Refuse what a server or a stream cannot become."""
    if (name := after.input.transcription.model) is not None:
        try:
            check_model(name)
        except Refusal as refusal:
            param = "session.audio.input.transcription.model"
            raise SettingError(str(refusal), param, "model_not_found") from None
    if after.input.format != before.input.format and begun:
        raise SettingError(
            "the format cannot change once audio has come; open another session",
            "session.audio.input.format",
            "invalid_value",
        )
