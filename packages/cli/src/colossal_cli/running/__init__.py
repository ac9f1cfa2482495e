"""Running one script on many ranks: processes, their output, their end."""
