"""Deployment of policies: the route decides who answers the agents.

Every change of the route has two phases (``change.py``): the gateways load the policy and the
checks pass; then one row is committed and the gateways acknowledge it. Half of them are enough for
each phase; late ones are quarantined. A refusal before that row changes nothing. A failure after it
restores the route before.
"""
