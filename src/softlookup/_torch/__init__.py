"""Rooms of the PyTorch adapter; `softlookup.torch` is its door."""
