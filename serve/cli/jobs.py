"""Let the running server transcribe audio in the background."""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

from serve.cli.api import ApiClient, ResponseLostError, open_api
from serve.cli.inputs import InputFile, find_recordings, readable
from serve.cli.options import add_cue_options, add_options
from serve.cli.outputs import print_table, targets_of, write
from serve.contract.config import OPTIONS, load_config
from serve.contract.errors import ConfigError, EarshotError, OverloadedError, UnavailableError
from serve.speech.cues import CUE_OPTIONS
from serve.speech.formats import Format

_JOBS = "/v1/audio/jobs"
FIRST_S, _MAX_PAUSE_S = 0.2, 5.0  # first and longest pause between two polls of a job
AWAY_S = 120.0  # longest outage of the server while a job is sent or waited for
_FORMATS = "text, srt, vtt, json, verbose_json or diarized_json"

Fields = dict[str, str | list[str]]
_FORM_FIELDS: dict[str, Fields] = {  # options with other names as form fields
    "word_timestamps": {"timestamp_granularities[]": ["segment", "word"]},
    "token_logprobs": {"include[]": "logprobs"},
}


def add_parser(commands: Any) -> None:
    title = "let the running server transcribe audio in the background"
    parser = commands.add_parser("jobs", help=title, description=__doc__)
    jobs = parser.add_subparsers(metavar="COMMAND", required=True)
    submit = _add(jobs, "submit", _submit, "send files or URLs; print the id of each job")
    submit.usage = "%(prog)s --config TOML [options] [FILE ...]"
    submit.epilog = (
        "If the server fails before it answers, the job is sent again with the same "
        f"Idempotency-Key, for at most {AWAY_S:.0f} s. Running the command again makes new jobs."
    )
    submit.add_argument("files", nargs="*", metavar="FILE", help="audio or a folder")
    add = submit.add_argument
    add("--url", action="append", default=[], help="audio that the server fetches; may be repeated")
    add("--format", default="text", help=f"format of the result: {_FORMATS}; default: text")
    add("--model", help="the model's name; default: the served model")
    add("--webhook-url", metavar="URL", help="URL that the server calls when the job ends")
    add("--wait", action="store_true", help="wait until the jobs end, and write the results")
    add("--output", type=Path, metavar="FOLDER", help="with --wait: write each result to a file")
    add_cue_options(submit)
    add_options(submit)
    every = _add(jobs, "list", _list, "list the jobs of this API key, newest first")
    every.add_argument("--limit", type=int, default=20, help="1 to 100; default: %(default)d")
    every.add_argument("--after", metavar="ID", help="only jobs older than this job")
    result = _add(jobs, "result", _result, "print the transcript of a job")
    result.add_argument("--format", help=f"{_FORMATS}; default: the format of the submission")
    add_cue_options(result)
    cancel = _add(jobs, "cancel", _cancel, "cancel a job, unless it has ended")
    show = _add(jobs, "show", _show, "print a job's description as JSON")
    for command in (show, result, cancel):
        command.add_argument("id", metavar="ID")


def _add(jobs: Any, name: str, run: Any, title: str) -> argparse.ArgumentParser:
    # Without abbreviations: --mode, a former flag, must not become --model.
    command: argparse.ArgumentParser
    command = jobs.add_parser(name, help=title, description=title, allow_abbrev=False)
    config = "the config of the running server"
    command.add_argument("--config", required=True, metavar="TOML", help=config)

    def ask(args: argparse.Namespace) -> int:
        with open_api(load_config(args.config)) as api:
            return int(run(api, args) or 0)

    command.set_defaults(run=ask)
    return command


def _submit(api: ApiClient, args: argparse.Namespace) -> int:
    if not (args.files or args.url):
        raise ConfigError("no audio is named; expected files, or URLs with --url")
    if args.output and not args.wait:
        raise ConfigError("--output needs --wait; or fetch each result with `jobs result`")
    sources, n_skipped = find_recordings(args.files) if args.files else ([], 0)
    if n_skipped:
        print(f"skipping {n_skipped} files that are not audio", file=sys.stderr)
    sources += [InputFile(url, PurePosixPath(urlsplit(url).path).name or "job") for url in args.url]
    file_format: Format = "json" if args.format.endswith("json") else args.format
    targets = targets_of(sources, args.output, file_format)
    fields = _fields(args)
    jobs: list[tuple[str, str, Path | None]] = []  # name, id, and the file of the result
    for source, target in zip(sources, targets, strict=True):
        name = readable(source.name)
        try:
            id = _post(api, _form_of(source, fields, source.name in args.url))
            jobs.append((name, id, target))
            line = f"{name}: {id}" if args.wait else id
            print(line, file=sys.stderr if args.wait else sys.stdout, flush=True)
        except EarshotError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
    failed = len(sources) - len(jobs)
    if args.wait:
        failed += _write_results(api, jobs, file_format)
    if failed:
        print(f"{failed} of {len(sources)} failed", file=sys.stderr)
    return 1 if failed else 0


def _fields(args: argparse.Namespace) -> Fields:
    """Return the form fields of the options; the server has defaults for the others."""
    fields: Fields = {"response_format": args.format, **_cue_fields(args)}
    fields |= {name: text for name in ("model", "webhook_url") if (text := getattr(args, name))}
    for name, option in OPTIONS.items():
        value = getattr(args, name, option.default)
        if value == option.default:
            continue
        fields |= _FORM_FIELDS.get(name) or {name: _text(value)}
    if args.known_speaker:
        names, references = zip(*args.known_speaker, strict=True)
        fields["known_speaker_names[]"] = list(names)
        fields["known_speaker_references[]"] = list(references)
    return fields


def _cue_fields(args: argparse.Namespace) -> Fields:
    return {name: _text(getattr(args, name)) for name in CUE_OPTIONS if hasattr(args, name)}


def _text(value: Any) -> str | list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _form_of(source: InputFile, fields: Fields, is_url: bool) -> dict[str, Any]:
    """Return the arguments of httpx2 that submit a job."""
    if is_url:
        return {"json": {**fields, "url": source.name}}
    name = readable(PurePosixPath(source.path).name)
    return {"data": fields, "files": {"file": (name, source.read())}}


def _post(api: ApiClient, form: dict[str, Any]) -> str:
    """Submit a job and return its id; submit it again if the response is lost."""
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    lost_s: float | None = None  # time at which the first response was lost
    for _ in _attempts():
        try:
            return str(api.object("POST", _JOBS, headers=headers, **form)["id"])
        except (UnavailableError, OverloadedError) as error:
            if lost_s is None:
                if not isinstance(error, ResponseLostError):
                    raise  # the server did not accept the job
                lost_s = time.monotonic()
                print(f"{error}; sending the job again", file=sys.stderr)
            if time.monotonic() - lost_s > AWAY_S:
                message = f"{error}; check with `jobs list` whether the server has the job"
                raise UnavailableError(message) from error
    raise AssertionError("attempts never end")


def _attempts() -> Iterator[None]:
    """Yield for each attempt, after pauses that grow."""
    pause_s = FIRST_S
    while True:
        yield
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)


def _write_results(
    api: ApiClient, jobs: Sequence[tuple[str, str, Path | None]], format: Format
) -> int:
    """Wait for each job and write its result; return the number of jobs without a result."""
    failed, titled = 0, len(jobs) > 1 and format != "json"
    for name, id, target in jobs:
        try:
            _wait(api, id)
            text = api.text("GET", f"{_path(id)}/result")
            write(_lines(text), name, target, titled)
        except EarshotError as error:
            failed += 1
            print(f"error: {name}: {error}", file=sys.stderr)
    return failed


def _wait(api: ApiClient, id: str) -> None:
    """Wait until a job ends; the server limits its duration."""
    answered_s = time.monotonic()
    for _ in _attempts():
        try:
            job = api.object("GET", _path(id))
            answered_s = time.monotonic()
            if job["ended_at"] is not None:
                return
        except (UnavailableError, OverloadedError):  # a job survives a restart of the server
            if time.monotonic() - answered_s > AWAY_S:
                raise


def _list(api: ApiClient, args: argparse.Namespace) -> None:
    query = {"limit": args.limit} | ({"after": args.after} if args.after else {})
    page = api.object("GET", _JOBS, params=query)
    rows = [("id", "status", "created", "audio_s", "audio")]
    for job in page["data"]:
        audio_s = "-" if job["duration"] is None else f"{job['duration']:.1f}"
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(job["created_at"]))
        rows.append((job["id"], job["status"], created, audio_s, _audio(job)))
    print_table(rows)
    if page["has_more"]:
        print(f"for older jobs: --after {page['last_id']}", file=sys.stderr)


def _show(api: ApiClient, args: argparse.Namespace) -> None:
    print(json.dumps(api.object("GET", _path(args.id)), indent=2))


def _result(api: ApiClient, args: argparse.Namespace) -> None:
    query = _cue_fields(args) | ({"response_format": args.format} if args.format else {})
    print(_lines(api.text("GET", f"{_path(args.id)}/result", params=query)), end="")


def _cancel(api: ApiClient, args: argparse.Namespace) -> None:
    print(api.object("POST", f"{_path(args.id)}/cancel")["status"])


def _path(id: str) -> str:
    return f"{_JOBS}/{quote(id, safe='')}"


def _lines(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _audio(job: dict[str, Any]) -> str:
    """Return the name of a job's audio, without control characters."""
    name = job.get("url") or job["filename"]
    return "".join(character if character.isprintable() else "?" for character in name)
