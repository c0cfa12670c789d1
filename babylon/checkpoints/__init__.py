"""Policies on disk: base model, checkpoints, adapters, and the verdict on a new one."""

import warnings

from transformers.utils import logging

# peft 0.21 reads an attribute that transformers 5 renamed.
warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
# Loading weights is quick, and standard error is for our own words.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
