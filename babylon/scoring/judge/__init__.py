"""The judge: trajectories and ground truth in, one calibrated score each out.

``window.judge_window`` is the way in; ``docs/judge.md`` tells how and why.
"""
