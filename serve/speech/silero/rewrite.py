# /// script
# requires-python = ">=3.11"
# dependencies = ["onnx==1.23.2", "numpy"]
# ///
"""Rewrite Silero VAD's ONNX file so that a CPU core runs it three times as fast.

The published file computes a convolution over four positions for each frame of 32 ms. ONNX Runtime
runs such a convolution frame by frame. Here the taps of all frames lie side by side and each
layer is one matrix product over all frames. The weights are the same; probabilities differ by at
most 1e-5 in recordings. The server does not need this script:

    uv run serve/speech/silero/rewrite.py silero_vad_16k_sequence.onnx silero_vad_16k.onnx
"""

import sys

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[np.float32]


class Graph:
    """A graph under construction; each method adds a node and returns its output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: npt.ArrayLike) -> str:
        """Add a constant."""
        name = f"constant_{len(self.constants)}"
        array = np.ascontiguousarray(value)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: object) -> str:
        """Add a node of one output."""
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def slice(self, tensor: str, start: int, end: int, axis: int) -> str:
        """Take a range of one axis."""
        bounds = (self.constant(np.array([number])) for number in (start, end, axis))
        return self.add("Slice", tensor, *bounds)

    def reshape(self, tensor: str, *shape: int) -> str:
        """Change the shape."""
        return self.add("Reshape", tensor, self.constant(np.array(shape)))

    def layer(self, tensor: str, weight: Array, bias: Array) -> str:
        """Multiply by a weight (inputs, outputs), add the bias, and apply ReLU."""
        product = self.add("MatMul", tensor, self.constant(weight))
        return self.add("Relu", self.add("Add", product, self.constant(bias)))


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with matrix products in place of convolutions."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    kernels = [weights[f"encoder.{i}.weight"].transpose(2, 1, 0) for i in range(4)]
    biases = [weights[f"encoder.{i}.bias"] for i in range(4)]
    graph = Graph()

    # The short-time Fourier transform: four windows of 256 samples, 128 apart, 129 magnitudes each.
    pads = graph.constant(np.array([0, 0, 0, 64]))
    hops = graph.reshape(graph.add("Pad", "input", pads, mode="reflect"), -1, 5, 128)
    halves = graph.slice(hops, 0, 4, 1), graph.slice(hops, 1, 5, 1)
    windows = graph.add("Concat", *halves, axis=2)
    basis = graph.constant(weights["stft.forward_basis_buffer"][:, 0].T)
    spectrum = graph.add("MatMul", windows, basis)
    parts = graph.slice(spectrum, 0, 129, 2), graph.slice(spectrum, 129, 258, 2)
    power = graph.add("Add", *(graph.add("Mul", part, part) for part in parts))
    magnitudes = graph.add("Sqrt", power)

    # Layer 0: 3 taps, 4 positions. Layer 1: 3 taps, stride 2, 2 positions. Layer 2: of 3 taps at
    # one position the first lies in the padding. Layer 3: only the middle tap sees data.
    padded = graph.add("Pad", magnitudes, graph.constant(np.array([0, 1, 0, 0, 1, 0])))
    taps = graph.add("Concat", *(graph.slice(padded, i, i + 4, 1) for i in range(3)), axis=2)
    hidden = graph.layer(taps, kernels[0].reshape(-1, 128), biases[0])
    padded = graph.add("Pad", hidden, graph.constant(np.array([0, 1, 0, 0, 0, 0])))
    taps = graph.add(
        "Concat",
        graph.reshape(graph.slice(padded, 0, 3, 1), -1, 1, 384),
        graph.reshape(graph.slice(padded, 2, 5, 1), -1, 1, 384),
        axis=1,
    )
    hidden = graph.layer(taps, kernels[1].reshape(-1, 64), biases[1])
    hidden = graph.layer(graph.reshape(hidden, -1, 128), kernels[2][1:].reshape(-1, 64), biases[2])
    hidden = graph.layer(hidden, kernels[3][1], biases[3])

    gates = [graph.constant(weights[f"onnx::LSTM_{number}"]) for number in (209, 210, 211)]
    sequence = graph.reshape(hidden, -1, 1, 128)
    lstm = helper.make_node(
        "LSTM", [sequence, *gates, "", "h", "c"], ["states", "hn", "cn"], hidden_size=128
    )
    graph.nodes.append(lstm)
    hidden = graph.add("Relu", graph.reshape("states", -1, 128))
    product = graph.add("MatMul", hidden, graph.constant(weights["output.weight"][:, :, 0].T))
    logits = graph.add("Add", product, graph.constant(weights["output.bias"]))
    graph.add("Reshape", graph.add("Sigmoid", logits), graph.constant([-1]), output="speech_probs")

    name, inputs, outputs = "silero_vad_16k", model.graph.input, model.graph.output
    made = helper.make_graph(graph.nodes, name, inputs, outputs, graph.constants)
    return helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)


if __name__ == "__main__":
    published, rewritten = sys.argv[1:]
    result = rewrite(onnx.load(published))
    onnx.checker.check_model(result)
    onnx.save(result, rewritten)
