"""What differs between kinds of models: one small file each, the same few functions in each."""
