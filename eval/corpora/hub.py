"""A data set of the Hugging Face hub, by name: hf:OWNER/NAME, hf:OWNER/NAME:CONFIG:SPLIT.

The hub keeps a Parquet copy of nearly every data set in a branch of its repository, one folder a
configuration and split; huggingface_hub reads it in parts, with the user's token where one is set.
"""

import re
from collections.abc import Iterable

from eval.corpora.layout import Layout
from eval.corpora.parquet import Parquet
from serve.contract.errors import ConfigError, UnavailableError

PREFIX = "hf:"
BRANCH = "refs/convert/parquet"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
_EXPECTED = "expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"


def open_hub(place: str) -> Layout:
    """Open a data set by name.

    Raises:
        ConfigError: the name is malformed, or the data set has no such configuration or split; the
            message lists those that it has.
        UnavailableError: the hub does not give it; the message says why and what to do.
    """
    match = _NAME.fullmatch(place.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(f"{place}: {_EXPECTED}")
    name, config, split = match[1], match[2], match[3]
    revision, files = _parquet_files(name)
    folders = {tuple(file.split("/")[:2]) for file in files}
    if not folders:
        raise UnavailableError(f"{place}: the hub holds no Parquet copy of this data set")
    config = _one(place, "configuration", config, (folder for folder, _ in folders))
    splits = (split_of for folder, split_of in folders if folder == config)
    split = _one(place, "split", split, splits, usual="test")
    return Parquet(
        [
            f"datasets/{name}@{revision}/{file}"
            for file in sorted(files)
            if file.startswith(f"{config}/{split}/")
        ],
        _filesystem(),
        f"{name} of the Hugging Face hub, {config}, {split}, revision {revision[:12]}",
        f"{name} {revision} {config} {split}",
    )


def _one(place: str, what: str, named: str | None, known: Iterable[str], usual: str = "") -> str:
    """Choose the one that was named, the only one there is, or the usual one."""
    choices = sorted(set(known))
    if named in choices:
        return str(named)
    if named is None and len(choices) == 1:
        return choices[0]
    if named is None and usual in choices:
        return usual
    has = f"it has {', '.join(choices)}; {_EXPECTED}"
    raise ConfigError(f"{place}: no {what} {named}; {has}" if named else f"{place}: {has}")


def _filesystem() -> object:
    from huggingface_hub import HfFileSystem  # noqa: PLC0415 - only for those who need it

    return HfFileSystem()


def _parquet_files(name: str) -> tuple[str, list[str]]:
    """Return the revision of the Parquet copy, and its files: config/split/0000.parquet."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 - as above

    # A proxy's refusal or a torn connection comes as the HTTP client's own error.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        info = HfApi().dataset_info(name, revision=BRANCH, timeout=30.0)
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/datasets/{name}"
        raise UnavailableError(
            f"the terms of {name} must be accepted: do it on {page}, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnavailableError(
            f"the Hugging Face hub has no data set {name}; if it is private, `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnavailableError(f"the hub holds no Parquet copy of the data set {name}") from error
    except (http_error, OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise UnavailableError(
            f"{name} cannot be had from the Hugging Face hub: {first_line}; without a network, "
            "name a folder on this machine"
        ) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    return str(info.sha), [file for file in files if file.count("/") == 2]
