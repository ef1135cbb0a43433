"""Token mixers: what lets a token see the tokens before it. Each has weights, a state, and one call."""
