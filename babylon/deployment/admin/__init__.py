"""The admin API: the functions of ``babylon deploy`` over HTTP, in a process and on a port of its own.

Agents' calls therefore neither reach it nor wait for it.
"""
