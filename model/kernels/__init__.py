"""Inner loops of the model, each behind one function."""
