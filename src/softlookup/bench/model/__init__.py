"""The model workload: a real language model on a long text, read by several implementations of attention in turns."""
