// The microphone as pieces of mono PCM16 at 24 kHz.

// Models learnt from sound as microphones give it; what is meant for calls takes words with it.
const AS_IT_IS = { echoCancellation: false, noiseSuppression: false, autoGainControl: true };

// Resolves to {stop}; `piece(buffer)` is called ten times a second.
export async function listen(piece) {
  if (!navigator.mediaDevices)
    throw new Error("Browsers allow the microphone only on this computer, or over https.");
  const stream = await permitted();
  const context = new AudioContext();
  try {
    await context.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
    const recorder = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    recorder.port.onmessage = (event) => piece(event.data);
    context.createMediaStreamSource(stream).connect(recorder);
    await context.resume();
  } catch (error) {
    end(stream, context);
    throw error;
  }
  return { stop: () => end(stream, context) };
}

async function permitted() {
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: AS_IT_IS });
  } catch (error) {
    if (error.name === "NotAllowedError")
      throw new Error("This page may not use the microphone. Allow it in the browser's settings.");
    if (error.name === "NotFoundError") throw new Error("No microphone was found.");
    throw new Error(`The microphone cannot be used: ${error.message || error.name}.`);
  }
}

function end(stream, context) {
  for (const track of stream.getTracks()) track.stop();
  context.close();
}

// How loud a piece is, 0 to 1.
export function level(buffer) {
  const samples = new Int16Array(buffer);
  const power = samples.reduce((sum, value) => sum + value * value, 0) / samples.length;
  const decibels = 10 * Math.log10(power / 32768 ** 2 + 1e-9);
  return Math.max(0, 1 + decibels / 60);
}
