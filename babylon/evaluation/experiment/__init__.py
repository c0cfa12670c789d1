"""A/B and canary experiments: is the challenger better than the champion on live agents?"""
