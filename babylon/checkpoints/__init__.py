"""Policies on disk: base model, checkpoints, adapters, and the verdict on a new one."""

from transformers.utils import logging

# Loading weights is quick, and standard error is for our own words.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
