"""Training on MLX: prerouter heads, and the recovery LoRA on the student's own path.

floats    a model's weights as float32 numbers, int4 dequantised once
delta     the delta rule for whole sequences, in chunks
mixers    attention and the gated delta net for a batch of sequences
experts   routed experts for a batch, each expert one product
model     all layers for a batch of sequences, with the prerouter's schedule kept exact
losses    what is minimised
sampling  texts that a model writes, a batch at a time
stages    heads, sft, opd: one step each, and what a checkpoint holds
"""
