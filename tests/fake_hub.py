"""A Hugging Face hub with one repository, so that tests need no network."""

import fnmatch
import shutil

import huggingface_hub

HUB_ID = "someone/whisper"
REVISION = "0123abc"


class FakeHub:
    """Takes the place of `snapshot_download`; notes what is asked for and what is downloaded."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.cache = cache / REVISION
        self.asked = []  # (id, revision) of each call
        self.downloaded = []  # names of files

    def snapshot_download(self, repo_id, revision=None, allow_patterns=None):
        self.asked.append((repo_id, revision))
        assert repo_id == HUB_ID and revision in (None, REVISION)
        self.cache.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns or "*"):
                self.downloaded.append(file.name)
                shutil.copy(file, self.cache)
        return str(self.cache)

    def install(self, monkeypatch):
        """Make it the hub that everything downloads from."""
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        return self
