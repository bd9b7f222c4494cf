"""Models: configuration, weights, tokenizer, and the one decoder that runs them."""
