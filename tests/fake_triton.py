"""A stand-in for `triton_python_backend_utils`, which only exists inside Triton.

It has what our model uses, and a trap of Triton 24.10: a metric family that goes before its metrics
takes the whole server down.
"""

import json
import queue

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Tensor:
    def __init__(self, name, values):
        self._name = name
        self.values = values

    def name(self):
        return self._name

    def as_numpy(self):
        return self.values


class TritonError:
    INTERNAL, UNAVAILABLE = "internal", "unavailable"
    INVALID_ARG, CANCELLED = "invalid", "cancelled"

    def __init__(self, message, code):
        self.message, self.code = message, code


class TritonModelException(Exception):
    pass


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class ResponseSender:
    """Keeps what was sent, as (response, final)."""

    def __init__(self):
        self.sent = queue.Queue()
        self.ended = False

    def send(self, response, flags=0):
        assert not self.ended, "a response after the last one"
        self.ended = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.sent.put((response, self.ended))


class Request:
    def __init__(self, **inputs):
        self._inputs = [Tensor(name, values) for name, values in inputs.items()]
        self.sender = ResponseSender()
        self.sent = {}

    def inputs(self):
        return self._inputs

    def parameters(self):
        """JSON text, as in Triton 24.10."""
        return json.dumps(self.sent)

    def get_response_sender(self):
        return self.sender


class Metric:
    def __init__(self, family, labels):
        self.family, self.labels = family, labels
        self.number = 0.0
        family.living += 1

    def __del__(self):
        self.family.living -= 1

    def value(self):
        return self.number

    def set(self, value):
        assert self.family.kind == MetricFamily.GAUGE
        self.number = value

    def increment(self, value):
        assert self.family.kind == MetricFamily.COUNTER and value >= 0
        self.number += value


class MetricFamily:
    COUNTER, GAUGE = "a counter", "a gauge"

    def __init__(self, name, description, kind):
        self.name, self.description, self.kind = name, description, kind
        self.living = 0  # metrics that have not gone

    def Metric(self, labels):
        return Metric(self, labels)
