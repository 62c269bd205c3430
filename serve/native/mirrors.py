"""Copies of the rows' state for the host, made while the device goes on."""

import collections

import torch

from serve.native.rules.state import RowState, new_state


class Mirrors:
    """Three of them: one being copied into, one being read, one between them.

    The next step waits for a copy on the device alone; from there another stream takes it to the
    host, which takes several times as long.

    Args:
        state: on a CUDA device.
    """

    def __init__(self, state: RowState) -> None:
        rows, n_text_ctx = state.tokens.shape
        device = state.tokens.device
        on_host = new_state(rows, n_text_ctx, torch.device("cpu"))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pairs = collections.deque(
            (new_state(rows, n_text_ctx, device), on_host.pinned()) for _ in "123"
        )

    def follow(
        self, state: RowState, rows: int, *, searched: bool
    ) -> tuple[RowState, torch.cuda.Event]:
        """Copy the state as it is after what was launched on the current stream.

        Args:
            state: what is copied.
            rows, searched: of `RowState.follow`.

        Returns:
            The host's copy, and what happens when it is there.
        """
        here, there = self._pairs[0]
        self._pairs.rotate(-1)
        here.follow(state, rows, searched=searched)
        ready, copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            there.follow(here, rows, searched=searched)
            copied.record()
        return there, copied
