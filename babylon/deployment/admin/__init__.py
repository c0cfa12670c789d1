"""The admin API: who serves the agents, asked and changed over HTTP, by the same functions as the
command line. A process and a port of its own: what agents call neither offers nor waits for it.
"""
