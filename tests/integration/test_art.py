"""ART on our trainer, and our pipeline on ART's trainers: everything that imports ``art``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import art
import pytest
import torch
from aiohttp.test_utils import unused_port

from babylon.art_backend import Backend
from babylon.checkpoints.load import load_policy
from babylon.grpo.trainer import TrainerConfig
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model
