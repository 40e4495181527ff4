"""The decoding loops on tensors that claim to be on a CUDA device, without one."""
