"""Measuring: decode latency beside its floor and beside other engines, start-up, and the kernels of one step."""
