"""Requests, scheduling, the step and the ``LLM`` class."""
