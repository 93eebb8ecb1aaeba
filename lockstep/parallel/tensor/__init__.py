"""Tensor parallel: the plan by which layers are cut, their products, sums and losses."""
