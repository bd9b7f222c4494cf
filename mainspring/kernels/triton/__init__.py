"""Triton kernels. Nothing outside ``mainspring.kernels`` imports these modules, and nothing at import time."""
