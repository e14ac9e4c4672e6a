"""RoFormer and its absolute-position baselines: positions, attention, encoder, heads, kernels."""
