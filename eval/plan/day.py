"""A day of requests, minute to minute: quiet at night, busy in the afternoon, and bursts."""

import math

import numpy as np
import numpy.typing as npt

MINUTES = 24 * 60
_SWING = 0.75  # the afternoon has so much more than the mean, the night so much less
_PEAK_MINUTE = 15 * 60
_NOISE = 0.12  # deviation of a minute's logarithm
_MEMORY = 0.8  # of it from the minute before
_BURSTS = 10  # on average; each brings half to one and a half times the load of the hour more
_BURST_LEAST, _BURST_MOST = 0.5, 1.5
_RISE_MINUTES = 2.0  # in which it comes
_HALVING_MINUTES = 5.0  # in which half of it goes again


def arrivals_per_s(mean_per_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Draw the rate of each minute of a day (requests a second), whose mean is `mean_per_s`."""
    rng = np.random.default_rng(seed)
    minutes = np.arange(MINUTES)
    rate = 1 + _SWING * np.cos((minutes - _PEAK_MINUTE) * 2 * math.pi / MINUTES)
    noise, steps = np.zeros(MINUTES), rng.normal(0, 1, MINUTES)
    for minute in range(1, MINUTES):
        noise[minute] = _MEMORY * noise[minute - 1] + math.sqrt(1 - _MEMORY**2) * steps[minute]
    rate *= np.exp(_NOISE * noise)
    bursts = np.zeros(MINUTES)
    for begin in rng.integers(0, MINUTES, rng.poisson(_BURSTS)):
        after = minutes - begin
        shape = np.minimum((after + 1) / _RISE_MINUTES, 0.5 ** (after / _HALVING_MINUTES))
        bursts += rng.uniform(_BURST_LEAST, _BURST_MOST) * np.where(after >= 0, shape, 0)
    rate *= 1 + bursts
    return np.asarray(rate * mean_per_s / rate.mean())
