"""What is refused before a new engine is opened, and what its clips say."""

import dataclasses
import json

import pytest

from serve.contract.config import Config
from serve.contract.errors import ConfigError, EngineError, UnavailableError
from serve.contract.server_config import ServerConfig
from serve.supervisor.control import ReloadRequest, send_request
from serve.supervisor.reload_checks import ReloadClip, check_reload, error_rate, read_clips

CONFIG = Config()


def order(config=CONFIG, engine="engines/none"):
    return ReloadRequest(config, str(engine))


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"name": "other"}, "name is 'other' in the config and 'demo' in the running server"),
        ({"runtime": dataclasses.replace(CONFIG.runtime, slots=3)}, "runtime.slots is 3"),
        ({"server": ServerConfig(max_inflight=7)}, "server.max_inflight is 7"),
    ],
)
def test_what_else_has_changed_is_named(changed, named, nano_engine):
    with pytest.raises(ConfigError, match=f"{named}.*restart the server"):
        check_reload(CONFIG, order(dataclasses.replace(CONFIG, **changed)), nano_engine)


def test_an_engine_may_be_another(nano_engine):
    config = dataclasses.replace(CONFIG, engine=str(nano_engine))
    check_reload(CONFIG, order(config, ""), nano_engine)


@pytest.mark.parametrize("key, value", [("sot_prev", 90), ("languages", {"en": 60})])
def test_other_tokens_are_another_product(nano_engine, tmp_path, key, value):
    manifest = json.loads((nano_engine / "engine.json").read_text())
    manifest["tokenizer"][key] = value
    (tmp_path / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"its tokens are not those .*restart the server"):
        check_reload(CONFIG, order(engine=tmp_path), nano_engine)


def test_a_folder_without_an_engine_is_named(nano_engine, tmp_path):
    with pytest.raises(EngineError, match=f"no engine at {tmp_path}"):
        check_reload(CONFIG, order(engine=tmp_path), nano_engine)


def heard(*texts):
    clips = [ReloadClip(f"{i}.wav", right) for i, (right, _) in enumerate(texts)]
    return error_rate(clips, [text for _, text in texts], 0.25)


def test_clips_are_right_whatever_their_case_and_signs():
    assert heard(("It IS.", " it is"), ("¿Qué?", "qué"), ("", ".")) == 0.0
    assert heard(("abcde", "abXde"), ("fghij", "fghij"), ("", "")) == 0.1


@pytest.mark.parametrize("text", ["", "abcdefgh" * 30, "other words"])
def test_nothing_a_loop_and_other_words_are_wrong(text):
    with pytest.raises(EngineError, match=r"for 1\.wav it returned .*, expected 'abcdefgh'"):
        heard(("abcdefgh", "abcdefgh"), ("abcdefgh", text), ("", ""))


def test_a_manifest_of_too_few_clips_is_refused(tmp_path):
    (tmp_path / "clips.jsonl").write_text('{"file": "a.wav"}\n')
    with pytest.raises(ConfigError, match="lists 1 clips; expected 3"):
        read_clips(str(tmp_path / "clips.jsonl"))


def test_a_server_that_does_not_run_is_said():
    config = dataclasses.replace(CONFIG, server=ServerConfig(http_port=1))
    with pytest.raises(UnavailableError, match=r"no server of this user runs at 127\.0\.0\.1:1;"):
        send_request(order(config), print)
