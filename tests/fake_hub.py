"""A Hugging Face hub with one repository, so that tests need no network."""

import fnmatch
import shutil
import types

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

HUB_ID = "someone/whisper"
REVISION = "0123abc"


class FakeHub:
    """Takes the place of the hub's client; notes what is asked for and what is downloaded."""

    def __init__(self, folder, cache, hub_id=HUB_ID):
        self.folder = folder
        self.cache = cache / REVISION
        self.hub_id = hub_id
        self.failure = None  # what the hub answers, if it is not the repository
        self.asked = []  # (id, revision) of each call
        self.downloaded = []  # names of files

    def model_info(self, repo_id, *, revision=None, timeout):
        self.asked.append((repo_id, revision))
        if self.failure is not None:
            raise self.failure
        assert repo_id == self.hub_id
        return types.SimpleNamespace(sha=REVISION)

    def snapshot_download(self, repo_id, revision, allow_patterns, local_files_only=False):
        if local_files_only:
            if repo_id != self.hub_id or not self.cache.is_dir():
                raise LocalEntryNotFoundError("Cannot find\nan appropriate")
            return str(self.cache)
        assert (repo_id, revision) == (self.hub_id, REVISION)
        self.cache.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                self.downloaded.append(file.name)
                shutil.copy(file, self.cache)
        return str(self.cache)

    def install(self, monkeypatch):
        """Make it the hub that everything downloads from."""
        for name in ("model_info", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))
        return self
