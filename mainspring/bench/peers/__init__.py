"""Other engines, asked the same: same shapes, same prompts, same figures."""
