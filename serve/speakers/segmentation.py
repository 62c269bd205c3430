"""Detect the activity of up to three speakers in 10 s of audio: pyannote's segmentation-3.0.

The network has sinc filters and two convolutions, each pooled and normalised, a bidirectional LSTM
and linear layers. Its seven classes are the sets of up to two of three speakers active in a frame.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 160_000  # samples per window: 10 s at 16 kHz
FRAMES = 589  # frames per window
HOP = 270  # samples between the starts of frames
OFFSET = 360  # samples before the first frame, which starts near its receptive field's middle
SPEAKERS = 3  # maximum speakers per window

_SETS = ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))  # active speakers by class
_CHANNELS = (1, 80, 60, 60)
_KERNELS = (251, 5, 5)
_STRIDES = (10, 1, 1)
_BATCH = 32  # windows per convolution, to limit memory


class Segmentation(nn.Module):
    """The segmentation network; the order of the speakers differs between windows."""

    members: Tensor

    def __init__(self) -> None:
        super().__init__()
        ends = zip(_CHANNELS[:-1], _CHANNELS[1:], _KERNELS, _STRIDES, strict=True)
        self.norm = nn.InstanceNorm1d(1, affine=True)
        self.convs = nn.ModuleList(
            nn.Conv1d(ins, outs, kernel, stride, bias=ins > 1) for ins, outs, kernel, stride in ends
        )
        self.norms = nn.ModuleList(nn.InstanceNorm1d(n, affine=True) for n in _CHANNELS[1:])
        self.lstm = nn.LSTM(60, 128, num_layers=4, bidirectional=True, batch_first=True)
        self.linears = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 128)])
        self.classifier = nn.Linear(128, len(_SETS))
        members = torch.tensor([[float(i in active) for i in range(SPEAKERS)] for active in _SETS])
        self.register_buffer("members", members, persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Compute the probability of each set of speakers.

        Args:
            windows: (batch, SAMPLES), 16 kHz mono in [-1, 1].

        Returns:
            (batch, FRAMES, 7), log-probabilities.
        """
        firsts = range(0, len(windows), _BATCH)
        x = torch.cat([self._convolved(windows[first : first + _BATCH]) for first in firsts])
        x, _ = self.lstm(x.transpose(1, 2))
        for linear in self.linears:
            x = functional.leaky_relu(linear(x))
        logits: Tensor = self.classifier(x)
        return functional.log_softmax(logits, dim=-1)

    def _convolved(self, windows: Tensor) -> Tensor:
        x: Tensor = self.norm(windows[:, None])
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x).abs() if index == 0 else conv(x)
            x = functional.leaky_relu(norm(functional.max_pool1d(x, 3)))
        return x

    def activity(self, windows: Tensor) -> Tensor:
        """Compute the probability of each speaker's activity, (batch, FRAMES, SPEAKERS)."""
        sets: Tensor = self(windows)
        return sets.exp() @ self.members
