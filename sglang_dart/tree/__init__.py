"""Candidates and a scorer → the tree that a round verifies."""
