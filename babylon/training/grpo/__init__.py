"""GRPO on a logged window: prefix tree, attention, losses and trainer, without I/O."""
