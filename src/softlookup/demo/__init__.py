"""The rooms of `softlookup demo`; `softlookup.cli` is the door. Without a model only `basics` and `show` are loaded."""
