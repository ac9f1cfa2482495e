"""The registry of pieces and the contract of plugins: hooks, records, targets.

What a plugin's light module imports is here and costs nothing else: the hook marker and the records.
"""
