"""Rooms of the transformers adapter; `softlookup.transformers` is its door."""
