"""Firesteel: train, package, prove and deploy speculative-decoding drafters."""

__version__ = "0.1.0"
