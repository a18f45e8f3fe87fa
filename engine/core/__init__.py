"""The engine core: scheduling, sampling, and the step loop that runs them."""
