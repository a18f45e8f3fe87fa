"""From a request to an answer: model or cascade, reasoning, generation, checks, tools."""
