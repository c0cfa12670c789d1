"""Import and export of traces: ATIF, chat messages, OpenTelemetry GenAI and OpenInference spans.

``docs/formats.md`` lists what each format cannot carry. Readers and writers are pure;
``import_files`` and ``export_files`` use the database.
"""
