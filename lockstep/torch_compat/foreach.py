"""Operations over many tensors in one kernel.

In-place sums, products and quotients, clamps, copies, and norms; and many tensors as a flat one.

Public torch: a loop over the tensors starts one kernel for each, several hundred a step.
`torch.nn.utils` has such operations only inside of its ways of clipping. Seen to work: torch 2.11.0
to 2.15.0. When gone: importing this file raises AttributeError; a loop over the tensors gives the
same bits.
"""

import torch

add_ = torch._foreach_add_
mul_ = torch._foreach_mul_
div_ = torch._foreach_div_
clamp_min_ = torch._foreach_clamp_min_
clamp_max_ = torch._foreach_clamp_max_
copy_ = torch._foreach_copy_
norm = torch._foreach_norm
flatten = torch._C._nn.flatten_dense_tensors
