"""The meter: counts what agents use of models, and refuses what is above a limit.

A process of its own (``main``), which shares with ctxd the files of counters, and nothing else.
"""
