"""Continuous reinforcement learning for fleets of live LLM agents."""

import os

# Engine, trainer and fleet share few cores. OpenMP threads that spin at barriers would starve each
# other (ten times slower when seen); sleeping ones do not. Read when torch loads, so set first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
