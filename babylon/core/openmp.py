"""OpenMP settings of this process. Torch reads them when it loads, so import this before torch.

Each package that imports torch imports this module in its ``__init__``, which runs before any of
its modules. Child processes inherit the variable.
"""

import os

# Engine, trainer and fleet share a few cores. OpenMP threads that spin at barriers slow each other
# down about ten times.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
