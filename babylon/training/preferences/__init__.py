"""Learning from preferences: pairs of replies (DPO), and replies that are good or bad (KTO)."""
