"""Token mixers: what lets a token see the tokens before it. Each has weights, and maps (x, state) to (y, state).

States are never changed in place: a snapshot is the old state, kept.
"""
