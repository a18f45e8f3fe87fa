"""Open-loop load on any OpenAI-compatible server: requests come when they would, done or not what came before."""
