"""Laws of the reference: what holds for every model, file, prompt and residency, and what garbage it refuses."""
