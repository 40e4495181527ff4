"""Shared by all packages: errors, requests, decoding state, traces, and the contracts between
packages.

A contract says what one package may expect of another. The contract of a model is in `denoiser`, of
the pieces of a masked decoder in `contracts`, of a speculative one in `speculative`, of a benchmark
in `benchmark`; that of uniform-state diffusion is next to its loop (`decoding/canvas`).

Names of tensors end in the letters of their dimensions (`tokens_KL` is (K, L)). A letter has the
same meaning in the whole package:

| letter | size of the dimension |
|---|---|
| K | branches: candidate states of one request that share a forward |
| L | canvas positions: the prompt and the space for new tokens |
| W | window positions: the part of the canvas that is being decoded |
| N | blocks |
| P | positions of one block |
| V | vocabulary |
| R | rows: positions whose logits are computed |
| M | rows gathered because they are masked |
| B | requests of a batch |
| D | draft tokens |
| H | hidden size |
| G | generated positions: the canvas after the prompt |
| A | window positions and fed positions after the window |
| X | any other size; the docstring or the line above says which |

A digit is a dimension of that size. One letter may stand for several dimensions if the docstring
says so. A gathered dimension has another letter than the one it was gathered from.
"""
