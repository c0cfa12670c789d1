"""Flow tests have a Prefect of their own; it reads its environment when it is first imported."""

import os
import tempfile

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="babylon-prefect-")
