"""Continuous batching: many requests in one step, with and without a drafter."""
