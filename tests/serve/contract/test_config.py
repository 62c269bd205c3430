"""Configuration files: strict keys, strict values, one home of defaults."""

import dataclasses

import pytest

from eval.config import EvaluationProduct as EvalsConfig
from serve.contract.config import Config, load_config, read_config
from serve.contract.errors import ConfigError
from tests.config_page import REMOVED


def load(tmp_path, text):
    path = tmp_path / "product.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_an_empty_file_is_all_defaults_named_after_the_file(tmp_path):
    assert load(tmp_path, "") == dataclasses.replace(Config(), name="product")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runtime]\nslot = 3", "unknown key 'slot'; did you mean 'slots'"),
        ("[surver]\n", "unknown key 'surver'; did you mean 'server'"),
        ("[transcriber]\ntemperatures = [0, 1.5]", "temperatures[1] = 1.5; expected at most 1"),
        (
            "[runtime.tensorrt_llm]\ntriton_backend = true",
            "runtime.tensorrt_llm.triton_backend was removed; it chose NVIDIA's C++ Triton model",
        ),
        ("[server]\nhttp_port = 8001", "three different ports"),
        ("[gateway]\nprocesses = 5", "max_inflight_mb = 1024, shared by gateway.processes = 5"),
        ("[build]\nengine = 'e'", "build.engine was removed; it is the key `engine` at the top of"),
        ("[runtime\n", "not valid TOML"),
        ("[server]\nhost = ''", "server.host = ''; expected an IPv4 address such as 127.0.0.1"),
        ("[server]\nstart_timeout_s = 1e300", "server.start_timeout_s = 1e+300; expected at most"),
        ("[runtime]\ndevice = 'gpu'", 'runtime.device = \'gpu\'; expected "cpu", "cuda" or'),
        ('engine = "a\\u0000b"', "expected text of printable characters"),
        ("[runtime]\nslots = " + "9" * 5000, "is not valid TOML"),
        ("[jobs]\nworkers = 3", "jobs.workers without jobs.folder"),
        ('[jobs]\nfolder = "jobs"\nallowed_hosts = ["ftp://a"]', "allowed_hosts"),
        ('[jobs]\nfolder = "jobs"\nallowed_hosts = ["s3://bucket"]', "allowed_hosts"),
        ('[jobs]\nfolder = "jobs"\nallowed_networks = ["10.0.0.1/8"]', "allowed_networks"),
        ('[jobs]\nfolder = "jobs"\ndatabase = "mysql://a"', "postgresql://"),
        ("[shadow]\nshare = 0.1", "there is no reference"),
        ('[shadow]\nshare = 0.1\nengine = "x"\ndevice = "cpu,cpu"', "expected one device"),
        ("[shadow]\nshare = 0.1\nbeam_size = 8\n[gateway]\nprocesses = 2", "processes = 1"),
        ("[shadow]\nshare = 2", "shadow.share"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"product\.toml") as caught:
        load(tmp_path, text)
    assert message in str(caught.value) and len(str(caught.value)) < 300


def test_sections_of_build_and_eval_are_passed_over_unread(tmp_path):
    others = "[build]\nprecision = 'int4'\n[eval]\nanything = 1\n"
    config = load(tmp_path, f"{others}[runtime]\nslots = 3")
    assert config.runtime.slots == 3


def fields_of(kind, before=()):
    """The place and the default of every key, sections within sections too."""
    for field in dataclasses.fields(kind):
        place = (*before, field.name)
        if dataclasses.is_dataclass(field.default):
            yield from fields_of(field.default, place)
        else:
            yield place, field.default


# As TOML has them. What none of a kind can be, and what some may.
NEVER = {
    bool: ["nan", "1", "0.5", "'x'", "[]", "{}", "1979-05-27"],
    int: ["nan", "inf", "-inf", "-1", "0.5", "true", "'1'", "[]", "{}", "1979-05-27", "9" * 40],
    float: ["nan", "inf", "-inf", "true", "'1'", "[]", "{}", "1979-05-27"],
    str: ["nan", "1", "0.5", "true", "[]", "{}", "1979-05-27", '"a\\u0000b"'],
    tuple: ["nan", "1", "0.5", "true", "'x'", "[[]]", "[nan]", "{}", "[{}]"],
}
SOMETIMES = ["0", "-1", "-1.5", "1e300", "9" * 40, "''", "'x'", "' '", "[]", "[0]", "['']"]
MAY_BE_EMPTY = """
build.confidence build.draft eval.heldout jobs.database jobs.folder jobs.webhook_secret_file
runtime.tensorrt_llm.python server.keys_file server.tls_certificate
server.tls_key server.usage_file shadow.engine
""".split()


FIELDS = {
    ".".join(place): (place, default)
    for place, default in fields_of(EvalsConfig)
    if ".".join(place) not in REMOVED
}


@pytest.mark.parametrize(("place", "default"), FIELDS.values(), ids=FIELDS)
def test_whatever_a_key_says_it_is_taken_or_refused_by_its_name(tmp_path, place, default):
    path = tmp_path / "product.toml"

    def refusal(value):
        path.write_text(f"{'.'.join(place)} = {value}")
        try:
            read_config(path, EvalsConfig)
        except ConfigError as error:
            return str(error)
        return None

    for value in NEVER[type(default)]:
        if (place, value) == (("transcriber", "vad"), "true"):  # the one choice that may be boolean
            continue
        found = refusal(value)
        assert found is not None and place[-1] in found, (value, found)
    for value in SOMETIMES:
        found = refusal(value)
        assert found is None or place[-1] in found, (value, found)
    if place[-1][-2:] == "_s":
        assert refusal("-0.5"), "a time that has passed"
    if isinstance(default, str) and ".".join(place) not in MAY_BE_EMPTY:
        assert refusal("''")
