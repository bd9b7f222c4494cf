"""Triton kernels. Only ``mainspring.kernels`` imports these modules, each at its first use."""
