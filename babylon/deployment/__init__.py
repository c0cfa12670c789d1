"""Deployment of policies: who answers the agents, and how that changes under them.

Every change of the route takes two phases (``change.py``): each gateway loads the policy and the
checks pass, then one row decides and each gateway says that it follows. A refusal before that row
changes nothing, one after it puts the route before in force again.
"""
