// Runs where sound is made: takes what a microphone gives at whatever rate, and posts mono PCM16 at
// 24 kHz in pieces of a tenth of a second.
//
// Resampling is by a windowed sinc, tabulated for 128 places between two samples.

const RATE = 24_000;
const PIECE = RATE / 10;
const PHASES = 128;
const ZEROS = 12; // crossings of the sinc on either side

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.step = sampleRate / RATE; // samples of the microphone for one of ours
    const stretch = Math.max(1, this.step); // no frequency above half of either rate
    this.half = Math.ceil(ZEROS * stretch);
    this.kernels = Array.from({ length: PHASES }, (_, phase) =>
      kernel(this.half, phase / PHASES, stretch),
    );
    this.heard = new Float32Array(0); // what is yet to be used
    this.at = this.half; // place in `heard` of our next sample
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
  }

  process([channels]) {
    if (!channels.length) return true;
    this.heard = joined(this.heard, mixed(channels));
    for (; this.at + this.half + 1 < this.heard.length; this.at += this.step)
      this.put(this.sample());
    const used = Math.floor(this.at) - this.half;
    this.heard = this.heard.slice(used);
    this.at -= used;
    return true;
  }

  sample() {
    const first = Math.floor(this.at);
    const weights = this.kernels[Math.floor((this.at - first) * PHASES)];
    let sum = 0;
    for (let i = 0; i < weights.length; i += 1)
      sum += weights[i] * this.heard[first - this.half + 1 + i];
    return sum;
  }

  put(value) {
    this.piece[this.filled] = Math.max(-1, Math.min(1, value)) * 32767;
    this.filled += 1;
    if (this.filled < PIECE) return;
    this.port.postMessage(this.piece.buffer, [this.piece.buffer]);
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
  }
}

// Weights of the samples from `half - 1` before to `half` after a place between two of them.
function kernel(half, fraction, stretch) {
  const weights = Array.from({ length: 2 * half }, (_, i) => {
    const x = (i - half + 1 - fraction) / stretch;
    const hann = 0.5 + 0.5 * Math.cos((Math.PI * x) / (half / stretch + 1));
    return hann * (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
  });
  const sum = weights.reduce((a, b) => a + b, 0);
  return Float32Array.from(weights, (weight) => weight / sum);
}

function mixed(channels) {
  if (channels.length === 1) return channels[0];
  return channels[0].map(
    (_, i) => channels.reduce((sum, one) => sum + one[i], 0) / channels.length,
  );
}

function joined(a, b) {
  const all = new Float32Array(a.length + b.length);
  all.set(a);
  all.set(b, a.length);
  return all;
}

registerProcessor("recorder", Recorder);
