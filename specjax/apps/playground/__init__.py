"""The HTML page of a run: its rounds step by step, why it is exact, and what it gains."""
