"""`softlookup bench`: the library beside its peers and beside the limits of the machine, in one run."""
