"""Traces of other systems, read into the game's rows and written from them: ATIF, chat messages,
OpenTelemetry GenAI spans and the OpenInference dialect. ``docs/formats.md`` says what each format
cannot carry. Everything here is pure; ``babylon.formats.import_files`` writes the rows."""
