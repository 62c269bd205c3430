"""deploy/README.md: what it shows works; `tests/test_documents.py` reads it as well."""

import re

from serve.contract.keys import read_keys
from tests.deploy.manifests import DEPLOY, KUBERNETES

TEXT = (DEPLOY / "README.md").read_text(encoding="utf-8")


def test_parts_that_it_names_exist():
    parts = set(re.findall(r"`((?:overlays|components)/[\w./-]*\w)", TEXT))
    assert {"overlays/demo", "overlays/turbo", "components/hpa"} <= parts
    assert [name for name in parts if not (KUBERNETES / name).exists()] == []


def test_its_file_of_keys_is_one(tmp_path):
    (toml,) = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
    path = tmp_path / "keys.toml"
    path.write_text(re.sub(r'"what .*?"', f'"{"ab" * 32}"', toml), encoding="utf-8")
    assert list(read_keys(path)) == ["alice"]
