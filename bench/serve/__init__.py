"""Open-loop load on any OpenAI-compatible server: requests come at their time, even if earlier ones are not done."""
