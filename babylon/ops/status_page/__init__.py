"""The status page: the fleet, its windows and its policies as HTML on the admin port.

Rendered on the server, without a script: the pages work with a keyboard, a screen reader and a
terminal browser, and the content security policy forbids every script that play could smuggle in.
"""
