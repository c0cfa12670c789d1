"""OpenAI's Responses and Anthropic's Messages, translated to chat completions and back."""
