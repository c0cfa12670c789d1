"""What a checkpoint is on disk: load, save, digest, tokenizer, layers."""
