"""Whose fault an exception is."""

import pytest

from serve.contract.errors import AudioError, DeviceError, OptionError, OverloadedError
from serve.transcriber.guard import guarded, runtime_calls


def raising(error):
    def work():
        raise error

    return work


def test_an_error_for_the_client_stays_as_it_is(caplog):
    error = AudioError("no sound")
    assert guarded("listening", raising(error)) is error
    assert not caplog.records, "the client's mistakes have no trace"


@pytest.mark.parametrize("error", [DeviceError("gone"), KeyboardInterrupt()])
def test_the_devices_failure_and_ctrl_c_pass(error):
    with pytest.raises(type(error)):
        guarded("waiting", raising(error))


@pytest.mark.parametrize("error", [DeviceError("gone"), OptionError("too long")])
def test_what_a_runtime_may_raise_passes(error):
    with pytest.raises(type(error)) as caught, runtime_calls():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OverloadedError("by zero")])
def test_anything_else_of_a_runtime_is_the_devices_failure(error, caplog):
    with pytest.raises(DeviceError, match="by zero"), runtime_calls():
        raise error
    assert "Traceback" in caplog.text
