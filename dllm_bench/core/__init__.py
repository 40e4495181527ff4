"""What all rooms share: errors, requests, decoding state, traces, and the contracts between rooms.

A contract says what one room may expect of another: `denoiser` of a model, `contracts` of the
pieces of a masked decoder, `speculative` of those of a speculative one, `canvas` of those of
uniform-state diffusion, `benchmark` of a benchmark.

Names of tensors end in the letters of their dimensions (`tokens_KL` is (K, L)). The letters mean
the same in the whole package:

| letter | size of the dimension |
|---|---|
| K | branches: candidate states of one request that share a forward |
| L | canvas positions: the prompt and the room for new tokens |
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
| A | window positions and those ahead of the window that were fed |
| X | any other size; the docstring or the line above says which |

A digit is a dimension of that size, and one letter may stand for several dimensions where the
docstring says so. A gathered tensor has another letter than the one it was gathered from.
"""
