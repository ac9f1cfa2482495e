"""The colossal command: run scripts on many ranks, list and switch plugins, show plans."""
