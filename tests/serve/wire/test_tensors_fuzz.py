"""Whatever tensors hold: a request or a refusal, an answer or an error, and nothing else.

The examples are the same in each run.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve.contract.config import TranscriberConfig
from serve.contract.errors import EarshotError, RequestError
from serve.contract.messages import Request
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.decoding_plan import plan_request
from serve.wire import tensors
from tests.fakes import CAPABILITIES, fake_engine
from tests.serving import SEGMENT, TRANSCRIPT

fixed = settings(max_examples=60, derandomize=True, deadline=None, database=None)
WORDS = st.sampled_from([b"en", b"translate", b"sing", b"", b"\xff\xfe", "Zoë".encode(), b"\0"])
NUMBERS = {
    "FP32": st.floats(width=32),
    "FP64": st.floats(),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "BOOL": st.booleans(),
}


def arrays(spec: tensors.TensorSpec) -> st.SearchStrategy[np.ndarray]:
    """What Triton lets pass: of the input's type and shape, with any content."""
    if spec.datatype == "BYTES":
        texts = WORDS | st.binary(max_size=40) | st.text(max_size=40).map(str.encode)
        return texts.map(lambda text: np.array([text], np.object_))
    length = st.integers(0, 5) if spec.dims == (-1,) else st.just(1)
    values = length.flatmap(lambda n: st.lists(NUMBERS[spec.datatype], min_size=n, max_size=n))
    return values.map(lambda found: np.array(found, tensors.NUMPY_TYPES[spec.datatype]))


# A few at a time, so that some requests are right.
INPUTS = st.lists(st.sampled_from(sorted(tensors.INPUTS)), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: arrays(tensors.INPUTS[name]) for name in names})
)
ONE_AUDIO = INPUTS.map(
    lambda found: {
        "AUDIO": np.array([b"RIFF"], np.object_),
        **{name: tensor for name, tensor in found.items() if name not in ("AUDIO", "SAMPLES")},
    }
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    engine = fake_engine(tmp_path_factory.mktemp("engine"))
    tokenizer = Tokenizer(engine)
    config = TranscriberConfig()
    return lambda request: plan_request(request, tokenizer, CAPABILITIES, config, engine.manifest)


def test_inputs_are_a_request_that_can_be_planned_or_are_refused(plan):
    ended = {"planned": 0, "refused": 0}

    @fixed
    @given(INPUTS | ONE_AUDIO)
    def check(inputs):
        try:
            request = tensors.request_from_inputs(inputs)
            assert isinstance(request, Request)
            plan(request)
        except RequestError as error:
            ended["refused"] += 1
            assert str(error)
        else:
            ended["planned"] += 1

    check()
    assert all(ended.values()), ended


JSON = (
    st.binary(max_size=60)
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"[null]", b"1e999"])
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    ).map(lambda value: tensors.to_json(value).encode())
)
TEXTS = JSON.map(lambda text: np.array([text], np.object_))
NUMBER = st.floats(width=32).map(lambda number: np.array([number], np.float32))
ANSWERS = st.tuples(
    st.fixed_dictionaries(
        {},
        optional={
            name: TEXTS if spec.datatype == "BYTES" else NUMBER
            for name, spec in tensors.OUTPUTS.items()
        },
    ),
    st.sets(st.sampled_from(sorted(tensors.OUTPUTS))),
)


@fixed
@given(ANSWERS)
@example(({}, set(tensors.OUTPUTS)))
def test_outputs_are_an_answer_or_an_expected_error(changes):
    """A right answer with some outputs left out and some replaced."""
    changed, left_out = changes
    right = {**tensors.transcript_outputs(TRANSCRIPT), **tensors.segment_outputs(SEGMENT)}
    outputs = {name: right[name] for name in right if name not in left_out} | changed
    for read in (tensors.transcript_from_outputs, tensors.segments_from_outputs):
        try:
            read(outputs.get)
        except EarshotError as error:
            assert len(str(error)) < 1000


@fixed
@given(st.text(max_size=80) | st.sampled_from(["AudioError: x", "annotations: x", ": "]), st.text())
def test_any_words_of_a_server_are_an_error(text, status):
    assert isinstance(tensors.error_from_text(text, status), EarshotError)
