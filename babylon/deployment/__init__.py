"""Deployment of policies: the route decides who answers the agents.

Every change of the route has two phases (``change.py``): each gateway loads the policy and the
checks pass; then one row is committed and each gateway acknowledges it. A refusal before that row
changes nothing. A failure after it restores the route before.
"""
