"""Where weights come from, and how their names map to the decoder's fused parameters."""
