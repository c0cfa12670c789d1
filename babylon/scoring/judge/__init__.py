"""The judge: a language model that scores trajectories against ground truth.

``judge_window.judge_window`` is the entry point. ``docs/judge.md`` describes the method.
"""
