"""Build engines from checkpoints: open the weights, quantise, write the folder, verify it."""
