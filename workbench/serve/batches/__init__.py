"""Run batches of calls, in OpenAI's and Anthropic's forms, at lower priority than all calls with waiting clients."""
