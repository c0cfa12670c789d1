"""Code that runs in vLLM's Python.

It has a directory of its own, so that nothing else of babylon can be imported there.
"""
