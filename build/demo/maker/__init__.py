"""What made the demo checkpoint, step by step.

It needs Debian's `espeak-ng` and `flite` (`apt-get install espeak-ng flite`), and a GPU to run in
minutes.

text, words_en, words_es   sentences from a grammar and word lists
voices, synth              sentences -> speech, through espeak-ng and flite
tokenizer, labels          sentences -> token ids, with Whisper's special tokens
windows, augment           speech -> 30 s windows on the device, made harder
network, store, train      the network, the growing store of speech, the training loop
export                     weights and configuration files in Hugging Face format
draft                      a decoder of one layer, distilled from the checkpoint's
evaluate, alignment        held-out figures; alignment heads
clips, heldout             test clips that are kept; held-out utterances by the thousand
heldout_clips, sentences   held-out utterances that are kept, and the sentences written for them
precision                  what INT8 and FP8 cost in accuracy on such utterances
"""
