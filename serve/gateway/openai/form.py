"""Forms of multipart/form-data. The file is spooled while it comes.

A file of more than `SPOOL_BYTES` is spooled to the run's folder and not to memory.
"""

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from serve.contract.errors import AudioError
from serve.gateway import errors
from serve.gateway.edge.uploads import body_chunks, in_time
from serve.gateway.errors import field_error
from serve.gateway.limits import Permit
from serve.gateway.target import HEAD_BYTES, AudioLength, audio_of_file
from serve.speech import raw

logger = logging.getLogger("earshot.gateway")

SPOOL_BYTES = 2**20

_FILE = "file"
MAX_FIELDS = 128
_MAX_FIELD_BYTES = 2**19  # twice the longest prompt, which is rejected by name
_EXPECTED = "expected a form with one file, as `curl -F file=@a.wav -F model=whisper-1` sends it"


@dataclasses.dataclass(frozen=True)
class Form:
    """A form that was received."""

    pairs: tuple[tuple[str, str], ...]  # the fields' names and texts, in their order
    file: UploadFile
    path: str | None  # of a large file; None: the file is in memory

    def audio(self) -> bytes | None:
        """Return the file's bytes; None: they are many, and lie at `path`."""
        return None if self.path else self.file.file.read()

    def audio_length(self) -> AudioLength:
        """Return the length of the file's audio."""
        self.file.file.seek(0)
        head = self.file.file.read(HEAD_BYTES)
        return audio_of_file(head, self.file.size or len(head))


@contextlib.asynccontextmanager
async def received_form(request: Request, permit: Permit, folder: Path) -> AsyncIterator[Form]:
    """Receive a form for the length of a `with` block; its file is removed afterwards.

    Args:
        request: a request with an unread body.
        permit: is charged with the body.
        folder: the folder for large files.

    Raises:
        ApiError: 400, 408, 413 or 415, the body is no such form, has not one file, is too large or
            too slow.
    """
    _check_headers(request)
    with contextlib.closing(_Parser(request, permit, folder)) as parser:
        try:
            form = await in_time(permit.admission, parser.parse())
            if not parser.ended:
                raise MultiPartException("It is cut short, its last boundary is missing;")
            pairs = form.multi_items()
            file = _only_file(pairs)
            _put_header(file, file.size or 0)  # the size is known now
            file.file.flush()
        except MultiPartException as error:
            raise errors.invalid(f"the form cannot be read: {error.message} {_EXPECTED}") from None
        except OSError as error:
            logger.error("an upload cannot be kept in %s: %s", folder, error)
            raise errors.no_room_for_upload() from error
        texts = tuple((name, text) for name, text in pairs if isinstance(text, str))
        yield Form(texts, file, cast(_Spool, file.file).path)


def _check_headers(request: Request) -> None:
    header = request.headers.get("content-type", "")
    kind, options = parse_options_header(header)
    if kind != b"multipart/form-data":
        raise errors.media_type(f"the body's type is {header[:60]!r}; {_EXPECTED}")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() != "utf-8":  # others may encode bytes that are no text
        raise errors.media_type(f"the form's charset is {charset[:60]!r}; expected utf-8")


class _Spool(tempfile.SpooledTemporaryFile[bytes]):
    """A file in memory that moves into a folder when it grows too large for that."""

    def __init__(self, max_size: int, folder: Path) -> None:
        super().__init__(max_size=max_size)
        self._folder = folder
        self.path: str | None = None

    def rollover(self) -> None:
        if self.path is not None:
            return
        large = tempfile.NamedTemporaryFile(dir=self._folder)  # noqa: SIM115
        self.seek(0)
        large.write(self._file.read())
        self._file.close()
        self._file, self._rolled, self.path = large, True, large.name


class _Parser(MultiPartParser):
    """Starlette's parser, with spooled files and a note of the last boundary."""

    def __init__(self, request: Request, permit: Permit, folder: Path) -> None:
        super().__init__(
            request.headers,
            body_chunks(request, permit),
            max_files=2,  # the second one is rejected by name
            max_fields=MAX_FIELDS,
            max_part_size=_MAX_FIELD_BYTES,
        )
        self._folder = folder
        self.ended = False
        """Whether the last boundary has come."""

    def close(self) -> None:
        """Close the files; an exception's traceback would keep their space on the disk for long."""
        for file in self._files_to_close_on_error:
            file.close()

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (upload := self._current_part.file) is not None:
            upload.file.close()
            spool = _Spool(SPOOL_BYTES, self._folder)
            upload.file, self._files_to_close_on_error[-1] = cast(BinaryIO, spool), spool
            _put_header(upload, 0)

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode()
            except UnicodeDecodeError as error:
                name = part.field_name[:60]
                message = f"{name} is not UTF-8: {error}; expected text in UTF-8"
                raise field_error(name, message) from error
        super().on_part_end()

    def on_end(self) -> None:
        self.ended = True


def _put_header(file: UploadFile, size: int) -> None:
    """Write the header that a file of raw samples lacks.

    Raises:
        ApiError: 400, the type of the file's part is wrong.
    """
    try:
        header = raw.header(file.content_type or "", size)
    except AudioError as error:
        raise field_error(_FILE, str(error)) from error
    if header:
        file.file.seek(0)
        file.file.write(header)
        if size:
            file.file.seek(0)


def _only_file(pairs: Sequence[tuple[str, UploadFile | str]]) -> UploadFile:
    names = [name[:60] for name, part in pairs if isinstance(part, UploadFile)]
    if names != [_FILE]:
        raise field_error(_FILE, f"the form has the files {names}; {_EXPECTED}")
    (file,) = (part for _, part in pairs if isinstance(part, UploadFile))
    if not file.size:
        raise field_error(_FILE, "file has 0 bytes; expected an audio file")
    return file
