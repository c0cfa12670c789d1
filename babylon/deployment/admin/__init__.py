"""The admin API: the functions of ``babylon deploy`` over HTTP.

It has a process and a port of its own: agents' calls neither reach it nor wait for it.
"""
