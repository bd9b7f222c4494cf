"""The OpenAI-compatible HTTP service: ``mainspring serve``."""
