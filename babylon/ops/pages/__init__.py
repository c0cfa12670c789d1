"""Pages that people read: what happened to a window, to the fleet, and tonight.

Everything is read from Postgres and from the files that it names. ``tasks`` leaves the pages in
Prefect as Markdown; the status page shows the same facts as HTML.
"""
