"""Checkpoints of a run: from the two books to files, and back into any layout."""
