"""Replies sampled for preferences: which prompts, which replies, and what they are worth."""
