-- JSON: the answer's message, if it holds more than the text in response (tool calls, reasoning).
ALTER TABLE babylon.calls ADD COLUMN answer text;
